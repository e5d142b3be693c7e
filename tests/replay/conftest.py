"""Replays on ranks that are forked, as the attempts of a proof are."""

from tests.proof.conftest import forked_ranks

__all__ = ["forked_ranks"]
