"""Writes docs/spike.md: a bad document that makes the loss of a language model spike is found, named and left out.

    python -m tools.spike

Trains a model of 1 million parameters on a CPU, in a throwaway folder, with the commands that the page shows.
"""

from __future__ import annotations

import json
import os
import random
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from itertools import pairwise
from pathlib import Path

from laststep.records.metrics import is_step, read_lines
from laststep.rundir import RunDir

PROJECT = Path(__file__).parent.parent
DOCS = PROJECT / "docs"
STEPS, WINDOW, BATCH = 140, 64, 8
WORDS = ("the", "model", "reads", "a", "plain", "sentence", "of", "common", "words", "and", "learns", "what", "follows")


def write_documents(file: Path) -> int:
    """Plain documents, and among them one of letters that are nowhere else; returns its number."""
    chance = random.Random(5)
    documents = [" ".join(chance.choice(WORDS) for _ in range(400)) + "." for _ in range(32)]
    bad = 21
    letters = [chr(code) for code in range(0x4E00, 0x9FA5)]
    documents.insert(bad, "".join(chance.choice(letters) for _ in range(60)))
    file.write_text("".join(json.dumps({"text": text}, ensure_ascii=False) + "\n" for text in documents))
    return bad


def laststep(folder: Path, *words: str) -> str:
    """What a command prints."""
    command = [sys.executable, str(PROJECT / "launch.py"), *words]
    env = {**os.environ, "CUDA_VISIBLE_DEVICES": "", "PYTHONPATH": str(PROJECT)}
    done = subprocess.run(command, cwd=folder, env=env, capture_output=True, text=True, check=False)
    if done.returncode:
        raise RuntimeError(f"{' '.join(words)}:\n{done.stdout}{done.stderr}")
    return done.stdout


def without_most(samples: str, bad: int) -> str:
    """What `samples` prints, with the first sample and those of the bad document."""
    run, rank, *lines = samples.rstrip().splitlines()
    kept = [line for line in lines if line is lines[0] or f"document {bad}," in line]
    return "\n".join([run, rank, *kept, f"... ({len(lines) - len(kept)} more)"])


def losses(run: RunDir) -> list[tuple[int, float]]:
    """The loss of each step that has one."""
    found = ((line["step"], line.get("loss")) for line in read_lines(run.metrics) if is_step(line))
    return [(step, loss) for step, loss in found if loss is not None]


def picture(curves: Mapping[str, Sequence[tuple[int, float]]], spike: int) -> str:
    """Loss by step, as SVG; the step of the spike is marked."""
    width, height, left, top = 720, 300, 50, 20
    most = max(loss for curve in curves.values() for _, loss in curve)
    last = max(step for curve in curves.values() for step, _ in curve)

    def at(step: int, loss: float) -> str:
        return f"{left + step / last * (width - left - 10):.1f},{top + (1 - loss / most) * (height - top - 40):.1f}"

    x = at(spike, 0).split(",")[0]
    lines = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}"',
        ' font-family="sans-serif" font-size="12">',
        f'<rect width="{width}" height="{height}" fill="white"/>',
        f'<line x1="{x}" x2="{x}" y1="{top}" y2="{height - 40}" stroke="#bbb" stroke-dasharray="4"/>',
        f'<text x="{x}" y="{top - 6}" text-anchor="middle" fill="#666">step {spike}</text>',
    ]
    for tick in range(int(most) + 1):
        y = at(0, tick).split(",")[1]
        lines.append(f'<text x="{left - 8}" y="{y}" text-anchor="end" dominant-baseline="middle">{tick}</text>')
        lines.append(f'<line x1="{left}" x2="{width - 10}" y1="{y}" y2="{y}" stroke="#eee"/>')
    for number, (name, curve) in enumerate(curves.items()):
        colour = ("#c0392b", "#2471a3")[number]
        points = " ".join(at(step, loss) for step, loss in curve)
        lines.append(f'<polyline points="{points}" fill="none" stroke="{colour}" stroke-width="1.5"/>')
        lines.append(f'<text x="{left + 200 * number}" y="{height - 8}" fill="{colour}">{name}</text>')
    lines.append(f'<text x="{width - 10}" y="{height - 24}" text-anchor="end">step {last}</text></svg>')
    return "\n".join(lines) + "\n"


def main() -> None:
    """Train, find, leave out, and write the page with its picture."""
    with tempfile.TemporaryDirectory(prefix="laststep-spike-") as name:
        folder = Path(name)
        bad = write_documents(folder / "documents.jsonl")
        laststep(folder, "prepare", "documents.jsonl", "data", "--validation", "0.1")
        begin = ["--config", "classics", "--local", "data.name=tokens", f"data.args.window={WINDOW}", "device=cpu"]
        begin += [f"train.batch_size={BATCH}", f"train.max_steps={STEPS}", "train.epochs=9", "optim.warmup_steps=10"]
        begin += ["checkpoint.anchors=20", "train.digest_every=10", "data.root=data"]
        laststep(folder, *begin, "--name", "first")
        first = RunDir(folder / "runs" / "first")
        curve = losses(first)
        settled = [(loss - before, step) for (_, before), (step, loss) in pairwise(curve[19:])]
        jump, step = max(settled)
        samples = laststep(folder, "samples", "first", "--step", str(step))
        named = json.loads(laststep(folder, "samples", "first", "--step", str(step), "--json"))
        rows = [
            row
            for part in named["samples"]
            for row, text in zip(part["rows"], part["names"])
            if f"document {bad}," in text
        ]
        again = laststep(folder, "replay", "first", "--step", str(step))
        leave = f"train.skip_samples={json.dumps(rows).replace(' ', '')}"
        laststep(folder, "--from", f"first@{step - 1}", "--local", "--name", "second", leave)
        second = losses(RunDir(folder / "runs" / "second"))
    after = dict(second)
    assert all(after[at] == loss for at, loss in curve if at < step), "the branch begins with the same steps"
    (DOCS / "spike.svg").write_text(picture({"first": curve, "second, without the samples": second}, step))
    before = dict(curve)[step - 1]
    page = f"""# A spike: found, named, left out

A language model of 1 million parameters trains on {33} short documents, one of which is bad: its letters occur nowhere
else (`python -m tools.spike`, on a CPU). The loss jumps from {before:.2f} to {dict(curve)[step]:.2f} in step {step}:

![Loss by step of both runs](spike.svg)

What was in that batch?

    laststep samples first --step {step}

```text
{without_most(samples, bad)}
```

Sample {", ".join(map(str, rows))} is of document {bad}, the bad one. Did the machine compute that step correctly?

    laststep replay first --step {step}

```text
{again.strip()}
```

It did: the document is the cause. So begin again before that step, without it:

    laststep --from first@{step - 1} --name second {leave}

Up to step {step - 1} the second run has exactly the losses of the first; in step {step} its loss is {after[step]:.2f}.
The document's other samples, in other steps, are found and left out in the same way.
"""
    (DOCS / "spike.md").write_text(page.replace(str(folder), "~/project"))
    print(f"step {step}: +{jump:.2f}, samples {rows}")


if __name__ == "__main__":
    main()
