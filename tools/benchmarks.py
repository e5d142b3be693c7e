"""Writes docs/benchmarks.md, a table of the figures measured in benchmarks/results.

Run `python -m tools.benchmarks` after a benchmark has written other figures; tests/test_docs.py fails until you do.
"""

from __future__ import annotations

import json
import textwrap
from collections.abc import Iterable, Iterator
from itertools import islice
from pathlib import Path
from typing import Any

from benchmarks._measure import MISSED, NOISE
from benchmarks.overhead import WORKLOADS
from benchmarks.resume import ADDED, DCP_LOAD, PARTS
from benchmarks.sharding import BARE, OURS
from laststep.say import counted
from tools.scale import RESULTS, result, table

MEASURED = (
    *("agreement", "goodput", "loading", "meeting", "memory", "overhead", "requeue"),
    *("rescue", "restart", "restore", "save", "shares", "start", "status", "stops", "submit"),
)
OPTIONAL = ("resume", "sharding", "sharded_save", "replicas_2")  # on the page once they have been measured
TARGET = Path(__file__).resolve().parents[1] / "docs" / "benchmarks.md"
PAGE = """\
# Benchmarks

Each figure comes from a script in `benchmarks/`, named in brackets. `make bench` runs most of them, and checks their
limits; `overhead --all` also measures Lightning and Accelerate.

Medians, some with a 95 % confidence interval; a goal missed by more than the noise is bold. On {cores} cores of
an {cpu}, Python {python}, torch {torch}, submitit {submitit}, {dates}; two gloo ranks where nothing
else is said, no GPU.

{figures}

{gpu}
"""

Row = tuple[str, str, str]
SAVE_WAYS = ("laststep", "dcp.async_save")
TO_THE_DISK = ("save_s", "restore_s")
SAVE_FIGURES = {
    "stall_s": ("the training loop pauses for a save", "s"),
    "save_s": ("until it is on the disk", "s"),
    "restore_s": ("restoring it from the disk; in a resume most of it happens earlier, see `resume`", "s"),
}


def page() -> str:
    """The whole page."""
    of = {
        name: result(name) for name in (*MEASURED, *OPTIONAL) if name in MEASURED or (RESULTS / f"{name}.json").exists()
    }
    dates = sorted({measured["date"] for measured in of.values()})
    return PAGE.format(
        **{key: of["overhead"][key] for key in ("cores", "python", "submitit")},
        cpu=" or ".join(sorted({measured["cpu"] for measured in of.values()})),
        torch=" and ".join(sorted({measured["torch"] for measured in of.values()})),
        dates=dates[0] if len(dates) == 1 else f"{dates[0]} to {dates[-1]}",
        figures=table(("what", "measured", "for comparison"), _rows(of)),
        gpu=textwrap.fill(
            "On a machine with a GPU, `python -m benchmarks.gpu` measures throughput, saves and starts. "
            + _gpu(json.loads((RESULTS / "gpu.json").read_text())["gpu"]),
            width=120,
        ),
    )


def _gpu(of: Any) -> str:
    """What was measured on a GPU: saves of 2 GB."""
    if not isinstance(of, dict) or "saves" not in of:
        return "None was available so far."
    saves = of["saves"]
    first, later, torch_save = (saves["2 GB"][name] for name in ("the first", "those after it", "torch.save and fsync"))
    return (
        f"On one {saves['device']} ({saves['cores']} cores, torch {saves['torch']}, {saves['date']}, beside other "
        f"tests) a "
        f"save of 2 GB stalls the training for {later['stall_s']:.2f} s, the first one, which pins its buffer, for "
        f"{first['stall_s']:.2f} s, and is on the disk after {later['write_s']:.1f} s; `torch.save` and fsync stall it "
        f"for {torch_save['stall_s']:.1f} s."
    )


def _rows(of: dict[str, Any]) -> Iterator[Row]:
    yield from _overhead(of["overhead"])
    yield _shares(of["shares"])
    if "sharding" in of:
        yield from _sharding(of["sharding"])
    yield from _ranks(of)
    yield from _starts(of["requeue"])
    if "resume" in of:
        yield _resume(of["resume"])
    yield from _faults(of["restart"], of["rescue"])
    yield from _checkpoints(of)
    if "sharded_save" in of:
        yield from _sharded_save(of["sharded_save"])
    if "replicas_2" in of:
        yield _replicas(of["replicas_2"])
    yield from _loading(of["loading"]["figures"])
    yield from _memory(of["memory"])
    yield from _commands(of)


