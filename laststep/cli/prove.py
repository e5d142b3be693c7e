"""prove: train a script undisturbed and disturbed on this machine, and compare every step."""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import functools
import json
import math
import sys
import textwrap
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from laststep import script
from laststep.cli.parsers import Parser, add_new_run, config_of, overrides_of
from laststep.config.config import Config
from laststep.config.errors import ConfigError
from laststep.config.machine import Machine, Way
from laststep.proof.differences import RULES, Difference, Number, fix_of, iterators_of, variables_of
from laststep.proof.project_copy import ProjectCopy
from laststep.proof.runs import (
    AGAIN,
    DISTURBED,
    KILL,
    LEAST_STEPS,
    SMOKE_STEPS,
    UNDISTURBED,
    WITHIN,
    Attempt,
    Place,
    Proof,
    Prover,
    missing_kinds,
)
from laststep.records.attempt_record import reason_in, users_line_in
from laststep.runs import run_folders
from laststep.say import counted, listed
from laststep.submission.machine_checks import count_gpus

DESCRIPTION = """\
Prove on this machine that a script resumes exactly: train it twice undisturbed,
then stop it, kill one of its ranks and resume it, and compare every step."""
EPILOG = """\
Trains on the ranks of the configuration, or on two, in a copy of the project
(in TMPDIR); what is too large to copy (10,000 entries, 1 GB) is linked. Files
that change in the project, or under an absolute path that the script is given,
are named; other places are not looked at. Trackers are off.
Compares after each step, on each rank: registered state, batch, inputs of the
model, metrics.jsonl. Shows the first difference, and the rule it points to.
Exit status: 0 exact; 1 not exact, or the script fails; 2 wrong input.
"""


def add_arguments(parser: Parser) -> None:
    """Declare what prove takes."""
    add_new_run(parser)
    parser.add_argument(
        "--steps",
        type=int,
        metavar="N",
        help="train N steps (default: 20 to 100, into the second epoch)",
    )
    parser.add_argument(
        "--minutes",
        type=float,
        metavar="M",
        help="about M minutes, with fewer steps and stops",
    )
    parser.add_argument(
        "--ignore",
        action="append",
        default=[],
        metavar="NAME",
        help="a metric or registered value that may differ; again for more",
    )
    parser.add_argument("--json", action="store_true", help="print the result as JSON")


def run(args: argparse.Namespace) -> int:
    """Make the runs and print what they show; returns 0 when the script is exact, else 1. Raises ConfigError."""
    from laststep.submission.local import train_here
    from laststep.submission.sbatch import throwaway_folder

    if args.steps is not None and args.steps < LEAST_STEPS:
        raise ConfigError(f"--steps {args.steps}: must be at least {LEAST_STEPS}")
    if args.minutes is not None and not 0 < args.minutes < math.inf:
        raise ConfigError(f"--minutes {args.minutes:g}: must be positive, e.g. --minutes 5")
    say = functools.partial(print, file=sys.stderr if args.json else sys.stdout, flush=True)
    words = overrides_of(args)
    config = Config.load(config_of(args, words), words, args.site or run_folders.site())
    with throwaway_folder("prove") as folder, _in_a_copy(config, folder) as (config, copy):
        config = _prepare(config, folder)
        script.check_knows_us(config, "prove")
        ranks = config.launch.world_size
        say(f"script {script.shown(config.script)}" if config.script else f"task   {config.task}")
        say(f"ranks  {ranks} on this machine; seed={config.seed} chooses where they are disturbed")
        say(f"cost   3 times {_length(args.steps)}, and up to 8 starts of the ranks")
        if args.minutes is not None:
            say(f"time   about {args.minutes:g} min, if four starts of the ranks fit")
        say(f"folder {folder}, removed at the end; the script works in a copy of yours")
        if copy.linked:
            say(textwrap.fill(f"links  {_listed(copy.linked)}: too large to copy, the script sees yours", 80))
        report = lambda attempt: say(line_of(attempt))  # noqa: E731
        prover = Prover(config, args.steps, train_here, report, args.ignore, args.minutes)
        proof = prover.prove()
        written = copy.written()
        say("\n".join([*summary(proof), *outside(written)]))
        if args.json:
            print(json.dumps({**as_json(proof, ranks, config.seed), "written_outside": written}, indent=1))
    return int(proof.verdict != "exact")


