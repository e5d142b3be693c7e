"""prepare: make token files for a language model from text."""

from __future__ import annotations

import argparse
import os
import shlex
import sys
from pathlib import Path

from laststep.cli.parsers import Parser
from laststep.config.errors import ConfigError
from laststep.say import command, counted

DESCRIPTION = """\
Make token files in the folder OUT from text, to train a language model on.
TEXT is plain text (one document), .jsonl (one per line, in its field "text") or
.parquet (one per row, in its column "text"). The same command continues after
an interruption."""
EPILOG = """\
Then train on them: {program} --config classics data.name=tokens data.root=OUT"""


def add_arguments(parser: Parser) -> None:
    """Declare what prepare takes."""
    parser.add_argument("texts", nargs="+", metavar="TEXT", help="a file of text")
    parser.add_argument("out", metavar="OUT", help="the folder to write")
    parser.add_argument(
        "--tokenizer",
        metavar="FILE",
        help="a tokenizer.json of the tokenizers library (default: a token is a byte)",
    )
    parser.add_argument(
        "--validation",
        type=float,
        default=0.05,
        metavar="SHARE",
        help="share of each file, at its end, to validate with (default: 0.05)",
    )


def run(args: argparse.Namespace) -> int:
    """Make the files; returns the exit status."""
    from rich.console import Console
    from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeRemainingColumn

    from laststep.data.token_writer import prepare
    from laststep.data.tokens import TRAIN, VALIDATION, Bytes, FromFile

    if not 0 <= args.validation < 1:
        raise ConfigError(f"--validation {args.validation:g}: must be at least 0 and below 1")
    texts, out = ([Path(os.path.expanduser(path)) for path in paths] for paths in (args.texts, [args.out]))
    file = None if args.tokenizer is None else Path(os.path.expanduser(args.tokenizer))
    tokenizer = Bytes() if file is None else FromFile(file, f"--tokenizer {args.tokenizer}")
    copy = None if file is None else file.read_bytes()
    total = sum(text.stat().st_size for text in texts if text.exists())
    columns = (TextColumn("reading"), BarColumn(), DownloadColumn(), TimeRemainingColumn())
    on_terminal = sys.stderr.isatty()
    with Progress(*columns, console=Console(stderr=True), transient=True, disable=not on_terminal) as progress:
        bar = progress.add_task("", total=total)
        folder = prepare(texts, out[0], tokenizer, args.validation, copy, lambda size: progress.advance(bar, size))
    train, validation = (len(folder.stream(part)) for part in (TRAIN, VALIDATION))
    print(
        f"{args.out}: {counted(len(texts), 'text')}, {train:,} tokens to train on, {validation:,} to validate with\n"
        f"  tokenizer {folder.vocabulary}, fingerprint {folder.fingerprint[:12]}"
    )
    print(f"train  {command(f'--config classics data.name=tokens data.root={shlex.quote(args.out)}')}")
    return 0
