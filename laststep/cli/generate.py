"""generate: text from a checkpoint of a language model."""

from __future__ import annotations

import argparse
from itertools import islice

from laststep.cli.parsers import Parser, add_checkpoint, add_run, named_run
from laststep.config.errors import ConfigError

DESCRIPTION = """\
Print text that the model of a run's newest checkpoint writes (task=language)."""


def add_arguments(parser: Parser) -> None:
    """Declare what generate takes."""
    add_run(parser)
    add_checkpoint(parser)
    parser.add_argument(
        "--prompt", default="\n", metavar="TEXT", help="what the text begins with (default: a new line)"
    )
    parser.add_argument("--tokens", type=int, default=400, metavar="N", help="at most this many (default: 400)")
    parser.add_argument(
        "--temperature",
        type=float,
        default=0.8,
        metavar="T",
        help="0: always the likeliest token (default: 0.8)",
    )
    parser.add_argument("--seed", type=int, default=0, metavar="N", help="another seed draws another text (default: 0)")


def run(args: argparse.Namespace) -> int:
    """Print the text; returns the exit status."""
    from laststep.data.tokens import Corpus
    from laststep.runs import run_config
    from laststep.tasks.sizes import size_of

    if args.tokens < 1:
        raise ConfigError(f"--tokens {args.tokens}: must be at least 1")
    if not 0 <= args.temperature < 100:
        raise ConfigError(f"--temperature {args.temperature:g}: must be at least 0 and below 100")
    folder = named_run(args)
    config = run_config.as_submitted(folder)
    if config.task != "language":
        raise ConfigError(f"{folder.name}: task={config.task} is no language model; generate needs task=language")
    corpus = Corpus.open(config.data)
    tokenizer = corpus.folders[0].tokenizer(f"data.name={config.data.name}")
    size = size_of(config.model.name, config.model.args, corpus.vocabulary.size)
    prompt = tokenizer.encode(args.prompt).tolist()
    if not prompt:
        raise ConfigError("--prompt '': give at least one character")

    import torch

    from laststep.checkpoint.export import read_run
    from laststep.tasks.decoder import Decoder, generate

    weights = read_run(folder, args.step, args.best, args.raw)
    on_gpu = config.device != "cpu" and torch.cuda.is_available()
    with torch.device("meta"):
        model = Decoder(size)
    try:
        model.load_state_dict(weights.tensors, assign=True)
    except RuntimeError:
        raise ConfigError(
            f"{folder.name}: its data have another vocabulary now than it was trained with ({corpus.vocabulary}); put "
            "back what it began with"
        ) from None
    model.to("cuda" if on_gpu else "cpu").eval()
    found = generate(model, prompt, corpus.window, args.temperature, args.seed, corpus.vocabulary.end)
    print(tokenizer.decode([*prompt, *islice(found, args.tokens)]).strip("\n"))
    return 0
