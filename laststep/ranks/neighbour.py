"""Whether the host of another node is still there: a node that loses power closes no connection, and TCP would take
many minutes to notice.

The first rank of each node asks the host of the next one, from time to time, for a connection to a port that nobody
uses. A host that runs refuses it at once. One that has answered before counts as dead when it has not answered for
`DEAD_AFTER_S`, and this rank has not got on meanwhile either: a network that only this question needs may be away.
Where hosts cannot be asked (a name that does not resolve, a firewall), nothing is known, and `launch.hang_timeout_s`
decides.
"""

from __future__ import annotations

import socket
import threading
from collections.abc import Callable

from laststep.ranks.watchdog import DEAD_AFTER_S
from laststep.ranks.world import World

PORT = 9  # "discard"
EVERY_S = 5.0
ANSWER_S = 3.0


class Neighbour:
    """Asks a host, in a thread, until it is dead. `ticks` counts this rank's progress."""

    def __init__(self, host: str, ticks: Callable[[], int], answers: Callable[[str], bool] | None = None) -> None:
        self.host = host
        self._ticks = ticks
        self._answers = answers or host_answers
        self._silent_rounds = 0  # not by a clock, so a process that was suspended finds nobody dead
        self._closed = threading.Event()
        threading.Thread(target=self._ask, name="neighbour", daemon=True).start()

    @classmethod
    def of(cls, world: World, ticks: Callable[[], int]) -> Neighbour | None:
        """The neighbour that this rank has to ask, if any. Call once the ranks know each other's hosts."""
        hosts = list(dict.fromkeys(world.hosts))
        if len(hosts) < 2 or world.hosts.index(world.hosts[world.rank]) != world.rank:
            return None
        return cls(hosts[(hosts.index(world.hosts[world.rank]) + 1) % len(hosts)], ticks)

    @property
    def is_dead(self) -> bool:
        """Whether the host has lost power, or its network."""
        return self._silent_rounds * EVERY_S >= DEAD_AFTER_S

    def close(self) -> None:
        """Ask no more."""
        self._closed.set()

    def _ask(self) -> None:
        answered, done = False, -1
        while not self.is_dead and not self._closed.wait(EVERY_S):
            if self._answers(self.host):
                answered, self._silent_rounds = True, 0
            elif answered:
                before, done = done, self._ticks()
                self._silent_rounds = self._silent_rounds + 1 if done == before else 0


def host_answers(host: str) -> bool:
    """Whether the host accepts or refuses a connection."""
    try:
        socket.create_connection((host, PORT), ANSWER_S).close()
    except (ConnectionRefusedError, ConnectionResetError):
        return True
    except OSError:
        return False
    return True
