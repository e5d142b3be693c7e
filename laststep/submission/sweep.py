"""A sweep: many runs that differ in a few keys, as one Slurm array (several where its limits ask for it), or one after
another on this machine.

runs/NAME/                   logs and code, which its runs share, and sweep.jsonl: each run with its varied keys
runs/NAME-lr_0.1-seed_3/     one of its runs, a run like any other
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
import json
import math
import operator
import re
import shutil
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from laststep.config import secret
from laststep.config.config import Config, variants
from laststep.config.errors import ConfigError, Unanswered
from laststep.config.keys import parse_override
from laststep.config.machine import Machine, Way
from laststep.records.append_only import append_line
from laststep.records.metrics import read_lines
from laststep.records.plan import write_given
from laststep.records.submissions import open_intents, read_submissions
from laststep.rundir import RunDir
from laststep.runs import run_config, run_folders
from laststep.runs.queue import Queue
from laststep.runs.run_folders import only_owner_writes
from laststep.runs.run_status import had_no_job, statuses_of
from laststep.say import counted, note
from laststep.submission import submission
from laststep.submission.submission import NAME_CHECKS, ReadyRun

MOST_RUNS = 1000  # Slurm takes as many in one array by default (MaxArraySize)
RANGE = re.compile(r"(-?\d+)\.\.(-?\d+)")


class Change(dict[str, Any]):
    """What sets one run of a sweep apart: values by dotted key."""

    def __init__(self, values: Mapping[str, Any], typed: Mapping[str, str] = {}, words: Mapping[int, str] = {}) -> None:
        super().__init__(values)
        self.typed = {key: typed.get(key, str(value)) for key, value in values.items()}  # as the user wrote them: 1e9
        self.words = words  # those of the script that vary, by their number; `values` has them by their option's name

    def __or__(self, other: Change) -> Change:  # type: ignore[override]
        return Change({**self, **other}, {**self.typed, **other.typed}, {**self.words, **other.words})

    def settings(self, script: Sequence[str]) -> dict[str, Any]:
        """The values of configuration keys alone. `script`: its words, as they were typed."""
        if not self.words:
            return dict(self)
        names = labels(script)
        changed = [self.words.get(number, word) for number, word in enumerate(script)]
        return {"script": changed, **{key: self[key] for key in self if key not in names.values()}}


def combinations(words: Iterable[str], script: Sequence[str] = ()) -> list[Change]:
    """Every combination of the values in `key=v1,v2` and `key=0..4` words, and in the marked words of a script. Raises
    ConfigError."""
    keys, choices = list[str](), list[list[Change]]()
    for word in words:
        key, _, text = word.partition("=")
        keys.append(key)
        choices.append([_parsed(key, value) for value in _values(word, text)])
    names = labels(script)
    for number, name in names.items():
        before, _, text = script[number].partition("@")
        keys.append(name)
        choices.append([Change({name: each}, words={number: before + each}) for each in _values(script[number], text)])
    if twice := [name for name in names.values() if keys.count(name) > 1]:
        raise ConfigError(f"{twice[0]}: two of what varies go by this name, and so would the runs; leave one out")
    if (count := math.prod(map(len, choices))) > MOST_RUNS:
        raise ConfigError(f"{count} combinations: a sweep has at most {MOST_RUNS}")
    return [functools.reduce(operator.or_, chosen, Change({})) for chosen in itertools.product(*choices)]


MARKED = re.compile(r"(?:-*([\w.-]+)=)?@(.+)", re.DOTALL)


def labels(script: Sequence[str]) -> dict[int, str]:
    """The words of a script that are marked to vary, by their number, with the name that each goes by: `lr` for
    `--lr @0.1,0.2`, `--lr=@0.1,0.2` and hydra's `lr=@0.1,0.2`. Only several values vary."""
    names = {}
    for number, word in enumerate(script):
        found = MARKED.fullmatch(word)
        if found and has_several_values(f"={found[2]}"):
            before = script[number - 1] if number and script[number - 1].startswith("-") else f"word{number}"
            names[number] = found[1] or re.sub(r"[^\w.]", "_", before.lstrip("-"))
    return names


