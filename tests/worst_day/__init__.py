"""The worst day of a disk: every file operation of a short run fails once, in turn, and no step is lost.

SQLite's authors test so: run once and count the operations, then run once more for each of them with that one failing.
`disk.c` is the disk: a library that stands between the processes of a run and their C library. `disk.py` arms it,
`scenario.py` is the run and what must be true of it afterwards, `plan.py` chooses the faults, `__main__.py` carries
them out and writes a section of docs/reports.md. The tests of this folder carry out a few dozen of them.
"""
