"""The ranks of one attempt: who am I, how we meet, how we stop together, how we watch each other, and what Slurm says
of our job. Not here: submitting jobs and starting ranks (cluster)."""
