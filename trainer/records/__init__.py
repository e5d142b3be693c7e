"""What a run writes down for good: metrics.jsonl, attempts.jsonl, and the retry policy, which decides from the
records whether a run goes on. Not here: what people look at (observe), and checkpoints (checkpoint)."""
