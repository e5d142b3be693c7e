"""The ranks of one attempt: which rank this process is, how the ranks meet, stop together and watch each other, and
what Slurm says about their job. Not here: submitting jobs and starting ranks (submission)."""
