"""The configuration of a run that exists: its config.yaml, checked against the copies of it that the run keeps.

`resume` and ranks of other launchers start from config.yaml, so it must be what the run was submitted with:

- A copy stands in each line of submissions.jsonl, and in the manifest of each checkpoint.
- The file is damaged if it is no YAML, ends early or lacks a key. The newest copy then replaces it; without one, the
  run is not continued. A default never stands in for a lost key: a run would silently become another one.
- A key that the newest copy lacks as well was added to Laststep later, and has its default. A run that has no copy was
  submitted before there were copies: of its file only the keys in `LATER_KEYS` may be missing.
- A file that was edited since the last submission is compared with that submission's copy: `launch` may differ, and the
  run may end later (`resume RUN train.epochs=20` or `train.max_steps=2000`). Any other change is refused.
"""

from __future__ import annotations

import contextlib
import dataclasses
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from laststep import rooms
from laststep.checkpoint.files import CheckpointError
from laststep.checkpoint.store import CheckpointStore
from laststep.config.checks import validate
from laststep.config.config import Config, missing_keys
from laststep.config.errors import ConfigError
from laststep.config.keys import fields_of, replaced
from laststep.config.schema import Train
from laststep.records import former_names
from laststep.records.plan import read_plan
from laststep.records.submissions import read_submissions
from laststep.rundir import RunDir
from laststep.runs import run_folders
from laststep.say import command, listed, note

# Keys added since the first version. A test reads a file of that version, and fails until a new key is listed here.
LATER_KEYS = (
    *("model.weights", "optim.decay_norms_and_biases", "optim.args", "train.nonfinite", "checkpoint.asynchronous"),
    *("args", "checkpoint.best_by", "train.rehearsal", "train.shares"),
    *("launch.grace_s", "launch.max_failures", "launch.init_method", "launch.backend", "launch.python", "launch.srun"),
    *("launch.max_restarts", "launch.spare_nodes", "launch.exclude_after", "launch.preflight"),
    *("launch.chain", "launch.least_time_min", "launch.uv", "launch.container"),
    *("optim.decay_share", "train.epoch_samples", "train.sharding"),
    *("checkpoint.replicas", "checkpoint.replica_every_steps", "train.cuda_graphs", "train.sanity", "script"),
    *("train.overfit_batches", "train.find_unused_parameters", "checkpoint.start_from"),
    *("train.digest_every", "train.skip_steps", "train.skip_samples", "checkpoint.anchors"),
    *(key for key, _, _ in fields_of(Config) if key.partition(".")[0] in rooms.section_names()),
)
# Keys whose default has changed since the first version, with the former one.
FORMER_DEFAULTS = {"train.deterministic": False}
ENDS = ("train.epochs", "train.max_steps")  # the keys that say where a run ends
PLACE = ("launch.root", "launch.name")  # a run's folder may be moved
Change = tuple[Any, Any]  # a key's value before and after


@dataclass(frozen=True)
class Copy:
    """A copy of a run's config.yaml."""

    text: str
    source: str  # where it is, for messages
    of_submission: bool  # else of a checkpoint


def _warn(text: str) -> None:
    note(f"WARNING: {text}")


def load(
    run: RunDir, overrides: Sequence[str] = (), warn: Callable[[str], None] = _warn, restore: bool = False
) -> Config:
    """The configuration with which to continue a run, with the folder's present place, since it may have been moved.

    With `restore`, a damaged config.yaml is replaced. Calls `warn` with what is unusual. Raises ConfigError when the
    file is damaged and there is no copy of it, and for a change that the run cannot follow.
    """
    text, copy = run.config.read_text(errors="replace"), newest_copy(run)
    if damage := _damage(run, text, copy):
        if copy is None:
            raise ConfigError(
                f"{run.config}: is damaged ({damage}), and there is no copy of it; restore it from a backup, or start "
                f"a new run from the weights: {command(f'submit model.weights={run.path}')}"
            )
        text = copy.text
        if restore:
            Config.parse(text).save(run.config)
        fix = "restored from" if restore else "using"
        warn(f"{run.config}: is damaged ({damage}); {fix} its copy in {copy.source}")
    config = Config.parse(text, overrides, run.config)
    before = Config.parse(text, source=run.config)
    if copy is not None and copy.of_submission and copy.text != text:
        edited, before = before, Config.parse(copy.text)
        if edits := changes(before, edited):
            _check_edits(run, edits)
            warn(f"{run.config}: was edited since the run was last submitted: {shown(edits)}")
    validate(config)
    if any(key in changes(before, config) for key in ENDS):
        check_later_end(run, before.train, config.train)
    launch = dataclasses.replace(config.launch, root=str(run.path.parent), name=run.name)
    return dataclasses.replace(_with_present_names(run, config), launch=launch)


def as_submitted(run: RunDir, overrides: Sequence[str] = ()) -> Config:
    """The configuration that the run was last submitted with, for looking at it. Not checked against limits. Raises
    ConfigError."""
    text, copy = run.config.read_text(errors="replace"), newest_copy(run)
    damage = _damage(run, text, copy)
    if copy is not None and (copy.of_submission or damage):
        text = copy.text
    elif damage:
        raise ConfigError(f"{run.config}: is damaged ({damage}), and there is no copy of it")
    return _with_present_names(run, Config.parse(text, overrides, run.config))


