#!/usr/bin/env python3
"""Laststep: PyTorch training on Slurm, launched from Python, that always resumes at its last step."""

import sys

if sys.version_info < (3, 10):  # noqa: UP036 - a cluster's own python3 may be older, and cannot read what follows
    print("error: Laststep needs Python 3.10 or newer; this one is " + sys.version.split()[0], file=sys.stderr)
    sys.exit(2)

if __name__ == "__main__":
    try:
        from laststep import main

        sys.exit(main())
    except KeyboardInterrupt:  # while Python still imports what would catch it
        sys.exit(130)
