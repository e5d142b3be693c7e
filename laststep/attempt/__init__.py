"""One attempt on one rank: how it begins, the orderly end, the end by fault, the rescue of the last finished step, the
grace period, why a signal was sent, and what follows. Not here: what the rank does between its first and its last step
(loops), the agreement on a last step and the watchdog (ranks), and the records that an attempt leaves (records)."""
