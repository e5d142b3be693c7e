"""`python -m trainer` in a clone: `python -m laststep`, as scripts of before version 0.2 call it."""

from __future__ import annotations

import runpy

if __name__ == "__main__":
    runpy.run_module("laststep", run_name="__main__", alter_sys=True)
