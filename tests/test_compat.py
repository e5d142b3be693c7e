"""The private names of other libraries still mean what Laststep takes them to mean.

A release that renames one of them must fail here, with the name, and not in the middle of somebody's training.
"""

from __future__ import annotations

import argparse
import contextlib
import functools
import importlib.util
import inspect
import io
import logging
import re
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from datetime import timedelta
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule, fully_shard
from torch.distributed.tensor import DTensor
from torch.utils.data import DataLoader, IterableDataset, TensorDataset, default_collate, get_worker_info

from laststep import compat
from laststep.compat import cuda_driver
from laststep.compat.cuda_driver import RELAXED, CudaDriver
from laststep.config.config import Config
from laststep.ranks.world import ShardPlace, shard_rows
from laststep.rundir import RunDir
from laststep.submission.sbatch import run_executor
from tests.ranks.stub_driver import StubDriver
from tests.support.needs import require_package
from tests.support.project import DEADLINE_S, PROJECT, install_finder, wait_until
from tests.support.states import pretended_rank, sharded, torch_setting


def test_it_imports_nothing() -> None:
    """The command answers at once only as long as torch stays away."""
    heavy = ("torch", "submitit", "tensorboard", "ray")
    code = f"import sys, laststep.compat; print([n for n in {heavy} if n in sys.modules])"
    said = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=PROJECT, check=True).stdout
    assert said == "[]\n"


def test_no_private_name_elsewhere() -> None:
    """One place to look when a library changes."""
    private = re.compile(
        r"\btorch(\.\w+)*\._(?!_)|tensorboard\.compat|JobEnvironment\._|\._(orig_mod|shutdown_w|option_s|schema|cdata)"
    )
    sources = {*(PROJECT / "laststep").rglob("*.py")} - {*(PROJECT / "laststep" / "compat").rglob("*.py")}
    found = [(path.name, use[0]) for path in sources for use in private.finditer(path.read_text())]
    assert not found


def test_argparse() -> None:
    """Completion offers what the parser knows, so it must see all of it."""
    parser = argparse.ArgumentParser()
    parser.add_argument("-f", "--follow", action="store_true")
    parser.add_argument("run")
    assert {"-f", "--follow", "--help"} <= compat.options_of(parser).keys()
    assert [action.dest for action in compat.positionals_of(parser)] == ["run"]


def test_process_group_functions() -> None:
    """Scripts find them in two modules, by signature and all, and torch's own are back afterwards."""
    places, names = (dist, dist.distributed_c10d), ("init_process_group", "destroy_process_group")
    before = [getattr(place, name) for place in places for name in names]
    assert before[:2] == before[2:]
    undo = compat.replace_group_functions(lambda *_: None, lambda *_: None)
    during = [getattr(place, name) for place in places for name in names]
    undo()
    assert not set(before) & set(during)
    assert {"backend", "rank", "world_size"} <= inspect.signature(during[0]).parameters.keys()
    assert [getattr(place, name) for place in places for name in names] == before


def test_timeouts_of_groups() -> None:
    """torch measures a collective by a clock: of ranks that were suspended, a collective that timed out as they woke
    would fail, in our group and in those that a user's code makes."""

    def timeout(group: Any) -> timedelta:
        found: timedelta = group._get_backend(torch.device("cpu")).options._timeout
        return found

    short, long = timedelta(seconds=9), timedelta(days=365)
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1, timeout=short)
    try:
        before = timeout(dist.new_group([0]))
        compat.set_timeout(long)
        undo = compat.replace_default_timeouts(long)
        during = timeout(dist.new_group([0]))
        undo()
        assert [timeout(dist.group.WORLD), during, timeout(dist.new_group([0]))] == [long, long, before]
    finally:
        dist.destroy_process_group()


