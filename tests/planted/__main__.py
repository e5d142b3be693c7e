"""Plant differences into pairs of runs, have `diff` look for them, and write a section of docs/reports.md.

    python -m tests.planted [--cases 60] [--pairs 100]

Each case is drawn from its number alone, and its result is kept in .cache/planted, so the command can be stopped and
started again. Ranks are forked on this machine and communicate by gloo.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import io
import json
import os
import random
import tempfile
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from laststep.cli.main import main as command
from laststep.config.config import Config
from laststep.data.order import Order
from laststep.rundir import RunDir
from laststep.submission import local
from tests.planted.task import PLANT, SAMPLES
from tests.support.project import PROJECT
from tests.support.ranks import Attempt, train
from tools.sections import put

CACHE = PROJECT / ".cache" / "planted"
BATCH, STEPS, SEED = 12, 12, 7
KINDS = {"operator": 38, "sample": 8, "line": 6, "seed": 5, "threads": 3}
TRIES = 4  # a bit that changes nothing else is drawn again


def words(ranks: int, sharding: str, seed: int) -> list[str]:
    """The configuration of a run."""
    return [
        *("task=tests.planted.task.Planted", "device=cpu", f"train.batch_size={BATCH}", "train.epochs=3"),
        *(f"seed={seed}", f"train.sharding={sharding}", "optim.clip_norm=1.0", "optim.name=adamw", "optim.lr=0.01"),
        *("train.digest_every=4", "checkpoint.anchors=3", f"launch.tasks_per_node={ranks}", "launch.cpus_per_task=1"),
    ]


def trained(root: Path, name: str, given: Sequence[str], plant: Mapping[str, Any] | None = None) -> RunDir:
    """A run, with what is planted into it."""
    config = Config.load(None, [*given, f"launch.root={root}", f"launch.name={name}"])
    env = {PLANT: json.dumps(plant)} if plant else {}
    config = dataclasses.replace(config, launch=dataclasses.replace(config.launch, env=env))
    return train(config, {**env, "OMP_NUM_THREADS": str(config.launch.cpus_per_task)})


def forked(config: Config, run: RunDir) -> str | None:
    """In place of `train_here`: the ranks of a replay."""
    env = {**config.launch.env, "OMP_NUM_THREADS": str(config.launch.cpus_per_task)}
    Attempt(config, env).wait()
    return None


def compared(first: RunDir, second: RunDir) -> dict[str, Any]:
    """What `diff --json` says."""
    out = io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(io.StringIO()):
        status = command(["diff", str(first.path), str(second.path), "--json"])
    found: dict[str, Any] = json.loads(out.getvalue())
    return {**found, "status": status}


def draw(number: int) -> tuple[str, int, str, random.Random]:
    """The kind, the ranks and the sharding of a case."""
    chance = random.Random(f"planted/{number}")
    kinds = [kind for kind, count in KINDS.items() for _ in range(count)]
    random.Random("kinds").shuffle(kinds)
    ranks = chance.choice([1, 2, 2, 3, 4])
    sharding = chance.choice(["none", "full"]) if ranks > 1 else "none"
    return kinds[number % len(kinds)], ranks, sharding, chance


def case(number: int, root: Path) -> dict[str, Any]:
    """Plant one difference; returns what was planted, what was found, and whether that is right."""
    kind, ranks, sharding, chance = draw(number)
    given = words(ranks, sharding, SEED)
    result: dict[str, Any] = {"number": number, "kind": kind, "ranks": ranks, "sharding": sharding, "harmless": 0}
    clean = trained(root, "clean", given)
    step, rank = chance.randint(1, STEPS - 1), chance.randrange(ranks)
    plant: dict[str, Any] = {"kind": kind, "step": step, "rank": rank, "element": chance.randrange(1 << 20)}
    plant |= {"bit": 0, "number": None, "note": str(root / "note")}
    if kind == "operator":
        trained(root, "count", given, {**plant, "kind": "count"})
        count = json.loads((root / "note").read_text())["count"]
        for attempt in range(TRIES):
            plant |= {"number": chance.randrange(count), "bit": chance.randint(18, 25)}
            (root / "note").unlink(missing_ok=True)
            try:
                odd = trained(root, f"odd{attempt}", given, plant)
            except AssertionError:  # it is not finite any more, and refused
                result["harmless"] += 1
                continue
            expected = json.loads((root / "note").read_text())
            found = compared(clean, odd)
            if found["status"] == 1:
                break
            result["harmless"] += 1
        else:
            return {**result, "right": None, "expected": "no bit that was drawn changed anything"}
        operator = found["operator"] or {}
        named = operator.get("b") or {}
        right = (
            found["step"] == step
            and operator.get("rank") == rank
            and named.get("operator") == expected["operator"]
            and operator.get("bits") == 1
        )
        expected = f"step {step}, rank {rank}, {expected['operator']}, 1 bit"
        text = f"step {found['step']}, rank {operator.get('rank')}, {named.get('operator')}, {operator.get('bits')} bit"
        return {**result, "right": right, "expected": expected, "found": text, "where": named.get("where")}
    if kind == "sample":
        changed, order = plant["element"] % SAMPLES, Order(SAMPLES, BATCH, SEED)
        places = [
            (at + 1, of)
            for at in range(STEPS)
            for of in range(ranks)
            if changed in [int(row) for rows in order.micro_batches(at, of, ranks, 1) for row in rows]
        ]
        found = compared(clean, trained(root, "odd", given, plant))
        step, rank = places[0]
        right = found["step"] == step and found["what"][0] == f"rank {rank}: the batch"
        return {
            **result,
            "right": right,
            "expected": f"step {step}, rank {rank}: the batch",
            "found": f"step {found['step']}, {(found['what'] or [''])[0]}",
        }
    if kind == "line":
        found = compared(clean, trained(root, "odd", given, plant))
        operator = found["operator"] or {}
        named = (operator.get("b") or {}).get("operator")
        return {
            **result,
            "right": found["step"] == step and named == "aten.mul.Tensor",
            "expected": f"step {step}, aten.mul.Tensor",
            "found": f"step {found['step']}, {named}",
        }
    if kind == "seed":
        found = compared(clean, trained(root, "odd", words(ranks, sharding, SEED + 1 + number)))
        return {
            **result,
            "right": found["step"] == 1 and "seed" in found["configuration"] and found["operator"] is not None,
            "expected": "seed, step 1",
            "found": f"{' '.join(found['configuration'])}, step {found['step']}",
        }
    threads = [word.replace("cpus_per_task=1", "cpus_per_task=2") for word in given]
    found = compared(clean, trained(root, "odd", threads))
    same = found["status"] == 0
    return {
        **result,
        "right": "launch.cpus_per_task" in found["configuration"] and (same or found["operator"] is not None),
        "expected": "launch.cpus_per_task",
        "found": f"{' '.join(found['configuration'])}, {'the same bits' if same else 'other bits'}",
    }


def pair(number: int, root: Path) -> dict[str, Any]:
    """Two runs without a difference."""
    chance = random.Random(f"clean/{number}")
    ranks = chance.choice([1, 2, 2, 3, 4])
    sharding = chance.choice(["none", "full"]) if ranks > 1 else "none"
    given = words(ranks, sharding, chance.randrange(1000))
    found = compared(*(trained(root, name, given) for name in ("one", "other")))
    return {"number": number, "ranks": ranks, "sharding": sharding, "right": found["status"] == 0}


def results(name: str, count: int) -> list[dict[str, Any]]:
    """Those of the first cases of this kind that are kept."""
    files = [CACHE / f"{name}_{number:03d}.json" for number in range(count)]
    return [json.loads(file.read_text()) for file in files if file.exists()]


def page(cases: int, pairs: int) -> str:
    """The section of docs/reports.md."""
    found, clean = results("case", cases), results("pair", pairs)
    counted = [one for one in found if one["right"] is not None]
    right = sum(bool(one["right"]) for one in counted)
    lines = [
        "## Planted differences",
        "",
        "`python -m tests.planted` trains pairs of runs of a small classifier (gloo, eager, 1 to 4 ranks, DDP and",
        "FSDP2), and plants one difference into the second, at a random step, rank and operator. A bit is named",
        "correctly if the step, the rank, the operator and the number of bits are. Bits that changed nothing that was",
        "recorded, or",
        f"ended the run, were drawn again: {sum(o['harmless'] for o in found)}.",
        "",
        f"* `diff` named {right} of {len(counted)} differences correctly (planned: {cases})",
        f"* it found no difference in {sum(one['right'] for one in clean)} of {len(clean)} pairs without one "
        f"(planned: {pairs})",
        f"* torch {torch.__version__}",
    ]
    planted, named = Counter(map(_kind, counted)), Counter(_kind(one) for one in counted if one["right"])
    lines.append(f"* correctly: {'; '.join(f'{kind}, {named[kind]} of {planted[kind]}' for kind in sorted(planted))}")
    if wrong := [one for one in counted if not one["right"]]:
        lines += [
            "",
            "Not named correctly:",
            "",
            "| case | ranks | sharding | planted | found |",
            "| --- | --- | --- | --- | --- |",
        ]
        lines += [
            f"| {o['number']} {o['kind']} | {o['ranks']} | {o['sharding']} | {o['expected']} | {o['found']} |"
            for o in wrong
        ]
    return "\n".join(lines) + "\n"


def _kind(one: Mapping[str, Any]) -> str:
    """The kind of difference; of a bit, also where in the step it was."""
    if one["kind"] != "operator":
        return str(one["kind"])
    where = one.get("where") or ""
    part = "the backward pass" if where.startswith("backward") else "the forward pass" if where else "loss or update"
    return f"a bit in {part}"


def main() -> None:
    """Run what is not kept yet, and write the page."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cases", type=int, default=60)
    parser.add_argument("--pairs", type=int, default=100)
    parser.add_argument("--page", action="store_true", help="only write the page")
    args = parser.parse_args()
    local.train_here = forked
    CACHE.mkdir(parents=True, exist_ok=True)
    work = [
        (name, do, at)
        for name, do, count in (("case", case, args.cases), ("pair", pair, args.pairs))
        for at in range(count)
    ]
    work.sort(key=lambda one: one[2] / (args.cases if one[0] == "case" else args.pairs))  # both at the same pace
    for name, do, number in [] if args.page else work:
        file = CACHE / f"{name}_{number:03d}.json"
        if not file.exists():
            with tempfile.TemporaryDirectory(prefix="laststep-planted-") as folder:
                result = do(number, Path(folder))
            file.write_text(json.dumps(result) + "\n")
            print(json.dumps(result), flush=True)
    put(page(args.cases, args.pairs))


if __name__ == "__main__":
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    main()
