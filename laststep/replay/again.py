"""A stretch of a run done once more: from the nearest checkpoint before it, with the same batches and the same bits.

The ranks train a copy of the run in a folder of its own: its checkpoint, its configuration as it was at these steps,
its code. So the run itself stays as it is, and may train meanwhile.
"""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
import json
import math
import os
import shutil
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from laststep import rooms
from laststep.checkpoint.files import CheckpointError
from laststep.checkpoint.store import CheckpointStore
from laststep.code import code_copy
from laststep.config.config import Config, with_launch
from laststep.config.errors import ConfigError
from laststep.config.machine import Machine, Way
from laststep.config.schema import without_gpus
from laststep.ranks.slurm import is_job_id
from laststep.records.attempt_record import done_by, reason_in
from laststep.records.metrics import CLOCK, newest_step, steps_from
from laststep.records.probes import ProbePlan, without_trackers
from laststep.records.submissions import read_submissions
from laststep.rundir import RunDir
from laststep.runs import run_config, run_folders
from laststep.runs.pending import WaitReport
from laststep.runs.run_status import StatusReader, records_of
from laststep.say import command, counted, note
from laststep.script import FILE
from laststep.submission import local, submission
from laststep.submission.machine_checks import count_gpus
from laststep.submission.sbatch import ended_by_signals, throwaway_folder

POLL_S = 0.5  # how often a job is looked at
NEVER: dict[str, Any] = {"every_steps": None, "every_minutes": None, "every_epochs": None, "anchors": None}


class Part(NamedTuple):
    """Steps of a run that the same number of ranks did, with the same configuration: up to and including `last`."""

    config: Config
    ranks: int
    last: int


@dataclasses.dataclass(frozen=True)
class Stretch:
    """Steps of a run, and how they are done again."""

    run: RunDir
    first: int  # the steps that are asked for, from 1
    last: int
    start: int  # the step of the checkpoint to begin with; 0: the beginning of the run
    parts: tuple[Part, ...]

    @property
    def ranks(self) -> int:
        """How many ranks do the last step."""
        return self.parts[-1].ranks

    def described(self, ranks: int) -> str:
        """A line for a person, before it begins on these ranks."""
        begins = f"the checkpoint of step {self.start}" if self.start else "the beginning of the run"
        return f"replay {self.run.name} from {begins}, {counted(ranks, 'rank')}"

    @classmethod
    def of(cls, run: RunDir, first: int, last: int, ranks: int | None = None, as_done: bool = False) -> Stretch:
        """The steps from `first` to `last` of a run, on this many ranks: by default one where train.shares allows it,
        else, or `as_done`, as many as did them. Raises ConfigError."""
        newest = newest_step(run.metrics)
        done = newest["step"] if newest else 0
        if not 0 < first <= last:
            raise ConfigError(f"--step {first} --to {last}: steps count from 1, and the first comes first")
        if last > done:
            raise ConfigError(f"{run.name}: has done {counted(done, 'step')}, so there is no step {last} to replay")
        store = CheckpointStore(run.checkpoints)
        start = 0
        for step in reversed(store.steps()):
            with contextlib.suppress(CheckpointError):
                if step < first and store.inspect(step):
                    start = step
                    break
        return cls(run, first, last, start, tuple(_parts(run, start, last, ranks, as_done)))


def _parts(run: RunDir, start: int, last: int, ranks: int | None, as_done: bool) -> Iterator[Part]:
    records = records_of(run)
    configs = {line["job_id"]: line["config"] for line in read_submissions(run.submissions) if "config" in line}

    def of_step(step: int) -> tuple[int, str | None]:
        if (found := done_by(records, step)) is None:  # of the attempt that trains now, or a record that is lost
            return run_config.as_submitted(run).launch.world_size, None
        return found["world_size"], configs.get(found["job_id"])

    for (size, text), steps in itertools.groupby(range(start + 1, last + 1), of_step):
        config = run_config.as_submitted(run) if text is None else Config.parse(text)
        yield Part(config, check_ranks(run, config, size, size if as_done else ranks), list(steps)[-1])


