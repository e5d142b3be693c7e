"""The proof that a user's script resumes exactly: runs on this machine, disturbed on purpose, and what their difference
says. Not here: what the ranks of these runs note of each step (loops/probe.py, records/probes.py)."""
