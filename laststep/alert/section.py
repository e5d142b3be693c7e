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
        "the events to send, of failed, finished, requeued, hung, idle (the GPUs of a node) and diverged (the loss)",
    )
    to: list[str] = setting(
        [],
        "where to: URLs of apprise, such as Slack's webhook or mailtos://USER:PASSWORD@HOST, and commands, which read "
        "the text from stdin. Kept in secrets.json of the run",
        secret=True,
    )
