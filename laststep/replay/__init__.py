"""The time machine: a run's steps done again with the same bits, the samples of a step, and where two runs part.

Here belongs what looks back at a run: `again` trains a stretch of it once more from a checkpoint, in a folder of its
own; `operators` notes, in the ranks of such a stretch, what each operator of torch returned; `parting` compares two
runs; `samples` computes, without torch, which samples a step used.

Not here: what a run keeps for this, the digests (laststep/loops/digest.py) and the checkpoints that stay for good
(laststep/config/keep.py). Nothing here is imported by a run that nobody looks back at.
"""
