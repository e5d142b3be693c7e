"""export: write a run's weights to files that other tools read."""

from __future__ import annotations

import argparse
import json
import os
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from laststep import __version__, script
from laststep.checkpoint.export import DCP, check_target, write, write_folder
from laststep.cli.parsers import ROOT_KEY, Parser, add_checkpoint, named_run
from laststep.rundir import RunDir
from laststep.runs import run_config
from laststep.say import counted

if TYPE_CHECKING:
    from laststep.checkpoint.export import Weights

DESCRIPTION = """\
Write the weights of a run's newest checkpoint to OUT, whose name ends in
.safetensors or .pt: the averaged weights, if train.ema_decay is set. An older
OUT is replaced. More than 5 GB become several .safetensors files and
OUT.index.json."""
EPILOG = """\
In Python, without a file: model.load_state_dict(laststep.load_weights(RUN))"""


def add_arguments(parser: Parser) -> None:
    """Declare what export takes."""
    parser.add_argument("run", metavar="RUN", help="name or folder of the run")
    parser.add_argument("out", metavar="OUT", help="the file to write")
    # The default keeps argparse from listing these words among those that are required.
    parser.add_argument("overrides", nargs="*", default=[], metavar=ROOT_KEY, help="the folder that holds all runs")
    add_checkpoint(parser)
    parser.add_argument(
        "--trained", action="store_true", help="without frozen weights: only what the run trains, such as adapters"
    )
    parser.add_argument(
        "--format", choices=[DCP], help=f"{DCP}: a new folder OUT, for torch.distributed.checkpoint.load"
    )


def run(args: argparse.Namespace) -> int:
    """Write the file; returns the exit status."""
    from laststep.checkpoint import export

    out, is_folder = Path(os.path.expanduser(args.out)), args.format == DCP
    check_target(out, is_folder)
    folder = named_run(args)
    script.check_knows_us(run_config.as_submitted(folder), f"export {folder.name}")
    weights = export.read_run(folder, args.step, args.best, args.raw, args.trained)
    manifest = weights.manifest
    if is_folder:
        files = write_folder(out, weights.tensors)
    else:
        files = write(out, weights.tensors, _metadata(folder, weights))
    parameters = counted(f"{sum(tensor.numel() for tensor in weights.tensors.values()):,}", "parameter")
    averaged = ", averaged weights" if weights.averaged else ""
    print(f"{out if is_folder else files[0]}: {folder.name}, step {manifest.step}, epoch {manifest.epoch}{averaged}")
    if weights.metrics:
        print(f"  {', '.join(f'{name} {value:.4f}' for name, value in weights.metrics.items())}")
    if weights.adapters:
        print("  adapters alone: load them by peft's set_peft_model_state_dict into the base model that was trained")
    if args.trained:
        print(f"  without {counted(weights.left_out, 'frozen tensor')}")
    print(f"  {parameters} in {counted(len(weights.tensors), 'tensor')}, {_size(files)}")
    return 0


def _size(files: Sequence[Path]) -> str:
    """How much has been written, and into how many files."""
    size = f"{sum(file.stat().st_size for file in files) / 1e6:.1f} MB"
    return size if len(files) == 1 else f"{size} in {len(files)} files"


def _metadata(run: RunDir, weights: Weights) -> dict[str, str]:
    """What the header of a .safetensors file says about the weights; its values are strings."""
    from laststep.checkpoint.export import weights_sha256

    config = run_config.as_submitted(run)
    found: dict[str, object] = {
        "format": "pt",  # other tools look for this: the tensors are torch's
        "laststep": __version__,
        "run": run.name,
        "step": weights.manifest.step,
        "epoch": weights.manifest.epoch,
        "averaged": json.dumps(weights.averaged),
        "weights_sha256": weights_sha256(weights.tensors),
        "task": config.task,
    }
    if config.task == "classification":
        # Every model of this task ends in the layer that has one output per class.
        found |= {"model.name": config.model.name, "classes": list(weights.tensors.values())[-1].shape[0]}
    return {name: str(value) for name, value in found.items()}