def smoke(config: Config, machine: Machine) -> int:
    """--smoke: a few steps, a save, a resume and a validation on this machine, in a throwaway folder; returns 0, or 1
    when the script fails. Raises ConfigError."""
    from laststep.submission import submission
    from laststep.submission.local import train_here
    from laststep.submission.sbatch import throwaway_folder

    began = time.monotonic()
    with throwaway_folder("prove") as folder, _in_a_copy(config, folder) as (config, copy):
        launch = dataclasses.replace(config.launch, root=str(folder), name="smoke", max_restarts=0, max_failures=0)
        train = dataclasses.replace(config.train, max_steps=min(config.train.max_steps or SMOKE_STEPS, SMOKE_STEPS))
        config = submission.ready(dataclasses.replace(config, launch=launch, train=train), machine)
        script.check_knows_us(config, "--smoke")
        prover = Prover(config, None, train_here, lambda _: None)
        prover.smoke()
        for line in outside(copy.written()):
            print(line)
    proof, ranks = prover.proof, counted(config.launch.world_size, "rank")
    if proof.verdict == "failed":
        print((proof.error or "").rstrip(), file=sys.stderr)
        when = "when it is resumed" if proof.attempts else "at its start"
        print(f"smoke  fails {when}: {reason_in(proof.error)}", file=sys.stderr)
        if line := users_line_in(proof.error):
            print(f"at     {line}", file=sys.stderr)
        return 1
    (probed,) = proof.runs.values()
    first, *resumed = [attempt.last_step or 0 for attempt in proof.attempts]
    later = f"resumed, trained to step {resumed[0]}" if resumed else "which is its last: nothing to resume"
    validated = f"validation batches: {len(probed.batches)}" if probed.batches else "no validation"
    print(f"smoke  trained to step {first} and saved, {later}")
    print(f"       {validated}; {ranks}, {time.monotonic() - began:.0f} s, no error; nothing is left of it")
    return 0


def _length(steps: int | None) -> str:
    return "20 to 100 steps (--steps N)" if steps is None else counted(steps, "step")


def _prepare(config: Config, folder: Path) -> Config:
    """The configuration as the runs use it: in `folder`, with two ranks where it names no number."""
    from laststep.submission import submission

    launch = dataclasses.replace(config.launch, root=str(folder), name="prove", max_restarts=0)
    one_gpu = config.device != "cpu" and count_gpus() == 1
    if launch.world_size == 1 and launch.tasks_per_node is None and not launch.gpus and not one_gpu:
        launch = dataclasses.replace(launch, tasks_per_node=2)
    return submission.ready(dataclasses.replace(config, launch=launch), Machine(Way.LOCAL))


@contextlib.contextmanager
def _in_a_copy(config: Config, folder: Path) -> Iterator[tuple[Config, ProjectCopy]]:
    """Work in a copy of the project in this folder; with the configuration for that."""
    (place := folder / "project").mkdir()
    copy = ProjectCopy(config, place)
    with copy.entered(config) as config:
        yield config, copy


# -- what a proof has found, in words and as JSON; no line is wider than a terminal ------------------------------------

WIDTH, LABEL = 80, 10  # of a line, and of the word that begins it
_listed = functools.partial(listed, most=6)


def line_of(attempt: Attempt) -> str:
    """What one attempt did."""
    if attempt.run != DISTURBED:
        again = " again" if attempt.run == AGAIN else ""
        text = f"trained {counted(attempt.last_step, 'step')} undisturbed{again}"
    else:
        end = "finished" if attempt.place is None else _strike(attempt.place)
        text = f"{_steps(attempt)}; {end}"
    took = f"{attempt.seconds:>8.1f} s  "
    return textwrap.fill(text, WIDTH, initial_indent=took, subsequent_indent=" " * len(took))


def _steps(attempt: Attempt) -> str:
    first, last = attempt.first_step, attempt.last_step
    return "no step" if first is None else f"step {first}" if first == last else f"steps {first} to {last}"


