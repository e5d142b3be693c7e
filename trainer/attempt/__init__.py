"""One attempt of one rank: how it begins, the orderly end, the end by fault, the rescue of the last whole step, and
why a signal came. Not here: what the rank does between its first and its last step (loops), and the records that an
attempt leaves (records)."""
