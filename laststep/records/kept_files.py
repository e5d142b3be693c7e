"""How far a command has come that does not know Laststep, seen from outside: by the files that it keeps.

It has no steps. So an attempt that has changed a file in the folder `RunDir.files` counts as one step, done and kept:
the retry policy asks for no more.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Sequence

from laststep.rundir import RunDir, write_whole


def mark(run: RunDir, words: Sequence[str], attempt: int) -> None:
    """Note what is there as the attempt of this number begins, of the command with these words. Raises OSError."""
    run.files.mkdir(parents=True, exist_ok=True)
    noted = {"steps": kept(run) or 0, "files": _seen(run), "words": list(words), "attempt": attempt}
    write_whole(run.progress, json.dumps(noted) + "\n")


def kept(run: RunDir) -> int | None:
    """The steps kept so far; None where no attempt of a command has begun. Raises OSError."""
    try:
        noted = json.loads(run.progress.read_text())
    except FileNotFoundError:
        return None
    return int(noted["steps"]) + (noted["files"] != _seen(run))


def words_of(run: RunDir, attempt: int) -> list[str] | None:
    """The words of this attempt's command; None if it is not the newest one that is noted. Raises OSError."""
    noted = json.loads(run.progress.read_text())
    return list(noted["words"]) if noted.get("attempt") == attempt else None


def _seen(run: RunDir) -> str:
    """A digest of the names, sizes and times of all files that the command keeps."""
    found, length = [], len(str(run.files))
    for folder, _, names in os.walk(run.files):
        for name in names:
            path = os.path.join(folder, name)
            try:
                file = os.stat(path)
            except OSError:  # deleted, or replaced, since
                continue
            found.append(f"{path[length:]} {file.st_size} {file.st_mtime_ns}")
    return hashlib.sha256("\n".join(sorted(found)).encode(errors="surrogateescape")).hexdigest()
