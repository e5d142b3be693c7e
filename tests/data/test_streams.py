"""Streams: the same samples from wherever a run resumes, for any number of ranks and workers."""

from __future__ import annotations

import gc
import json
import random
from collections.abc import Iterator
from dataclasses import asdict
from itertools import chain
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader, IterableDataset

from laststep.config.errors import ConfigError
from laststep.data.streams import StepStream, StreamOptions, StreamRecord

CPU = torch.device("cpu")


class Numbers(IterableDataset[int]):
    """Counts to `count`, and does not say where it is."""

    def __init__(self, count: int = 50) -> None:
        self.count = count

    def __iter__(self) -> Iterator[int]:
        yield from range(self.count)


class Stateful(Numbers):
    """Says where it is."""

    reads = 0  # of all copies
    lies = ""

    def __init__(self, count: int = 50) -> None:
        super().__init__(count)
        self.at = self.start = 0
        self.resumed = False

    def __iter__(self) -> Iterator[int]:
        self.at, self.start = self.start, 0
        while self.at < self.count:
            type(self).reads += 1
            self.at += 1
            yield self.at - 1

    def state_dict(self) -> dict[str, Any]:
        """Where it is."""
        return {"at": 0 if self.lies == "second" and self.resumed else self.at}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue there."""
        self.start, self.resumed = state["at"] + 3 * (self.lies == "buffer"), True


class Forgetful(Stateful):
    """Loses what is in its shuffle buffer, as some data sets do."""

    lies = "buffer"


class Twice(Stateful):
    """Begins anew when it is resumed for the second time."""

    lies = "second"


class Drifting(Numbers):
    """Another order each time, after the first samples."""

    def __init__(self, same: int = 0) -> None:
        super().__init__()
        self.same = same

    def __iter__(self) -> Iterator[int]:
        generator = random.Random()
        yield from range(self.same)
        yield from (generator.randrange(1 << 40) for _ in range(self.count))


class Drawing(Numbers):
    """Augments its samples by the global generators, and shuffles by them as well."""

    def __iter__(self) -> Iterator[Any]:
        order = list(range(self.count))
        random.shuffle(order)
        for number in order:
            yield number, round(random.random(), 6), round(float(torch.rand(())), 6)


def even(part: int, parts: int) -> Iterator[int]:
    """A generator of the samples of a part."""
    yield from range(part, 48, parts)


def a_stream(
    source: Any, place: tuple[int, int] = (0, 1), record: StreamRecord | None = None, **options: Any
) -> StepStream:
    """A stream of batches of 4."""
    seed, shares = options.pop("seed", 1), options.pop("shares", None)
    chosen: dict[str, Any] = {"batch_size": 4, "shuffle": 0, "collate": list, "workers": 0} | options
    return StepStream(StreamOptions(source, **chosen), seed, CPU, place, shares, record)


def take(stream: StepStream, steps: int) -> list[Any]:
    """The next batches."""
    units = stream.batches(0, steps)
    return list(units)


def stored(record: StreamRecord) -> StreamRecord:
    """The record after a checkpoint."""
    return StreamRecord.of(json.loads(json.dumps(asdict(record))))


SOURCES = [Numbers(), Stateful(), Forgetful(), Twice(), Drawing(), even, list(range(37))]


@pytest.mark.parametrize("shuffle", [0, 10])
@pytest.mark.parametrize("source", SOURCES, ids=lambda source: getattr(source, "__name__", type(source).__name__))
def test_resumes_at_any_step(source: Any, shuffle: int) -> None:
    """Again and again, over the end of the data, with a state, without one, and with one that lies."""
    whole = take(a_stream(source, shuffle=shuffle), 40)
    assert len({tuple(batch) for batch in whole[:9]}) == 9
    found: list[Any] = []
    record: StreamRecord | None = None
    for steps in (1, 6, 5, 9, 1, 18):
        stream = a_stream(source, record=record, shuffle=shuffle)
        found += take(stream, steps)
        record = stored(stream.record)
    assert found == whole


def test_each_sample_once() -> None:
    """In a cycle over the data, over all ranks; a shuffled one has another order."""
    for shuffle in (0, 16):
        ranks = [a_stream(Numbers(48), (rank, 3), batch_size=6, shuffle=shuffle) for rank in range(3)]
        seen = [sample for stream in ranks for batch in take(stream, 8) for sample in batch]
        assert sorted(seen) == list(range(48))
    assert seen[:16] != sorted(seen[:16])


@pytest.mark.parametrize("source", [Stateful(), even], ids=["strided", "parts"])
@pytest.mark.parametrize("workers", [0, 2])
def test_any_number_of_ranks(source: Any, workers: int) -> None:
    """With shares, or when a run resumes on fewer ranks, each step has the same samples in the same shares."""

    def steps(
        size: int, records: StreamRecord | None, count: int, shares: int | None
    ) -> tuple[list[Any], StreamRecord]:
        streams = [a_stream(source, (rank, size), records, shares=shares, workers=workers) for rank in range(size)]
        own = [take(stream, count) for stream in streams]
        record = streams[0].record.snapshot()
        for stream in streams:
            for part in stream.own:
                record.marks[part] = stream.record.marks[part]
            stream.close()
        each = 4 // size if shares else 1
        by_step = [[unit for rank in own for unit in rank[each * step : each * (step + 1)]] for step in range(count)]
        return [[sample for unit in units for sample in unit] for units in by_step], stored(record)

    alone, _ = steps(4, None, 14, None)
    with_shares, _ = steps(1, None, 14, 4)
    assert alone == with_shares
    first, record = steps(4, None, 5, 4)
    second, record = steps(2, record, 4, 4)
    third, record = steps(1, record, 5, None)
    assert first + second + third == alone


def test_workers_give_the_same_to_any_number_of_them() -> None:
    """How many read is recorded with the stream, so a resume with others has the same samples."""
    stream = a_stream(Stateful(), workers=2)
    whole = take(stream, 20)
    stream.close()
    first = a_stream(Stateful(), workers=2)
    found = take(first, 7)
    first.close()
    second = a_stream(Stateful(), record=stored(first.record), workers=0)
    assert found + take(second, 13) == whole
    assert second.record.parts == 2


def test_what_was_loaded_ahead_does_not_count() -> None:
    """Workers read ahead; the checkpoint must hold the sample that was used last."""
    stream = a_stream(Stateful(), workers=1)
    take(stream, 2)
    stream.close()
    mark = stream.record.marks[0]
    assert mark is not None and stream.record.taken == 2
    assert (mark.batch, mark.state) == (1, '{"at": 4}')


def test_old_marks() -> None:
    """After a rescue those of dead ranks are older than the step, or not known at all."""
    stream = a_stream(Stateful())
    early = (take(stream, 3), list(stream.record.marks))[1]
    take(stream, 6)
    expected = take(stream, 3)
    for marks in (early, [None]):
        record = stored(stream.record)
        record.taken, record.marks = 9, list(marks)
        assert take(a_stream(Stateful(), record=record), 3) == expected


def test_a_state_saves_reading() -> None:
    """A resume of a long stream reads a batch or two, not all that was before."""
    Stateful.reads = 0
    stream = a_stream(Stateful(10_000))
    take(stream, 1000)
    Stateful.reads = 0
    take(a_stream(Stateful(10_000), record=stored(stream.record)), 1)
    assert Stateful.reads <= 9


@pytest.mark.parametrize(
    ("source", "line"),
    [
        (Forgetful(), "a Forgetful does not come back to its state_dict() once, so its samples are counted"),
        (Twice(), "a Twice does not come back to its state_dict() twice, so its samples are counted"),
        (Numbers(), "a Numbers does not say where it is, so its samples are counted"),
    ],
)
def test_says_that_it_counts(source: Any, line: str, capsys: pytest.CaptureFixture[str]) -> None:
    """A resume then takes as long as reading what was before: the user must hear of it before that."""
    take(a_stream(source), 1)
    assert line in capsys.readouterr().out


def test_lies_later(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """A source that has told the truth at first is found out by the batch that it gives after a resume."""
    whole = take(a_stream(Stateful()), 12)
    stream = a_stream(Stateful())
    take(stream, 7)
    monkeypatch.setattr(Stateful, "lies", "buffer")
    assert take(a_stream(Stateful(), record=stored(stream.record)), 5) == whole[7:]
    assert "does not come back to where its state_dict() was taken" in capsys.readouterr().out


def test_another_order_each_time() -> None:
    """Such a stream cannot be resumed at all: the run ends with the fix, at its start if the first samples show it, and
    does not train on other samples."""
    with pytest.raises(ConfigError, match=r"gives another sample than before when it is read again: .* give its shuf"):
        take(a_stream(Drifting()), 1)
    stream = a_stream(Drifting(same=9))
    take(stream, 7)
    with pytest.raises(ConfigError, match=r"gives another sample than before at batch 6: .* give its shuffling a"):
        take(a_stream(Drifting(same=9), record=stored(stream.record)), 1)


@pytest.mark.parametrize(
    ("source", "options", "message"),
    [
        (iter(range(9)), {}, "a range_iterator can be iterated only once; give the function that makes it"),
        (7, {}, "a int cannot be iterated"),
        ([], {}, "part 0 of 1 has no samples"),
        ([1, 2], {"place": (2, 4)}, "part 2 of 4 has no samples; there must be at least 4"),
        (Numbers(), {"batch_size": 5, "place": (0, 2)}, "batch_size=5): not divisible by 2 shares"),
        (DataLoader(Numbers(), 2), {}, "a DataLoader gives batches already; leave batch_size out"),
        (DataLoader([1, 2], 2, shuffle=True), {"batch_size": None}, "its order is random"),  # type: ignore[arg-type]
    ],
)
def test_refused(source: Any, options: dict[str, Any], message: str) -> None:
    """One line that says what to write."""
    with pytest.raises(ConfigError) as error:
        take(a_stream(source, **options), 1)
    assert message in str(error.value)


def test_refused_at_a_resume() -> None:
    """What would change the samples of the steps that are left."""
    stream = a_stream(Numbers(), (0, 2))
    take(stream, 1)
    with pytest.raises(ConfigError, match="this run reads it in 2 parts, batch_size=4, shuffle=0, not in 2, 8, 0"):
        a_stream(Numbers(), (0, 2), stream.record, batch_size=8)
    with pytest.raises(ConfigError, match="read in 2 shares, which 3 ranks cannot divide"):
        a_stream(Numbers(), (0, 3), stream.record, batch_size=6)
    with pytest.raises(ConfigError, match="needs count=N"):
        len(stream)


def test_a_loader_of_batches() -> None:
    """A user's own DataLoader: an item is a batch, and its workers end with the stream."""
    loader = DataLoader(Numbers(20), 3, num_workers=1)
    stream = a_stream(loader, batch_size=None, collate=None)
    whole = [batch.tolist() for batch in take(stream, 9)]
    stream.close()
    assert whole[:2] == [[0, 1, 2], [3, 4, 5]] and whole[6] == [18, 19] and whole[7] == [0, 1, 2]
    record = stored(stream.record)
    again = a_stream(DataLoader(Numbers(20), 3), batch_size=None, collate=None, record=record)
    assert take(again, 1)[0].tolist() == [6, 7, 8]


