"""Where a run's time went, as a stacked bar with a legend."""

from __future__ import annotations

from laststep.observe.progress import duration
from laststep.records.time_split import TimeSplit

# The classes of page.css, which the timeline uses too.
CLASS = {"training": "running", "queue": "queued", "restarts": "restarting", "lost steps": "lost", "saves": "saving"}
HEIGHT_PX = 14


def time_bar(split: TimeSplit) -> str:
    """The bar as HTML; empty for a run that has taken no time."""
    parts, items, x = [], [], 0.0
    for name, share in split.shares.items():
        if not share:
            continue
        taken = f"{name} {share:.1%}, {duration(share * split.total)}"
        parts.append(
            f'<rect class="{CLASS[name]}" x="{100 * x:.3f}%" width="{100 * share:.3f}%" height="{HEIGHT_PX}">'
            f"<title>{taken}</title></rect>"
        )
        items.append(f'<li><svg><rect class="{CLASS[name]}" width="100%" height="100%"/></svg>{taken}</li>')
        x += share
    if not parts:
        return ""
    return (
        f'<h3>Where the time went</h3>\n<div class="lane"><svg role="img" aria-label="where the time went" '
        f'style="height:{HEIGHT_PX}px">{"".join(parts)}</svg></div>\n<ul class="legend">{"".join(items)}</ul>\n'
    )
