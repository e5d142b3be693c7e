"""What to train: ready-made tasks."""
