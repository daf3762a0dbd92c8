"""What a router learns while it serves: its paths' times, thresholds for them, and whether promises hold."""