def test_editable_installs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A job must not import from an editable install what the copy of the code has."""
    install_finder("mine", {"mine": str(tmp_path / "mine"), "ns.part": str(tmp_path / "ns" / "part")}, monkeypatch)
    found = compat.editable_modules()
    assert (found["mine"], found["ns.part"]) == (tmp_path / "mine", tmp_path / "ns" / "part")


def test_submitits_script(tmp_path: Path) -> None:
    """`--dry-run` shows the script that a submission would hand over."""
    config = Config.load(None, [f"launch.root={tmp_path}", "launch.name=first"])
    script = compat.sbatch_script(run_executor(config, RunDir(tmp_path / "first")))
    assert script.startswith("#!/bin/bash") and "submitit.core._submit" in script and "srun" in script


def test_submitits_node_list(monkeypatch: pytest.MonkeyPatch) -> None:
    """The nodes of the step, not those of the job."""
    monkeypatch.setenv("SLURM_JOB_NODELIST", "n[1-4]")
    monkeypatch.setenv("SLURM_STEP_NODELIST", "n[2-3]")
    assert compat.step_hostnames() == ["n2", "n3"]


def test_tensorboards_records() -> None:
    """An event goes into a framed record of the file format (length, checksum, data, checksum)."""
    (Event, SessionLog, Summary, RecordWriter), buffer = compat.event_file_parts(), io.BytesIO()
    value = Summary.Value(tag="train/loss", simple_value=0.5)
    event = Event(wall_time=1.0, step=3, summary=Summary(value=[value]))
    RecordWriter(buffer).write(event.SerializeToString())
    read = Event.FromString(buffer.getvalue()[12:-4])
    assert (read.step, read.summary.value[0].tag) == (3, "train/loss")
    assert SessionLog.START


def test_tensorboards_hyperparameters() -> None:
    """The plugin finds a run's values in the metadata of a summary with a tag of its own."""
    parts = compat.hparams_parts()
    start = parts.SessionStartInfo(start_time_secs=1.0)
    start.hparams["seed"].number_value = 3
    data = parts.metadata(parts.PluginData(session_start_info=start)).plugin_data
    assert data.plugin_name == "hparams" and parts.START_TAG.startswith("_hparams_/")
    assert parts.PluginData.FromString(data.content).session_start_info.hparams["seed"].number_value == 3
    assert parts.SessionEndInfo(status=parts.SUCCESS) and parts.nothing is not None
    assert parts.END_TAG != parts.START_TAG


def test_copying_and_versions() -> None:
    """The custom loop takes a tensor whose version has not moved as unchanged."""
    targets, sources = [torch.zeros(2), torch.zeros(3)], [torch.ones(2), torch.ones(3)]
    before = [compat.version_of(target) for target in targets]
    compat.copy_each(targets, sources)
    assert all(torch.equal(target, source) for target, source in zip(targets, sources))
    assert [compat.version_of(target) for target in targets] != before


@pytest.mark.parametrize("value", [1.0, float("nan"), float("inf")])
def test_finding_what_is_not_finite(value: float) -> None:
    """The guard against NaN reads this flag; the gradients themselves must stay as they are."""
    gradients, found = [torch.ones(3), torch.tensor([value])], torch.zeros(())
    compat.note_nonfinite(gradients, found, torch.ones(()))
    assert bool(found) == (value != 1.0)
    assert torch.equal(gradients[0], torch.ones(3))


def test_a_backward_pass_with_a_gradient() -> None:
    """The last bits of a run depend on it. A loss that torch refuses is refused with torch's own message."""
    gradients = []
    for backward in (compat.backward, lambda loss, leaf, plain: torch.autograd.backward([loss, leaf], [None, plain])):
        weight, tap = nn.Parameter(torch.linspace(-1, 1, 7)), nn.Parameter(torch.zeros(()))
        for power in (2, 3):  # the second pass adds to the gradients of the first
            loss = weight.tanh().pow(power).sum()
            backward(loss, tap, loss.detach())
        assert weight.grad is not None and tap.grad is not None
        gradients.append(torch.cat([weight.grad, tap.grad[None]]))
    assert torch.equal(*gradients)
    with pytest.raises(RuntimeError, match="only for scalar outputs"):
        compat.backward(weight.tanh(), tap, tap.detach())
    with pytest.raises(RuntimeError, match="does not require grad"):
        compat.backward(tap.detach(), nn.Parameter(torch.zeros(())), tap.detach())


def test_a_backward_pass_of_one_loss() -> None:
    """The same, without a second root."""
    gradients = []
    for run in (compat.backward, Tensor.backward):
        weight = nn.Parameter(torch.linspace(-1, 1, 7))
        run(weight.tanh().pow(3).sum())
        gradients.append(weight.grad)
    assert gradients[0] is not None and gradients[1] is not None and torch.equal(gradients[0], gradients[1])
    with pytest.raises(RuntimeError, match="grad can be implicitly created only for scalar outputs"):
        compat.backward(torch.ones(3, requires_grad=True).tanh())
    with pytest.raises(RuntimeError, match="does not require grad"):
        compat.backward(torch.ones(()))


