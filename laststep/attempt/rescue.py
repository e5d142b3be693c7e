"""After a fault: the surviving ranks save the last finished step together. They agree on it through the run folder.

The key-value store may have died with rank 0, and so may the connections between the ranks; the file system is left.
Survivors may be one step apart: the dead rank's last all-reduce may have reached only some of them. (Just-in-time
checkpointing: Gupta et al., EuroSys 2024.)

    1. Each survivor signs in with a file `rank_R.json`, before it freezes its state; afterwards it adds what it holds.
       It rewrites the file in every round, as a heartbeat.
    2. One survivor leads: the one that created `leader_0.json`, which a file system lets only one process do. It alone
       reads the files of all ranks, and writes the plan into its own in every round. The others read only that.
    3. The ranks that the plan names write a stripe of the state each; one of them commits and records the end. If one
       dies meanwhile, the others share what it has not written. laststep.attempt.rescue_plan decides what is planned.
    4. If the leader falls silent, another survivor creates `leader_1.json` and continues with the plan. Both may live
       for a while. That does no harm: a plan names its own folder for the files, only ranks that know their state to be
       whole write them, and no commit replaces an intact checkpoint.

No folder is ever listed, since a network file system may show an old list. With N survivors a round costs N reads by
the leader and four small operations by each rank, so rounds are longer with more ranks.
"""

from __future__ import annotations

import contextlib
import json
import shutil
import threading
import traceback
from collections.abc import Callable, Mapping
from dataclasses import asdict, replace
from pathlib import Path
from time import monotonic
from typing import Any

from laststep.attempt.rescue_plan import (
    ALONE_S,
    SILENT_S,
    Assignment,
    Board,
    Holding,
    Plan,
    Roll,
    Survivor,
    is_behind,
    next_plan,
)
from laststep.ranks.disk import polling_round_s
from laststep.ranks.fault import Fault
from laststep.ranks.process import start_thread
from laststep.ranks.seal import Seal
from laststep.ranks.world import Gathered
from laststep.rundir import write_whole
from laststep.say import say


class Superseded(Exception):
    """The plan has changed, and what is being written is not part of it."""


def make_folder(folder: Path) -> None:
    """Make the folder of a rescue. Raises OSError, also where the run is gone: a deleted run must not come back."""
    folder.parent.mkdir(exist_ok=True)
    folder.mkdir(exist_ok=True)


