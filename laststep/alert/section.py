"""The section `alert` of the configuration."""

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
