"""`python -m trainer` in a clone does what `python -m laststep` does, for scripts written before version 0.2."""

from __future__ import annotations

import runpy

if __name__ == "__main__":
    runpy.run_module("laststep", run_name="__main__", alter_sys=True)