@pytest.mark.filterwarnings("ignore")
def test_torchdata() -> None:
    """StatefulDataLoader comes back by its own state."""
    torchdata = pytest.importorskip("torchdata.stateful_dataloader")

    def loader() -> Any:
        torch.manual_seed(0)  # as a run seeds it: its sampler draws a seed
        return torchdata.StatefulDataLoader(list(range(30)), 3, shuffle=True, num_workers=1)

    stream = a_stream(loader(), batch_size=None, collate=None)
    whole = [batch.tolist() for batch in take(stream, 15)]
    stream.close()
    assert sorted(number for batch in whole[:10] for number in batch) == list(range(30))
    first = a_stream(loader(), batch_size=None, collate=None)
    found = [batch.tolist() for batch in take(first, 7)]
    first.close()
    second = a_stream(loader(), batch_size=None, collate=None, record=stored(first.record))
    found += [batch.tolist() for batch in take(second, 8)]
    second.close()
    assert found == whole


@pytest.mark.parametrize("buffer", [0, 20])
@pytest.mark.parametrize("workers", [0, 2])
def test_hugging_face(buffer: int, workers: int) -> None:
    """Its streaming data sets resume by their shards, also one with a shuffle buffer of its own."""
    datasets = pytest.importorskip("datasets")

    def source() -> Any:
        found = datasets.Dataset.from_dict({"n": list(range(96))}).to_iterable_dataset(num_shards=8)
        return found.shuffle(seed=3, buffer_size=buffer) if buffer else found

    def numbers(stream: StepStream, steps: int) -> list[list[int]]:
        found = [[sample["n"] for sample in batch] for batch in take(stream, steps)]
        stream.close()
        return found

    whole = [numbers(a_stream(source(), (rank, 2), workers=workers), 60) for rank in range(2)]
    if not workers:
        assert sorted(n for rank in whole for batch in rank[:24] for n in batch) == list(range(96))
    first = a_stream(source(), (1, 2), workers=workers)
    found = numbers(first, 13)
    second = a_stream(source(), (1, 2), stored(first.record), workers=workers)
    found += numbers(second, 20)
    third = a_stream(source(), (1, 2), stored(second.record), workers=workers)
    assert found + numbers(third, 27) == whole[1]


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("by_node", [True, False])
def test_webdataset(by_node: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its shards go to the parts, or each part reads all of them; a resume counts."""
    wds = pytest.importorskip("webdataset")
    monkeypatch.setenv("RANK", "1")
    monkeypatch.setenv("WORLD_SIZE", "2")
    for shard in range(4):
        with wds.TarWriter(str(tmp_path / f"{shard}.tar")) as tar:
            for number in range(6):
                tar.write({"__key__": f"{shard}{number}", "txt": str(10 * shard + number)})
    urls = [str(tmp_path / f"{shard}.tar") for shard in range(4)]

    def source() -> Any:
        split = {"nodesplitter": wds.split_by_node} if by_node else {}
        return wds.WebDataset(urls, shardshuffle=False, **split).decode().to_tuple("txt")

    def texts(stream: StepStream, steps: int) -> list[list[str]]:
        return [[sample[0] for sample in batch] for batch in take(stream, steps)]

    ranks = [texts(a_stream(source(), (rank, 2)), 12) for rank in range(2)]
    assert len({text for rank in ranks for batch in rank[:6] for text in batch}) == 24
    first = a_stream(source(), (1, 2))
    found = texts(first, 4)
    assert found + texts(a_stream(source(), (1, 2), stored(first.record)), 8) == ranks[1]
    parts = lambda part, parts: wds.WebDataset(urls[part::parts], shardshuffle=False).to_tuple("txt")  # noqa: E731
    assert len(texts(a_stream(parts, (1, 2)), 2)) == 2
    del first
    gc.collect()  # it leaves its files open


@pytest.mark.filterwarnings("ignore")
def test_webdataset_as_people_write_it(tmp_path: Path) -> None:
    """Its shuffling takes a seed from the clock: here from the run's, another one in each cycle. It makes its batches
    itself, of arrays, which become tensors as in a DataLoader."""
    wds = pytest.importorskip("webdataset")
    for shard in range(4):
        with wds.TarWriter(str(tmp_path / f"{shard}.tar")) as tar:
            for number in range(6):
                tar.write({"__key__": f"{shard}{number}", "cls": 10 * shard + number})
    urls = [str(tmp_path / f"{shard}.tar") for shard in range(4)]

    def source() -> Any:
        dataset = wds.WebDataset(urls, shardshuffle=4, nodesplitter=wds.split_by_node)
        return dataset.shuffle(8).decode().to_tuple("cls").batched(3)

    def numbers(stream: StepStream, steps: int) -> list[list[int]]:
        return [batch[0].tolist() for batch in take(stream, steps)]

    made = source()
    whole = numbers(a_stream(made, (0, 2), batch_size=None), 8)
    assert sorted(chain(*whole[:4])) == sorted(chain(*whole[4:])) and whole[:4] != whole[4:]
    first = a_stream(made, (0, 2), batch_size=None)
    found = numbers(first, 5)
    assert found + numbers(a_stream(made, (0, 2), stored(first.record), batch_size=None), 3) == whole
    del first
    gc.collect()
