"""A loop of one's own: what a hand-written training function is given, and how it comes to stop and resume exactly."""
