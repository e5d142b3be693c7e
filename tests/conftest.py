"""What all tests share."""

from __future__ import annotations

import os

# Two cores and many ranks: more threads than cores would only wait for each other.
os.environ["OMP_NUM_THREADS"] = "1"
