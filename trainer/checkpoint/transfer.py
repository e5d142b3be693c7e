"""Which bytes of a checkpoint's files go to which ranks. Computed by every rank, with the same result on all of them.

A tensor that each rank holds whole is needed by all ranks, a row of a sharded one by those that hold it. What only the
rank that has read a file needs, that rank copies; everything else is sent to all ranks.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import NamedTuple

from trainer.checkpoint.pack import Layout, Target, aligned
from trainer.checkpoint.shards import range_of
from trainer.checkpoint.store import Manifest
from trainer.checkpoint.stripes import ALIGNMENT


class Segment(NamedTuple):
    """A run of bytes in a file."""

    stored: int  # where it begins in the file
    start: int  # where it begins in the bytes of the full tensors
    size: int

    @property
    def stop(self) -> int:
        """Where it ends in the file."""
        return self.stored + self.size


class Transfer:
    """The way of the bytes from the ranks that have read the files to those whose tensors are to be filled."""

    def __init__(
        self, layout: Layout, manifest: Manifest, owners: Mapping[str, int], targets: Sequence[Target], size: int
    ) -> None:
        """`owners` has the rank that has read a file, `targets` the tensors of one rank of `size`. Raises ValueError
        when they are sharded over different numbers of ranks."""
        self._layout, self._owners, self._size = layout, owners, size
        self._bytes = {name: manifest.files[name]["bytes"] for name in manifest.shards}
        self._files = [(shard, name) for shard, names in enumerate(manifest.shards_of_state) for name in names]
        self._sharded = {target.number for target in targets if target.shards}
        counts = {target.shards for target in targets if target.shards} or {1}
        if len(counts) > 1:
            raise ValueError(f"its tensors are cut into different numbers of shards: {sorted(counts)}")
        (self._shards,) = counts
        self.alone = self._shards == size  # whether each rank has rows of its own

    def own(self, rank: int, largest: int) -> Iterator[tuple[str, Segment]]:
        """What a rank has read and needs alone, with its file, in pieces of at most `largest` bytes."""
        for name, first, shard in self._placed():
            if self.alone and self._owners[name] == rank:
                for segment in self._segments(name, first, shard, sent=False):
                    yield from ((name, piece) for (piece,) in _pieces([segment], largest))

    def sent(self, largest: int) -> Iterator[tuple[str, list[Segment]]]:
        """What is sent to all ranks, with its file, in pieces of at most `largest` bytes together."""
        for name, first, shard in self._placed():
            if not self._is_alone_with(name, shard):
                segments = self._segments(name, first, shard, sent=True)
                yield from ((name, pieces) for pieces in _pieces(segments, largest))

    def _placed(self) -> Iterator[tuple[str, int, int]]:
        """Each file, where it begins in the bytes of its shard, and that shard."""
        first, before = 0, -1
        for shard, name in self._files:
            first = first if shard == before else 0
            yield name, first, shard
            first, before = first + self._bytes[name], shard

    def _is_alone_with(self, name: str, shard: int) -> bool:
        """Whether a file's owner is known, without a look at each tensor, to be the only one that needs it: as after a
        restart with the same sharding."""
        same = self._layout.shards == self._shards and self._layout.sharded <= self._sharded
        return self._size == 1 or (self.alone and same and self._owners[name] == shard > 0)

    def _segments(self, name: str, first: int, shard: int, sent: bool) -> list[Segment]:
        """What is sent, or not, of a file that begins at byte `first` of a shard."""
        found: list[Segment] = []
        last, position = first + self._bytes[name], 0
        for number, begin, end in self._layout.held(shard):
            stored = aligned(end - begin)
            if position < last and position + stored > first:
                for start, stop, needed_by in self._needs(number, begin, end):
                    only_owner = self._size == 1 or (self.alone and self._owners[name] == needed_by)
                    if only_owner != sent:
                        start = max(start, begin + first - position)
                        count = min(stop, begin + last - position) - start
                        place = position + start - begin - first
                        _append(found, Segment(place, self._layout.offsets[number] + start, count))
            position += stored
        return found

    def _needs(self, number: int, begin: int, end: int) -> Iterator[tuple[int, int, int | None]]:
        """A range of the bytes of a tensor in parts, each with the live shard that needs it; None: all need it."""
        stand_in = self._layout.stand_ins[number]
        stop = end
        if end == stand_in.nbytes and begin % ALIGNMENT == 0:
            stop = aligned(end)  # with the padding neighbours form one run
        if number not in self._sharded:
            yield begin, stop, None
            return
        each = range_of(stand_in, 0, self._shards)[1]
        while begin < end:
            shard = begin // each
            until = (shard + 1) * each
            yield begin, (stop if until >= end else until), shard
            begin = until


def _append(segments: list[Segment], segment: Segment) -> None:
    """Add a segment; to the last one, if it continues that in the file and in the tensors."""
    if segment.size <= 0:
        return
    if segments:
        last = segments[-1]
        if last.stop == segment.stored and last.start + last.size == segment.start:
            segments[-1] = last._replace(size=last.size + segment.size)
            return
    segments.append(segment)


def _pieces(segments: list[Segment], largest: int) -> Iterator[list[Segment]]:
    """Segments cut and put together, so that each list has as many bytes, the last one perhaps fewer."""
    piece: list[Segment] = []
    room = largest
    for stored, start, count in segments:
        done = 0
        while done < count:
            part = min(count - done, room)
            piece.append(Segment(stored + done, start + done, part))
            done, room = done + part, room - part
            if not room:
                yield piece
                piece, room = [], largest
    if piece:
        yield piece
