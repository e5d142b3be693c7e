"""From a configuration to ranks that start: it is made ready and checked on this machine; sbatch, the batch script and
its shell; sweeps; ranks on this machine. Not here: what they do (attempt), and looking at runs (runs)."""
