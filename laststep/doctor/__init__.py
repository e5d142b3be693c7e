"""Checks for anything on this machine or cluster that could break a run, and a roll call of the cluster's nodes. Not
here: the watchdog of a run in progress (ranks), and the hints in its log (records)."""
