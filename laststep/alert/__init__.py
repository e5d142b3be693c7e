"""Alerts: a message for each event of a run, sent once, by the first process that sees it in the run folder.

What has happened is read from the run folder (events.py), so it does not matter who is left to read it: a program
beside the training, the batch shell, the next attempt, or a watching command on a login node. Who sends claims the
message by a new file (post.py).

Not here: what a run prints (laststep/observe), and its state (laststep/runs/run_status.py).
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
        "the events to send: failed (the run ended, and does not continue by itself), finished, requeued, hung, idle "
        "(the GPUs of a node for 5 minutes), diverged (the loss left its range for 20 steps)",
    )
    to: list[str] = setting(
        [],
        "where to: URLs of apprise, such as the webhook of Slack or Discord, mailtos://USER:PASSWORD@HOST or "
        "ntfy://TOPIC, and commands, which read the text from stdin. A secret: kept in secrets.json of the run",
        secret=True,
    )