class Rescue:
    """This rank's part in a rescue. A thread calls `round` until `close`; tests call it themselves. `is_recorded` says
    whether the end of the attempt is recorded."""

    def __init__(self, folder: Path, rank: int, size: int, is_recorded: Callable[[], bool], seal: Seal) -> None:
        self.round_s = polling_round_s(size)
        self._folder, self._size, self._is_recorded, self._seal = folder, size, is_recorded, seal
        self._me = Survivor(rank)
        self._changed = threading.Condition()  # guards all fields of this object
        self._term = -1  # of the leader that this rank follows
        self._roll: Roll | None = None  # while this rank leads
        self._observed_at = monotonic()
        self._generations = 0  # that this rank has begun as a leader
        self._board: Board | None = None
        self._silent = 0  # rounds without news from the leader
        self._refused = 0  # rounds in which the disk refused this rank's file
        self.is_over = False  # whether there is nothing left to do for this rank
        self._closed = threading.Event()

    def sign_in(self, failure: Fault | None, began_step: bool) -> None:
        """Take part. Call before anything that may take time."""
        self._me = replace(self._me, failure=failure, began_step=began_step)
        with contextlib.suppress(OSError):
            make_folder(self._folder)
        self.round()

    def start(self) -> None:
        """Do the rounds in a thread."""
        start_thread("rescue", self._rounds)

    def announce(self, *holdings: Holding, gathered: Gathered | None = None, silence: str = "") -> None:
        """Say what this rank has frozen and gathered last, and why its device cannot be read, if so."""
        self._update(frozen=True, holdings=holdings, gathered=gathered, silence=silence)

    def next_duty(self) -> Assignment | Plan | Gathered | None:
        """Wait for what this rank is to do next: write a stripe, update, or act as the plan says. None at the end."""
        with self._changed:
            while (duty := self.duty()) is None and not self.is_over:
                self._changed.wait()
            return duty

    def duty(self) -> Assignment | Plan | Gathered | None:
        """The same, without waiting: None also when there is nothing to do yet."""
        plan, me = self.plan, self._me
        if plan is None or (me.unable is not None and plan.moment is not None):
            return None
        if plan.gathered is not None:
            return plan.gathered if me.can_advance(plan.gathered) else None
        if plan.act:
            return plan if plan.actor == me.rank and not (me.acted and me.generation == plan.generation) else None
        written = self._written_for(plan)
        return next(
            (
                assignment
                for assignment in plan.assignments
                if assignment.rank == me.rank and assignment.file not in written
            ),
            None,
        )

    @property
    def plan(self) -> Plan | None:
        """The plan in force."""
        return self._board.plan if self._board else None

    @property
    def progress(self) -> int:
        """Grows with what the survivors get done."""
        return self._me.progress + (self._board.progress if self._board else 0)

    def check(self, assignment: Assignment) -> None:
        """A chunk of this stripe is written. Raises Superseded when the rest is not needed."""
        self._update()
        if (plan := self.plan) is None or assignment not in plan.assignments:
            raise Superseded

    def report_written(self, plan: Plan, assignment: Assignment, entry: Any) -> None:
        """The stripe is written and synced; `entry` is that of the manifest."""
        self._update(
            generation=plan.generation, written={**self._written_for(plan), assignment.file: entry}, acted=False
        )

    def report_acted(self, plan: Plan) -> None:
        """This rank has done what the plan asked of its actor."""
        self._update(generation=plan.generation, written=self._written_for(plan), acted=True)

    def report_unable(self, why: str) -> None:
        """This rank can no longer write."""
        self._update(unable=why)

    def missing(self, plan: Plan) -> list[int]:
        """The ranks that have not signed in, not even after the plan was made, or were killed after that."""
        return [
            rank
            for rank in range(self._size)
            if (rank not in plan.present and read_survivor(self._folder, rank, self._seal) is None)
            or (exit_status(self._folder, rank) or 0) < 0
        ]

    def close(self) -> None:
        """Stop the rounds."""
        self._closed.set()

    def _written_for(self, plan: Plan) -> dict[str, Any]:
        return self._me.written if self._me.generation == plan.generation else {}

    def _update(self, **changes: Any) -> None:
        with self._changed:
            self._me = replace(self._me, progress=self._me.progress + 1, **changes)

    def _rounds(self) -> None:
        while not self._closed.wait(self.round_s):
            try:
                self.round()
            except Exception:  # the others take over; this rank must not wait for what will not come
                say(traceback.format_exc())
                return self._end()

    def round(self) -> None:
        """Show that this rank lives; read the plan, or as the leader make it."""
        with self._changed:
            me = self._me = replace(self._me, beat=self._me.beat + 1)
        try:
            # First of all: a client of a network file system that changes a folder notices what others changed there.
            write_fields(survivor_file(self._folder, me.rank), asdict(me), self._seal)
            self._refused = 0
        except OSError as error:
            if isinstance(error, FileNotFoundError):  # the disk refused the folder when this rank signed in
                with contextlib.suppress(OSError):
                    make_folder(self._folder)
            self._refused += 1
            if self._refused * self.round_s >= ALONE_S and not self.is_over:
                say(f"WARNING: this rank cannot take part in the rescue: {error}")
                self._end()
            return
        self._follow()
        if self._roll is not None:
            self._lead(self._roll)
        elif self._board is not None and self._board.over:
            self._leave(self._board)
        elif self._term < 0 or self._silent * self.round_s >= SILENT_S:
            self._claim(self._term + 1)

    def _follow(self) -> None:
        """Read the newest leader's file."""
        while (board := read_board(self._folder, self._term + 1, self._seal)) is not None:
            self._term, self._roll = self._term + 1, None
            self._set_board(board)
        if self._roll is not None or self._term < 0:
            return
        board = read_board(self._folder, self._term, self._seal)
        if board is None or board == self._board:
            self._silent += 1
        else:
            self._set_board(board)

    def _leave(self, board: Board) -> None:
        """The leader says that the rescue is over. A rank that comes late may hold more than was saved."""
        if board.plan is not None and is_behind(board.plan, self._me.holdings):
            self._claim(self._term + 1)
        elif self._me.frozen:
            self._end()

    def _lead(self, roll: Roll) -> None:
        """Read what all survivors say, and publish the plan that follows."""
        found = [read_survivor(self._folder, rank, self._seal) for rank in range(self._size)]
        plan = self.plan
        before, self._observed_at = self._observed_at, monotonic()
        roll.observe([one for one in found if one is not None], plan, self._observed_at - before)
        roll.gone.update(rank for rank in roll.unseen if gone_file(self._folder, rank).exists())

        def new_generation() -> str:
            self._generations += 1
            return f"rescue-{self._term}-{self._generations}"

        plan = next_plan(plan, roll, new_generation)
        board = self._board
        assert board is not None
        over = False
        if plan is not None and plan.act:  # until its actor has acted, or has died after it recorded the end
            actor = roll.found[plan.actor]
            over = (actor.acted and actor.generation == plan.generation) or self._is_recorded()
        progress = sum(one.progress for one in roll.found.values())
        board = Board(self._me.rank, board.beat + 1, progress, plan, over)
        with contextlib.suppress(OSError):  # the next round tries again
            write_fields(leader_file(self._folder, self._term), asdict(board), self._seal)
            self._set_board(board)
            if over:
                self._end()

    def _claim(self, term: int) -> None:
        """Try to become the leader of this term, and continue with the plan of the one before."""
        mine = Board(self._me.rank, plan=self.plan)
        try:
            write_fields(leader_file(self._folder, term), asdict(mine), self._seal, new=True)
        except FileExistsError:
            self._term, self._silent = term, 0  # another rank leads; a file that stays unreadable ends its term
            return
        except OSError:
            return
        self._term, self._roll = term, Roll(self._size, self.round_s)
        self._set_board(mine)
        self._lead(self._roll)

    def _set_board(self, board: Board) -> None:
        with self._changed:
            self._board, self._silent = board, 0
            self._changed.notify_all()

    def _end(self) -> None:
        with self._changed:
            self.is_over = True
            self._changed.notify_all()


