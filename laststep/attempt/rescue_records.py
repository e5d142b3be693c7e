"""What the files of a rescue say: what each survivor holds, and who is to write which part of it.

A state consists of shards: one that is not sharded is a single shard, of which each rank has a replica. A survivor may
hold several shards, and one shard of several steps: what it trains with, and copies in host memory.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from laststep.checkpoint.pack import Stripe
from laststep.ranks.shard_place import Gathered
from laststep.ranks.watchdog import Fault

Place = tuple[int, int, bool, bool]  # see `Position.place`


@dataclass(frozen=True)
class Holding:
    """A shard of a state that a survivor can write. It has at most one with this place and shard."""

    place: Place
    bytes: int  # of the shard
    saved: bool  # whether there is a checkpoint of this state
    savable: bool = True  # whether the ranks that hold the shards have all of the state
    shard: int = 0
    shards: int = 1  # that the state consists of
    commits: bool = True  # whether this rank can also write what is no part of a shard, and so commit
    advances: bool = False  # whether this rank can do the update after it, given what others have gathered


@dataclass(frozen=True)
class Survivor:
    """A surviving rank, as it describes itself."""

    rank: int
    began_step: bool = False  # in this attempt: only then can a step be lost
    failure: Fault | None = None  # this rank's own, if it had one
    beat: int = 0
    progress: int = 0  # counts what it has done, to the chunk
    frozen: bool = False  # whether it knows what it holds
    holdings: tuple[Holding, ...] = ()
    gathered: Gathered | None = None  # by all ranks, at the end of the last step of which it knows that
    silence: str = ""  # why its device cannot be read; the holdings are those in host memory
    unable: str | None = None  # why it could not save its state
    generation: str = ""  # of the plan that `written` and `acted` belong to
    written: dict[str, Any] = field(default_factory=dict)  # the manifest's entry of each part that it wrote, by file
    acted: bool = False  # it has committed and recorded, as the plan asked

    @classmethod
    def parse(cls, fields: Mapping[str, Any]) -> Survivor:
        """The survivor with these fields, as `dataclasses.asdict` made them. Raises TypeError or KeyError."""
        holdings = tuple(Holding(**{**one, "place": tuple(one["place"])}) for one in fields["holdings"])
        failure, gathered = fields["failure"] and Fault(**fields["failure"]), _gathered(fields)
        return cls(**{**fields, "failure": failure, "holdings": holdings, "gathered": gathered})

    def can_advance(self, gathered: Gathered) -> bool:
        """Whether it holds the state before this step, and can do the step's update."""
        return self.unable is None and any(_is_before(holding, gathered) for holding in self.holdings)

    def advanced(self, gathered: Gathered) -> Survivor:
        """What it will be once it has done that."""
        if not self.can_advance(gathered):
            return self
        holdings = (
            replace(one, place=(gathered.step, *one.place[1:])) if _is_before(one, gathered) else one
            for one in self.holdings
        )
        return replace(self, holdings=tuple(holdings))


def _is_before(holding: Holding, gathered: Gathered) -> bool:
    return holding.advances and holding.place[0] == gathered.step - 1


def _gathered(fields: Mapping[str, Any]) -> Gathered | None:
    if (found := fields["gathered"]) is None:
        return None
    step, values = found
    return Gathered(step, tuple(values))


@dataclass(frozen=True)
class Part:
    """A stripe of a shard of the state, and the rank that writes it."""

    shard: int
    number: int
    of: int
    rank: int

    @property
    def stripe(self) -> Stripe:
        """The bytes of the shard that it covers."""
        return Stripe(self.number, self.of)

    @property
    def file(self) -> str:
        """The name of its file until the commit. No two ranks write to one file."""
        return f"shard_{self.shard}-part_{self.number}-of-{self.of}-by-{self.rank}.bin"


@dataclass(frozen=True)
class Plan:
    """Who does what. A plan with another `generation` has nothing in common with the one before it, not even files."""

    generation: str
    actor: int  # the rank that commits and records the end; the lowest of those that can
    place: Place | None  # of the state to save; None: the survivors do not hold all of any
    parts: tuple[Part, ...] = ()  # by shard, in the order of their bytes; empty if the state is saved or not savable
    gathered: Gathered | None = None  # nothing is saved yet: those that hold the step before do this update
    act: bool = False  # everything is written, and nobody is waited for: the actor acts
    written: dict[str, Any] = field(default_factory=dict)  # with `act`: the manifest's entry of each part, by file
    present: tuple[int, ...] = ()  # with `act`: the ranks that signed in
    failures: tuple[Fault, ...] = ()  # with `act`: theirs
    done_step: int = -1  # with `act`: the last step that is done, as far as they know
    lost_shards: tuple[int, ...] = ()  # with `act`: the shards of that step that no survivor can write
    silences: tuple[tuple[int, str], ...] = ()  # with `act`: the ranks whose device cannot be read, and why

    @classmethod
    def parse(cls, fields: Mapping[str, Any]) -> Plan:
        """The plan with these fields, as `dataclasses.asdict` made them. Raises TypeError or KeyError."""
        return cls(
            **{
                **fields,
                "place": fields["place"] and tuple(fields["place"]),
                "parts": tuple(Part(**part) for part in fields["parts"]),
                "gathered": _gathered(fields),
                "present": tuple(fields["present"]),
                "failures": tuple(Fault(**failure) for failure in fields["failures"]),
                "lost_shards": tuple(fields["lost_shards"]),
                "silences": tuple((rank, why) for rank, why in fields["silences"]),
            }
        )


@dataclass(frozen=True)
class Board:
    """What a leader publishes."""

    leader: int
    beat: int = 0
    progress: int = 0  # of all survivors together
    plan: Plan | None = None
    over: bool = False  # the end is recorded, and there is nothing left to save