def _parsed(key: str, text: str) -> Change:
    """The change that one `key=value` word makes. Raises ConfigError."""
    values = parse_override(f"{key}={text}")
    return Change(values, {} if isinstance(values.get(key), str) else {key: text})  # text may stand in quotes


def has_several_values(word: str) -> bool:
    """Whether a `key=value` word gives several values."""
    text = word.partition("=")[2]
    return len(_split(text)) > 1 or RANGE.fullmatch(text) is not None


def name_of(sweep: str, change: Mapping[str, object]) -> str:
    """The run's name: the sweep's, followed by the varied keys and their values, as in scan-lr_0.1-seed_3."""
    values = {key: re.sub(r"[^A-Za-z0-9.+-]+", "_", str(value)).strip("_") for key, value in change.items()}
    return "-".join([sweep, *(f"{short}_{values[key]}" for key, short in short_names(change).items())])[:200]


def short_names(keys: Iterable[str]) -> dict[str, str]:
    """Each of these keys, and the last part of it, which is enough where no two have the same."""
    last = {key: key.rpartition(".")[2] for key in keys}
    return {key: key if list(last.values()).count(short) > 1 else short for key, short in last.items()}


class Submitted(NamedTuple):
    """What came of submitting a sweep."""

    job_id: str | None  # the array's, or those of several; None: no run was missing
    runs: list[str]  # the names of the array's runs
    size: int  # of the whole sweep


def plan(config: Config, changes: Sequence[Change]) -> dict[str, tuple[Config, str]]:
    """The configuration of each run of the sweep `config.launch.name`, and its text, by the run's name. Raises
    ConfigError for one that cannot work."""
    sweep = run_folders.folder_of(config)
    if sweep.config.exists():
        raise ConfigError(f"launch.name={sweep.name}: a run has this name; choose another for the sweep")
    names = [_name(sweep, change) for change in changes]
    if duplicate := next((name for name in names if names.count(name) > 1), None):
        raise ConfigError(f"{duplicate}: two combinations would have this name; leave one out")
    values = [json.dumps(change) for change in changes]
    if same := next((i for i, value in enumerate(values) if values.index(value) < i), None):
        raise ConfigError(f"{names[same]}: has the values of {names[values.index(values[same])]}; leave one out")
    changed = [{**change.settings(config.script), "launch.name": name} for change, name in zip(changes, names)]
    planned = dict(zip(names, variants(config, changed)))
    for varied, _ in planned.values():
        for check in NAME_CHECKS:
            check(varied, Machine(Way.SLURM))
    return planned


def _name(sweep: RunDir, change: Change) -> str:
    """The name of a run, with the values as they were typed; as they were parsed where an older Laststep made it so."""
    older = name_of(sweep.name, change)
    return older if (sweep.path.parent / older).exists() else name_of(sweep.name, change.typed)


