"""Which bytes of a checkpoint's files go to which ranks. Computed by every rank, with the same result on all of them.

A tensor that each rank holds whole is needed by all ranks, a row of a sharded one by those that hold it. What only the
rank that has read a file needs, that rank copies; everything else is sent to all ranks.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from itertools import groupby
from typing import NamedTuple

from laststep.checkpoint.pack import Layout, Target, aligned
from laststep.checkpoint.shards import range_of
from laststep.checkpoint.store import Manifest
from laststep.checkpoint.stripes import ALIGNMENT


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
        self._files = [[(name, manifest.files[name]["bytes"]) for name in names] for names in manifest.shards_of_state]
        self._sharded = {target.number for target in targets if target.shards}
        counts = {target.shards for target in targets if target.shards} or {1}
        if len(counts) > 1:
            raise ValueError(f"its tensors are cut into different numbers of shards: {sorted(counts)}")
        (self._shards,) = counts
        self.alone = self._shards == size  # whether each rank has rows of its own

    def own(self, rank: int, largest: int) -> Iterator[tuple[str, Segment]]:
        """What a rank has read and needs alone, with its file, in pieces of at most `largest` bytes."""
        for shard, files in enumerate(self._files):
            if self.alone and any(self._owners[name] == rank for name, _ in files):
                for name, segments in self._segments(shard, sent=False):
                    if self._owners[name] == rank:
                        yield from ((name, piece) for each in segments for (piece,) in _pieces([each], largest))

    def sent(self, largest: int) -> Iterator[tuple[str, list[Segment]]]:
        """What is sent to all ranks, with its file, in pieces of at most `largest` bytes together."""
        for shard, files in enumerate(self._files):
            if not all(self._stays(name, shard) for name, _ in files):
                for name, segments in self._segments(shard, sent=True):
                    yield from ((name, pieces) for pieces in _pieces(segments, largest))

    def _stays(self, name: str, shard: int) -> bool:
        """Whether a file's owner is known, without a look at each tensor, to be the only one that needs it: as after a
        restart with the same sharding."""
        same = self._layout.shards == self._shards and self._layout.sharded <= self._sharded
        return self._size == 1 or (self.alone and same and self._owners[name] == shard > 0)

    def _segments(self, shard: int, sent: bool) -> Iterator[tuple[str, list[Segment]]]:
        """What is sent, or not, of each file of a shard."""
        for name, parts in groupby(self._by_file(shard), key=lambda part: part[0]):
            found: list[Segment] = []
            for _, segment, needed_by in parts:
                stays = self._size == 1 or (self.alone and self._owners[name] == needed_by)
                if stays != sent:
                    _append(found, segment)
            yield name, found

    def _by_file(self, shard: int) -> Iterator[tuple[str, Segment, int | None]]:
        """The bytes of a shard in their order, by file, each segment with the live shard that needs it, or None."""
        files = iter(self._files[shard])
        name, first, end = "", 0, 0
        for (stored, start, left), needed_by in self._needed(shard):
            while left:
                while stored >= end:
                    name, size = next(files)
                    first, end = end, end + size
                count = min(left, end - stored)
                yield name, Segment(stored - first, start, count), needed_by
                stored, start, left = stored + count, start + count, left - count

    def _needed(self, shard: int) -> Iterator[tuple[Segment, int | None]]:
        """The bytes of a shard, with the live shard that needs them; None: every rank needs them."""
        stored = 0
        for number, begin, end in self._layout.held(shard):
            for start, stop, needed_by in self._parts(number, begin, end):
                place = stored + start - begin
                yield Segment(place, self._layout.offsets[number] + start, stop - start), needed_by
            stored += aligned(end - begin)

    def _parts(self, number: int, begin: int, end: int) -> Iterator[tuple[int, int, int | None]]:
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
