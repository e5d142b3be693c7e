"""Every private name of another library that Laststep uses, in one place. Not here: what is built on them.

Such a name may change in any release, so each has a contract test in tests/test_compat.py that fails with the name in
its message. Importing this module imports none of these libraries: each function imports what it needs.
"""

from __future__ import annotations

import contextlib
import copy
import functools
import inspect
import os
import re
import sys
from collections.abc import Callable, Iterable, Sequence
from datetime import timedelta
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, TypeGuard

if TYPE_CHECKING:
    import argparse
    from contextlib import AbstractContextManager

    import torch
    from submitit import SlurmExecutor
    from torch import Tensor, nn
    from torch.amp import GradScaler
    from torch.nn.modules.batchnorm import _BatchNorm
    from torch.optim import Optimizer

# --- argparse


def options_of(parser: argparse.ArgumentParser) -> dict[str, argparse.Action]:
    """The options of a parser, each by every name it can be typed as."""
    return parser._option_string_actions


def positionals_of(parser: argparse.ArgumentParser) -> list[argparse.Action]:
    """The positional arguments of a parser, in order."""
    return parser._get_positional_actions()


# --- torch: operators as they run


def dispatch_mode() -> Any:
    """The class through which each operator passes, in a block of an object of it."""
    from torch.utils._python_dispatch import TorchDispatchMode

    return TorchDispatchMode


def schema_of(operator: Any) -> Any:
    """What an operator (an OpOverload) returns and writes into, a torch.FunctionSchema."""
    return operator._schema


def autograd_number() -> int:
    """How many nodes autograd has made in this thread: those that are made next have this number, and later ones."""
    import torch

    number: int = torch._C._autograd._get_sequence_nr()
    return number


def autograd_node_number() -> int | None:
    """The number of the node whose backward pass runs now; None outside of a backward pass."""
    import torch

    node = torch._C._current_autograd_node()
    return None if node is None else node._sequence_nr()


# --- torch.distributed


def all_gather_single(output: Tensor, mine: Tensor, **options: Any) -> Any:
    """torch.distributed.all_gather_single, which before torch 2.14 has another name."""
    import torch.distributed as dist

    gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
    return gather(output, mine, **options)


def set_timeout(timeout: timedelta) -> None:
    """torch.distributed.set_timeout, for the default group: how long its collectives may take from now on. It is new in
    torch 2.14."""
    import torch.distributed as dist

    (getattr(dist, "set_timeout", None) or dist.distributed_c10d._set_pg_timeout)(timeout)


def replace_default_timeouts(timeout: timedelta) -> Callable[[], None]:
    """Set how long the collectives of groups may take that are made from now on without a timeout.

    Call what this returns to put torch's own defaults back.
    """
    from torch.distributed import distributed_c10d

    theirs = {name: getattr(distributed_c10d, name) for name in ("default_pg_timeout", "default_pg_nccl_timeout")}
    vars(distributed_c10d).update(dict.fromkeys(theirs, timeout))
    return lambda: vars(distributed_c10d).update(theirs)


# --- setuptools


def editable_modules() -> dict[str, Path]:
    """The modules of editable installs that Python finds without an entry in sys.path: a file or folder for each."""
    finders = {getattr(finder, "__module__", "") for finder in sys.meta_path}
    mappings = [getattr(sys.modules.get(name), "MAPPING", {}) for name in finders if name.startswith("__editable__")]
    return {name: Path(path) for mapping in mappings for name, path in mapping.items()}


# --- submitit


def sbatch_script(executor: SlurmExecutor) -> str:
    """The sbatch script that a submission by this executor would hand over."""
    return executor._make_submission_file_text(executor._submitit_command_str, uid="dry-run")


def step_hostnames() -> list[str]:
    """The nodes of the Slurm step that this process is in; a step need not have all nodes of its job.

    Raises submitit's SlurmParseException when the environment does not say.
    """
    from submitit.slurm.slurm import SlurmJobEnvironment

    class Step(SlurmJobEnvironment):
        _env = {**SlurmJobEnvironment._env, "nodes": "SLURM_STEP_NODELIST"}  # noqa: RUF012

    return Step().hostnames


# --- TensorBoard