def submit_missing(
    config: Config, changes: Sequence[Change], parallel: int | None, given: Sequence[str] = ()
) -> Submitted:
    """Submit the missing runs of the sweep `config.launch.name`: those never submitted, or ended before they finished.

    Raises ConfigError; then nothing was submitted.
    """
    planned = plan(config, changes)
    root, names = Path(config.launch.root), list(planned)
    sweep = run_folders.folder_of(config)
    existing, missing = _existing_and_missing(root, planned)
    if not missing:
        return Submitted(None, [], len(names))
    sweep_is_new = not sweep.path.exists()
    made: list[RunDir] = []
    try:
        with only_owner_writes():
            sweep.logs.mkdir(parents=True, exist_ok=True)
            for run in missing:
                if run.name not in existing:
                    made.append(run)
                    _make(run, sweep, planned[run.name][1], given)
            runs = [ReadyRun(run, planned[run.name][0], len(read_submissions(run.submissions))) for run in missing]
            jobs = submission.hand_over(sweep, config, runs, parallel)
    except BaseException as error:  # Ctrl-C during a wait, too
        taken = [run for run in missing if run not in made or _may_have_job(run)]
        for run in made:
            if run not in taken and run.path.exists():
                run_folders.remove(run)
        if taken or not sweep_is_new:
            _list_runs(sweep, {run: change for run, change in zip(names, changes) if (root / run).exists()})
        else:
            shutil.rmtree(sweep.path, ignore_errors=True)
        new = sum(map(_may_have_job, made))
        some = (
            f"{new} of {counted(len(made), 'new run')} submitted; for the others type it again with --name {sweep.name}"
        )
        if isinstance(error, Unanswered):
            raise
        if not isinstance(error, (ConfigError, OSError)):
            if new:
                note(f"[laststep] {some}")
            raise
        said = str(error) if isinstance(error, ConfigError) else f"launch.root={root}: {error}"
        raise ConfigError(f"{some}: {said}" if new else said) from None
    _list_runs(sweep, dict(zip(names, changes)))
    arrays = dict.fromkeys(job.job_id.partition("_")[0] for job in jobs)
    return Submitted(", ".join(arrays), [run.name for run in missing], len(names))


def _may_have_job(run: RunDir) -> bool:
    """Whether Slurm has taken a job of this run, or may have."""
    return bool(read_submissions(run.submissions) or open_intents(run.submissions))


def run_here(
    config: Config, changes: Sequence[Change], given: Sequence[str], start: Callable[[Config, RunDir], int]
) -> int:
    """Run the missing runs of the sweep one after another, each by `start`; returns the exit status.

    A run that fails does not end the sweep; one that is stopped does. The same command again continues both. Raises
    ConfigError before anything starts.
    """
    planned = plan(config, changes)
    root, typed = Path(config.launch.root), dict(zip(planned, changes))
    sweep = run_folders.folder_of(config)
    existing, missing = _existing_and_missing(root, planned)
    print(
        f"sweep  {sweep.name}: {counted(len(planned), 'run')}, {len(missing)} to do, one after another on this machine"
    )
    if not missing:
        return 0
    print("       Ctrl-C saves the present run and ends the sweep; the next run follows one that fails", flush=True)
    failed: list[str] = []
    for number, run in enumerate(missing, 1):
        print(f"\n{number}/{len(missing)}", flush=True)
        one, text = planned[run.name]
        with only_owner_writes():
            sweep.logs.mkdir(parents=True, exist_ok=True)
            if run.name not in existing:
                _make(run, sweep, text, given)
            _list_runs(sweep, {run.name: typed[run.name]})
        with run_folders.reconfigured(run, one):
            status = start(one, run)
        if status > 128:
            left = counted(len(missing) - number + 1, "run")
            print(f"[laststep] {left} of sweep {sweep.name} left; to continue, type it again with --name {sweep.name}")
            return status
        failed += [run.name] * (status != 0)
    done = len(missing) - len(failed)
    print(f"\nsweep  {sweep.name}: {done} finished{f', {len(failed)} failed: ' if failed else ''}{', '.join(failed)}")
    return 1 if failed else 0


def _existing_and_missing(root: Path, planned: dict[str, tuple[Config, str]]) -> tuple[list[str], list[RunDir]]:
    """The names of the planned runs that exist, whose configuration becomes that in `planned`, and the runs to start.
    Raises ConfigError."""
    wanted = [RunDir(root / name) for name in planned]
    existing = [run.name for run in wanted if run.config.exists()]
    for name in existing:
        planned[name] = _same(RunDir(root / name), *planned[name])
    return existing, _missing(wanted)


