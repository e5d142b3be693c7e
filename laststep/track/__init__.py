"""Trackers: W&B, MLflow and trackio show one run for one training, each step once, however often it was interrupted. A
process beside rank 0 sends what is in metrics.jsonl; nothing of it runs in a rank. Not here: metrics.jsonl itself
and TensorBoard (`records`), the process beside the training (`laststep/ranks/beside.py`)."""