def event_file_parts() -> tuple[Any, Any, Any, Any]:
    """Event, SessionLog, Summary and RecordWriter: what writes TensorBoard's event files without tensorflow, which
    EventFileWriter imports where it exists."""
    from tensorboard.compat.proto.event_pb2 import Event, SessionLog
    from tensorboard.compat.proto.summary_pb2 import Summary
    from tensorboard.summary.writer.record_writer import RecordWriter

    return Event, SessionLog, Summary, RecordWriter


def hparams_parts() -> SimpleNamespace:
    """What describes a run to TensorBoard's tab HPARAMS without tensorflow, which the plugin's own writer imports."""
    from tensorboard.plugins.hparams import api_pb2, metadata, plugin_data_pb2

    return SimpleNamespace(
        PluginData=plugin_data_pb2.HParamsPluginData,
        SessionStartInfo=plugin_data_pb2.SessionStartInfo,
        SessionEndInfo=plugin_data_pb2.SessionEndInfo,
        metadata=metadata.create_summary_metadata,
        nothing=metadata.NULL_TENSOR,
        START_TAG=metadata.SESSION_START_INFO_TAG,
        END_TAG=metadata.SESSION_END_INFO_TAG,
        SUCCESS=api_pb2.STATUS_SUCCESS,
    )


# --- torch: tensors


def copy_each(targets: list[Tensor], sources: Sequence[Tensor]) -> None:
    """Copy each source into its target, in one call."""
    import torch

    torch._foreach_copy_(targets, tuple(sources))


def note_nonfinite(gradients: list[Tensor], found: Tensor, scale: Tensor) -> None:
    """Set `found`, a scalar, to 1.0 if a gradient holds an infinity or a NaN; all are multiplied by `scale`, a scalar.

    It is what GradScaler uses: one kernel, in a tenth of the time of a norm.
    """
    import torch

    torch._amp_foreach_non_finite_check_and_unscale_(gradients, found, scale)


def reads_found_inf(optimizer: Optimizer) -> bool:
    """Whether an optimiser skips its step by itself where its attribute `found_inf`, a scalar on the device, is not 0.
    GradScaler asks the same way."""
    return getattr(optimizer, "_step_supports_amp_scaling", False)


def takes_hooks(optimizer: Optimizer) -> bool:
    """Whether hooks can be registered on the optimizer. A wrapper may be an Optimizer by its type alone."""
    return hasattr(optimizer, "_optimizer_step_pre_hooks")


def version_of(tensor: Tensor) -> int:
    """How often torch has seen the tensor change in place."""
    return tensor._version


def viewed(tensor: Tensor) -> Tensor | None:
    """The tensor of which this one is a view."""
    return tensor._base


def tree_leaves(tree: Any) -> list[Any]:
    """The leaves of nested lists, tuples and dictionaries."""
    from torch.utils._pytree import tree_leaves

    return tree_leaves(tree)


def tree_map(function: Callable[[Any], Any], tree: Any) -> Any:
    """A copy of nested lists, tuples and dictionaries with each leaf replaced."""
    from torch.utils._pytree import tree_map

    return tree_map(function, tree)


def set_found_inf(scaler: GradScaler, optimizer: Optimizer, found_inf: Tensor) -> None:
    """Let `scaler.step` act as after an `unscale_` that has found this flag, a scalar on the device. torch's own would
    ask the other ranks in the middle of the update."""
    from torch.amp.grad_scaler import OptState

    state = scaler._per_optimizer_states[id(optimizer)]
    state["found_inf_per_device"] = {found_inf.device: found_inf}
    state["stage"] = OptState.UNSCALED


def on_this_rank(tensor: Tensor) -> Tensor:
    """What this rank holds of a DTensor, as it is at this moment; any other tensor itself. `to_local()` takes ten times
    as long."""
    local: Tensor = getattr(tensor, "_local_tensor", tensor)
    return local


def scale_each(tensors: list[Tensor], factor: Tensor) -> None:
    """Multiply each tensor by a scalar on the device, in one call."""
    import torch

    torch._foreach_mul_(tensors, factor)


# --- torch: the two calls of a step