def test_skipping_by_a_flag() -> None:
    """A fused optimiser leaves its step out by itself, so that no step waits for the device; others do not."""
    weight = nn.Parameter(torch.ones(3))
    fused = torch.optim.AdamW([weight], fused=True)
    assert compat.reads_found_inf(fused)
    assert not compat.reads_found_inf(torch.optim.RMSprop([weight]))
    weight.grad, fused.found_inf = torch.ones(3), torch.ones(())  # type: ignore[attr-defined]
    fused.step()
    assert torch.equal(weight, torch.ones(3))


def test_trees() -> None:
    """A model may return any nest of tensors."""
    tree = {"a": [1, (2, 3)]}
    assert compat.tree_leaves(tree) == [1, 2, 3]
    assert compat.tree_map(lambda leaf: 2 * leaf, tree) == {"a": [2, (4, 6)]}


def test_batch_norm() -> None:
    """A recomputed forward pass must not count a batch twice, in any kind of batch norm."""
    kinds = (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d, nn.SyncBatchNorm)
    assert all(compat.is_batch_norm(kind(3)) for kind in kinds)
    assert not compat.is_batch_norm(nn.LayerNorm(3))


def test_buffers_of_a_module() -> None:
    """A buffer that is replaced must be found, and put back."""
    module = nn.BatchNorm1d(2)
    compat.buffers_of(module)["running_mean"] = mean = torch.ones(2)
    assert module.running_mean is mean and list(compat.buffers_of(nn.Sequential(module))) == []
    module.register_buffer("cache", torch.ones(1), persistent=False)
    assert compat.saved_buffers(module) == ["running_mean", "running_var", "num_batches_tracked"]


def test_the_compiler_says_when_it_works() -> None:
    """Else a compilation that takes longer than launch.hang_timeout_s would be taken for a hang, in every attempt."""
    torch._dynamo.reset()
    noted: list[bool] = []
    compat.on_compiling(noted.append)
    assert torch.compile(lambda x: x + 1, backend="eager")(torch.ones(2))[0] == 2
    assert noted == [True, False]
    torch._dynamo.reset()


def test_the_compiler_makes_a_graph_for_each_shape(monkeypatch: pytest.MonkeyPatch) -> None:
    """As many as it keeps. From then on a resumed run may compile other shapes than the undisturbed one, which must not
    happen in silence. torch's own default would be one graph for all, once it has met a second shape."""
    torch._dynamo.reset()
    with torch_setting(torch._dynamo.config, "automatic_dynamic_shapes", True):
        log = logging.getLogger("torch._dynamo.convert_frame")
        warnings: list[str] = []
        monkeypatch.setattr(log, "filters", [])
        monkeypatch.setattr(log, "propagate", False)
        for _ in range(2):
            compat.compile_each_shape(warnings.append)
        elsewhere: list[bool] = []
        thread = threading.Thread(target=lambda: elsewhere.append(torch._dynamo.config.automatic_dynamic_shapes))
        thread.start()
        thread.join()
        assert elsewhere == [False], "in a user's own thread, too"
        graphs: list[Any] = []

        def backend(graph: Any, _: Any) -> Any:
            graphs.append(graph)
            return graph.forward

        double = torch.compile(lambda x: 2 * x, backend=backend)
        limit = torch._dynamo.config.recompile_limit
        for size in [*range(2, limit + 2), 3, 2]:
            assert double(torch.ones(size)).tolist() == [2] * size
        assert (len(graphs), warnings) == (limit, [])
        for size in (50, 60):
            assert double(torch.ones(size)).tolist() == [2] * size
        assert len(graphs) == limit
        assert warnings == [compat.LIMIT.format(limit)]
    torch._dynamo.reset()