def _strike(place: Place) -> str:
    strike = place.strike
    where = f"step {strike.step}" + ("" if place.kind == WITHIN else f", {place.kind}")
    if strike.batch is not None:
        where = f"batch {strike.batch} of the validation after step {strike.step}"
    what = f"rank {strike.rank} killed" if strike.signal == KILL else f"{strike.signal} to rank {strike.rank}"
    return f"{what} in {where}"


def summary(proof: Proof) -> list[str]:
    """The verdict, what was compared, and where the runs part."""
    if proof.verdict == "failed":
        when = "when it is resumed" if DISTURBED in proof.runs else "undisturbed"
        lines = (proof.error or "").rstrip().splitlines()
        said = (line if line.startswith(" ") else textwrap.fill(line, WIDTH, break_long_words=False) for line in lines)
        return [f"FAILED: the script ends with an error {when}", "", *said]
    if proof.difference is None:
        return ["EXACT", *_compared(proof), *_numbers(proof.numbers)]
    headline = proof.verdict.upper()
    if proof.beside:
        differ = f"{_listed(proof.beside)} {'differ' if len(proof.beside) > 1 else 'differs'}"
        headline = textwrap.fill(f"{headline}: weights and inputs exact; {differ}", WIDTH, break_long_words=False)
    return [headline, *_parting(proof, proof.difference), *_numbers(proof.numbers)]


def _numbers(numbers: Sequence[Number]) -> Iterator[str]:
    """The numbers of the script's own that a resume changes, and what to do about them."""
    if not numbers:
        return
    shown = [f"{one.name} ({one.found} instead of {one.expected} in step {one.step})" for one in numbers]
    yield from _field("numbers", f"not registered, and another number after a resume: {_listed(shown)}")
    counters = [one.name for one in numbers if one.counts]
    if len(counters) < len(numbers):
        yield from _field("fix", "If they matter, keep them in a dict and register it: run.restore(..., best=best).")
    if counters:
        yield from _field("fix", f"{_listed(counters)}: count with run.step, which a resume does not change.")


def _compared(proof: Proof) -> Iterator[str]:
    """What was the same in all runs."""
    expected, ranks = proof.runs[UNDISTURBED], len(proof.runs[UNDISTURBED].steps)
    places = [attempt.place for attempt in proof.attempts if attempt.place]
    kills = sum(place.strike.signal == KILL for place in places)
    yield from _field(
        "did",
        f"{counted(len(places) - kills, 'stop')}, {counted(kills, 'killed rank')}, "
        f"{counted(len(places), 'restart')}; {counted(proof.done_again, 'step')} done again",
    )
    values = counted(len(expected.steps[0][-1]["state"]), "value")
    yield from _field(
        "the same",
        f"all registered state ({values}, {proof.checkpoint_bytes / 1e6:.1f} MB), the batch and the model's inputs "
        f"in each of {counted(expected.last_step, 'step')} on each of {counted(ranks, 'rank')}; "
        f"{counted(len(expected.metrics), 'line')} of metrics",
    )
    if proof.ignored:
        names = _listed(sorted(proof.ignored))
        yield from _field("left out", f"values that differ even between the undisturbed runs: {names}")
    if proof.left_out:
        yield from _field("left out", f"by --ignore: {_listed(proof.left_out)}")
    if proof.spared:
        yield from _field("spared", f"{counted(proof.spared, 'stop')} for which --minutes left no time")
    if not proof.spared and (missing := missing_kinds(places)):
        yield from _field(
            "not tried", f"a stop in {_joined(missing, 'or')}: the run did not get there; --steps N trains longer"
        )


def _parting(proof: Proof, difference: Difference) -> Iterator[str]:
    """Where two runs differ first, and why."""
    assert proof.rule is not None
    yield from _field("first", _first(proof, difference))
    if names := _state_names(proof, difference):
        yield from _field("values", _listed(names))
    rule = RULES[proof.rule]
    yield from _field("rule", f"{rule.finding}.")
    if variables := _variables(proof, difference):
        yield from _field("variables", f"not registered: {_listed(variables)}")
    yield from _field("fix", fix_of(proof.rule, proof.runs[UNDISTURBED]))


