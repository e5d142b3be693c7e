"""From a configuration to ranks that start: the list of steps (submission.py); the batch script and sbatch; sweeps and
branches; ranks on this machine. Not here: what the ranks do (attempt), and looking at runs (runs)."""
