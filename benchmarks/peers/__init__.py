"""The training lost to each fault, under Laststep and under the two usual ways of requeueing on Slurm."""
