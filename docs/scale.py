"""Writes scale.md beside it: what the measured figures in benchmarks/results come to on up to 1,024 ranks.

`python -m docs.scale` after a benchmark has written other figures; a test says when that was forgotten.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from trainer.checkpoint.goodput import NODE_MTBF_S, Conditions, goodput
from trainer.checkpoint.interval import best_interval
from trainer.config.schema import Checkpoint, Launch
from trainer.world.address import POLL_S
from trainer.world.stop import ANSWER_S
from trainer.world.watchdog import BEAT_S

TARGET = Path(__file__).resolve().parent / "scale.md"
RESULTS = TARGET.parent.parent / "benchmarks" / "results"

RANKS, PER_NODE = 1024, 8
NODES = RANKS // PER_NODE
HANG_TIMEOUT_S = Launch().hang_timeout_s
DEFAULT_S = 60 * float(Checkpoint().every_minutes or 0)
# What is assumed, and was not measured here.
DISK_BYTES_S = 10e9  # that a shared file system reads for all its clients together
FILES_S = 20_000  # small ones that it opens and reads in a second, likewise
KILL_WAIT_S = 30  # Slurm's default
SOFT_LIMIT = 1024  # open files of a process, as most shells have it

PAGE = """\
# Scale

What Laststep costs on up to {ranks} ranks ({nodes} nodes of {per_node}), and what breaks first. Nobody has run it
on so many. *Measured* are figures of `benchmarks/`, on {cores} cores; *calculated* is what follows from them, and from
what is assumed: a shared disk that reads {disk} GB/s for all its clients together, and opens {files} small files a
second. `python -m docs.scale` writes this page from the figures.

## How often to save

With `checkpoint.every_minutes=auto` the interval follows from what a save costs the training and how often the run
fails (`trainer/checkpoint/interval.py`), by Daly's formula; `trainer/checkpoint/goodput.py` has the model. An end that
comes with a grace (a preemption, a time limit), or that one rank survives, loses no step and is no reason to save. The
steps since the last save are lost only when all ranks die at once.