def _overhead(overhead: dict[str, Any]) -> Iterator[Row]:
    """How much longer a step takes than in a bare loop, on 1 and 2 ranks."""
    checks: dict[str, list[dict[str, Any]]] = {}  # of each training, that of each run
    for check in (check for run in overhead["runs"] for check in run):
        checks.setdefault(check["what"].partition(", ")[2], []).append(check)
    for model in WORKLOADS:
        measured = {(step["contender"], step["ranks"]): step for step in overhead["steps"] if step["model"] == model}
        ratio = {key: step["ratio"]["median"] for key, step in measured.items() if "ratio" in step}
        bare = [measured["bare", ranks]["us"]["median"] for ranks in (1, 2)]
        ours = []
        for n in (1, 2):
            if runs := checks.get(f"{model}, {counted(n, 'rank')}"):
                ours.append(f"{_interval(runs)} on {counted(n, 'rank')} (goal {runs[0]['limit']:g})")
            else:
                ours.append(f"{ratio['laststep', n]:.2f} on {counted(n, 'rank')}, in one run of few turns")
        what = "a 64-64-10 perceptron" if model == "perceptron" else "a wider network"
        yield (
            f"a step of {what}, everything on (`overhead`)",
            f"times the bare loop's {_us(bare[0])} and {_us(bare[1])}, in {counted(len(overhead['runs']), 'run')}: "
            + "; ".join(ours),
            "; ".join(
                f"{title} {ratio[name, 1]:.2f} and {ratio[name, 2]:.2f}"
                for name, title in (
                    ("accelerate", "Accelerate"),
                    ("lightning barebones", "Lightning with everything off"),
                    ("lightning", "Lightning with defaults"),
                )
                if (name, 1) in ratio and (name, 2) in ratio
            ),
        )


def _shares(shares: dict[str, Any]) -> Row:
    """What train.shares costs."""
    goals = [_goal(check).removeprefix("; ") for check in shares["checks"]]
    ratios = [f"{check['median']:.2f}{goal and f' ({goal})'}" for check, goal in zip(shares["checks"], goals)]
    sent = [" and ".join(f"{size / 1e6:.0f}" for size in of["sent_bytes"]) for of in shares["pairs"]]
    return (
        "a step of ResNet-50 with `train.shares`: 2 and 4 ranks with a share each, one rank with 4 shares (`shares`)",
        f"{ratios[0]}, {ratios[1]} and {ratios[2]} times that of plain DistributedDataParallel, and of accumulation",
        f"sent per step without and with shares: {sent[0]} MB on 2 ranks, {sent[1]} MB on 4",
    )


def _sharding(sharding: dict[str, Any]) -> Iterator[Row]:
    """What train.sharding=full saves and costs."""
    peaks, checks = sharding["memory"], iter(sharding["checks"])
    of = {way: [peak["peak_mb"][way] for peak in peaks if way in peak["peak_mb"]] for way in (OURS, BARE)}
    ranks, states = ([peak[key] for peak in peaks] for key in ("ranks", "state_mb"))
    missed = "".join(_goal(check) for check in islice(checks, len(peaks)))
    yield (
        f"peak memory of a rank that trains {sharding['parameters'] / 1e6:.0f} million parameters with AdamW and "
        f"`train.sharding=full`, {_list(ranks)} ranks (`sharding`)",
        f"{_list(of[OURS])} MB{missed}",
        f"its part of parameters, gradients and moments {_list(states)} MB; a bare FSDP2 loop on {_list(ranks[1:])} "
        f"ranks {_list(of[BARE])} MB",
    )
    for timed, check in zip(sharding["time"], checks):
        yield (
            f"a step with `train.sharding=full` on {timed['ranks']} ranks (`sharding`)",
            f"{_ratio(check)} times that of a bare FSDP2 loop",
            _us(1e6 * timed["step_s"][BARE]),
        )


