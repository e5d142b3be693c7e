"""What outlives an attempt: the store of checkpoints, the writer that works beside the training, when to save and how
often, and how far a run has come. Not here: what a loop puts into a checkpoint (loops), and who saves after a fault
(attempt)."""
