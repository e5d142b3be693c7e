"""From a configuration to ranks that start: a list of steps (submission.py), with each room's
checks; the batch script and sbatch; sweeps and branches; ranks on this machine. Not here: what they do (attempt), and looking at runs (runs)."""
