"""verify: check every checkpoint of a run for damage, and print what is in it."""

from __future__ import annotations

import argparse
import contextlib
import json
from pathlib import Path
from typing import Any

from laststep import script
from laststep.checkpoint.files import CheckpointError, files_sha256
from laststep.checkpoint.store import CheckpointGone, CheckpointStore, Manifest
from laststep.cli.parsers import Parser, add_run, named_run
from laststep.rundir import RunDir
from laststep.runs import run_config

DESCRIPTION = "Read every checkpoint of a run and compare it with its manifest."

LOOKS = 5


def add_arguments(parser: Parser) -> None:
    """Declare what verify takes."""
    parser.add_argument("--json", action="store_true", help="print the result as JSON")
    add_run(parser)


def run(args: argparse.Namespace) -> int:
    """Print what each checkpoint holds; returns 1 when one is damaged."""
    run = named_run(args)
    found = inspect(run)
    if not found:
        script.check_knows_us(run_config.as_submitted(run), f"verify {args.run}")
    if args.json:
        print(json.dumps(found, indent=1))
    elif not found:
        print(f"{args.run}: no checkpoint yet")
    else:
        print(f"{'step':>9}  {'epoch':>5}  {'ranks':>5}  {'MB':>8}  state")
        for c in found:
            state = f"intact, {_fingerprint(c)}" if c["ok"] else f"DAMAGED: {c['error']}"
            size = "?" if c["bytes"] is None else f"{c['bytes'] / 1e6:.1f}"
            print(f"{c['step']:>9}  {c['epoch'] or '?':>5}  {c['world_size'] or '?':>5}  {size:>8}  {state}")
    return 0 if all(c["ok"] for c in found) else 1


def inspect(run: RunDir) -> list[dict[str, Any]]:
    """One record per checkpoint, oldest first: step, epoch, world_size, bytes, ok, error, weights_sha256, files_sha256.

    Of a checkpoint that run.checkpoint(...) has written, the files of the framework are known, but not the weights in
    them: then `weights_sha256` is None. Of any other, `files_sha256` is None.
    One that the run deletes meanwhile, since it keeps only the newest and best, is left out.
    """
    store = CheckpointStore(run.checkpoints)
    found: list[dict[str, Any]] = []
    # A run that saves often may have replaced all of them by newer ones meanwhile: then look at those.
    for _ in range(LOOKS):
        for step in [] if found else store.steps():
            while store.path(step).exists():
                with contextlib.suppress(CheckpointGone):  # it may also have been replaced: then read the new one
                    found.append(_inspect(store, step))
                    break
    return found


def _inspect(store: CheckpointStore, step: int) -> dict[str, Any]:
    record: dict[str, Any] = {"step": step, "epoch": None, "world_size": None, "bytes": None}
    outcome: dict[str, Any] = {"ok": False, "error": None, "weights_sha256": None, "files_sha256": None}
    try:
        manifest = store.verify(step)
        record |= {"epoch": manifest.epoch, "world_size": manifest.world_size, "bytes": manifest.bytes}
        outcome["ok"] = True
        if manifest.opaque:
            outcome["files_sha256"] = files_sha256(manifest.opaque)
        else:
            with store.reading(step):
                outcome["weights_sha256"] = _weights(store.path(step), manifest)
    except CheckpointGone:
        raise
    except CheckpointError as error:
        outcome |= {"ok": False, "error": str(error)}
    return record | outcome


def _fingerprint(record: dict[str, Any]) -> str:
    kind = "weights" if record["weights_sha256"] else "files"
    return f"{kind} {record[f'{kind}_sha256'][:16]}"


def _weights(folder: Path, manifest: Manifest) -> str:
    from laststep.checkpoint.export import weights_of, weights_sha256
    from laststep.checkpoint.pack import load

    return weights_sha256(weights_of(load(folder, manifest)))