def _sharded_save(save: dict[str, Any]) -> Iterator[Row]:
    """Saving and restoring a sharded state."""
    ways = [{of: [save["results"][n][way][of] for n in save["results"]] for of in SAVE_FIGURES} for way in SAVE_WAYS]
    what = f"a sharded state of {save['bytes'] / 1e9:g} GB on {_list(save['results'])} ranks"
    for of, (title, unit) in SAVE_FIGURES.items():
        digits = 2 if unit == "s" else 0
        figures = [_list(f"{figure:.{digits}f}" for figure in way[of]) for way in ways]
        dd = [ways["dd"][of] for ways in save["results"].values() if "dd" in ways]
        disk = f"; `dd` past the page cache {_list(f'{s:.2f}' for s in dd)} s" if dd and of in TO_THE_DISK else ""
        yield (
            f"{title} of {what} (`sharded_save`)" if of == "stall_s" else title,
            f"{figures[0]} {unit}",
            f"`torch.distributed.checkpoint` {figures[1]} {unit}{disk}",
        )


def _replicas(replicas: dict[str, Any]) -> Row:
    """Copies in another node's memory."""
    step = {name: f"{replicas[name]['step_ms']:.0f}" for name in ("no copies", "every 10 steps", "every step")}
    return (
        f"a step with a copy of {replicas['megabytes']:g} MB per rank on another node, every 10th step and every step "
        "(`replicas`)",
        f"{step['every 10 steps']}, {step['every step']} ms",
        f"without copies {step['no copies']} ms",
    )


def _ranks(of: dict[str, Any]) -> Iterator[Row]:
    """How long ranks take to connect, and to stop."""
    meeting, stops, cores = of["meeting"], of["stops"], of["meeting"]["cores"]
    ranks = ("2", "8", "32")
    met = ", ".join(f"{meeting['ranks'][size]['met']['median']:.2f}" for size in ranks)
    agreed = ", ".join(f"{1000 * meeting['ranks'][size]['stop']['median']:.1f}" for size in ranks)
    whole = stops["from the signal"]["in all"]
    lost = f"{counted(stops['lost_steps'], 'step')} lost" if stops["lost_steps"] else "no step lost"
    growth = "grows as ranks to the power of"
    yield (
        f"{', '.join(ranks)} ranks connect, all on these {cores} cores (`meeting`)",
        f"{met} s",
        f"{growth} {meeting['growth']['met']}",
    )
    yield "the same ranks agree on a stop, from the signal", f"{agreed} ms", f"{growth} {meeting['growth']['stop']}"
    cost = f"{of['agreement']['cost']:.0f} ns"
    yield "cost per step of being able to stop together, when nothing happens (`agreement`)", cost, ""
    yield (
        f"a stop, from the signal to the exit of both ranks, {stops['stops']} times (`stops`)",
        f"{whole['median']:.2f} s, at most {whole['max']:.2f} s; {lost}",
        f"one step {stops['one step']['median']:.2f} s, the write {1000 * stops['write']['median']:.0f} ms",
    )


def _starts(requeue: dict[str, Any]) -> Iterator[Row]:
    """From a requeue to the first step."""
    floor, compiled = requeue["floor"], requeue["compile"]
    whole, first_step = (requeue["resume"][phase]["median"] for phase in ("in all", "first batch"))
    first, again = compiled["first start"], compiled["requeue"]
    check, without = requeue["checks"]
    yield (
        "from a requeue to the first step (`requeue`)",
        f"{whole:.2f} s, including {first_step:.2f} s from the restore to the end of the first step; "
        f"{check['median']:.2f} times the floor{_goal(check)}",
        "floor (python, import torch, connect, read the bytes, a step of a bare loop) "
        f"{floor['in all']['median']:.2f} s, of which the step {floor['first batch']['median']:.2f} s; without it "
        f"{without['median']:.2f} times the floor",
    )
    yield (
        "with `train.compile`, from start to first step: first start, requeue (`requeue`, once each)",
        f"{first['in all']:.1f}, {again['in all']:.1f} s",
        f"of which compiling {first['warm-up']:.1f}, {again['warm-up']:.1f} s",
    )


def _resume(resume: dict[str, Any]) -> Row:
    """What a large checkpoint adds to a resume."""
    (check,) = resume["checks"]
    adds, peer = (resume["results"][way]["median"] for way in (ADDED, DCP_LOAD))
    left, loads = (resume["results"][part]["median"] for part in PARTS[1:])
    return (
        f"a checkpoint of {resume['bytes'] / 1e9:.1f} GB, which the disk reads, makes a resume on 2 ranks longer by "
        "(`resume`)",
        f"{adds:.2f} s; read while the model is made, which ended {left:.2f} s later, and loaded in {loads:.2f} s",
        f"`dcp.load` {peer:.2f} s; {check['median']:.2f} times that{_goal(check)}",
    )


