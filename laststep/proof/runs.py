"""The runs of a proof: two undisturbed ones, and one that is struck in chosen places and resumed."""

from __future__ import annotations

import math
import random
import time
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Literal, NamedTuple

from laststep.checkpoint.store import CheckpointStore
from laststep.config import secret
from laststep.config.config import Config, with_launch
from laststep.config.errors import ConfigError
from laststep.proof.differences import (
    WEIGHTS,
    Difference,
    Number,
    RuleName,
    beside_names,
    changed_numbers,
    differences_of,
    differs_by_rank,
    first_of,
    rule_of,
    unsteady,
)
from laststep.records.attempt_record import read_ended_attempts
from laststep.records.probes import Probed, ProbePlan, Strike
from laststep.records.retry import FAILURES
from laststep.rundir import RunDir
from laststep.runs import run_folders
from laststep.say import counted

# Trains one attempt of the run in this folder to its end. Returns why its ranks refused to begin or to continue, if
# they did.
Train = Callable[[Config, RunDir], str | None]
Verdict = Literal["exact", "not exact", "not deterministic", "failed"]
LEAST_STEPS = 4
SMOKE_STEPS, SMOKE_BATCHES = 4, 3  # of each validation
LEAST_STARTS = 4  # of the ranks: undisturbed, up to a stop, up to a killed rank, and to the end
UNDISTURBED, AGAIN, DISTURBED = "undisturbed", "again", "disturbed"


class Attempt(NamedTuple):
    """One attempt: its run, the place where it was struck (None: nowhere), the steps that rank 0 has finished (None:
    no step), whether it has finished the run, and how long it took."""

    run: str
    place: Place | None
    first_step: int | None
    last_step: int | None
    finished: bool
    seconds: float


@dataclass
class Proof:
    """What the runs have shown."""

    verdict: Verdict = "exact"
    runs: dict[str, Probed] = field(default_factory=dict)
    attempts: list[Attempt] = field(default_factory=list)
    difference: Difference | None = None
    rule: RuleName | None = None
    error: str | None = None  # the script's own
    ignored: set[str] = field(default_factory=set)  # what differs between undisturbed runs of the same weights
    left_out: tuple[str, ...] = ()  # by the user
    beside: list[str] = field(default_factory=list)  # what differs where the weights and the inputs are the same
    numbers: list[Number] = field(default_factory=list)  # of the script's variables, that a resume changes
    spared: int = 0  # places in which the budget left no time to disturb the run
    checkpoint_bytes: int = 0

    @property
    def done_again(self) -> int:
        """Steps that a killed rank has cost, and that were done again."""
        lines = self.runs[DISTURBED].steps[0] if DISTURBED in self.runs else []
        return len(lines) - len({line["step"] for line in lines})


class _ScriptFailed(Exception):
    """An attempt ended by an error of the script's; the message is that error."""