def check_ranks(run: RunDir, config: Config, size: int, asked: int | None, words: str = "") -> int:
    """On how many ranks to do what `size` ranks have done, where `asked` of them are asked for, by these words. Raises
    ConfigError."""
    words = words or f"--ranks {asked}"
    if asked is not None and asked < 1:
        raise ConfigError(f"{words}: must be at least 1")
    shares = config.train.shares
    if shares is None:
        if asked not in (None, size):
            raise ConfigError(
                f"{words}: {run.name} has no train.shares, so only {counted(size, 'rank')} can compute the "
                "same bits again"
            )
        if config.train.sharding == "hybrid" and str(config.launch.nodes) != "1":
            raise ConfigError(f"{run.name}: train.sharding=hybrid over {config.launch.nodes} nodes cannot be replayed")
        return size
    wanted = asked or 1
    while asked is None and (shares % wanted or not _is_power_of_2(shares // wanted)):
        wanted += 1
    if shares % wanted or not _is_power_of_2(shares // wanted):
        raise ConfigError(f"{words}: train.shares={shares} takes a number of ranks that is shares / 2^k")
    return wanted


def _is_power_of_2(number: int) -> bool:
    return number > 0 and not number & (number - 1)


class Difference(NamedTuple):
    """A field of metrics.jsonl in which a step done again differs from what the run has recorded."""

    step: int
    name: str
    recorded: Any
    again: Any


@contextlib.contextmanager
def folder_for(keep: str | None = None) -> Iterator[Path]:
    """Where steps are done again; removed at the end, however the command ends, unless it is to be kept. Raises
    ConfigError."""
    if keep is None:
        with throwaway_folder("replay") as place:
            yield place
        return
    place = Path(keep).absolute()
    try:
        place.mkdir()
    except OSError as error:
        raise ConfigError(f"--keep {keep}: {error.strerror}; name a new folder") from None
    with ended_by_signals():
        yield place


@contextlib.contextmanager
def up_to(source: RunDir, step: int) -> Iterator[RunDir]:
    """A copy of the run that has a checkpoint of `step`, done again for it and removed after the block. Raises
    ConfigError."""
    stretch = Stretch.of(source, step, step)
    check_gpus(stretch)
    print(stretch.described(stretch.ranks), flush=True)
    with folder_for() as folder:
        copy = copy_of(stretch, folder)
        try:
            train(stretch, copy)
        except RuntimeError as error:
            raise ConfigError(f"--from {source.name}@{step}: {error}") from None
        if found := differences(source, copy, stretch.start + 1, step):
            raise ConfigError(
                f"--from {source.name}@{step}: step {found[0].step} does not come out again as it was recorded "
                f"({found[0].name} differs), so no run can begin after it; branch off a checkpoint"
            )
        yield copy


def copy_of(stretch: Stretch, folder: Path, name: str = "replay") -> RunDir:
    """A copy of the run as it was at the start of the stretch, in `folder`: nothing is trained yet. Raises
    ConfigError."""
    run = run_folders.create(_config(stretch, stretch.parts[0], folder, name))
    fill(stretch, run)
    with contextlib.suppress(FileNotFoundError, StopIteration), stretch.run.submissions.open() as file:
        run.submissions.write_text(next(file))  # the ranks work in the folder where the run was begun
    return run


def check_gpus(stretch: Stretch) -> None:
    """Raise ConfigError where this machine has too few GPUs for the stretch."""
    run, here = stretch.run, count_gpus()
    needed = max((part.ranks for part in stretch.parts if part.config.launch.gpus), default=0)
    if needed > here:
        fix = ""
        if any(is_job_id(line["job_id"]) for line in read_submissions(run.submissions)):
            fix = f"; `{command(f'replay {run_folders.typed(run)} --step {stretch.first} --nodes N')}` is a job"
        raise ConfigError(
            f"{run.name}: step {stretch.first} needs {counted(needed, 'GPU')}, and this machine has {here}{fix}"
        )


def fill(stretch: Stretch, run: RunDir) -> None:
    """Copy into the folder of a new run what the stretch begins with. Raises ConfigError."""
    source = stretch.run
    for path, copy in (
        (source.given, run.given),
        (source.data, run.data),
        (source.initial_weights, run.initial_weights),
    ):
        with contextlib.suppress(FileNotFoundError):
            shutil.copy(path, copy)
    if stretch.start:
        store, copies = CheckpointStore(source.checkpoints), CheckpointStore(run.checkpoints)
        try:
            with store.reading(stretch.start):
                shutil.copytree(store.path(stretch.start), copies.path(stretch.start), copy_function=_link)
                copies.verify(stretch.start)
        except (OSError, CheckpointError) as error:
            raise ConfigError(
                f"{source.name}: the checkpoint of step {stretch.start} cannot be read: {error}"
            ) from None
        with source.metrics.open("rb") as lines, run.metrics.open("wb") as kept:
            for line in lines:
                with contextlib.suppress(ValueError):
                    if json.loads(line)["step"] > stretch.start:
                        break
                kept.write(line)


def _link(source: str, to: str) -> None:
    try:
        os.link(source, to)
    except OSError:
        shutil.copyfile(source, to)


def _config(stretch: Stretch, part: Part, folder: Path, name: str) -> Config:
    """The configuration of the copy."""
    config = part.config
    on_gpus = config.launch.gpus > 0
    launch = dataclasses.replace(
        config.launch,
        name=name,
        root=str(folder),
        env={**config.launch.env, **without_trackers(RunDir(folder / name).probes)},
        nodes=1,
        gpus_per_node=part.ranks if on_gpus else 0,
        tasks_per_node=None if on_gpus else part.ranks,
        slurm=without_gpus(config.launch.slurm),
        init_method=None,
    )
    return once(dataclasses.replace(config, launch=launch))


def once(config: Config) -> Config:
    """The configuration for steps that are done again: one attempt, which saves at its end alone, and of which no
    tracker and no webhook hears."""
    quiet = {name: type(getattr(config, name))() for name in rooms.section_names()}
    launch = dataclasses.replace(config.launch, spare_nodes=0, chain=1, max_restarts=0, max_failures=0)
    saves = dataclasses.replace(config.checkpoint, keep_last=1, keep_best=0, replicas=0, **NEVER)
    train = dataclasses.replace(config.train, digest_every=1)
    return dataclasses.replace(config, launch=launch, checkpoint=saves, train=train, **quiet)


def train(
    stretch: Stretch, run: RunDir, plan: ProbePlan | None = None, change: Callable[[Config], Config] | None = None
) -> None:
    """Do the stretch again in a copy of the run. `plan` says what the ranks note of it, apart from its end; `change`
    is made to the configuration. Raises ConfigError where the ranks refuse, and RuntimeError where they fail."""
    for part in stretch.parts:
        own = dataclasses.replace(plan or ProbePlan(since=part.last + 1), steps=part.last)
        config = _config(stretch, part, run.path.parent, run.name)
        config = change(config) if change else config
        env = {**config.launch.env, **own.environment(), **_code(stretch.run, config)}
        config = dataclasses.replace(config, launch=dataclasses.replace(config.launch, env=env))
        config.save(run.config)
        if refusal := local.train_here(config, run):
            raise ConfigError(f"{stretch.run.name}: {refusal}")
        check_done(stretch, run, part.last)


def check_done(stretch: Stretch, run: RunDir, last: int) -> None:
    """Raise RuntimeError where the copy of the run has not come to this step."""
    ended = records_of(run)[-1:]
    if not ended or ended[0]["reason"] in (None, "failed", "hung", "lost"):
        why = reason_in(ended[0]["error"]) if ended else "its ranks ended before they began"
    elif ended[0]["end_step"] < last:
        why = f"{ended[0]['reason']} after step {ended[0]['end_step']}"
    else:
        return
    raise RuntimeError(f"{stretch.run.name}: step {last} could not be done again: {why}")


def _code(run: RunDir, config: Config) -> dict[str, str]:
    """What makes the ranks run the code that the run's jobs have run; nothing where it was started on this machine."""
    if not run.code.exists():
        return {}
    origin = code_copy.origin_of(run, config)
    found = {"PYTHONPATH": code_copy.python_path(origin, run.code)}
    if (file := code_copy.script_in(origin, run, config)) is not None:
        found[FILE] = str(file)
    return found


def differences(recorded: RunDir, again: RunDir, first: int, last: int) -> list[Difference]:
    """What differs between the steps of a run and those of its replay, apart from what a clock wrote."""
    before, after = steps_of(recorded, first, last), steps_of(again, first, last)
    return [
        Difference(step, name, before[step][name], line[name])
        for step, line in sorted(after.items())
        for name in line.keys() & before.get(step, {}).keys() - {*CLOCK}
        if line[name] != before[step][name]
    ]


def steps_of(run: RunDir, first: int = 1, last: float = math.inf) -> Mapping[int, dict[str, Any]]:
    """The lines of these steps in metrics.jsonl."""
    lines = itertools.takewhile(lambda line: line["step"] <= last, steps_from(run.metrics, first))
    return {line["step"]: dict(line) for line in lines}


def looking(step: int, asked: Mapping[str, str]) -> ProbePlan:
    """Have rank 0 write what is asked of this step: its `batch`, or a `trace`, each into a file."""
    return ProbePlan(since=step, observer="laststep.replay.looking:Observer", asked={"step": step, **asked})


def check_debug(stretch: Stretch) -> None:
    """Raise ConfigError where one process cannot do the stretch again."""
    if stretch.ranks > 1 or len({part.ranks for part in stretch.parts}) > 1:
        raise ConfigError(
            f"--debug: works in one process, and step {stretch.first} of {stretch.run.name} needs "
            f"{counted(stretch.ranks, 'rank')} (no train.shares)"
        )


def debug(stretch: Stretch, run: RunDir, asked: Mapping[str, str]) -> int:
    """Do the stretch again in this process, and stop in pdb before its first step; returns the exit status."""
    for part in stretch.parts:
        plan = dataclasses.replace(looking(stretch.first, {**asked, "debug": "pdb"}), steps=part.last)
        config = _config(stretch, part, run.path.parent, run.name)
        launch = dataclasses.replace(config.launch, hang_timeout_s=10**9)
        config = dataclasses.replace(config, launch=launch)
        config.save(run.config)
        os.environ.update({**plan.environment(), **without_trackers(run.probes), **_code(stretch.run, config)})
        status = local.run_debug(config)
    return 0 if status > 128 else status  # the stop after the step


# -- by a job, which is submitted as those of any run are ------------------------------------------------------------


def job_for(stretch: Stretch, words: Sequence[str], plan: ProbePlan | None = None) -> Config:
    """The configuration of a job with these `launch` words that does the stretch again, checked as any submission is.
    Raises ConfigError."""
    run, first = stretch.run, stretch.parts[0]
    config = Config.parse(first.config.to_yaml(), words)
    shown = " ".join(words)
    if not str(config.launch.nodes).isdecimal():
        raise ConfigError(f"launch.nodes={config.launch.nodes}: a replay needs one number of nodes, not a range")
    alike = {dataclasses.replace(part.config, launch=config.launch).to_yaml() for part in stretch.parts}
    if len(alike) > 1 or (config.train.shares is None and len({part.ranks for part in stretch.parts}) > 1):
        raise ConfigError(
            f"{shown}: steps {stretch.start + 1} to {stretch.last} of {run.name} were done with several configurations "
            "or numbers of ranks, which one job cannot do; replay them on one machine"
        )
    if shutil.which("sbatch") is None:
        raise ConfigError(f"{shown}: no Slurm on this machine (sbatch not found); leave it out to replay here")
    size = config.launch.world_size
    check_ranks(run, config, first.ranks, size, f"{counted(size, 'rank')} ({shown})")
    name = f"{run.name}-replay-{stretch.first}"
    own = dataclasses.replace(plan or ProbePlan(since=stretch.last + 1), steps=stretch.last)
    env = {**config.launch.env, **own.environment()}
    launch = dataclasses.replace(config.launch, name=None, root=str(run.path.parent.absolute()), env=env)
    search = code_copy.search_path(run, config, runs_copy=True)
    config = once(dataclasses.replace(config, launch=launch))
    config = submission.ready(config, Machine(Way.SLURM, search=search, words=words), name)
    silent = without_trackers(run_folders.folder_of(config).probes)
    return with_launch(config, env={**config.launch.env, **silent})


def submit_job(stretch: Stretch, config: Config) -> RunDir:
    """Submit the job, with the code that the run's jobs have run. Raises ConfigError."""
    os.chdir(run_folders.working_folder(stretch.run))  # where its ranks are to work
    with run_folders.created(config) as run:
        fill(stretch, run)
        if stretch.run.code.exists():
            run.code.symlink_to(stretch.run.code.resolve())
        (job,) = submission.hand_over(run, config, [submission.ReadyRun(run, config)])
    launch = config.launch
    print(f"job    {job.job_id}: {counted(int(launch.nodes), 'node')} x {counted(launch.ranks_per_node, 'rank')}")
    print(f"folder {run_folders.short(run.path)}", flush=True)
    return run


def await_job(stretch: Stretch, run: RunDir) -> None:
    """Wait until the job has ended. Raises RuntimeError where it has not come to the last step, and KeyboardInterrupt,
    which leaves the job alone."""
    reader, waiting = StatusReader(), WaitReport(lambda text: note(f"[laststep] {text}"))
    try:
        while (status := reader.read([run])[0]).alive:
            waiting.update(status)
            time.sleep(POLL_S)
    except KeyboardInterrupt:
        name, source = run_folders.typed(run), run_folders.typed(stretch.run)
        note(f"\n[laststep] the job goes on; to end it: `{command(f'cancel {name}')}`; after its end, what differs:")
        note(f"[laststep] `{command(f'diff {source} {name} --records')}`")
        raise
    check_done(stretch, run, stretch.last)
