"""Which samples a step used, computed without torch: their order is a pure function of (seed, epoch, step)."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import numpy

from laststep.config.config import Config
from laststep.config.errors import ConfigError
from laststep.records.attempt_record import done_by
from laststep.records.plan import read_plan
from laststep.rundir import RunDir
from laststep.runs import run_config
from laststep.runs.run_status import records_of


@dataclass(frozen=True)
class Samples:
    """The samples of one rank, or share, of a step."""

    rank: int
    share: int | None  # with train.shares
    rows: list[int]  # their numbers in the training set


def samples_of(run: RunDir, step: int) -> tuple[int, list[Samples]]:
    """The epoch of a step (both from 1), and the samples of each rank, in order. Raises ConfigError."""
    config, plan = run_config.as_submitted(run), read_plan(run.plan)
    if plan is None:
        raise ConfigError(f"{run.name}: no attempt has begun to train, so nothing is known of its data set")
    if "samples" not in plan:
        raise ConfigError(
            f"{run.name}: the order of its samples is not known here (a sampler, a stream or a loop that draws its own "
            f"batches, or a run of an older version); `replay {run.name} --step {step} --save-batch FILE` has the batch"
        )
    if not 0 < step <= plan["total_steps"]:
        raise ConfigError(f"--step {step}: {run.name} has steps from 1 to {plan['total_steps']}")
    attempt = done_by(records_of(run), step)  # where none has done it yet: as many as the run has now
    ranks = attempt["world_size"] if attempt else config.launch.world_size
    return _of_plan(config, plan["samples"], plan["batch_size"], step, ranks)


def _of_plan(config: Config, samples: int, batch_size: int, step: int, ranks: int) -> tuple[int, list[Samples]]:
    train, seed = config.train, config.seed
    few = train.overfit_batches
    in_epoch = samples if few is None else min(samples, few * batch_size)
    in_epoch = in_epoch if train.epoch_samples is None else train.epoch_samples
    per_epoch = -(-in_epoch // batch_size)
    epoch, number = divmod(step - 1, per_epoch)
    begin, end = number * batch_size, min(in_epoch, (number + 1) * batch_size)
    if few is not None:
        first = permuted(samples, seed, 0, 0, in_epoch)
        batch = first[permuted(in_epoch, seed, epoch, begin, end)]
    elif train.epoch_samples is not None:
        batch = _of_passes(samples, seed, epoch * in_epoch + begin, epoch * in_epoch + end)
    else:
        batch = permuted(samples, seed, epoch, begin, end)
    shares = train.shares or ranks
    found = []
    for share in range(shares):
        rows = [batch[a:b] for a, b in cuts(len(batch), batch_size, share, shares, train.accumulate)]
        rank, here = share * ranks // shares, numpy.concatenate(rows)
        here = here[:0] if step in train.skip_steps else here[~numpy.isin(here, train.skip_samples)]
        found.append(Samples(rank, share if train.shares else None, here.tolist()))
    return epoch + 1, found


def _of_passes(samples: int, seed: int, begin: int, end: int) -> Any:
    parts = []
    while begin < end:
        number, start = divmod(begin, samples)
        stop = min(samples, start + end - begin)
        parts.append(permuted(samples, seed, number, start, stop))
        begin += stop - start
    return numpy.concatenate(parts)


def cuts(count: int, batch_size: int, rank: int, size: int, accumulate: int) -> list[tuple[int, int]]:
    """Where each of a rank's micro-batches starts and stops within a global batch: see `laststep.data.order._cuts`,
    which needs torch; a test compares the two."""
    parts = size * accumulate
    least = max(1, min(2, batch_size // parts))
    parts = max(1, min(parts, count // least))
    first = rank * accumulate
    return list(pairwise(count * min(i, parts) // parts for i in range(first, first + accumulate + 1)))


def permuted(samples: int, seed: int, epoch: int, begin: int, end: int) -> Any:
    """Places `begin` to `end` of the order of an epoch: torch.randperm with a seed, on a CPU (randperm_cpu in
    aten/src/ATen/native/TensorFactories.cpp). A test compares the two."""
    digest = hashlib.blake2b(f"order/{seed}/{epoch}".encode(), digest_size=8).digest()
    state = numpy.random.RandomState((int.from_bytes(digest, "little") >> 1) & 0xFFFFFFFF).get_state(legacy=False)
    generator = numpy.random.MT19937()
    generator.state = state  # type: ignore[assignment]
    draws = generator.random_raw(max(0, min(end, samples - 1))) % (
        samples - numpy.arange(max(0, min(end, samples - 1)))
    )
    moved: dict[int, int] = {}  # what is no longer at its own place
    found = []
    for place in range(end):
        other = place + int(draws[place]) if place < len(draws) else place
        found.append(moved.get(other, other))
        moved[other] = moved.pop(place, place) if other != place else found[-1]
    return numpy.array(found[begin:end], dtype=numpy.int64)


SHOWN = 40  # letters of a text


class Named:
    """What a sample is: a window of a document in a token file. Of other data only the number is known here."""

    def __init__(self, corpus: Any) -> None:
        self.known = corpus is not None
        self._corpus = corpus

    @classmethod
    def of(cls, run: RunDir) -> Named:
        """For the data of a run; its files may be elsewhere by now."""
        from laststep.data.catalog import TEXTS
        from laststep.data.tokens import Corpus

        config = run_config.as_submitted(run)
        if config.task != "language" or config.data.name not in TEXTS:
            return cls(None)
        try:
            return cls(Corpus.open(config.data))
        except ConfigError:
            return cls(None)

    def of_row(self, row: int) -> str | None:
        """The file of a sample, its document there, its first token, and what the text begins with."""
        if not self.known:
            return None
        from laststep.data.tokens import TRAIN, Mixture

        corpus = self._corpus
        number, window = Mixture.of(corpus.windows(TRAIN), corpus.weights).window(row)
        folder, begin = corpus.folders[number], window * corpus.window
        stream = folder.stream(TRAIN)
        file, document = stream.place_of(begin)
        try:
            text = folder.tokenizer("data").decode(stream.read(begin, begin + SHOWN).tolist())
        except Exception:  # a tokenizer whose library is not here
            text = ""
        shown = " ".join(text.split())[:SHOWN]
        return f"{file}, document {document}, token {begin}: {shown}"
