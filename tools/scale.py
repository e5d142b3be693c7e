"""Writes docs/scale.md, which extrapolates the figures measured in benchmarks/results to 1,024 ranks.

`python -m tools.scale` after a benchmark has written other figures; a test says when that was forgotten.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from benchmarks._goodput import Conditions, goodput
from laststep.attempt.rescue_plan import GATHER_S, SETTLE_S, SILENT_S
from laststep.checkpoint.files import READ_BYTES, file_count, stripe_count
from laststep.checkpoint.interval import NODE_MTBF_S, best_interval
from laststep.checkpoint.restore import PIECE_BYTES
from laststep.config.schema import Checkpoint, Launch
from laststep.ranks.disk import S_PER_RANK, SHORTEST_ROUND_S
from laststep.ranks.meeting import POLL_S
from laststep.ranks.slurm import DEFAULT_KILL_WAIT_S
from laststep.ranks.stop import ANSWER_S
from laststep.ranks.watchdog import BEAT_S
from tools.scale_goodput import HEAD, Size, rows, summary

TARGET = Path(__file__).resolve().parents[1] / "docs" / "scale.md"
RESULTS = TARGET.parent.parent / "benchmarks" / "results"

RANKS, PER_NODE = 1024, 8
NODES = RANKS // PER_NODE
CHECKPOINTS = {"409 MB": 0.409e9, "10 GB": 10e9, "100 GB": 100e9}
GOODPUT_RANKS, GOODPUT_STATE = (RANKS, 16_384), "100 GB"
HANG_TIMEOUT_S = Launch().hang_timeout_s
DEFAULT_S = 60 * float(Checkpoint().every_minutes or 0)
# Assumptions, not measured here.
DISK_BYTES_S = 10e9  # read or written by a shared file system for all its clients together
NETWORK_BYTES_S = 20e9  # that a node receives
HOP_S = 5e-6  # from one rank of a ring to the next, most of them on the same node
FILES_S = 20_000  # small files that it opens and reads per second, or other operations on them
SHOWN = ("2", "32", "128", str(RANKS))  # of the numbers of ranks that were measured
LEFT_OUT = ("comparing beats", "verify", "restore", "logs")  # measured, but small at any size
SOFT_LIMIT = 1024  # open files per process in most shells

PAGE = """\
# Scale

The cost of Laststep on {ranks} ranks ({nodes} nodes of {per_node}), where nobody has run it. *Measured* figures come
from `benchmarks/`, on {cores} cores; *calculated* ones follow from these, and assume that a shared disk reads or writes
{disk} GB/s for all its clients together, and opens {files} small files per second.

## How often to save

`checkpoint.every_minutes=auto` chooses the interval by Daly's formula. Calculated: the share of time lost to saves and
repeated steps if each failure killed all ranks, and a node failed every {mtbf} days, as in Llama 3's training. The save
of {save} s is measured (`benchmarks.save`: 409 MB, 2 ranks).

{intervals}

Use `auto` where saves are expensive or a run fails often: with a save of {save} s it gains at most {gain:.2f} % over
the default of {default:.0f} minutes.

## Goodput

