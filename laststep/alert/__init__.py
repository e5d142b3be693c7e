"""Alerts: a message for each event of a run, sent once, by the first process that sees it in the run folder.

What has happened is read from the run folder (events.py), so it does not matter who is left to read it: a program
beside the training, the batch shell, the next attempt, or a watching command on a login node. Who sends claims the
message by a new file (post.py).

Not here: what a run prints (laststep/records/progress.py), and its state (laststep/runs/run_status.py).
"""
