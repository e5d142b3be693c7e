"""Everything that outlives an attempt: the folder of checkpoints (`store`) and how its files are read and hashed
(`files`), the bytes of a state (`pack`), what a framework writes by itself (`opaque`), the background writer
(`writer`), how the ranks of an attempt read a checkpoint together (`restore`), the memory for both (`buffers`), when to
save (`manager`) and how often (`interval`, `goodput`), how far a run has come (`position`), and the weights that are
read from a checkpoint and written to a file (`weights`, `export`).

Not here: what a loop puts into a checkpoint (loops), and which rank saves after a fault (attempt)."""
