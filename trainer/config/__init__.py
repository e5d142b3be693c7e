"""A run's configuration: the schema of all keys, loading, and the checks that words alone allow. Not here: checks
that ask the machine or the cluster (cluster.machine_checks)."""
