"""The files by which ranks and their supervisors know of a rescue; laststep.attempt.rescue says what the others are."""

from __future__ import annotations

import contextlib
import shutil
from pathlib import Path


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
    """Remove what earlier rescues have left, as this attempt begins. A rank of it may have died already: what its
    supervisor says of that stays. Raises OSError if files of this attempt's name may be left."""
    with contextlib.suppress(OSError):  # no attempt looks into the folder of another
        for folder in rescues.iterdir():
            if folder.name != attempt:
                shutil.rmtree(folder, ignore_errors=True)
    with contextlib.suppress(FileNotFoundError):
        for file in (rescues / attempt).iterdir():
            if not file.name.startswith(GONE):
                file.unlink(missing_ok=True)