def _list_runs(sweep: RunDir, changes: Mapping[str, Change]) -> None:
    """Add the runs that sweep.jsonl lacks. Raises OSError."""
    known = {line["run"] for line in read_lines(sweep.sweep)}
    for name, change in changes.items():
        if name not in known:
            typed = {key: text for key, text in change.typed.items() if text != str(change[key])}
            append_line(sweep.sweep, json.dumps({"run": name, **change, **({"typed": typed} if typed else {})}))


def members(sweep: RunDir) -> dict[str, Change]:
    """The varied keys and values of each run of a sweep, by the run's name. Raises ConfigError if there is no such
    sweep."""
    found = {line.pop("run"): Change(line, line.pop("typed", {})) for line in read_lines(sweep.sweep)}
    if not found:
        raise ConfigError(f"--sweep {sweep.name}: no such sweep in {sweep.path.parent}/")
    return found


def _missing(wanted: Sequence[RunDir]) -> list[RunDir]:
    """The runs to submit. Raises ConfigError when Slurm must be asked and does not answer."""
    if not any(run.submissions.exists() for run in wanted):
        return list(wanted)
    queue = Queue(time.time(), {}) if all(map(had_no_job, wanted)) else Queue.ask(wanted)
    if queue.jobs is None:
        raise ConfigError(f"{queue.problem}, so it is unknown which runs are missing; try again")
    statuses = zip(wanted, statuses_of(wanted, queue))
    return [run for run, status in statuses if not status.alive and status.state != "finished"]


def _same(run: RunDir, config: Config, text: str) -> tuple[Config, str]:
    """The configuration, and its text, with which to continue a run that exists, perhaps by an older Laststep. Raises
    ConfigError when the run has another one; its `launch` section may differ."""
    before = run.config.read_text()
    whole = "\n  slurm:" in before and before.endswith("\n")  # the last key: reading the file takes far longer
    if whole and before.partition("\nlaunch:")[0] == text.partition("\nlaunch:")[0]:
        return config, text
    written = run_folders.with_absolute_data(run_config.load(run, restore=True))
    config = run_config.with_former_defaults(config, written)
    if dataclasses.replace(written, launch=config.launch) != config:
        raise ConfigError(f"{run.name}: this run exists with another configuration; give the sweep another --name")
    return config, config.to_yaml()


def _make(run: RunDir, sweep: RunDir, text: str, given: Sequence[str]) -> None:
    """Create the folder of one run; it shares the sweep's logs and code. `given`: see `run_folders.create`."""
    run.path.mkdir(parents=True)
    if given:
        write_given(run.given, given)
    run.config.write_text(text)
    secret.write(run.secrets)
    for shared in (sweep.logs, sweep.code):
        (run.path / shared.name).symlink_to(Path("..") / sweep.name / shared.name)


def _split(text: str) -> list[str]:
    """The parts between commas that are outside brackets and quotes."""
    parts, depth, quote = [""], 0, ""
    for letter in text:
        if quote:
            quote = "" if letter == quote else quote
        elif letter in "'\"":
            quote = letter
        else:
            depth += (letter in "[{(") - (letter in "]})")
        if letter == "," and not depth and not quote:
            parts.append("")
        else:
            parts[-1] += letter
    return parts


def _values(word: str, text: str) -> list[str]:
    """The values that the text of a word gives: the parts between its commas, and all of a range such as 0..4. Raises
    ConfigError."""
    found: list[str] = []
    for part in _split(text):
        if not part:
            raise ConfigError(f"{word}: a value is missing")
        if not (ends := RANGE.fullmatch(part)):
            found.append(part)
            continue
        first, last = map(int, ends.groups())
        if first > last:
            raise ConfigError(f"{word}: {part} is empty; the smaller number comes first")
        if last - first >= MOST_RUNS:
            raise ConfigError(f"{word}: {last - first + 1} combinations: a sweep has at most {MOST_RUNS}")
        found += map(str, range(first, last + 1))
    return found
