"""What runs inside a job but outside its ranks: a rank's supervisor, what follows when srun has ended, which nodes to
keep. Not here: the batch script (submission), and what a rank does (attempt)."""