def backward(loss: Tensor, leaf: Tensor | None = None, gradient: Tensor | None = None) -> None:
    """`loss.backward()` or, with a leaf, `torch.autograd.backward([loss, leaf], [None, gradient])`.

    It leaves out torch's checks, which take as long as a small backward pass itself. With two roots they also import
    sympy, to compare the shapes of a tensor and its gradient: that would take a rank half a second at its first step.
    """
    import torch
    from torch.autograd.graph import _engine_run_backward

    roots = (loss,) if leaf is None else (loss, leaf)
    if type(loss) is not torch.Tensor or loss.numel() != 1 or not loss.is_floating_point():
        return torch.autograd.backward(roots, (None, gradient)[: len(roots)])  # which says what is wrong
    ones = torch.ones_like(loss, memory_format=torch.preserve_format)
    gradients = (ones,) if leaf is None else (ones, gradient)
    _engine_run_backward(roots, gradients, False, False, (), allow_unreachable=True, accumulate_grad=True)


def step(optimizer: Optimizer) -> None:
    """`optimizer.step()`. It leaves out what torch puts around the method of the class for hooks and its profiler,
    where there are no hooks: for a small model that takes as long as the update itself."""
    from torch.optim.optimizer import _global_optimizer_post_hooks, _global_optimizer_pre_hooks

    method = type(optimizer).step
    plain = getattr(method, "__wrapped__", None)
    if (
        not hasattr(method, "hooked")  # what torch has wrapped; the user may have replaced it, or wrapped it once more
        or hasattr(plain, "hooked")
        or "step" in vars(optimizer)
        or optimizer._optimizer_step_pre_hooks
        or optimizer._optimizer_step_post_hooks
        or _global_optimizer_pre_hooks
        or _global_optimizer_post_hooks
    ):
        optimizer.step()
    else:
        plain(optimizer)  # type: ignore[misc]


# --- torch: process groups


def replace_group_functions(init: Callable[..., None], destroy: Callable[..., None]) -> Callable[[], None]:
    """Replace torch.distributed's `init_process_group` and `destroy_process_group` in both modules that have them.

    Call what this returns to put them back.
    """
    import torch.distributed as dist
    from torch.distributed import distributed_c10d

    def put(functions: dict[str, Callable[..., None]]) -> None:
        for module in (dist, distributed_c10d):
            vars(module).update(functions)

    theirs = {"init_process_group": dist.init_process_group, "destroy_process_group": dist.destroy_process_group}
    ours = zip(theirs.items(), (init, destroy))
    put({name: functools.wraps(original)(replacement) for (name, original), replacement in ours})
    return lambda: put(theirs)


# --- torch: modules


def buffers_of(module: nn.Module) -> dict[str, Tensor | None]:
    """The module's own buffers, by name: those of no submodule. It looks them up here."""
    return module._buffers


def saved_buffers(module: nn.Module) -> list[str]:
    """The names of the module's own buffers that are in its state_dict()."""
    return [name for name in module._buffers.keys() if name not in module._non_persistent_buffers_set]  # noqa: SIM118


def is_batch_norm(module: nn.Module) -> TypeGuard[_BatchNorm]:
    """Whether a module is batch norm of any dimension, or synchronised batch norm."""
    from torch.nn.modules.batchnorm import _BatchNorm

    return isinstance(module, _BatchNorm)


def compiled_original(module: Any) -> Any:
    """The module inside one that torch.compile, or Fabric's setup, returned; None for any other."""
    return getattr(module, "_forward_module" if type(module).__name__ == "_FabricModule" else "_orig_mod", None)


def checkpoint_activations(
    model: nn.Module,
    chosen: Callable[[nn.Module], bool],
    contexts: Callable[[], tuple[AbstractContextManager[None], ...]] | None,
) -> None:
    """Recompute the chosen modules in the backward pass.

    `contexts` gives a context for the forward pass and one for the recomputation.
    """
    from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import (
        apply_activation_checkpointing,
        checkpoint_wrapper,
    )

    def wrap(module: nn.Module) -> nn.Module:
        return checkpoint_wrapper(module, **({} if contexts is None else {"context_fn": contexts}))

    apply_activation_checkpointing(model, checkpoint_wrapper_fn=wrap, check_fn=chosen)