Calculated, for a replicated state of {goodput_state}: the share of time spent on steps that are kept, and what takes
the rest; the largest term is bold. Each failure, as frequent as in Llama 3's training ([table
5](https://arxiv.org/abs/2407.21783): 419 in 54 days on 16,384 GPUs), kills one node, and another is there at once.
`auto` decides when to save; a meeting takes four times as long for twice the ranks. A requeued job waits 121 s (Slurm's
default) and finds an empty queue.

{goodput}

{goodput_summary}

Not counted: stragglers, and `launch.hang_timeout_s` for hangs: {hang_share} of the time on 16,384 GPUs if every failure
were one.

## What grows with the ranks

Measured (`benchmarks.scale`): milliseconds, medians of {rounds}. The ranks are threads that share {cores} busy cores
and a local disk.

{growth}

*A beat*: the heartbeats of all ranks, every {beat} s. *Save*: {state} MB until the commit. *Rescue*: one round of the
leader. Real ranks, with their collectives, take longer to meet: {met} s on {ranks}, by the growth
[measured](benchmarks.md) with up to 32.

## A rescue

Calculated: how long {ranks} ranks that lose one of them take to save the last step. Slurm kills the survivors
{kill_wait} s after the first rank has ended (KillWait). A leader or a writer that dies meanwhile costs {silent:g} s
more.

{rescues}

## A restore

Calculated: one rank reads each byte, hashes it at the measured {hash} GB/s (`benchmarks.restore`), and sends it to all
others in pieces of at most {piece} MB. Assumed: a network that brings each node {network} GB/s, and {hop} µs for a
piece from one rank to the next. A slow disk is no hang: every {unit} MB read is progress.

{restores}

## What breaks first

{limits}

torch (2.15) asks the name server about each of a rank's six connections: {lookups} queries when {ranks} ranks start; an
unanswered one delays its rank by 5 s.
"""


def page() -> str:
    """The whole page."""
    scale, save = result("scale"), result("save")
    save_s = round(save["results"]["CheckpointWriter"]["lost_ms"] / 1000, 2)
    restore = result("restore")
    hash_bytes_s = restore["bytes"] / restore["results"]["one shard"]["hash"]["median"]
    sizes = [size_of(ranks, save_s, hash_bytes_s) for ranks in GOODPUT_RANKS]
    return PAGE.format(
        ranks=f"{RANKS:,}",
        nodes=NODES,
        per_node=PER_NODE,
        cores=scale["cores"],
        disk=f"{DISK_BYTES_S / 1e9:g}",
        files=f"{FILES_S:,}",
        mtbf=f"{NODE_MTBF_S / 86400:.0f}",
        save=save_s,
        intervals=intervals([save_s, 60], [1, NODES]),
        default=DEFAULT_S / 60,
        gain=100 * max(lost(save_s, nodes, DEFAULT_S) - lost(save_s, nodes) for nodes in range(1, NODES + 1)),
        goodput_state=GOODPUT_STATE,
        goodput=table(HEAD, (row.cells for size in sizes for row in rows(size))),
        goodput_summary=summary(sizes[-1:], DEFAULT_KILL_WAIT_S),
        hang_share=f"{100 * HANG_TIMEOUT_S / sizes[-1].failure_s:.1f} %",
        rounds=scale["rounds"],
        growth=growth(scale["ranks"]),
        beat=BEAT_S,
        state=f"{scale['state_bytes'] / 1e6:.0f}",
        met=f"{met_s():.0f}",
        kill_wait=DEFAULT_KILL_WAIT_S,
        rescues=rescues({**CHECKPOINTS, "200 GB": 200e9}),
        silent=SILENT_S,
        limits=limits(scale),
        hash=f"{hash_bytes_s / 1e9:.1f}",
        piece=f"{PIECE_BYTES / 1e6:.0f}",
        network=f"{NETWORK_BYTES_S / 1e9:.0f}",
        hop=f"{1e6 * HOP_S:.0f}",
        unit=f"{READ_BYTES / 1e6:.0f}",
        lookups=f"{6 * RANKS:,}",
        restores=restores({**CHECKPOINTS, "200 GB": 200e9}, hash_bytes_s),
    )


def size_of(ranks: int, save_s: float, hash_bytes_s: float) -> Size:
    """What a failure costs a run on so many GPUs."""
    size = CHECKPOINTS[GOODPUT_STATE]
    met_s = result("scale")["ranks"][str(RANKS)]["meeting: the store"] * (ranks / RANKS) ** 2
    restored_s = restore_s(size, ranks, hash_bytes_s)[-1]
    written_s = size / DISK_BYTES_S
    return Size(ranks, ranks // PER_NODE, save_s, written_s, rescue_s(size, ranks), start_s(), met_s, restored_s)


def start_s() -> float:
    """From the start of Python to the first step, without the meeting and the restore."""
    phases = result("requeue")["resume"]
    return sum(phases[phase]["median"] for phase in ("python", "import", "first batch"))


def result(name: str) -> Any:
    """The results of a benchmark."""
    return json.loads((RESULTS / f"{name}.json").read_text())


def table(head: Sequence[object], rows: Iterable[Sequence[object]]) -> str:
    """A table in Markdown."""
    lines = [head, ["---"] * len(head), *rows]
    return "\n".join(f"| {' | '.join(map(str, line))} |" for line in lines)


def intervals(saves_s: Sequence[float], nodes: Sequence[int]) -> str:
    """The interval that `auto` chooses, and what it gains."""
    head = ["a save costs", "nodes", "a failure every", "`auto` saves every", "lost", f"every {DEFAULT_S / 60:.0f} min"]
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
    """The share of time lost to saves and deaths; an interval of None is that of `auto`."""
    death_s = NODE_MTBF_S / nodes
    return 1 - goodput(Conditions(death_s, save_s), interval_s or best_interval(save_s, death_s))


def growth(ranks: dict[str, dict[str, float]]) -> str:
    """Milliseconds by activity and number of ranks."""
    names = [name for name in next(iter(ranks.values())) if name not in LEFT_OUT and not name.endswith(": the store")]
    shown = {size: ranks[size] for size in SHOWN}
    limits = {
        "meeting": f"{1000 * HANG_TIMEOUT_S:,} (`launch.hang_timeout_s`)",
        "a beat": f"{1000 * BEAT_S:,.0f}, then heartbeats are late",
        "agreeing on a stop": f"{1000 * ANSWER_S:,.0f}, then the attempt ends by fault",
    }
    rows = ([name, *(_three(1000 * taken[name]) for taken in shown.values()), limits.get(name, "")] for name in names)
    return table(["ranks", *(f"{int(size):,}" for size in shown), "limit"], rows)


def met_s() -> float:
    """Seconds until real ranks have met, as they grow."""
    measured = result("meeting")
    most = max(map(int, measured["ranks"]))
    return measured["ranks"][str(most)]["met"]["median"] * (RANKS / most) ** measured["growth"]["met"]


def round_s(ranks: int) -> float:
    """The length of a round of a rescue."""
    return max(SHORTEST_ROUND_S, S_PER_RANK * ranks)


def rescue_s(size: float, ranks: int) -> float:
    """Seconds from a failure until the last survivor leaves."""
    # Noticed within a beat. Rounds: signed in, frozen, planned; then written, asked to commit, committed, left.
    before = BEAT_S + 3 * round_s(ranks) + SETTLE_S
    after = 4 * round_s(ranks) + stripe_count(int(size), ranks) / FILES_S
    return max(before + size / DISK_BYTES_S, BEAT_S + GATHER_S) + after


def rescues(checkpoints: dict[str, float]) -> str:
    """How long a rescue takes."""
    rows = []
    for name, size in checkpoints.items():
        files, writing, total = stripe_count(int(size), RANKS), size / DISK_BYTES_S, rescue_s(size, RANKS)
        fits = "yes" if total < DEFAULT_KILL_WAIT_S else "**no**"
        rows.append((name, files, f"{_three(writing)} s", f"{_three(total)} s", fits))
    head = ["state", "files", "writing", "until the last rank leaves", f"within {DEFAULT_KILL_WAIT_S} s"]
    return table(head, rows)


def limits(scale: dict[str, Any]) -> str:
    """The limits, how near each is, and at how many ranks it is reached."""
    files = {int(size): count for size, count in scale["open_files"].items()}
    each = (max(files.values()) - min(files.values())) // (max(files) - min(files))
    own = min(files.values()) - each * min(files)
    rows = [
        (
            f"open files of rank 0: {own} and {each} for each rank (measured with {_and(files)} real ranks)",
            f"{own + each * RANKS:,}",
            f"{SOFT_LIMIT:,}, the usual limit of a shell",
            f"{(SOFT_LIMIT - own) // each} ranks, or {(4096 - own) // each} where the hard limit, to which each rank "
            "raises its own, is 4,096; often it is more",
        ),
        (
            f"waiting ranks look for rank 0's address on the disk every {POLL_S} s (calculated)",
            f"{RANKS / POLL_S:,.0f} per second",
            f"{FILES_S:,} per second",
            f"{FILES_S * POLL_S:,.0f} ranks; rank 0's own reads are delayed meanwhile",
        ),
        (
            "files in a checkpoint; logs of a job (calculated)",
            f"at most {file_count(1 << 60, RANKS) + 2:,}; {RANKS:,}",
            "the file quota",
            "",
        ),
    ]
    return table(["what", f"at {RANKS:,} ranks", "limit", "reached at"], rows)


def restores(checkpoints: dict[str, float], hash_bytes_s: float) -> str:
    """How long a restore takes all ranks together."""
    head = ["checkpoint", "read", "sent", f"restored on {RANKS:,} ranks"]
    return table(head, (_restore(name, size, hash_bytes_s) for name, size in checkpoints.items()))


def restore_s(size: float, ranks: int, hash_bytes_s: float) -> tuple[float, float, float, float]:
    """Seconds to read a checkpoint on so many ranks together: read, hashed, sent, and all of it."""
    # Files of the same size, as a save makes them. A rank hashes its files at once, while it reads.
    files = file_count(int(size), ranks)
    read_s, hash_s = size / DISK_BYTES_S, size / files / hash_bytes_s
    sent_s = size / NETWORK_BYTES_S + files * math.ceil(size / files / PIECE_BYTES) * ranks * HOP_S
    return read_s, hash_s, sent_s, max(read_s, hash_s) + sent_s


def _restore(name: str, size: float, hash_bytes_s: float) -> Sequence[object]:
    read_s, _, sent_s, together_s = restore_s(size, RANKS, hash_bytes_s)
    times = [f"{_three(seconds)} s" for seconds in (read_s, sent_s, together_s)]
    return [name, *times]


def _three(value: float) -> str:
    """Three significant digits, at most two of them behind the point."""
    return f"{float(f'{value:.3g}'):,.{2 if value < 10 else 1 if value < 100 else 0}f}"


def _and(numbers: Iterable[int]) -> str:
    *most, last = numbers
    return f"{', '.join(map(str, most))} and {last}"


if __name__ == "__main__":
    TARGET.write_text(page())
