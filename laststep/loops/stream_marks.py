"""The streams of a custom training loop: what each rank knows of the parts that the others read.

A save gathers the newest marks of all parts. A rescue has no one to ask. So every `EXCHANGE_STEPS` steps each rank
leaves its marks at rank 0's store, and picks up those that the others left the time before: nothing waits, and no
collective or device takes part. A run that is rescued reads the batches since then again, and throws them away.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import asdict
from typing import Any

from laststep.config.errors import ConfigError
from laststep.data.order import seed_of
from laststep.data.streams import Mark, StepStream, StreamRecord
from laststep.ranks.group import Group

EXCHANGE_STEPS = 50


class Streams:
    """The streams that a function has made, by name."""

    def __init__(self, group: Group, seed: int, shares: int | None) -> None:
        """`shares` is train.shares."""
        self._group, self._seed, self._shares = group, seed, shares
        self._streams: dict[str, StepStream] = {}
        self._exchanged = 0  # how often

    def make(
        self,
        name: str,
        saved: Mapping[str, Any],
        source: Any,
        batch_size: int | None,
        shuffle: int,
        collate: Callable[[list[Any]], Any] | None,
        workers: int,
        pin_memory: bool,
    ) -> StepStream:
        """The stream of this name. One that was made before continues where it was; else `saved` has what the
        position says of the run's streams. Raises ConfigError."""
        record = None
        if earlier := self._streams.get(name):
            if not earlier.record.taken:
                raise ConfigError(f"run.stream(name={name!r}): there are two of this name; give each its own")
            earlier.close()
            record = earlier.record.snapshot()
        elif name in saved:
            found = saved[name]
            record = found.snapshot() if isinstance(found, StreamRecord) else StreamRecord.of(found)
        world = self._group.world
        self._streams[name] = made = StepStream(
            source,
            batch_size,
            shuffle,
            collate,
            workers,
            seed_of("stream", name, self._seed),
            self._group.device,
            (world.rank, world.size),
            self._shares,
            record,
            pin_memory,
        )
        return made

    def snapshot(self, before: dict[str, Any]) -> dict[str, Any]:
        """What a checkpoint holds of the streams after this step. `before` is what it has held."""
        if not self._streams:
            return before
        return {**before, **{name: stream.record.snapshot() for name, stream in self._streams.items()}}

    def gather(self) -> None:
        """Let every rank know the marks of all. A collective."""
        if not self._streams or self._group.world.size == 1:
            return
        for text in self._group.gather_bytes(self._own().encode()):
            self._take(text)

    def exchange(self, step: int) -> None:
        """Every EXCHANGE_STEPS steps (counted from 1): leave this rank's marks for the others, and take those that they
        left the time before. All of them have done so by now, unless one is dead."""
        group = self._group
        if not self._streams or group.world.size == 1 or step % EXCHANGE_STEPS:
            return
        key = "streams/{}/{}".format  # of two in turn: a rank that is ahead overwrites none that is still needed
        if self._exchanged:
            for text in group.store.multi_get([key(self._exchanged % 2, rank) for rank in range(group.world.size)]):
                self._take(text)
        self._exchanged += 1
        group.store.set(key(self._exchanged % 2, group.world.rank), self._own())

    def close(self) -> None:
        """End all worker processes."""
        for stream in self._streams.values():
            stream.close()

    def _own(self) -> str:
        """The marks of the parts that this rank reads."""
        return json.dumps(
            {
                name: {part: asdict(mark) for part in stream.own if (mark := stream.record.marks[part]) is not None}
                for name, stream in self._streams.items()
            }
        )

    def _take(self, text: bytes) -> None:
        for name, marks in json.loads(text).items():
            stream = self._streams[name]
            for part, mark in marks.items():
                if int(part) not in stream.own:
                    stream.record.marks[int(part)] = Mark(**mark)
