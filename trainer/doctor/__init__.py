"""What could break a run on this machine or this cluster, and a roll call of its nodes. Not here: the watchdog of a
run under way (world), and the hints in its log (observe)."""