def test_the_compiler_chooses_nothing_by_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """It would choose anew in each attempt, among kernels that add in different orders."""
    import torch._inductor.config as config

    for chosen, expected in (("0", False), (None, True)):  # the user's choice is kept
        monkeypatch.setenv("TORCHINDUCTOR_DETERMINISTIC", chosen or "")
        if chosen is None:
            monkeypatch.delenv("TORCHINDUCTOR_DETERMINISTIC")
        with torch_setting(config, "deterministic", False):
            compat.compile_without_timing()
            assert config.deterministic == expected
    monkeypatch.setenv("TORCHINDUCTOR_DETERMINISTIC", "1")
    code = "import torch._inductor.config as config; print(config.deterministic)"
    assert subprocess.check_output([sys.executable, "-c", code], text=True) == "True\n", "where it is imported later"


def test_what_the_compiler_makes_for_gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without the first, dropout would differ after a resume where activations are recomputed on a GPU."""
    import torch._dynamo.config
    import torch._functorch.config
    from torch._inductor import cudagraph_trees

    with torch_setting(torch._functorch.config, "graphsafe_rng_functionalization", True):
        compat.draw_from_default_generators()
        assert not torch._functorch.config.graphsafe_rng_functionalization
    assert "config.graphsafe_rng_functionalization" in inspect.getsource(torch._functorch.partitioners)
    with torch_setting(torch._dynamo.config, "optimize_ddp", True):
        compat.compile_whole_under_ddp()
        assert not torch._dynamo.config.optimize_ddp
    assert not compat.has_cuda_graphs(torch.device("cuda", 0)), "no device, no graphs"
    roots: dict[int, list[Any]] = {}
    monkeypatch.setattr(
        cudagraph_trees, "get_manager", lambda index, create_if_none_exists: SimpleNamespace(roots=roots)
    )
    forward = SimpleNamespace(children={})
    for graphs in ({}, {0: [forward]}):
        roots.update(graphs)
        assert not compat.has_cuda_graphs(torch.device("cuda", 0)), "no backward pass"
    forward.children[1] = ["its backward pass"]
    assert compat.has_cuda_graphs(torch.device("cuda", 0))
    monkeypatch.setitem(torch._dynamo.utils.counters["inductor"], "cudagraph_skips", 1)
    assert not compat.has_cuda_graphs(torch.device("cuda", 0)), "not all of the model"
    source = inspect.getsource(cudagraph_trees)
    assert "self.roots[function_id].append(" in source and "self.children[function_id].append(" in source
    assert '["cudagraph_skips"] += 1' in inspect.getsource(torch._inductor.cudagraph_utils)


def test_compiled_modules() -> None:
    """A checkpoint names tensors as the plain model does."""
    model = nn.Linear(2, 1)
    assert compat.compiled_original(torch.compile(model)) is model
    assert compat.compiled_original(model) is None


@pytest.mark.parametrize("make", [lambda: nn.Sequential(nn.Linear(4, 4)), lambda: nn.Linear(4, 4)])
def test_a_module_of_torchs_own_is_compiled(make: Callable[[], nn.Module], monkeypatch: pytest.MonkeyPatch) -> None:
    """Before torch 2.14, `Module.compile` silently left it out: train.compile=true changed nothing."""
    counters = torch._dynamo.utils.counters
    torch._dynamo.reset()
    counters.clear()
    module = make()
    monkeypatch.setattr(module, "compile", functools.partial(module.compile, backend="eager"))
    compat.compile_in_place(module)
    module(torch.ones(2, 4))
    assert counters["stats"]["unique_graphs"] == 1


def test_checkpointed_activations() -> None:
    """Blocks are recomputed in the backward pass, within the context given for that."""
    model, entered = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 1)), []

    @contextlib.contextmanager
    def note(what: str) -> Iterator[None]:
        entered.append(what)
        yield

    first = model[0]
    compat.checkpoint_activations(model, lambda module: module is first, lambda: (note("forward"), note("again")))
    model(torch.ones(1, 2, requires_grad=True)).sum().backward()
    assert entered == ["forward", "again"]


def test_ddp_leaves_buffers_alone() -> None:
    """Otherwise DDP would broadcast them before each forward pass, over those that Laststep has broadcast."""
    (switch,) = compat.no_buffer_sync()
    assert switch in ("forward_sync_buffers", "broadcast_buffers")


def test_ddp_attributes() -> None:
    """The custom loop sets these on a DistributedDataParallel that the user has made."""
    source = Path(sys.modules["torch.nn.parallel.distributed"].__file__ or "").read_text()
    assert "self.require_backward_grad_sync = " in source
    assert "self.broadcast_buffers = " in source or "def broadcast_buffers(self, value" in source


def test_parameters_without_a_gradient() -> None:
    """`train.find_unused_parameters` names them: an update without them would be made with gradients of one rank."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        model = nn.ModuleList([nn.Linear(2, 1), nn.Linear(2, 1)])
        model.forward = lambda x: model[0](x)
        ddp = nn.parallel.DistributedDataParallel(model)
        ddp(torch.ones(1, 2)).sum().backward()
        assert compat.missing_gradients(ddp) == [2, 3]
        zeros = [torch.zeros_like(parameter) for parameter in model[1].parameters()]
        torch.autograd.backward(list(model[1].parameters()), zeros)
        assert compat.missing_gradients(ddp) is None
        ddp(torch.ones(1, 2))  # torch has summed all, too
    finally:
        dist.destroy_process_group()