def _first(proof: Proof, difference: Difference) -> str:
    """The place of the first difference."""
    name = list(proof.runs)[-1]
    step, rank = difference.step, f"on rank {difference.rank}"
    if proof.rule == "rank":
        return f"step {step}: the registered state {rank} differs from that on rank 0"
    what = {
        "missing": "one of the runs ends before it",
        "batch": f"another batch {rank}",
        "inputs": f"another input of the model {rank}",
        "metrics": f"other metrics: {_listed(difference.names)}",
        "state": f"other registered state {rank}",
        "beside": f"other registered values {rank}",
        "epoch": f"another line of its epoch: {_listed(difference.names)}",
    }[difference.what]
    lines = proof.runs[name].of(difference.rank, difference.attempt)
    resumed = name == DISTURBED and difference.attempt and lines and lines[0]["step"] == step
    return f"step {step}{', the first after a resume' if resumed else ''}: {what}"


def _state_names(proof: Proof, difference: Difference) -> list[str]:
    """The registered values that differ after the step of the difference."""
    if proof.rule == "rank":
        return list(difference.names)
    found = list(proof.runs.values())[-1]
    one, other = (run.at(difference.rank, difference.step) for run in (proof.runs[UNDISTURBED], found))
    if one is None or other is None:
        return []
    return [name for name, digest in one["state"].items() if other["state"].get(name) != digest]


def _variables(proof: Proof, difference: Difference) -> list[str]:
    """The user's variables that may be the cause."""
    if proof.rule not in ("generator", "unregistered", "second loader", "not deterministic"):
        return []
    expected, found = proof.runs[UNDISTURBED], list(proof.runs.values())[-1]
    if proof.rule == "second loader":
        return iterators_of(difference, found)
    again = expected if proof.rule == "not deterministic" else proof.runs[AGAIN]
    kind = "generator" if proof.rule == "generator" else None
    return variables_of(difference, expected, again, found, kind)


def outside(written: Sequence[str]) -> list[str]:
    """The files of the user's own that the script has written, or that somebody else has meanwhile."""
    return _field("outside", f"changed meanwhile, outside of the copy: {_listed(written)}") if written else []


def as_json(proof: Proof, ranks: int, seed: int) -> dict[str, Any]:
    """The proof as `--json` prints it."""
    difference = proof.difference
    undisturbed = proof.runs.get(UNDISTURBED)
    return {
        "verdict": proof.verdict,
        "ranks": ranks,
        "seed": seed,
        "steps": undisturbed.last_step if undisturbed else 0,
        "steps_done_again": proof.done_again,
        "attempts": [
            {
                "run": attempt.run,
                "first_step": attempt.first_step,
                "last_step": attempt.last_step,
                "seconds": round(attempt.seconds, 1),
                "strike": dataclasses.asdict(attempt.place.strike) if attempt.place else None,
            }
            for attempt in proof.attempts
        ],
        "first_difference": None
        if difference is None
        else {
            "step": difference.step,
            "rank": difference.rank,
            "what": difference.what,
            "names": list(difference.names),
            "state": _state_names(proof, difference),
            "variables": _variables(proof, difference),
        },
        "rule": proof.rule,
        "weights_exact": proof.verdict == "exact" or bool(proof.beside),
        "values": proof.beside,
        "numbers": [one._asdict() for one in proof.numbers],
        "metrics_left_out": sorted(proof.ignored),
        "left_out": list(proof.left_out),
        "spared": proof.spared,
        "checkpoint_bytes": proof.checkpoint_bytes,
        "error": proof.error,
    }


def _field(label: str, text: str) -> list[str]:
    """A labelled paragraph."""
    return textwrap.wrap(
        text, WIDTH, initial_indent=f"{label:<{LABEL}}", subsequent_indent=" " * LABEL, break_long_words=False
    )


def _joined(words: Sequence[str], last: str) -> str:
    return f" {last} ".join([", ".join(words[:-1]), words[-1]] if len(words) > 1 else list(words))