def read_board(folder: Path, term: int, seal: Seal) -> Board | None:
    """What the leader of a term has published, None if nothing that can be read."""
    fields = read_fields(leader_file(folder, term), seal)
    with contextlib.suppress(TypeError, KeyError, AttributeError):
        if fields is not None:
            return Board(**{**fields, "plan": fields["plan"] and Plan.parse(fields["plan"])})
    return None


def read_survivor(folder: Path, rank: int, seal: Seal) -> Survivor | None:
    """The survivor with this rank, None if it has not signed in."""
    fields = read_fields(survivor_file(folder, rank), seal)
    with contextlib.suppress(TypeError, KeyError, AttributeError):
        if fields is not None and fields["rank"] == rank:
            return Survivor.parse(fields)
    return None


# Every file of a rescue is written and read by these two.


def write_fields(path: Path, fields: Mapping[str, Any], seal: Seal, new: bool = False) -> None:
    """Write a file of a rescue, at once for any reader. Raises OSError, with `new` FileExistsError if it exists."""
    line = seal.seal(_key(path), json.dumps(fields)) + b"\n"
    if new:
        with path.open("xb") as file:
            file.write(line)
        return
    write_whole(path, line)


def read_fields(path: Path, seal: Seal) -> dict[str, Any] | None:
    """What a file of a rescue says; None if there is none, or none that can be read."""
    with contextlib.suppress(OSError, ValueError):
        line = path.read_bytes()
        if line.endswith(b"\n") and (text := seal.open(_key(path), line[:-1])) is not None:  # else half-written
            fields = json.loads(text)
            return fields if isinstance(fields, dict) else None
    return None


def _key(path: Path) -> str:
    return f"rescue/{path.name}"


def survivor_file(folder: Path, rank: int) -> Path:
    """The file with which a rank takes part in the rescue."""
    return folder / f"rank_{rank}.json"


GONE = "gone_"


def leader_file(folder: Path, term: int) -> Path:
    """The file of the leader of a term, from 0."""
    return folder / f"leader_{term}.json"


def has_begun(folder: Path) -> bool:
    """Whether any rank has begun its end by fault, and so given up on the others."""
    return leader_file(folder, 0).exists()


def gone_file(folder: Path, rank: int) -> Path:
    """A rank's supervisor writes the rank's exit status there, the negative number of the signal that killed it."""
    return folder / f"{GONE}{rank}"


def exit_status(folder: Path, rank: int) -> int | None:
    """What the rank's supervisor has written there; None if the rank lives, as far as this host sees."""
    with contextlib.suppress(OSError, ValueError):
        return int(gone_file(folder, rank).read_text())
    return None


def exiting_file(folder: Path, rank: int) -> Path:
    """Exists if the rank's supervisor sees its process end, which takes long: it has much memory to give back."""
    return folder / f"exiting_{rank}"


def is_ending(folder: Path, rank: int) -> bool:
    """Whether a rank that is not gone will be soon: it lived when the rescue began, or is being torn down."""
    return survivor_file(folder, rank).exists() or exiting_file(folder, rank).exists()


def silent_file(folder: Path) -> Path:
    """Exists if a rank gave no sign of life."""
    return folder / "silent"


def clear(rescues: Path, attempt: str) -> None:
    """Remove what earlier rescues have left, but not what a supervisor says of a rank of this attempt that has died
    already. Raises OSError if files of this attempt's name may be left."""
    with contextlib.suppress(OSError):  # no attempt looks into the folder of another
        for folder in rescues.iterdir():
            if folder.name != attempt:
                shutil.rmtree(folder, ignore_errors=True)
    with contextlib.suppress(FileNotFoundError):
        for file in (rescues / attempt).iterdir():
            if not file.name.startswith(GONE):
                file.unlink(missing_ok=True)
