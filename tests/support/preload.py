"""What a fork server of ranks imports, before it forks them."""

import gc

from trainer.attempt.compiler import defer_import

defer_import()

import trainer.loops.task_loop  # noqa: E402, F401

gc.collect()
gc.freeze()  # the forks need not look at these objects again