def missing_gradients(ddp: Any) -> list[int] | None:
    """After a backward pass: the trained parameters, by number, for which DistributedDataParallel still waits, as they
    got no gradient on this rank; None if it has summed all. After the first backward pass, a collective."""
    try:
        ddp.reducer._rebuild_buckets()  # which the next forward pass does otherwise
    except RuntimeError as error:
        if "finished reduction" not in str(error):
            raise
        found = re.search(r"did not receive grad for rank \d+: ([\d ,]+)", str(error))
        return [int(number) for number in re.findall(r"\d+", found[1])] if found else []
    return None


def no_buffer_sync() -> dict[str, Any]:
    """The argument with which DistributedDataParallel leaves buffers alone: torch 2.15 renamed it."""
    from torch.nn.parallel import DistributedDataParallel

    known = inspect.signature(DistributedDataParallel).parameters
    return {"forward_sync_buffers" if "forward_sync_buffers" in known else "broadcast_buffers": False}


# --- torch: the compiler. torch.optim and DistributedDataParallel import it in their first step, whether anything is
# compiled or not. So a supervisor imports it, with torch, before it forks a rank.

LIMIT = (
    "WARNING: torch.compile has met more than {} kinds of input, such as shapes, and runs further ones uncompiled. A "
    "resumed run may compile others, so its last bits may differ; pad the batches to a few shapes"
)


def cache_in(folder: Path) -> None:
    """Have torch keep what it compiles in `folder`, unless the user has chosen a place. Ranks may share it.

    Torch's own default is in /tmp, where the next attempt, on other nodes, does not find it.
    """
    import fcntl

    folder.mkdir(exist_ok=True)
    with (folder / "lock").open("w") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_SH)
        except OSError:  # no locks on this file system, as on some Lustre mounts: torch would fail to lock there
            return
    os.environ.setdefault("TORCHINDUCTOR_CACHE_DIR", str(folder / _processor()))


def _processor() -> str:
    """A name for this model of processor. Torch compiles C++ for the processor that it runs on, but its cache does not
    distinguish processors."""
    import hashlib
    import platform

    cpuinfo = Path("/proc/cpuinfo")
    lines = cpuinfo.read_text().splitlines() if cpuinfo.exists() else []
    features = next((line for line in lines if line.startswith(("flags", "Features"))), "")
    return f"{platform.machine()}-{hashlib.sha256(features.encode()).hexdigest()[:8]}"


def compile_each_shape(warn: Callable[[str], None]) -> None:
    """Compile a graph for each shape of the input, also where the user's code compiles. Imports the compiler.

    By default it makes a graph for all sizes as soon as it meets a second one, and uses it for the first one from then
    on. Then the bits of a step depend on the steps before, and so on where the run was resumed. It keeps a limited
    number of graphs: `warn` is called with a line once that is reached.
    """
    import logging

    import torch._dynamo.config as config

    said = False

    def at_limit(record: logging.LogRecord) -> bool:
        nonlocal said
        if not said and "hit config." in str(record.msg):
            said = True
            with contextlib.suppress(Exception):  # the compiler calls this
                warn(LIMIT.format(config.recompile_limit))
        return True

    _set_in_all_threads(config, "automatic_dynamic_shapes", False)
    log = logging.getLogger("torch._dynamo.convert_frame")
    if all(getattr(known, "__name__", "") != at_limit.__name__ for known in log.filters):
        log.addFilter(at_limit)


def _set_in_all_threads(config: Any, name: str, value: bool) -> None:
    """Set one of torch's settings, and its default: what is set holds for this thread alone since torch 2.15."""
    setattr(config, name, value)
    config._config[name].default = value


def compile_without_timing() -> None:
    """Let the compiler choose no kernel by how long it takes where another one adds in another order: each attempt, and
    each rank, might choose another one. A user who has set TORCHINDUCTOR_DETERMINISTIC has chosen."""
    if os.environ.setdefault("TORCHINDUCTOR_DETERMINISTIC", "1") == "1" and "torch._inductor.config" in sys.modules:
        _set_in_all_threads(sys.modules["torch._inductor.config"], "deterministic", True)


def draw_from_default_generators() -> None:
    """Where a compiled model recomputes activations on a GPU, let it draw its random numbers, as for dropout, from
    torch's default generators.

    By default it draws them from generators of its own, which are seeded once per process: seeding the default ones
    before a step does not reach them, so a resumed run would draw other numbers.
    """
    import torch._functorch.config as config

    _set_in_all_threads(config, "graphsafe_rng_functionalization", False)