def _with_present_names(run: RunDir, config: Config) -> Config:
    """The configuration of a run that a former version may have begun; its task may import by former names."""
    if not former_names.is_of_former_version(run):
        return config
    former_names.resolve()
    return dataclasses.replace(config, task=former_names.present(config.task))


def with_former_defaults(config: Config, started: Config, words: Sequence[str] = ()) -> Config:
    """`config`, which a command makes anew to continue a run, with the defaults of the version that started the run. A
    key that one of the `words` sets stays as it is."""
    then = {key: value for key, _, value in fields_of(started)}
    words_keys = [word.partition("=")[0] for word in words]
    for key, former in FORMER_DEFAULTS.items():
        if then[key] == former and key not in words_keys:
            config = replaced(config, key.split("."), former)
    return config


def changes(before: Config, after: Config) -> dict[str, Change]:
    """The keys whose values differ, apart from the run's place."""
    old = {key: value for key, _, value in fields_of(before)}
    return {
        key: (old[key], value)
        for key, _, value in fields_of(after)
        if value != old[key] and key not in PLACE  # old has every key: both are of this version's schema
    }


def shown(changed: dict[str, Change]) -> str:
    """Changes as they are shown: `optim.lr: 0.1 -> 0.05`."""
    texts = {key: ["null" if value is None else str(value) for value in pair] for key, pair in changed.items()}
    return ", ".join(f"{key}: {old} -> {new}" for key, (old, new) in texts.items())


def newest_copy(run: RunDir) -> Copy | None:
    """The newest copy of the run's config.yaml that can be read."""
    for copy in _copies(run):
        with contextlib.suppress(ConfigError):
            Config.parse(copy.text)
            return copy
    return None


def _copies(run: RunDir) -> Iterator[Copy]:
    """Every copy; those of submissions first, since every start of a run but a user's own is one."""
    for line in reversed(read_submissions(run.submissions)):
        if text := line.get("config"):
            yield Copy(text, run.submissions.name, of_submission=True)
    store = CheckpointStore(run.checkpoints)
    for step in reversed(store.steps()):
        with contextlib.suppress(CheckpointError):
            if text := store.manifest(step).config:
                yield Copy(text, f"the checkpoint of step {step}", of_submission=False)


def _damage(run: RunDir, text: str, copy: Copy | None) -> str:
    """What is wrong with the text of a config.yaml; empty if nothing is. Raises ConfigError for a key of another
    version."""
    if copy is None:
        Config.parse(text, source=run.config)
    elif text == copy.text:
        return ""
    try:
        missing = missing_keys(text)
    except ConfigError as error:
        return str(error)
    added_later = LATER_KEYS if copy is None else missing_keys(copy.text)
    lost = [key for key in missing if key not in added_later]
    if lost:
        return f"it lacks {listed(lost)}"
    return "it ends too early" if copy is not None and copy.text.startswith(text) else ""


def _check_edits(run: RunDir, edits: dict[str, Change]) -> None:
    """Raise ConfigError for an edit of something else than `launch` and the end of the run."""
    fixed = {key: pair for key, pair in edits.items() if not may_change(key)}
    if fixed:
        raise ConfigError(
            f"{run.config}: was edited: {shown(fixed)}; a run keeps these values. Put them back, or start another run "
            f"from this one: {command(f'submit --from {run_folders.typed(run)} KEY=VALUE')}"
        )


def may_change(key: str) -> bool:
    """Whether a run may continue with another value of this key: it says how the run is run or watched, or where it
    ends, not what it computes."""
    return key in ENDS or key.partition(".")[0] in ("launch", *rooms.section_names())


def check_later_end(run: RunDir, before: Train, after: Train) -> None:
    """Raise ConfigError unless the run ends later than it did."""
    plan = read_plan(run.plan)
    if plan is None:  # no attempt has begun to train
        if after.epochs < before.epochs or _limit(after) < _limit(before):
            raise ConfigError(f"{_given(before, after)}: a run can only end later than before, not earlier")
        return
    total = plan["total_steps"]
    if _ends_by_steps(before, total):
        # How many steps an epoch has is not known, so the epochs must be left alone, or raised.
        by_epochs = math.inf if after.epochs >= before.epochs else 0
    else:
        by_epochs = total // before.epochs * after.epochs
    if min(by_epochs, _limit(after)) <= total:
        given = _given(before, after) or f"--from {run.name}"
        raise ConfigError(
            f"{given}: {run.name} ends at step {total}, and can only end later; give e.g. {longer(before, total)}"
        )


def longer(train: Train, total: int | None) -> str:
    """The word that doubles the length of a run of `total` steps."""
    if _ends_by_steps(train, total):
        return f"train.max_steps={2 * int(_limit(train))}"
    return f"train.epochs={2 * train.epochs}"


def _ends_by_steps(train: Train, total: int | None) -> bool:
    return train.max_steps is not None and (total is None or total >= train.max_steps)


def _limit(train: Train) -> float:
    return math.inf if train.max_steps is None else train.max_steps


def _given(before: Train, after: Train) -> str:
    """The changed keys, as they are typed."""
    pairs = {"train.epochs": (before.epochs, after.epochs), "train.max_steps": (before.max_steps, after.max_steps)}
    return " ".join(f"{key}={'null' if new is None else new}" for key, (old, new) in pairs.items() if old != new)
