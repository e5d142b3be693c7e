"""The training lost to each fault, under Laststep and under the usual ways of requeueing on Slurm."""