def compile_whole_under_ddp() -> None:
    """Within DistributedDataParallel, compile a model as one graph instead of one for each bucket of gradients."""
    import torch._dynamo.config as config

    config.optimize_ddp = False


def compile_in_place(module: nn.Module, mode: str | None = None) -> None:
    """Compile a module for fixed shapes, as `Module.compile` does.

    Before torch 2.14 that compiles nothing, without a word, of a module whose forward is torch's own, such as an
    nn.Sequential or an nn.TransformerEncoderLayer, unless the module is wrapped.
    """
    import torch._dynamo.config as config

    with config.patch(wrap_top_frame=type(module).forward.__module__.startswith("torch.nn.")):
        module.compile(dynamic=False, mode=mode)


def has_cuda_graphs(device: torch.device) -> bool:
    """Whether the compiler has recorded CUDA graphs on this device for a forward and a backward pass, and left out no
    part of a model so far. Call it in the thread that trains."""
    from torch._dynamo.utils import counters
    from torch._inductor.cudagraph_trees import get_manager

    manager = get_manager(device.index or 0, create_if_none_exists=False)
    if manager is None or counters["inductor"]["cudagraph_skips"]:
        return False
    return any(any(forward.children.values()) for forwards in manager.roots.values() for forward in forwards)


def on_compiling(note: Callable[[bool], None]) -> None:
    """Call `note` from now on whenever torch's compiler begins and ends its work in this process. Imports it."""
    from torch._dynamo.callback import callback_handler

    callback_handler.register_start_callback(lambda _: note(True))
    callback_handler.register_end_callback(lambda _: note(False))


# --- torch: loading


def kept_iterator(loader: Any) -> Any:
    """The iterator that a DataLoader with persistent workers keeps; None where there is none."""
    return getattr(loader, "_iterator", None)


def worker_processes(iterator: Any) -> list[Any]:
    """The worker processes of an iteration over a DataLoader; none where it has no workers."""
    return getattr(iterator, "_workers", [])


def shut_down_workers(iterator: Any) -> None:
    """End the workers of an iteration over a DataLoader, as torch does when it drops the iterator."""
    iterator._shutdown_workers()


def hide_worker() -> None:
    """From now on torch's get_worker_info() says that this process is no loader's worker: a data set would read only
    some of its shards."""
    from torch.utils.data._utils import worker

    worker._worker_info = None


def with_seeded_shuffles(source: Any, seed: int) -> Any:
    """This pipeline of webdataset's, with a seed for each `.shuffle(...)` that would draw one from the clock. Any other
    source as it is."""
    stages = getattr(source, "pipeline", None)
    if not isinstance(stages, list) or not type(source).__module__.startswith("webdataset"):
        return source
    seeded = copy.copy(source)
    seeded.pipeline = [_with_seed(stage, seed + number) for number, stage in enumerate(stages)]
    return seeded


def _with_seed(stage: Any, seed: int) -> Any:
    shuffles = getattr(getattr(stage, "f", None), "__name__", "") == "_shuffle"
    if not shuffles or len(stage.args) > 2 or any(stage.kw.get(name) is not None for name in ("rng", "seed")):
        return stage
    return type(stage)(stage.f, *stage.args, **{**stage.kw, "seed": seed})


def open_iterations(objects: Iterable[Any]) -> list[tuple[Any, Any, int]]:
    """The unfinished iterations over DataLoaders among these objects: each with its data set, and how many batches it
    has given. Without those over persistent workers, which the loader keeps."""
    from torch.utils.data.dataloader import _BaseDataLoaderIter

    iterations = [each for each in objects if issubclass(type(each), _BaseDataLoaderIter)]
    return [
        (each, each._dataset, each._num_yielded)
        for each in iterations
        if not each._persistent_workers and each._num_yielded < _length(each)
    ]


def _length(iteration: Any) -> float:
    try:
        return len(iteration)
    except (TypeError, NotImplementedError):
        return float("inf")


def collate_as_list(kind: type) -> None:
    """From now on torch's default collate makes a list of samples of this type."""
    from torch.utils.data._utils.collate import default_collate_fn_map

    default_collate_fn_map[kind] = lambda batch, **_: list(batch)