def test_loader_workers() -> None:
    """Workers ignore SIGTERM, so the rank must find and end them itself: else it waits at its exit."""
    loader = DataLoader(TensorDataset(torch.ones(4)), num_workers=1, persistent_workers=True)
    assert compat.kept_iterator(loader) is None
    next(iter(loader))
    iterator = compat.kept_iterator(loader)
    (worker,) = compat.worker_processes(iterator)
    assert worker.is_alive()
    compat.shut_down_workers(iterator)
    worker.join(30)
    assert not worker.is_alive()
    assert compat.worker_processes(iter([])) == []


class _SaysWorker(IterableDataset[Any]):
    def __iter__(self) -> Iterator[bool]:
        compat.hide_worker()
        yield get_worker_info() is None


def test_a_hidden_worker() -> None:
    """A data set that is read in a worker of a stream must not take a part of its shards for all of them."""
    assert list(DataLoader(_SaysWorker(), batch_size=None, num_workers=1, collate_fn=bool)) == [True]


def test_open_iterations() -> None:
    """An open iteration over a DataLoader is found, and one that has ended is not."""
    loader: DataLoader[int] = DataLoader(range(3))  # type: ignore[arg-type]
    going, ended = iter(loader), iter(loader)
    next(going), list(ended)
    assert compat.open_iterations([going, ended, loader, 1]) == [(going, loader.dataset, 1)]


def test_hooks_of_optimizers() -> None:
    """An optimizer that has never been set up as one is told from any other."""
    assert compat.takes_hooks(torch.optim.SGD([torch.ones(1)])) and not compat.takes_hooks(
        object.__new__(torch.optim.SGD)
    )


def test_views() -> None:
    """A slice of a batch is known as part of that batch."""
    batch = torch.ones(3)
    assert compat.viewed(batch[:2]) is batch and compat.viewed(batch) is None


def test_collating() -> None:
    """A batch of encoded images is a list; torch would refuse their type."""

    class Sample:
        pass

    compat.collate_as_list(Sample)
    samples: list[Any] = [Sample(), Sample()]
    assert default_collate(samples) == samples


