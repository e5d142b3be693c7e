"""What a run writes of itself for people: metrics, progress, how its attempts ended."""