class Prover:
    """Makes the runs, in the folder of all runs that the configuration names, and compares them."""

    def __init__(
        self,
        config: Config,
        steps: int | None,
        train: Train,
        report: Callable[[Attempt], None],
        left_out: Collection[str] = (),
        minutes: float | None = None,
    ) -> None:
        """`steps`: how many to train, see `ProbePlan`. `report` is called after each attempt. `left_out`: names of
        values that may differ. `minutes`: how long all runs may take, as far as LEAST_STARTS of the ranks allow."""
        self._config, self._steps, self._train, self._report = config, steps, train, report
        self._ranks, self._budget_s = config.launch.world_size, None if minutes is None else 60 * minutes
        self._began = time.monotonic()
        self._validation_batches: int | None = None  # all of them
        self.proof = Proof(left_out=tuple(left_out))

    def prove(self) -> Proof:
        """Raises ConfigError when the ranks refuse the configuration before they have done a step."""
        proof = self.proof
        try:
            undisturbed = self._undisturbed(UNDISTURBED)
            if proof.difference is None:
                if (steps := undisturbed.last_step) < LEAST_STEPS:
                    raise ConfigError(f"the run has {counted(steps, 'step')}; a proof needs at least {LEAST_STEPS}")
                # A run that has finished by itself is not stopped in its last step: a validation may follow.
                self._steps = steps + 1 if proof.attempts[0].finished else steps
                proof.checkpoint_bytes = self._checkpoint_bytes()
                places = self._affordable(choose_places(undisturbed, self._ranks, self._config.seed))
                if not proof.spared:
                    self._undisturbed(AGAIN)
            if proof.difference is None:
                self._disturbed(undisturbed, places)
        except _ScriptFailed as error:
            proof.verdict, proof.error = "failed", str(error)
        return proof

    def smoke(self) -> None:
        """Only see whether all of it works: stop a run in its second step, resume it and end it, by itself where it is
        no longer than `SMOKE_STEPS`. Raises ConfigError as `prove` does."""
        self._steps = SMOKE_STEPS + 1  # a run that ends by itself validates after its last step
        self._validation_batches = SMOKE_BATCHES
        try:
            self._attempt(DISTURBED, Place(Strike(STOP, 0, 2), WITHIN))
            if not self.proof.attempts[0].finished:
                self._attempt(DISTURBED, None)
        except _ScriptFailed as error:
            self.proof.verdict, self.proof.error = "failed", str(error)

    def _undisturbed(self, name: str) -> Probed:
        """Train without a strike, and check what can be checked by that alone."""
        probed = self._attempt(name, None)
        if difference := differs_by_rank(probed):
            self._found("not exact", difference, "rank")
        elif name == AGAIN:
            self.proof.ignored = unsteady(self.proof.runs[UNDISTURBED], probed)
            if differences := differences_of(self.proof.runs[UNDISTURBED], probed, self._ignored):
                self._found("not deterministic", first_of(differences), "not deterministic")
        return probed

    @property
    def _ignored(self) -> set[str]:
        return {*self.proof.ignored, *self.proof.left_out}

    def _affordable(self, places: list[Place]) -> list[Place]:
        """The places for which the budget has time: each costs at most what the undisturbed run has cost."""
        if self._budget_s is None:
            return places
        left_s = self._budget_s - (time.monotonic() - self._began)
        starts = int(left_s / self.proof.attempts[0].seconds)
        if starts >= len(places) + 2:  # undisturbed again, and to the end
            return places
        within = sorted(places, key=lambda place: (place.kind != WITHIN, place.strike.step))
        kept = within[: max(LEAST_STARTS - 2, starts - 2)]
        self.proof.spared = len(places) - len(kept)
        return [place for place in places if place in kept]

    def _disturbed(self, undisturbed: Probed, places: Sequence[Place]) -> None:
        """Train with a strike per attempt, up to the first difference on which the weights depend."""
        proof = self.proof
        for place in (*places, None):
            found = self._attempt(DISTURBED, place)
            over = place is None or proof.attempts[-1].finished
            differences = differences_of(undisturbed, found, self._ignored, so_far=not over)
            if differences and AGAIN not in proof.runs and (over or any(one.what in WEIGHTS for one in differences)):
                del proof.runs[DISTURBED]  # the last of the runs is the one that a difference was found in
                self._undisturbed(AGAIN)
                if proof.difference is not None:
                    return
                proof.runs[DISTURBED] = found
                differences = differences_of(undisturbed, found, self._ignored, so_far=not over)
            if not over and not any(one.what in WEIGHTS for one in differences):
                continue
            again = proof.runs.get(AGAIN)
            if again is not None:
                proof.numbers = changed_numbers(undisturbed, again, found, self._ignored)
            if differences:
                assert again is not None
                difference = first_of(differences)
                rule = rule_of(difference, undisturbed, again, found)
                self._found("not deterministic" if rule == "not deterministic" else "not exact", difference, rule)
                if not any(one.what in WEIGHTS for one in differences):
                    proof.beside, proof.rule = beside_names(undisturbed, found, self._ignored), "beside"
            return

    def _checkpoint_bytes(self) -> int:
        store = CheckpointStore(RunDir(f"{self._config.launch.root}/{UNDISTURBED}").checkpoints)
        return max((store.manifest(step).bytes for step in store.steps()), default=0)

    def _found(self, verdict: Verdict, difference: Difference, rule: RuleName) -> None:
        self.proof.verdict, self.proof.difference, self.proof.rule = verdict, difference, rule

    def _attempt(self, name: str, place: Place | None) -> Probed:
        """Train one attempt of the run of that name. Raises _ScriptFailed."""
        least_s = None if self._budget_s is None or self.proof.runs else self._budget_s / (2 * LEAST_STARTS)
        plan = ProbePlan(self._steps, place.strike if place else None, self._validation_batches, least_s)
        config = with_launch(self._config, name=name, env={**self._config.launch.env, **plan.environment()})
        run = run_folders.folder_of(config)
        if not run.path.exists():
            secret.forget()  # its alerts would be about a run that nobody has started
            run_folders.create(config)
        ended, began = len(read_ended_attempts(run.attempts)), time.monotonic()
        refusal = self._train(config, run)
        seconds = time.monotonic() - began
        probed = self.proof.runs[name] = Probed.read(run, self._ranks)
        records = read_ended_attempts(run.attempts)[ended:]
        killed = place is not None and place.strike.signal == KILL
        if refusal and not probed.steps[0]:
            raise ConfigError(refusal)
        if not killed and (not records or records[-1]["reason"] in FAILURES):
            raise _ScriptFailed(refusal or (records[-1]["error"] if records else None) or "its ranks were killed")
        if not probed.steps[0]:
            raise _ScriptFailed("it ended without a step")
        steps = [line["step"] for line in probed.of(0, sum(one.run == name for one in self.proof.attempts))]
        finished = bool(records) and records[-1]["reason"] == "finished"
        attempt = Attempt(name, place, min(steps, default=None), max(steps, default=None), finished, seconds)
        self.proof.attempts.append(attempt)
        self._report(attempt)
        return probed


