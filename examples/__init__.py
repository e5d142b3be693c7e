"""Training loops to copy."""
