"""Everything that outlives an attempt: the folder of checkpoints and which of them a run continues from (`store`), how
its files are read and hashed (`files`), the bytes of a state (`pack`) and of its shards (`shards`), what a framework
writes by itself (`opaque`), how a state is written in the background (`writer`) or by the survivors of a fault
(`frozen`), how the ranks of an attempt read a checkpoint together (`restore`), when to save and how far a run has come
(`manager`), how often to save (`interval`), and the weights that are read from a checkpoint and written to a file
(`export`).

Not here: what a loop puts into a checkpoint (loops), and which rank saves after a fault (attempt)."""
