"""Sizes of language models by name, and what follows from a size: parameters and FLOPs. Imports no torch."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from laststep.checkpoint.store import CheckpointStore
from laststep.config.config import Config
from laststep.config.errors import ConfigError, nearest
from laststep.data.tokens import Corpus
from laststep.records.plan import check_fingerprint
from laststep.rundir import RunDir


@dataclass(frozen=True)
class Size:
    """The shape of a decoder."""

    layers: int
    width: int
    heads: int
    kv_heads: int  # heads of keys and values; each serves heads / kv_heads heads of queries
    ffn: int  # hidden width of the SwiGLU
    vocabulary: int  # that of the name; the data's takes its place
    tied: bool = True  # one matrix for the embedding of tokens and for the logits
    rope_base: float = 10_000.0

    @property
    def head_width(self) -> int:
        """Of a query, key or value."""
        return self.width // self.heads

    @property
    def parameters(self) -> int:
        """Of the whole model."""
        return self._matrices + (2 * self.layers + 1) * self.width + (0 if self.tied else self.vocabulary * self.width)

    def flops_per_token(self, window: int) -> int:
        """FLOPs of a forward and a backward pass, as PaLM counts them (Chowdhery et al. 2022, appendix B): 6 per
        weight that a token is multiplied with, and those of attention over the whole window."""
        return 6 * self._matrices + 12 * self.layers * self.width * window

    @property
    def _matrices(self) -> int:
        """Weights that each token is multiplied with: those of the blocks and of the logits."""
        attention = 2 * self.width * self.head_width * (self.heads + self.kv_heads)
        return self.layers * (attention + 3 * self.width * self.ffn) + self.vocabulary * self.width


# With its own vocabulary, each has within 5 % of the parameters in its name. The vocabularies are those of bytes,
# GPT-2, Llama 2 and Llama 3.
SIZES = {
    "tiny-1m": Size(layers=5, width=128, heads=4, kv_heads=2, ffn=384, vocabulary=256),
    "tiny-4m": Size(layers=5, width=256, heads=8, kv_heads=4, ffn=768, vocabulary=256),
    "small-25m": Size(layers=8, width=512, heads=8, kv_heads=4, ffn=1536, vocabulary=256),
    "gpt2-124m": Size(layers=12, width=768, heads=12, kv_heads=12, ffn=2048, vocabulary=50257),
    "gpt2-355m": Size(layers=24, width=1024, heads=16, kv_heads=16, ffn=2736, vocabulary=50257),
    "llama-1b": Size(layers=16, width=2048, heads=32, kv_heads=8, ffn=8192, vocabulary=32000),
    "llama-3b": Size(layers=28, width=3072, heads=24, kv_heads=8, ffn=8192, vocabulary=32000),
    "llama-8b": Size(
        layers=32,
        width=4096,
        heads=32,
        kv_heads=8,
        ffn=14336,
        vocabulary=128256,
        tied=False,
        rope_base=500_000.0,
    ),
}
ARGS = [field.name for field in dataclasses.fields(Size)]


def size_of(name: str, args: Mapping[str, Any], vocabulary: int) -> Size:
    """The size of this name for data with this vocabulary, with `args` instead of its own numbers.

    Raises ConfigError for a name or a number that cannot be.
    """
    if name not in SIZES:
        raise ConfigError(f"model.name={name}: no such size of a language model; {nearest(name, list(SIZES))}")
    for key, value in args.items():
        if key not in ARGS:
            raise ConfigError(f"model.args.{key}: a language model has no such number; {nearest(key, ARGS)}")
        if key == "tied" and not isinstance(value, bool):
            raise ConfigError(f"model.args.tied={value}: must be true or false")
        if key == "rope_base" and not (_is_number(value) and value > 1):
            raise ConfigError(f"model.args.rope_base={value}: must be a number above 1")
        if key not in ("tied", "rope_base") and not (isinstance(value, int) and _is_number(value) and value > 0):
            raise ConfigError(f"model.args.{key}={value}: must be a positive integer")
    size = dataclasses.replace(SIZES[name], **{"vocabulary": vocabulary, **args})
    if size.vocabulary < vocabulary:
        raise ConfigError(f"model.args.vocabulary={size.vocabulary}: the data have {vocabulary} tokens; leave it out")
    if size.width % (2 * size.heads):
        raise ConfigError(
            f"model.args.heads={size.heads}: model.args.width={size.width} must be a multiple of 2 x heads"
        )
    if size.heads % size.kv_heads:
        raise ConfigError(
            f"model.args.kv_heads={size.kv_heads}: model.args.heads={size.heads} must be a multiple of kv_heads"
        )
    return size


def _is_number(value: Any) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool)


TASK_ARGS = ("z_loss",)


def check_language(config: Config) -> None:
    """Raise ConfigError unless the data are there, and the model fits them."""
    z_loss_of(config)
    corpus = Corpus.open(config.data)
    size_of(config.model.name, config.model.args, corpus.vocabulary.size)


def check_same_data(config: Config) -> None:
    """Raise ConfigError if the run of this configuration has checkpoints, and began with other data. The ranks check
    this again."""
    run = RunDir(Path(config.launch.root) / str(config.launch.name))
    if CheckpointStore(run.checkpoints).steps():
        check_fingerprint(run.data, Corpus.open(config.data).fingerprint, f"data.name={config.data.name}")


def z_loss_of(config: Config) -> float:
    """The weight of the z-loss. Raises ConfigError for args that the task does not read."""
    for name in config.args:
        if name not in TASK_ARGS:
            raise ConfigError(f"args.{name}: task={config.task} does not read it; {nearest(name, TASK_ARGS)}")
    found = config.args.get("z_loss", 0.0)
    if isinstance(found, bool) or not isinstance(found, (int, float)) or not 0 <= found < 1:
        raise ConfigError(f"args.z_loss={found}: must be at least 0 and below 1, e.g. 1e-4")
    return float(found)
