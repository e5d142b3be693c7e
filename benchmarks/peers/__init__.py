"""What Laststep loses to each fault, and what the two usual ways of requeueing on Slurm lose to it."""
