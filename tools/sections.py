"""docs/reports.md has a section for each long proof; the command that carries out a proof replaces its own section."""

from __future__ import annotations

import re
from pathlib import Path

REPORTS = Path(__file__).resolve().parents[1] / "docs" / "reports.md"


def put(section: str, page: Path = REPORTS) -> None:
    """Replace the section of this page that has the same heading, "## ..."; a new one goes to the end."""
    section = section.strip() + "\n"
    heading = section.partition("\n")[0]
    if not heading.startswith("## "):
        raise ValueError(f"a section begins with its heading, not with: {heading}")
    parts = re.split(r"^(?=## )", page.read_text() if page.exists() else "", flags=re.MULTILINE)
    begins = [number for number, part in enumerate(parts) if part.partition("\n")[0] == heading]
    at = begins[0] if begins else len(parts)
    parts[at : at + 1] = [section]
    page.write_text("\n".join(part.strip() + "\n" for part in parts if part.strip()))