def _faults(restart: dict[str, Any], rescue: dict[str, Any]) -> Iterator[Row]:
    """From a fault to the first new step, and the rescue alone."""
    killed, hung, floor, requeue = (restart[way]["in all"]["median"] for way in ("killed", "hung", "floor", "requeue"))
    goals = [_goal(check) for check in restart["checks"]]  # killed: seconds, and times the floor; frozen
    yield (
        "from SIGKILL of a rank to the first new step in the same allocation, 2 nodes x 2 ranks (`restart`)",
        f"{killed:.2f} s{goals[0]}{goals[1]}",
        f"new processes to their first step, at the least {floor:.2f} s; with a requeue {requeue:.1f} s",
    )
    yield (
        "the same for a frozen rank, beyond `launch.hang_timeout_s`",
        f"{hung:.2f} s{goals[2]}{goals[3]}",
        "",
    )
    (check,) = rescue["checks"]
    yield (
        f"{rescue['ranks']} surviving ranks save {rescue['gigabytes']:g} GB together (`rescue`)",
        f"{rescue['rescue_s']:.2f} s; {check['median']:.2f} times the plain write{_goal(check)}",
        f"the same ranks write a stripe each, hashed and fsynced {rescue['plain_s']:.2f} s",
    )


def _checkpoints(of: dict[str, Any]) -> Iterator[Row]:
    """Saving, restoring, and what is lost without."""
    save, restore, goodput = of["save"], of["restore"]["results"]["four shards"], of["goodput"]
    peers, ours = save["results"], save["results"]["CheckpointWriter"]
    others = [peer for name, peer in peers.items() if name.startswith("async_save")]
    stall, cost = (min(other[key] for other in others) for key in ("stall_ms", "lost_ms"))
    seconds = {key: f"{value['median']:.2f} s" for key, value in restore.items()}
    yield (
        f"the training loop pauses for a save of {save['bytes'] / 1e6:.0f} MB (`save`)",
        f"{ours['stall_ms']:.0f} ms",
        f"`torch.save` and fsync {peers['torch.save + fsync']['stall_ms']:.0f} ms; `torch.save` "
        f"{peers['torch.save']['stall_ms']:.0f} ms; `torch.distributed.checkpoint.async_save` {stall:.0f} ms at best"
        + (f"; {copy} {peers[copy]['stall_ms']:.0f} ms" if (copy := "a bare copy in memory") in peers else ""),
    )
    yield (
        "the same, plus the slowdown of the steps during the write",
        f"{ours['lost_ms']:.0f} ms of {ours['write_s']:.1f} s",
        f"`async_save` {cost:.0f} ms at best",
    )
    together = of["restore"]["together"]
    for what, key in (
        ("bytes that each rank reads to restore 1 GB (`restore`)", "read_mb"),
        ("memory for that", "memory_mb"),
    ):
        most = (max(rank[key] for rank in ranks) for ranks in together.values())
        yield what, f"{', '.join(f'{mb:.0f}' for mb in most)} MB", f"with {', '.join(together)} ranks"
    yield (
        "a process reads 1 GB in four shards from the page cache, as `export` does",
        seconds["load"],
        f"reading the bytes with one thread {seconds['read']}; `torch.load` {seconds['torch.load']}",
    )
    yield "it checks them against their hashes first", seconds["verify"], f"SHA-256 alone {seconds['hash']}"
    yield (
        f"training lost when both ranks die, {goodput['deaths']} times, with a save every "
        f"{goodput['interval_s']:.0f} s (`goodput`)",
        f"{goodput['measured']['lost_s']:.1f} ± {goodput['standard_error_s']:.1f} s",
        f"the model predicts {goodput['model']['lost_s']:.1f} s",
    )


def _loading(figures: list[dict[str, Any]]) -> Iterator[Row]:
    """Images per second and core, without loader workers."""
    for workload, what, peer in (
        ("photos of 500x375", "JPEGs of 500x375, augmented", "torchvision's reference pipeline"),
        ("photos of 2000x1500", "JPEGs of 2000x1500, augmented", "torchvision's reference pipeline"),
        ("photos of 500x375, decoded once", "500x375, decoded once (`data.args.cache=true`)", "the same pipeline"),
        ("digits of mnist-5k", "5,000 digits in memory", "PyTorch's MNIST example"),
    ):
        found = {
            figure["contender"]: _count(figure["per_core"]["median"])
            for figure in figures
            if figure["workload"] == f"{workload}, 0 workers"
        }
        names = {"reference": peer, "torchcodec": "TorchCodec", "dali": "DALI on the CPU"}
        beside = [f"{names[contender]} {figure}" for contender, figure in found.items() if contender in names]
        yield f"loading, images/s per core: {what} (`loading`)", found["laststep"], "; ".join(beside)


