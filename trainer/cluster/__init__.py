"""Around the job: submission, the batch shell, ranks on this machine, run folders, the code copy, the queue, and how
a run stands. Not here: what happens within a rank (attempt), and the command line (commands)."""
