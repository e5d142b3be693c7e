"""The files that a run keeps for good: metrics.jsonl, attempts.jsonl, submissions.jsonl and plan.json, and the retry
policy, which decides from the recorded attempts whether a run continues by itself. Not here: what is made for people to
look at (observe), and checkpoints (checkpoint)."""
