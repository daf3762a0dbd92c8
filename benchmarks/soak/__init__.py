"""What attacks latfit for longer than a test run may; each module prints how often each outcome came, and exits with 1
on a loss."""
