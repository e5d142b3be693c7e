"""The command line: one file per verb, their table (verbs.py), and what their parsers share (parsers.py). Not here: the
work behind a verb (submission, runs, doctor, report)."""