# --- Accelerate


def _accelerate_gradients() -> Any:
    """Accelerate's state of gradient accumulation, one per process; None if the script has no Accelerator."""
    state = getattr(sys.modules.get("accelerate.state"), "GradientState", None)
    return state() if state is not None and state._shared_state != {} else None


def accelerate_micro_batches() -> int:
    """How many micro-batches the script's Accelerator accumulates, 1 if there is none."""
    state = _accelerate_gradients()
    return 1 if state is None else state.num_steps


def begin_accelerate_steps(loop: Any) -> Callable[[], None] | None:
    """Have `accelerator.accumulate(...)` make its updates in the last micro-batch of each step of `loop`, as it does in
    the last batch of a loader of its own. Call what this returns to end that."""
    if (state := _accelerate_gradients()) is None:
        return None

    class Loader:
        """What Accelerate asks a loader that it is iterating over."""

        remainder = 0
        end_of_dataloader = property(lambda self: loop.micro_batch == loop.last_micro_batch)

    loader = Loader()
    state._add_dataloader(loader)
    return lambda: state._remove_dataloader(loader)


# --- Lightning


def leave_signals_alone(trainer: Any) -> None:
    """Keep Lightning's Trainer from handling signals: its handler for SIGTERM starts a collective wherever the main
    thread is."""
    trainer._signal_connector.register_signal_handlers = lambda: None


def replace_lightning_loaders(trainer: Any, of_fit: Callable[[Any], Any], of_others: Callable[[Any], Any]) -> None:
    """Have the Trainer train from what `of_fit` makes of its training loader, as the user has made that: by default
    Lightning puts another sampler into it, which shuffles. `of_others` replaces all other loaders."""
    connector = trainer._data_connector
    prepare = connector._prepare_dataloader

    def prepare_dataloader(loader: Any, shuffle: bool, mode: Any = None) -> Any:
        return of_fit(loader) if mode == "train" else of_others(prepare(loader, shuffle=shuffle, mode=mode))

    connector._prepare_dataloader = prepare_dataloader


def lightning_swa_model(callback: Any) -> Any:
    """The averaged model of Lightning's StochasticWeightAveraging."""
    return callback._average_model


def lightning_fetcher(trainer: Any) -> Any:
    """What fetches the training batches, and counts them in `fetched`; None until Lightning's loop has begun."""
    return trainer.fit_loop._data_fetcher


def get_lightning_steps(trainer: Any) -> int:
    """How many steps Lightning's loggers have been given."""
    return trainer.fit_loop.epoch_loop._batches_that_stepped


def set_lightning_steps(trainer: Any, steps: int) -> None:
    """Set what `get_lightning_steps` returns."""
    trainer.fit_loop.epoch_loop._batches_that_stepped = steps


# --- transformers


def load_no_transformers_checkpoint(trainer: Any, loader: Any) -> None:
    """Keep the Trainer of transformers from loading anything but its counters from the folder it resumes from, and from
    skipping batches of `loader`, which begins where the run is."""
    import transformers.trainer as module

    for part in ("from_checkpoint", "optimizer_and_scheduler", "scaler", "rng_state"):
        setattr(trainer, f"_load_{part}", lambda *_: None)
    skip = module.skip_first_batches
    module.skip_first_batches = lambda given, count: given if given is loader else skip(given, count)


def on_best_transformers_metric(trainer: Any, act: Callable[[], None]) -> None:
    """Call `act` after each evaluation of the Trainer of transformers whose metric is the best so far."""
    determine = trainer._determine_best_metric

    def determined(**words: Any) -> bool:
        if best := determine(**words):
            act()
        return best

    trainer._determine_best_metric = determined


# --- Ray


def ray_drains_a_node() -> bool:
    """Whether Ray drains the node of any worker in this worker's group. `ray.train.get_preemption_info` would wait for
    all workers."""
    from ray.train.v2._internal.execution.context import get_train_context

    return get_train_context().preemption_context.preemption_info is not None


def count_in_ray(key: str) -> int:
    """How often this was called with this key before, in the whole Ray cluster."""
    from ray.experimental.internal_kv import _internal_kv_get, _internal_kv_put

    count = int(_internal_kv_get(key) or 0)
    _internal_kv_put(key, str(count + 1))
    return count
