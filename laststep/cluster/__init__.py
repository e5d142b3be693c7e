"""Everything around the job: preparing and submitting a run, the sbatch script and its batch shell, ranks on this
machine, run folders, the code copy, the queue, the status and the logs of a run. Not here: what happens inside a rank
(attempt), and the command line (commands)."""
