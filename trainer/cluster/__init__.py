"""Around the job: executors, the sbatch script, run folders, checks before a start."""
