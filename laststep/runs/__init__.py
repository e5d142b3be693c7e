"""Run folders as they are found: their configuration, who may write to them, which jobs in the queue are theirs, the
status and the logs of a run. Not here: every path of a folder (rundir), what attempts record (records), and what starts
anything (submission)."""
