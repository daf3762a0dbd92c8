"""What a fit says of steps that it has not seen."""
