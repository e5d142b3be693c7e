"""The `laststep` command.

It is not part of the package `trainer` but stands beside it: so it finds that package, whatever else has its name.
"""

from __future__ import annotations

import sys
from pathlib import Path

HERE = Path(__file__).absolute().parent


def main() -> int:
    """Run the command; returns the exit status."""
    package = HERE / "trainer" / "__init__.py"
    if not (package.is_file() and package.read_text().startswith('"""Laststep')):
        print(
            f"error: {package.parent} is not Laststep's: another package called `trainer` was installed over it; "
            "install Laststep in an environment without that one",
            file=sys.stderr,
        )
        return 2
    try:
        sys.path.insert(0, str(HERE))  # ahead of PYTHONPATH, where there may be another module called `trainer`
        from trainer.commands.main import main as run

        sys.path.pop(0)
        return run(sys.argv[1:])
    except KeyboardInterrupt:  # while Python still imports what would catch it
        return 130


if __name__ == "__main__":
    sys.exit(main())
