"""A uv project that needs no network: its packages are wheels in its own folder."""

from __future__ import annotations

import base64
import hashlib
import os
import subprocess
import zipfile
from pathlib import Path

from laststep.code.uv import find_uv
from tests.support.needs import require

PROJECT_FILE = """\
[project]
name = "shades"
version = "1"
requires-python = ">=3.10"
dependencies = ["laststep", "shade"]

[tool.uv.sources]
laststep = {{ path = "wheels/laststep-9-py3-none-any.whl" }}
shade = {{ path = "wheels/{shade}" }}
"""
NOT_IMPORTED = "raise SystemExit('the ranks import Laststep from the copy of the code')\n"


def wheel(folder: Path, name: str, version: str, module: str) -> Path:
    """Write a wheel with one module."""
    path, info = folder / f"{name}-{version}-py3-none-any.whl", f"{name}-{version}.dist-info"
    files = {
        f"{name}.py": module,
        f"{info}/METADATA": f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n",
        f"{info}/WHEEL": "Wheel-Version: 1.0\nGenerator: tests\nRoot-Is-Purelib: true\nTag: py3-none-any\n",
    }

    def line(file: str, text: str) -> str:
        digest = base64.urlsafe_b64encode(hashlib.sha256(text.encode()).digest()).rstrip(b"=").decode()
        return f"{file},sha256={digest},{len(text.encode())}\n"

    record = "".join(line(*item) for item in files.items()) + f"{info}/RECORD,,\n"
    folder.mkdir(parents=True, exist_ok=True)
    with zipfile.ZipFile(path, "w") as archive:
        for file, text in {**files, f"{info}/RECORD": record}.items():
            archive.writestr(zipfile.ZipInfo(file), text)  # the same bytes each time
    return path


def locks(folder: Path, shade: str) -> None:
    """Make the folder a uv project, or change its lock file, so that `shade.NAME` is this one."""
    require(None if find_uv() else "no uv on this machine: pip install -e .[dev]")
    wheel(folder / "wheels", "laststep", "9", NOT_IMPORTED)
    named = wheel(folder / "wheels", "shade", {"red": "1", "blue": "2"}[shade], f"NAME = {shade!r}\n")
    (folder / "pyproject.toml").write_text(PROJECT_FILE.format(shade=named.name))
    subprocess.run([str(find_uv()), "lock", "--offline", "-q"], cwd=folder, check=True, env=os.environ)
