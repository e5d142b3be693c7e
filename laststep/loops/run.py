"""Run: the object that a custom training loop is called with."""

from __future__ import annotations

import builtins
import dataclasses
import functools
import inspect
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

from laststep import script
from laststep.config.args import user_args
from laststep.config.checks import check_no_sharding
from laststep.config.errors import ConfigError
from laststep.config.reads import GivenKeys, declared, for_a_function
from laststep.data.loader import LoaderFactory, StepLoader, StepNumbers
from laststep.data.streams import StepStream, StreamOptions
from laststep.loops.custom_loop import CustomLoop, Framework, Phase
from laststep.loops.engine import AttemptContext
from laststep.loops.loop_rules import NEEDED
from laststep.loops.registered import Own
from laststep.records.plan import read_given
from laststep.task import args_parameter


class Run:
    """A run, as your own training loop sees it.

    Write the loop as a function of one argument and name it in the configuration: `task: package.module.main`. Every
    rank calls it, with the process group set up (also when there is only one rank):

        def main(run):
            loader = run.loader(train_set, batch_size=64)
            run.restore(model=model, optimizer=optimizer, scheduler=scheduler)
            for epoch in run.epochs(5):
                for x, y in run.steps(loader):      # one iteration is one step: one update (see `steps`)
                    ...
                for x, y in run.validation(val_loader):
                    ...

    At a stop all ranks leave the function after the same step, from one of the two inner loops, and everything is
    saved. The next attempt calls the function again: code before the loops runs again, and the loops continue where the
    run was. When a rank dies, the surviving ranks save the last finished step.

    All random generators are seeded from (seed, step, rank) before each step, and likewise before each batch of a
    validation, so a resumed run draws the same random numbers. The function begins with the same seed on every rank.

    The function returns the run's result, a dict of numbers. If it returns nothing, the result is what the last epoch
    has logged. docs/custom-loops.md lists the rules that such a loop must follow.

    A script written for torchrun need not change its first and last lines: RANK, WORLD_SIZE, LOCAL_RANK,
    LOCAL_WORLD_SIZE, MASTER_ADDR and MASTER_PORT are set under every launcher, `init_process_group()` joins the process
    group that exists, `destroy_process_group()` leaves it alone, and `sys.exit(0)` is a return.

    Settings of your own are `args.NAME=VALUE` in the configuration and on the command line, and `run.args.NAME` here.
    With a second parameter named `args`, annotated with a dataclass of yours, they are checked against its fields:

        @dataclass
        class Args:
            width: int = 64

        def main(run, args: Args):
            ...

    With several ranks every optimizer must update the parameters of a registered DistributedDataParallel, or of a
    registered model that torch's `fully_shard` has sharded. If the loop averages the gradients itself, set
    `run.averages_gradients = True` before `run.restore(...)`.

    Attributes: `rank`, `size` (number of ranks), `local_rank`, `local_size` (number of ranks on this node), `device`
    (this rank's torch.device), `config`, `args`, `name` and `folder` (the run's name, and the path of its folder).
    """

    averages_gradients = False

    def __init__(self, loop: CustomLoop, args: Any) -> None:
        self._loop = loop
        self.args = args
        world = loop.group.world
        self.rank, self.size = world.rank, world.size
        self.local_rank, self.local_size = world.local_rank, world.local_size
        self.device = loop.group.device
        self.config = loop.given.reads.watch(loop.config)
        if loop.engine.probe is not None:
            loop.engine.probe.variables.leave_out(args)
        self.name, self.folder = loop.run_dir.name, loop.run_dir.path

    @property
    def step(self) -> int:
        """Finished steps, counted from the start of the run."""
        return self._loop.engine.position.step

    @property
    def sync_gradients(self) -> bool:
        """Whether this iteration of `steps` is the last of its step, which makes the update. True without
        `accumulate`."""
        return self._loop.micro_batch == self._loop.last_micro_batch

    def loader(
        self,
        dataset: Any,
        batch_size: int,
        num_workers: int = 0,
        collate_fn: Callable[[Any], Any] | None = None,
        *,
        sampler: Any = None,
        drop_last: bool = False,
        pin_memory: bool = True,
        persistent_workers: bool = False,
        shares: int | None = None,
    ) -> StepLoader:
        """Make a loader for `steps`: it gives this rank its share of each batch, on the device.

        `batch_size` counts the samples of all ranks together. Samples are reshuffled in each epoch, in an order that
        depends only on the seed. The last batch of an epoch may be short. `dataset` has `__len__` and `__getitem__`; a
        sample may draw random numbers, since generators are seeded from (seed, epoch, sample index) before it is made.

        `num_workers` processes load samples, 0: this process. `collate_fn` makes a batch from a list of samples, None:
        torch's default_collate.

        `sampler` chooses the samples and their order instead: a sequence of indices, or a torch Sampler that is the
        same on every rank and has no generator of its own (not a DistributedSampler: each batch is shared out here). It
        is iterated once per epoch, after `set_epoch(epoch)` if it has that, with all generators seeded by (seed,
        epoch). `drop_last` leaves out a short last batch. `pin_memory` (on GPUs) and `persistent_workers` are torch's:
        workers that stay from epoch to epoch do not see what the loop changes in the data set.

        `shares` is for a loop that is written for one value of train.shares: any other is refused. See `shares`.

        Raises ConfigError when the data set is empty or has no length, `batch_size` is not divisible by the number of
        ranks or shares, or the order of the sampler could not be repeated.
        """
        loading = LoaderFactory(collate_fn, num_workers, self.device, pin_memory, persistent_workers)
        self._loop.shares.check_loader(batch_size, shares)
        return self._loop.loaders.make(loading, dataset, self.config.seed, batch_size, sampler, drop_last)

    def stream(
        self,
        source: Any,
        batch_size: int | None = None,
        num_workers: int = 0,
        collate_fn: Callable[[Any], Any] | None = None,
        *,
        shuffle: int = 0,
        name: str = "stream",
        pin_memory: bool = True,
    ) -> StepStream:
        """Make a loader for `steps` of data that can only be iterated:

            for batch in run.steps(run.stream(samples, 64), count=1000):

        `source` is read over and over, and `count` is the length of an epoch. It gives samples; `batch_size` counts
        those of a step over all ranks. Without `batch_size` it gives batches, as a StatefulDataLoader does: one per
        step for each rank, or share. It is any of

        * an iterable, of which each rank reads all and keeps its part;
        * a streaming data set of Hugging Face, or a WebDataset with nodesplitter=split_by_node: each rank reads its
          own shards, if there are enough of them;
        * a function of (part, parts) that returns an iterable over this part of the samples.

        It must give the same samples in the same order each time it is read from its beginning, and not divide them
        by rank itself. Random draws within it are seeded. If it has state_dict() and load_state_dict(), and these hold
        what they promise, a resumed run continues there. Else the samples are counted, and a resume reads and throws
        away those before (a line says so).

        `shuffle` shuffles within blocks of this many samples, which a resume reads again. `num_workers` processes per
        rank read. The samples of a step follow from the number of ranks, or train.shares, and of workers with which
        the run began; a run resumes on any number of ranks that divides that number. A second stream needs another
        `name`. Raises ConfigError.
        """
        asked = StreamOptions(source, batch_size, shuffle, collate_fn, num_workers, pin_memory)
        return self._loop.streams.make(name, self._loop.engine.position.streams, asked)

    def restore(self, **objects: Any) -> None:
        """Register everything that a checkpoint should hold, and restore it from the newest checkpoint if there is one.

        Call this once, before the first step. Each object has state_dict() and load_state_dict(), or is a dict, and its
        state must be the same on every rank, but for that of `own`. At least one is an optimizer. Register the
        DistributedDataParallel, not the model inside it. Raises ConfigError for an object that cannot be stored, for a
        checkpoint that does not fit the objects, and where nothing averages the gradients of several ranks (see
        `averages_gradients`).

        A model may be sharded by torch's `fully_shard`, over a mesh of all ranks: `(ranks,)`, or `(replicas, shards)`.
        Of DTensors, in its optimizer and in any other object, each rank saves its rows. None is left out, as of a
        scaler that is not used.
        """
        self._loop.register(_given(objects), self.averages_gradients)

    def own(self, **objects: Any) -> Own:
        """State that differs between ranks, to be registered: run.restore(..., game=run.own(envs=envs, last=last)).

        Everything else that is registered is the same on every rank. Use this for what a rank plays, draws or counts
        alone: environments, a replay buffer. It may change until the update of a step begins, not after it. Then all
        ranks exchange it, so that any of them can save it: keep it small. Such a run resumes on the same number of
        ranks. Raises ConfigError for an object that `restore` would not take.
        """
        return Own(objects, self._loop.group)

    def checkpoint(self, save: Callable[[Path], object], load: Callable[[Path], object], **objects: Any) -> None:
        """Call this instead of `restore` where a framework holds state that cannot be registered, such as the shards
        of DeepSpeed: it saves and loads that itself. `objects` are registered besides, as in `restore`.

        `save(folder)` is called on all ranks together, between two steps and after the function has returned. It writes
        into that empty folder, which all ranks share, and is done when it returns. The folder becomes part of the
        checkpoint, and is renamed. If `save` raises, the attempt ends. `load(folder)` is called here, at once, if there
        is a checkpoint: its files are those that were saved, compared with their hashes. It must not change them.

        Surviving ranks cannot save such state: a rank that dies costs the steps since the newest checkpoint. Nor can
        the ranks stop within a validation, unless the steps before it have been saved. Before the first step of an
        attempt, and after a break out of the steps until the next validation or epoch, nothing may change this state.
        """
        functions: dict[str, Any] = {"save": save, "load": load}
        for name, given in functions.items():
            if not callable(given):
                kind = type(given).__name__
                raise ConfigError(f"run.checkpoint({name}=...): must be a function of a folder, not a {kind}")
        self._loop.register(_given(objects), framework=Framework(save, load))

    def epochs(self, count: int) -> Iterator[int]:
        """The epochs, from 0, that are left of `count`. The first of them may be half done."""
        return self._loop.epochs(count)

    def steps(
        self,
        loader: StepLoader | StepStream | None = None,
        count: int | None = None,
        samples: int = 0,
        accumulate: int = 1,
    ) -> Sized:
        """The batches of the steps that are left of this epoch.

        Each iteration is one step. A step makes one update of the registered objects: they may change from the first
        `optimizer.step()` to the end of the iteration. An epoch has `count` steps, by default once over the data.
        `loader` comes from `run.loader(...)`.

        Without a loader, for a loop that draws its own batches: the numbers of the epoch's `count` steps, as `run.step`
        counts them. Draw each batch in its own iteration, from the generators of Python, NumPy or torch: they are
        seeded by (seed, step, rank). `samples` is the number of samples per step over all ranks, to report a speed in.

        With `accumulate=k` a step has k iterations, one for each micro-batch, and the update is in the last:

            for x, y in run.steps(loader, accumulate=4):
                model.require_backward_grad_sync = run.sync_gradients    # DDP averages the gradients once
                loss = cross_entropy(model(x), y) / 4
                loss.backward()
                run.log(loss=4 * loss)
                if run.sync_gradients:
                    optimizer.step()
                    optimizer.zero_grad()

        The loader's `batch_size` is that of a micro-batch, over all ranks. The last step of an epoch has what is left,
        so it may have fewer. `count` and `run.step` count steps. Generators are seeded by (seed, step, micro-batch,
        rank). What several micro-batches log is averaged. The ranks stop, and save, between two steps only: no gradient
        is in a checkpoint, and an attempt that ends within a step does all of it again.

        `len(run.steps(...))` is the number of iterations that are left of the epoch.
        """
        if loader is None and count is None:
            raise ConfigError("run.steps() needs a loader that run.loader(...) gave, or count=N for N steps")
        source = StepNumbers(count or 0, samples) if loader is None else loader
        batches = self._loop.steps(source, count, accumulate)
        return Sized(batches, lambda: self._loop.batches_left(source, count, accumulate))

    def shares(self, batch: Any) -> Iterator[Any]:
        """The parts of a step's batch that this rank computes, one after another. With train.shares each is a share,
        and the run ends with the same bits on any number of ranks that fits. Without it, this is the batch itself.

            for batch in run.steps(loader):
                for x, y in run.shares(batch):
                    loss = cross_entropy(model(x), y)   # the mean over these samples
                    loss.backward()
                    run.log(loss=loss)
                optimizer.step()
                optimizer.zero_grad()

        The gradient after this loop, and the logged values, are means over all samples of the step. All generators are
        seeded by (seed, step, share) before each share, and by (seed, step) before and after this loop. Nothing but
        gradients and logged values may outlive a share.
        """
        return self._loop.share_batches(batch)

    def batches(self, loader: StepLoader, per_step: int = 1) -> Iterator[Any]:
        """The batches of a second loader, for `next(...)` in the iterations of `steps`: `per_step` for each iteration,
        over and over. Which ones follows from its number, so a resumed run draws the same.

            more = run.batches(run.loader(unlabelled, 256))
            for x, y in run.steps(loader):
                (u,) = next(more)
        """
        return self._loop.batches(loader, per_step)

    def validation(self, loader: Iterable[Any]) -> Sized:
        """The batches of a loader, any iterable with the same number of batches on every rank.

        The ranks can stop before each batch. The next attempt then repeats everything that follows the steps of this
        epoch, from the state that these steps have left. Its length is that of the loader.
        """
        return Sized(self._loop.validation(loader), lambda: len(loader))  # type: ignore[arg-type]

    def generator(self, name: str, kind: str = "numpy") -> Any:
        """A random generator of your own: numpy.random.Generator, or of another `kind`, "torch" (on `run.device`) or
        "python" (random.Random). It is seeded whenever the global ones are, from (seed, name, step, rank) before each
        step, so a resumed run draws the same numbers, and what draws from others does not change them. Each call with
        the same name returns the same object."""
        return self._loop.generators.get(name, kind, self.device)

    def log(self, **values: Any) -> None:
        """Write numbers, or tensors of one element, to metrics.jsonl: within a step to that step's line, elsewhere to
        the line of the epoch. An Image, Histogram, Table or Text of laststep.records.media becomes a file under the
        run's folder, which trackers show at that step.

        Rank 0's values count. Log a step's values before its update: then all ranks have them, and can write them even
        if rank 0 dies. Values logged after the update reach the other ranks only every `train.log_every` steps.
        """
        self._loop.log(values)