@pytest.mark.parametrize(
    ("file", "code"),
    [
        ("lightning/pytorch/trainer/trainer.py", "self._signal_connector.register_signal_handlers()"),
        ("lightning/pytorch/loops/fit_loop.py", "self._data_fetcher: Optional[_DataFetcher] = None"),
        ("lightning/pytorch/loops/fit_loop.py", "iter(self._data_fetcher)"),
        ("lightning/pytorch/loops/fetchers.py", "self.done = self.fetched >= self.length"),
        ("lightning/pytorch/loops/training_epoch_loop.py", "self._batches_that_stepped: int = 0"),
        ("lightning/pytorch/loops/training_epoch_loop.py", "self.on_advance_end(data_fetcher)"),
        ("lightning/pytorch/trainer/connectors/data_connector.py", "._prepare_dataloader(dataloader, shuffle="),
        ("lightning/pytorch/callbacks/stochastic_weight_avg.py", "self._average_model = deepcopy(pl_module)"),
        ("lightning/pytorch/callbacks/stochastic_weight_avg.py", '"average_model_state": '),
        ("lightning/fabric/wrappers.py", "class _FabricModule("),
        ("lightning/fabric/wrappers.py", "self._forward_module = forward_module"),
        ("transformers/trainer.py", "def _load_from_checkpoint("),
        ("transformers/trainer.py", "def _load_optimizer_and_scheduler("),
        ("transformers/trainer.py", "def _load_scaler("),
        ("transformers/trainer.py", "def _load_rng_state("),
        ("transformers/trainer.py", "_dataloader = skip_first_batches("),
        ("transformers/trainer.py", "self._determine_best_metric(metrics=metrics, trial=trial)"),
        ("accelerate/state.py", "self.dataloader_references"),
        ("accelerate/state.py", "def _add_dataloader(self, dataloader):"),
        ("accelerate/state.py", "def _remove_dataloader(self, dataloader):"),
        (
            "accelerate/accelerator.py",
            "self.gradient_state.sync_with_dataloader and self.gradient_state.end_of_dataloader",
        ),
        ("ray/train/v2/_internal/execution/context.py", "preemption_context: PreemptionContext"),
        ("ray/train/v2/_internal/execution/preemption.py", "preemption_info: Optional[PreemptionInfo] = None"),
        (
            "ray/train/v2/_internal/execution/worker_group/poll.py",
            "RayActorError) and error.preempted",
        ),
        ("ray/experimental/internal_kv.py", "def _internal_kv_get("),
        ("ray/experimental/internal_kv.py", "def _internal_kv_put("),
    ],
)
def test_frameworks(file: str, code: str) -> None:
    """The adapters set and read these. Read as text: to import the frameworks takes seconds."""
    package, _, inner = file.partition("/")
    require_package(package)
    spec = importlib.util.find_spec(package)
    assert spec is not None and spec.origin is not None
    assert code in Path(spec.origin).with_name(inner.partition("/")[0]).parent.joinpath(inner).read_text()


def test_a_flag_for_the_scaler() -> None:
    """A sharded step sets the flag that all ranks have agreed on: the scaler must skip the step and lower its scale."""
    parameter = nn.Parameter(torch.ones(3))
    optimizer = torch.optim.SGD([parameter], lr=1.0, fused=True)
    scaler = torch.amp.GradScaler("cpu", init_scale=4.0)
    for found, left, scale in ((1.0, 1.0, 2.0), (0.0, 0.0, 2.0)):
        scaler.scale(torch.ones(()))
        parameter.grad = torch.ones(3)
        compat.set_found_inf(scaler, optimizer, torch.tensor(found))
        scaler.step(optimizer)
        scaler.update()
        assert parameter.tolist() == [left] * 3 and scaler.get_scale() == scale


def test_tensors_are_scaled_together() -> None:
    """Clipping a gradient of thousands of tensors must not cost thousands of calls."""
    tensors = [torch.ones(2), torch.ones(3)]
    compat.scale_each(tensors, torch.tensor(0.5))
    assert torch.cat(tensors).tolist() == [0.5] * 5


def test_what_this_rank_holds_of_a_tensor() -> None:
    """Where a rescue looks whether a sharded weight has been moved in memory."""
    with pretended_rank(ShardPlace(1, 2, 0, 1)) as mesh, torch.no_grad():
        weight = nn.Parameter(sharded(torch.ones(3, 2), ShardPlace(1, 2, 0, 1), mesh))
        assert compat.on_this_rank(weight).data_ptr() == weight.to_local().data_ptr() > 0  # type: ignore
    plain = torch.ones(2)
    assert compat.on_this_rank(plain) is plain


@pytest.mark.parametrize("place", [ShardPlace(0, 2, 0, 1), ShardPlace(1, 2, 1, 2), ShardPlace(3, 4, 0, 1)])
def test_how_fsdp2_cuts_rows(place: ShardPlace) -> None:
    """Where a rank's rows lie in a checkpoint is computed, so FSDP2 must cut exactly there: uneven, too, or none."""
    with pretended_rank(place) as mesh:
        model = nn.Linear(3, 5, device="meta")
        fully_shard(model, mesh=mesh)
        begin, end = shard_rows(5, place.shard, place.shards)
        assert isinstance(model.weight, DTensor) and isinstance(model.bias, DTensor)
        assert model.weight.placements[-1].is_shard(0) and all(p.is_replicate() for p in model.weight.placements[:-1])
        assert model.weight.to_local().shape == (end - begin, 3) and model.bias.to_local().shape == (end - begin,)


