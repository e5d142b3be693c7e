"""The files that a run keeps for good: metrics.jsonl, attempts.jsonl, submissions.jsonl and plan.json; what shows them
while it trains: progress lines, hints and TensorBoard; and the retry policy, which decides from the recorded attempts
whether a run continues by itself. Not here: the page on how runs went (report), and checkpoints (checkpoint)."""
