"""What a fork server of ranks imports, before it forks them: all that ranks import."""

import gc
import importlib.util

for name in (
    "tensorboard.plugins.hparams.plugin_data_pb2",
    "tensorboard.summary.writer.record_writer",
    "tests.support.tasks",
    "laststep.attempt.attempt",
    "laststep.loops.custom_loop",
    "laststep.loops.sharded",
    "laststep.loops.task_loop",
):
    if name.partition(".")[0] != "tensorboard" or importlib.util.find_spec("tensorboard"):  # it is not in every image
        importlib.import_module(name)

gc.collect()
gc.freeze()  # the forks need not look at these objects again
