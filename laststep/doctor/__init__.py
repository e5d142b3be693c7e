"""Checks for anything on this machine or cluster that could break a run, and a roll call of the cluster's nodes. Not
here: the watchdog of a run in progress (world), and the hints in its log (observe)."""