def _memory(memory: dict[str, Any]) -> Iterator[Row]:
    """The peak of a rank, and that it does not grow."""
    peaks = {n: [peak for peak in memory["peaks"] if peak["ranks"] == n] for n in (1, 2)}
    most = {n: max(peak["laststep_mb"] for peak in found) for n, found in peaks.items()}
    buffers = {n: found[0]["buffer_mb"] for n, found in peaks.items()}
    bare = {n: found[0]["bare_mb"] for n, found in peaks.items()}
    yield (
        f"peak memory of a rank with a state of {buffers[1]:.0f} MB, 1 and 2 ranks (`memory`)",
        f"{most[1]:.0f}, {most[2]:.0f} MB, including the save buffer of {buffers[1]:.0f}, {buffers[2]:.0f} MB",
        f"the bare loop {bare[1]:.0f}, {bare[2]:.0f} MB",
    )
    largest = max(memory["growth"], key=lambda grown: grown["late"]["anonymous_mb"])
    early, late = largest["early"], largest["late"]
    same = all(g["late"][key] <= g["early"][key] for g in memory["growth"] for key in ("threads", "files", "keys"))
    yield (
        "memory after 1,000 steps and 10 saves, and after 10,000 and 100",
        f"{early['anonymous_mb']:.0f}, {late['anonymous_mb']:.0f} MB{'; not one more thread, file or key' * same}",
        "",
    )


def _commands(of: dict[str, Any]) -> Iterator[Row]:
    """How long a user waits for a command."""
    start = {name: f"{taken['median_ms']:.0f} ms" for name, taken in of["start"]["results"].items()}
    submit, status = of["submit"], of["status"]
    yield (
        "`launch.py --help`, `--dry-run` (`start`)",
        f"{start['launch.py --help']}, {start['launch.py --dry-run --nodes 2']}",
        f"`import submitit, omegaconf` {start['import submitit, omegaconf']}",
    )
    calls = f"{status['squeue_calls']:.0f} call{'s' * (status['squeue_calls'] != 1)} of squeue"
    yield (
        f"`launch.py status` over {status['runs']:,} runs (`status`)",
        f"{status['status']['median']:.1f} s, {calls}",
        "",
    )
    yield (
        "`launch.py --nodes 2`, held on the throwaway Slurm (`submit`)",
        f"{submit['launch.py --nodes 2']['median']:.2f} s",
        f"`sbatch` with the same script {submit['sbatch']['median']:.3f} s",
    )
    sweep = f"{submit['a sweep of 1000']['median']:.1f} s"
    yield "`launch.py sweep` of 1,000 runs, as one array", sweep, ""


def _interval(runs: Iterable[dict[str, Any]]) -> str:
    """The medians of some runs with their intervals; what misses its goal by more than the noise is bold."""
    said = ((check, f"{check['median']:.2f} ({check['low']:.2f} to {check['high']:.2f})") for check in runs)
    return ", ".join(f"**{text}**" if check["verdict"] == MISSED else text for check, text in said)


def _ratio(check: dict[str, Any]) -> str:
    """A median, its interval, and what to say about its limit."""
    return f"{check['median']:.2f} ({check['low']:.2f} to {check['high']:.2f}{_goal(check)})"


def _goal(check: dict[str, Any]) -> str:
    """What to say about a limit that is not met."""
    said = {MISSED: "; **misses the goal of {limit:g}**", NOISE: "; within noise of the goal of {limit:g}"}
    return said.get(check["verdict"], "").format_map(check)


def _list(values: Iterable[Any]) -> str:
    return ", ".join(map(str, values))


def _us(microseconds: float) -> str:
    return f"{microseconds:,.0f} us" if microseconds < 10_000 else f"{microseconds / 1000:.0f} ms"


def _count(number: float) -> str:
    return f"{number / 1e6:.1f} million" if number > 1e6 else f"{float(f'{number:.3g}'):,.0f}"


if __name__ == "__main__":
    TARGET.write_text(page())
