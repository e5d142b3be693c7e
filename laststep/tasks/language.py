"""Language modelling: a decoder predicts each next token of text."""

from __future__ import annotations

import math
from collections.abc import Mapping
from functools import cached_property
from typing import Any

import numpy
import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.optim import Optimizer
from torch.utils.data import Dataset, TensorDataset

from laststep.config.config import Config
from laststep.data.tokens import TRAIN, VALIDATION, Corpus, Mixture, Tokens
from laststep.optim.build import make_optimizer
from laststep.task import Task
from laststep.tasks.decoder import Decoder
from laststep.tasks.sizes import size_of, z_loss_of

IN_MEMORY_BYTES = 1 << 27  # windows that take no more are held in memory, and their batches gathered there


class Language(Task):
    """The text of `data` with a decoder of the size `model.name`.

    A sample is a window of tokens, and its last token's successor. See `Windows`.
    """

    def __init__(self, config: Config) -> None:
        super().__init__(config)
        self.corpus = Corpus.open(config.data)
        self.size = size_of(config.model.name, config.model.args, self.corpus.vocabulary.size)
        self.z_loss = z_loss_of(config)

    def datasets(self) -> tuple[Dataset[Any], Dataset[Any]]:
        return open_windows(self.corpus, TRAIN), open_windows(self.corpus, VALIDATION)

    def fingerprint(self) -> str:
        return self.corpus.fingerprint

    def model(self) -> nn.Module:
        return Decoder(self.size)

    def optimizer(self, model: nn.Module) -> Optimizer:
        embeddings = [module for module in model.modules() if isinstance(module, nn.Embedding)]
        return make_optimizer(model, self.config.optim, [p for module in embeddings for p in module.parameters()])

    def on_device(self, batch: Any) -> Any:
        tokens, *positions = batch
        return tokens.long(), *positions

    def step(self, model: nn.Module, batch: Any) -> dict[str, Tensor]:
        tokens, *positions = batch
        logits = model(tokens[:, :-1], *positions).flatten(0, 1).float()
        loss = functional.cross_entropy(logits, tokens[:, 1:].flatten())
        if self.z_loss and model.training:  # keeps the logits from drifting (Chowdhery et al. 2022, section 5)
            loss = loss + self.z_loss * logits.logsumexp(1).square().mean()
        return {"loss": loss}

    def derived(self, line: Mapping[str, Any], samples: int, ranks: int) -> dict[str, float]:
        if line.get("val_loss") is not None:
            bits = line["val_loss"] / math.log(2) / self.corpus.validation_bytes_per_token
            return {"val_perplexity": _exp(line["val_loss"]), "val_bits_per_byte": bits}
        if "samples_per_s" not in line:
            return {}
        found: dict[str, float] = {} if line["loss"] is None else {"perplexity": _exp(line["loss"])}
        per_s = line["samples_per_s"] * self.corpus.window
        found |= {"tokens": samples * self.corpus.window, "tokens_per_s": round(per_s, 1)}
        if self._peak_flops is not None:
            found["mfu"] = round(per_s * self.size.flops_per_token(self.corpus.window) / self._peak_flops / ranks, 4)
        return found

    @cached_property
    def _peak_flops(self) -> float | None:
        """Of the GPU that this rank trains on; None for the CPU, and for a GPU that the table lacks."""
        if self.config.device == "cpu" or not torch.cuda.is_available():
            return None
        return peak_flops(torch.cuda.get_device_name())


def _exp(loss: float) -> float:
    return math.exp(min(loss, 700.0))


# The first that is part of the name counts, so variants stand before their family.
PEAK = (
    ("GB300", 2.5e15),
    ("B300", 2.25e15),
    ("GB200", 2.5e15),
    ("B200", 2.25e15),
    ("H100 PCIe", 756e12),
    ("H100 NVL", 835e12),
    ("GH200", 989e12),
    ("H200", 989e12),
    ("H100", 989e12),
    ("H800", 989e12),
    ("H20", 148e12),
    ("A100", 312e12),
    ("A800", 312e12),
    ("A40", 149.7e12),
    ("A30", 165e12),
    ("A10", 125e12),
    ("L40S", 362e12),
    ("L40", 181e12),
    ("L4", 121e12),
    ("RTX 4090", 165.2e12),
    ("RTX 3090", 71e12),
    ("V100", 125e12),
    ("T4", 65e12),
    ("MI300X", 1307.4e12),
    ("MI250X", 383e12),
)


def peak_flops(gpu: str) -> float | None:
    """FLOPs per second of a GPU of this name; None for one that the table lacks."""
    return next((peak for name, peak in PEAK if name in gpu), None)


def open_windows(corpus: Corpus, part: str) -> Dataset[Any]:
    """The windows to train on, or to validate with.

    A sample is (tokens (window + 1),), or with `mask_documents` (tokens (window + 1), positions (window)).
    """
    windows = Windows(corpus, part)
    if not len(windows) or len(windows) * sum(tensor.nbytes for tensor in windows[0]) > IN_MEMORY_BYTES:
        return windows
    samples = [windows[number] for number in range(len(windows))]
    return TensorDataset(*(torch.stack(tensors) for tensors in zip(*samples)))


class Windows(Dataset[Any]):
    """Windows that are read from the token files when they are asked for."""

    def __init__(self, corpus: Corpus, part: str) -> None:
        self.corpus = corpus
        self.streams = [folder.stream(part) for folder in corpus.folders]
        sizes = corpus.windows(part)
        # Validation has each window once: its mean is over the text, not over the mixture.
        self.mixture = Mixture.of(sizes, corpus.weights if part == TRAIN else [max(1, size) for size in sizes])

    def __len__(self) -> int:
        return len(self.mixture)

    def __getitem__(self, index: int) -> tuple[Tensor, ...]:
        if not 0 <= index < len(self):
            raise IndexError(index)
        source, number = self.mixture.window(index)
        start, stop = number * self.corpus.window, (number + 1) * self.corpus.window
        stream = self.streams[source]
        tokens = as_tensor(stream.read(start, stop + 1))
        if not self.corpus.mask_documents:
            return (tokens,)
        return tokens, torch.from_numpy(stream.positions(start, stop).astype(numpy.int32))


def as_tensor(tokens: Tokens) -> Tensor:
    """Tokens in a type with which torch can do everything."""
    return torch.from_numpy(tokens if tokens.dtype == numpy.uint8 else tokens.astype(numpy.int32))
