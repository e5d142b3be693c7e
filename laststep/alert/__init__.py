"""Alerts: a message for each event of a run, sent once, by the first process that sees it in the run folder.

What has happened is read from the run folder (events.py), so it does not matter who is left to read it: a program
beside the training, the batch shell, the next attempt, or a watching command on a login node. Who sends claims the
message by a new file (post.py).

Not here: what a run prints (laststep/records/progress.py), and its state (laststep/runs/run_status.py).
"""

from __future__ import annotations

from dataclasses import dataclass

from laststep.config.setting import setting

KINDS = ("failed", "finished", "requeued", "hung", "idle", "diverged")


@dataclass
class Alert:
    """Messages about what happens to the run."""

    when: list[str] = setting(
        ["failed", "finished", "hung", "idle", "diverged"],
        "the events to send, of failed, finished, requeued, hung, idle (the GPUs of a node) and diverged (the loss)",
    )
    to: list[str] = setting(
        [],
        "where to: URLs of apprise, such as Slack's webhook or mailtos://USER:PASSWORD@HOST, and commands, which read "
        "the text from stdin. Kept in secrets.json of the run",
        secret=True,
    )