def make_script_loop(context: AttemptContext) -> CustomLoop:
    """The loop around a script."""
    words, name = context.config.script, script.name_of(context.config.script)

    def call(run: Run) -> None:
        try:
            script.run_as_main(words)
        except SystemExit as error:
            if loop_of(run).phase is Phase.SETUP and not loop_of(run).engine.saves.last:
                said = f": {error.code}" if isinstance(error.code, str) else ""  # which Python would print
                status = 1 if said else error.code or 0
                advice = said or ("" if status else f"; {NEEDED}")  # argparse has said what is wrong
                raise ConfigError(f"{name}: ended with exit status {status} before run.restore(...){advice}") from None
            raise

    return _make_loop(call, context, None, None)


class Sized(Iterator[Any]):
    """Batches, and how many there are: progress bars ask."""

    def __init__(self, batches: Iterator[Any], length: Callable[[], int]) -> None:
        self._batches, self._length = batches, length

    def __next__(self) -> Any:
        return next(self._batches)

    def __len__(self) -> int:
        return self._length()


def _given(objects: Mapping[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in objects.items() if value is not None}


def loop_of(run: Run) -> CustomLoop:
    """The loop behind a Run, for the adapters of laststep.frameworks."""
    return run._loop


def make_custom_loop(function: Callable[..., Any], context: AttemptContext) -> CustomLoop:
    """The loop around a function that has its own training loop: called with a Run and, if it takes them, with the
    args. Raises ConfigError for args that do not fit it."""
    check_no_sharding(context.config)
    takes_args = args_parameter(function) is not None
    call = (lambda run: function(run, run.args)) if takes_args else function
    return _make_loop(call, context, getattr(function, "reads", None), settings_of(function))


def _make_loop(
    call: Callable[[Run], Any], context: AttemptContext, reads: Iterable[str] | None, settings: type | None
) -> CustomLoop:
    config = context.config
    reads_late = declared(reads, settings)
    given = GivenKeys(config.task, read_given(context.run.given), for_a_function(config), reads_late)
    args = user_args(settings, config.args, given.reads.keys)

    def begin(loop: CustomLoop) -> Any:
        script.joined = run = Run(loop, args)
        return call(run)

    return CustomLoop(begin, context, given)


def settings_of(function: Callable[..., Any]) -> type | None:
    """The dataclass with which the second parameter of this function, `args`, is annotated; None if it is not."""
    parameter = args_parameter(function)
    annotation = None if parameter is None else _resolved(function, parameter)
    return annotation if isinstance(annotation, type) and dataclasses.is_dataclass(annotation) else None


def _resolved(function: Callable[..., Any], parameter: inspect.Parameter) -> Any:
    """The annotation of a parameter, which is text where the module imports `annotations` from __future__."""
    if not isinstance(parameter.annotation, str):
        return parameter.annotation
    first, *rest = parameter.annotation.strip("'\"").split(".")
    if not all(map(str.isidentifier, [first, *rest])):
        return None  # an expression such as `dict[str, int]`: no dataclass
    try:
        return functools.reduce(getattr, rest, {**vars(builtins), **vars(inspect.getmodule(function))}[first])
    except (KeyError, AttributeError):
        raise ConfigError(
            f"def {function.__name__}(run, args: {parameter.annotation}): its module has no such class when it is run; "
            "import it there, outside `if TYPE_CHECKING`"
        ) from None
