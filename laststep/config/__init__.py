"""A run's configuration: the schema of all keys, loading it, and the checks that need nothing but its values. Not here:
checks that look at this machine or the cluster (each room's `check`)."""
