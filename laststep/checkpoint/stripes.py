"""How the bytes of a state are divided among the ranks that write it."""

from __future__ import annotations

from typing import NamedTuple

# One file for each of these, at most one per rank: more files would cost more than they gain.
STRIPE_BYTES = 64 << 20
ALIGNMENT = 64  # bytes: a cache line, and a multiple of the size of every dtype


class Stripe(NamedTuple):
    """One of `of` equal parts of a run of bytes. A stripe that is cut again covers the same bytes as its parts."""

    number: int  # from 0
    of: int

    def bounds(self, count: int) -> tuple[int, int]:
        """Where it begins and ends in `count` bytes, both multiples of ALIGNMENT as `count` is."""
        begin, end = (count * number // self.of // ALIGNMENT * ALIGNMENT for number in (self.number, self.number + 1))
        return begin, end


def stripe_count(count: int, ranks: int) -> int:
    """Into how many stripes to cut `count` bytes that this many ranks can write."""
    return max(1, min(ranks, -(-count // STRIPE_BYTES)))


def own_stripe(count: int, rank: int, ranks: int) -> Stripe | None:
    """The stripe that a rank writes when all ranks save together. Where there are fewer stripes than ranks, those that
    write are far apart, so on different nodes; rank 0 is always one of them."""
    stripes = stripe_count(count, ranks)
    number = -(-rank * stripes // ranks)
    return Stripe(number, stripes) if number < stripes and number * ranks // stripes == rank else None