def test_fsdp2_and_the_memory_of_shards() -> None:
    """A model is cut without memory and given it afterwards. Then an update works on the rows in their place, so they
    must stay there, and a validation must be able to free what it has gathered."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        model = nn.Linear(3, 3, bias=False, device="meta")
        fully_shard(model, mesh=dist.init_device_mesh("cpu", (1,)))
        assert isinstance(model, FSDPModule) and isinstance(model.weight, DTensor)
        model.weight = nn.Parameter(torch.empty_like(model.weight, device="cpu"))
        model.weight.to_local().detach().copy_(torch.eye(3))
        model.load_state_dict({}, strict=False)  # has FSDP2 look where its shards are now
        shard = model.weight
        for step in (1, 2):
            place = shard.to_local().data_ptr()
            assert torch.equal(model(torch.ones(1, 3)), torch.full((1, 3), float(step))), "it gathers what is there"
            assert not isinstance(model.weight, DTensor), "the root stays gathered until a backward pass"
            model.reshard()
            assert model.weight is shard and shard.to_local().data_ptr() == place
            model(torch.ones(1, 3)).sum().backward()
            assert model.weight is shard and isinstance(shard.grad, DTensor)
            assert torch.equal(shard.grad.to_local(), torch.ones(3, 3)) and shard.to_local().data_ptr() == place
            shard.grad = None
            shard.to_local().detach().add_(torch.eye(3))
    finally:
        dist.destroy_process_group()


# --- CUDA's driver


@pytest.fixture(scope="module")
def stub_driver(tmp_path_factory: pytest.TempPathFactory) -> StubDriver:
    return StubDriver(tmp_path_factory.mktemp("driver"))


def test_a_query_holds_no_lock_of_pythons(stub_driver: StubDriver) -> None:
    """The driver may wait for the device, while a thread launches into a full queue. With Python's lock held, no thread
    would run any more: neither heartbeats, nor the rescue, nor the deadline that ends the process."""
    driver = CudaDriver(stub_driver.library)
    stub_driver.set("release", 0)
    thread = threading.Thread(target=driver.has_passed, args=(1,), daemon=True)
    thread.start()
    wait_until(lambda: stub_driver.number("waiting") or not thread.is_alive(), "the query has not begun")
    assert thread.is_alive(), "nothing ran beside it"
    stub_driver.set("release", 1)
    thread.join(DEADLINE_S)
    assert not thread.is_alive()


def test_answers_of_a_query(stub_driver: StubDriver) -> None:
    """An error is no answer: torch is asked, which names it."""
    driver = CudaDriver(stub_driver.library)
    assert driver.has_passed(1) is True and driver.has_passed(0x600) is False
    stub_driver.set("status", 700)  # an illegal memory access
    assert driver.has_passed(1) is None
    stub_driver.set("status", 0)


def test_captures_are_ignored_in_a_block(stub_driver: StubDriver) -> None:
    """A query in CUDA's default mode spoils any graph that another thread captures."""
    driver = CudaDriver(stub_driver.library)
    with driver.ignoring_captures():
        driver.has_passed(1)
    assert stub_driver.number("queried_in") == RELAXED
    driver.has_passed(1)
    assert stub_driver.number("queried_in") == 0, "the mode is the thread's own again"


def test_events_are_the_drivers() -> None:
    """torch shows the driver's handle of an event, none before it is first recorded."""
    assert "cuda_event" in dir(torch.cuda.Event) and not torch.cuda.Event().cuda_event


def test_no_driver(monkeypatch: pytest.MonkeyPatch) -> None:
    """With ROCm there is none: torch is asked."""
    monkeypatch.setattr(cuda_driver, "LIBRARY", "libnosuchdriver.so.1")
    assert CudaDriver.load() is None


def test_operators_pass_through_a_mode() -> None:
    """`diff` sees every operator, and in whose backward pass it runs."""
    seen = []

    class Mode(compat.dispatch_mode()):  # type: ignore[misc]
        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            seen.append((str(func), func.is_view, compat.schema_of(func).is_mutable, compat.autograd_node_number()))
            return func(*args, **(kwargs or {}))

    x = torch.ones(3, requires_grad=True)
    before = compat.autograd_number()
    with Mode():
        (x.view(3) * 2).sum().backward()
    names = [name for name, *_ in seen]
    assert names[:3] == ["aten.view.default", "aten.mul.Tensor", "aten.sum.default"] and seen[0][1] and not seen[1][2]
    numbers = [number for *_, number in seen if number is not None]
    assert numbers and before <= numbers[-1] < 2**64