Calculated, as if every failure killed all ranks: the share of the time that saves and lost steps take. A node fails
every {mtbf} days (Llama 3's training: 419 unexpected interruptions in 54 days on 16,384 GPUs). {save} s is what a save
cost where it was measured (`benchmarks.save`: 409 MB, 2 ranks).

{intervals}

So the default stays at {default:.0f} minutes: where a save costs {save} s, `auto` gains {gain:.2f} % at most. It is for
runs whose saves are dear, and for those that fail often.

The model beside real runs, measured (`benchmarks.goodput`): both ranks of a run killed at once, {deaths} times, at
random moments, with a save every {interval} s. A death lost {lost} ± {error} s of training; the model says
{model_lost} s. Of the time {kept} % was kept; the model says {model_kept} %. `tests/checkpoint/test_goodput.py`
checks it against a simulation.

## What grows with the ranks

Measured (`benchmarks.scale`): milliseconds, medians of {rounds}. A thread with a connection of its own stands in for
a rank, so all ranks' work shares {cores} cores; on machines of their own they wait less, but for the work of the
one store, whose processor time has lines of its own. The machine did other work meanwhile. The disk is a local one.

{growth}

* *meeting*: each rank leaves its card, waits for all and reads all, N² in all; *agreeing on a stop* likewise.
* *a beat* is what all ranks tell the store every {beat} s, *comparing beats* what rank 0 does with them as often.
* *save*: {state} MB in N stripes, each fsynced, until they are committed. *verify*: rank 0 reads and hashes them.
  *restore*: a rank reads them.
* *rescue*: after a fault, one of the ranks that are left reads what each of the others wrote.
* *logs*: `launch.py logs` merges them, {lines} lines each.

Real ranks, measured (`benchmarks.meeting`), in milliseconds; the last column is calculated, as if they grew on alike.
They reach the store (*sign in*), know each other and are connected (*met*), and agree after a signal (*stop*). All
share {cores} cores here, too.

{real}

## What breaks first

{limits}

Reading a checkpoint back, calculated: rank 0 verifies the newest alone, at the {verify} GB/s measured, and the others
wait for it. Then all ranks read all of it; those of a node find it in the page cache once one of them has read it, so
that the disk sees each node once. To the watchdog a rank that reads makes no progress: what takes longer than
`launch.hang_timeout_s` ({hang} s) here ends the attempt, and the next one alike, so it has to be raised for checkpoints
of more than {largest:.0f} GB.

{restores}

Each rank makes six connections to the store, and torch (2.15) asks the name server for the name of the other end of
each: {lookups} questions when {ranks} ranks start. Seen here: a question that is not answered holds up its rank for
5 s, glibc's time-out.

What does not grow: the lock, which rank 0 alone takes; metrics.jsonl; attempts.jsonl, but for the names of the nodes;
what a step pays for the agreement ({agreement} ns, `benchmarks.agreement`). A rank's share of a save shrinks.
"""


def page() -> str:
    """The whole page."""
    scale, deaths, save = result("scale"), result("goodput"), result("save")
    save_s = round(save["results"]["Saver"]["lost_ms"] / 1000, 2)
    verify_bytes_s = scale["state_bytes"] / min(taken["verify"] for taken in scale["ranks"].values())
    return PAGE.format(
        ranks=f"{RANKS:,}",
        nodes=NODES,
        per_node=PER_NODE,
        cores=scale["cores"],
        disk=f"{DISK_BYTES_S / 1e9:g}",
        files=f"{FILES_S:,}",
        mtbf=f"{NODE_MTBF_S / 86400:.0f}",
        save=save_s,
        intervals=intervals([save_s, 10, 60], [1, 16, NODES]),
        default=DEFAULT_S / 60,
        gain=100 * max(lost(save_s, nodes, DEFAULT_S) - lost(save_s, nodes) for nodes in range(1, NODES + 1)),
        deaths=deaths["deaths"],
        interval=f"{deaths['interval_s']:.2f}",
        lost=f"{deaths['measured']['lost_s']:.2f}",
        error=f"{deaths['standard_error_s']:.2f}",
        model_lost=f"{deaths['model']['lost_s']:.2f}",
        kept=f"{100 * deaths['measured']['goodput']:.0f}",
        model_kept=f"{100 * deaths['model']['goodput']:.0f}",
        rounds=scale["rounds"],
        growth=growth(scale["ranks"]),
        beat=BEAT_S,
        state=f"{scale['state_bytes'] / 1e6:.0f}",
        lines=scale["log_lines"],
        real=real_ranks(),
        limits=limits(scale),
        verify=f"{verify_bytes_s / 1e9:.1f}",
        hang=HANG_TIMEOUT_S,
        largest=HANG_TIMEOUT_S * DISK_BYTES_S / NODES / 1e9,
        lookups=f"{6 * RANKS:,}",
        restores=restores({"409 MB": 0.409e9, "10 GB": 10e9, "100 GB": 100e9}, verify_bytes_s),
        agreement=f"{result('agreement')['cost']:.0f}",
    )


def result(name: str) -> Any:
    """What a benchmark has written."""
    return json.loads((RESULTS / f"{name}.json").read_text())


def table(head: Sequence[object], rows: Iterable[Sequence[object]]) -> str:
    """In Markdown."""
    lines = [head, ["---"] * len(head), *rows]
    return "\n".join(f"| {' | '.join(map(str, line))} |" for line in lines)


def intervals(saves_s: Sequence[float], nodes: Sequence[int]) -> str:
    """What `auto` chooses, and what that brings."""
    head = ["a save costs", "nodes", "they fail every", "`auto` saves every", "lost", f"every {DEFAULT_S / 60:.0f} min"]
    return table(
        head,
        (
            (
                f"{save_s} s",
                count,
                f"{NODE_MTBF_S / count / 86400:.3g} days",
                f"{best_interval(save_s, NODE_MTBF_S / count) / 60:.3g} min",
                f"{100 * lost(save_s, count):.2f} %",
                f"{100 * lost(save_s, count, DEFAULT_S):.2f} %",
            )
            for save_s in saves_s
            for count in nodes
        ),
    )


def lost(save_s: float, nodes: int, interval_s: float | None = None) -> float:
    """The share of the time that saves and deaths cost; the interval is that of `auto` when None."""
    death_s = NODE_MTBF_S / nodes
    return 1 - goodput(Conditions(death_s, save_s), interval_s or best_interval(save_s, death_s))


def growth(ranks: dict[str, dict[str, float]]) -> str:
    """Milliseconds by what takes them and by the number of ranks."""
    names = next(iter(ranks.values()))
    rows = ([name, *(_three(1000 * taken[name]) for taken in ranks.values())] for name in names)
    return table(["ranks", *(f"{int(size):,}" for size in ranks)], rows)


def real_ranks() -> str:
    """Milliseconds that real ranks take to meet and to stop, and how that grows."""
    measured = result("meeting")
    ranks, growth = measured["ranks"], measured["growth"]
    rows = []
    for phase, power in growth.items():
        medians = [1000 * taken[phase]["median"] for taken in ranks.values()]
        carried_on = medians[-1] * (RANKS / int(list(ranks)[-1])) ** power
        rows.append([phase, *map(_three, medians), f"N^{power}", _three(carried_on)])
    return table(["real ranks", *ranks, "grows as", f"{RANKS:,}"], rows)


def limits(scale: dict[str, Any]) -> str:
    """What has a limit, how near it is, and at how many ranks it is reached."""
    files = {int(size): count for size, count in scale["open_files"].items()}
    each = (max(files.values()) - min(files.values())) // (max(files) - min(files))
    own = min(files.values()) - each * min(files)
    most = scale["ranks"][str(RANKS)]
    rows = [
        (
            f"open files of rank 0: {own} and {each} for each rank (measured with {_and(files)} real ranks)",
            f"{own + each * RANKS:,}",
            f"{SOFT_LIMIT:,}, the usual limit of a shell",
            f"{(SOFT_LIMIT - own) // each} ranks; so each rank raises its limit to the hard one, often 4,096 or more: "
            f"{(4096 - own) // each} ranks",
        ),
        (
            "rescue: each rank that is left reads a small file of each other, N² (calculated)",
            f"{RANKS**2 / FILES_S:.0f} s",
            f"{KILL_WAIT_S} s, Slurm's KillWait, when srun ends the ranks that are left",
            f"{math.isqrt(KILL_WAIT_S * FILES_S)} ranks; then the steps since the last save are lost",
        ),
        (
            f"ranks that wait for rank 0 look for its address on the disk every {POLL_S} s (calculated)",
            f"{RANKS / POLL_S:,.0f} a second",
            f"{FILES_S:,} a second",
            f"{FILES_S * POLL_S:,.0f} ranks; what rank 0 reads meanwhile comes late",
        ),
        (
            "agreeing on a stop (measured, see above)",
            f"{most['agreeing on a stop']:.1f} s, the store {most['agreeing on a stop: the store']:.1f} s of it",
            f"{ANSWER_S:.0f} s, then the attempt ends as a fault",
            _reached(most["agreeing on a stop"], ANSWER_S),
        ),
        (
            "a beat (measured)",
            f"{most['a beat']:.2f} s, the store {most['a beat: the store']:.2f} s of it",
            f"{BEAT_S} s, then beats come later",
            _reached(most["a beat"], BEAT_S),
        ),
        (
            "meeting (measured), collectives not counted",
            f"{most['meeting']:.1f} s, the store {most['meeting: the store']:.1f} s of it",
            f"{HANG_TIMEOUT_S} s, `launch.hang_timeout_s`",
            _reached(most["meeting"], HANG_TIMEOUT_S),
        ),
        (
            "files: a stripe per rank in each checkpoint, a log per rank and job (calculated)",
            f"{RANKS + 2:,} in a checkpoint, {RANKS:,} logs",
            "the quota of files",
            "",
        ),
    ]
    return table(["what", f"at {RANKS:,} ranks", "limit", "reached at"], rows)


def restores(checkpoints: dict[str, float], verify_bytes_s: float) -> str:
    """How long reading a checkpoint takes all ranks together."""
    head = ["checkpoint", "rank 0 verifies it", f"{NODES} nodes read it", "if the page cache helps nothing"]
    return table(
        head,
        (
            (
                name,
                f"{_three(size / verify_bytes_s)} s",
                f"{_three(size * NODES / DISK_BYTES_S)} s",
                f"{_three(size * RANKS / DISK_BYTES_S)} s",
            )
            for name, size in checkpoints.items()
        ),
    )


def _reached(seconds: float, limit_s: float) -> str:
    return "not reached" if seconds < limit_s else "**reached**"


def _three(value: float) -> str:
    """Three digits that count, no more than two of them behind the point."""
    return f"{float(f'{value:.3g}'):,.{2 if value < 10 else 1 if value < 100 else 0}f}"


def _and(numbers: Iterable[int]) -> str:
    *most, last = numbers
    return f"{', '.join(map(str, most))} and {last}"


if __name__ == "__main__":
    TARGET.write_text(page())