STOP, KILL = "SIGTERM", "SIGKILL"
WITHIN = "within an epoch"
AT_AN_END = ("the last step of an epoch", "a validation", "the first step of an epoch")


class Place(NamedTuple):
    """A strike, and which kind of place it is in."""

    strike: Strike
    kind: str


def choose_places(undisturbed: Probed, ranks: int, seed: int) -> list[Place]:
    """The strikes of a disturbed run, in order, at most one per attempt. The same seed chooses the same ones.

    A stop within an epoch; stops in the last step of an epoch, in a validation, and in the first step of an epoch, as
    far as the run has them; and a killed rank. The first stop is followed by steps in the same epoch, which show
    whether a difference passes. No count of 2 to 6 divides its step, so that it parts updates that span several steps.
    """
    draw, last = random.Random(seed), undisturbed.last_step - 1  # the last attempt has a step to do
    lines = undisturbed.steps[0]
    firsts = [after["step"] for before, after in pairwise(lines) if after["epoch"] != before["epoch"]]
    edges = {step for first in firsts for step in (first - 1, first)}
    inner = [line["step"] for line in lines if 1 < line["step"] <= last and line["step"] not in edges]
    early = [step for step in inner if step < min(firsts, default=last + 2) - 3] or inner
    chosen: dict[tuple[int, int], Place] = {}  # by step, and batch of the validation after it

    def add(signal: str, step: int, kind: str, batch: int | None = None) -> None:
        strike = Strike(signal, draw.randrange(ranks), step, batch)
        if 0 < step <= last:
            chosen.setdefault((step, batch or 0), Place(strike, kind))

    if stop := _pick(draw, [step for step in early if math.gcd(step, 30) == 1], early):
        add(STOP, stop, WITHIN)
    if firsts:
        add(STOP, firsts[0] - 1, AT_AN_END[0])
        add(STOP, firsts[0], AT_AN_END[2])
    if batches := [line for line in undisturbed.batches if line["after"] <= last]:
        batch = draw.choice([line for line in batches if line["after"] == batches[0]["after"]])
        add(STOP, batch["after"], AT_AN_END[1], batch["validation_batch"])
    apart = [step for step in inner if all(abs(step - other) > 1 for other, _ in chosen)]
    if killed := _pick(draw, apart, [step for step in range(2, last + 1) if (step, 0) not in chosen]):
        add(KILL, killed, WITHIN)
    return [chosen[key] for key in sorted(chosen)]


def _pick(draw: random.Random, *choices: Sequence[int]) -> int | None:
    """One of the first of these choices that has any."""
    return next((draw.choice(steps) for steps in choices if steps), None)


def missing_kinds(places: Sequence[Place]) -> list[str]:
    """The kinds of places that the run did not have."""
    kinds = {place.kind for place in places}
    return [kind for kind in AT_AN_END if kind not in kinds]
