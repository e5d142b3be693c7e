"""What outlives an attempt: the checkpoint store."""
