"""This host's view of a folder on a network file system, refreshed where it waits for what another host does there.

An NFS client remembers for up to a minute which names a folder has, that a name does not exist, and how long a file is
(nfs(5): acdirmax, lookupcache). So what another host creates or renames shows up late. But a client that itself changes
a folder gets the folder's new attributes with the answer, sees that others have changed it too, and forgets what it
remembered of it. Files need no such care: opening one shows what was closed before. Code that polls for a file, lists a
folder, or relies on the absence of a name calls `look_anew` first.

On a coherent file system (Lustre, GPFS, a local disk) it costs two operations and changes nothing.
"""

from __future__ import annotations

import time
from contextlib import suppress
from pathlib import Path

from laststep.ranks.world import hostname

MARK = ".look-"  # how the name of the folder begins that `look_anew` makes and removes
# How often a process that polls refreshes its view: at most once in this time for each rank of the attempt, so that
# many ranks do not overload the file system, and once in the shortest.
PERIOD_S_PER_RANK = 0.001
SHORTEST_PERIOD_S = 0.1


def look_anew(folder: Path) -> None:
    """See what other hosts have changed in a folder: from now on its names are those of the server.

    Makes and removes a folder in it, `.look-HOST`. A killed process may leave it there; the next look removes it. Where
    that is refused, nothing happens. If the folder itself is not there, it may have appeared elsewhere: then the folder
    above is refreshed.
    """
    own = folder / f"{MARK}{hostname()}"
    try:
        with suppress(FileExistsError):  # another process of this host is here, or has died here
            own.mkdir()
    except FileNotFoundError:
        if folder.parent != folder:
            look_anew(folder.parent)
        return
    except OSError:
        return
    with suppress(OSError):
        own.rmdir()


class FreshView:
    """A view of folders that a process polls: refreshed often enough, and not too often for the file system."""

    def __init__(self, ranks: int, *folders: Path) -> None:
        """`ranks`: how many may poll at the same time."""
        self._folders = folders
        self._period_s = max(SHORTEST_PERIOD_S, PERIOD_S_PER_RANK * ranks)
        self._next = 0.0

    def refresh(self) -> None:
        """Call before each look."""
        if time.monotonic() >= self._next:
            for folder in self._folders:
                look_anew(folder)
            self._next = time.monotonic() + self._period_s
