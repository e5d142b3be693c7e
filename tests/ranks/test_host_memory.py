"""Memory that a step frees stays with the process, for the next step."""

from __future__ import annotations

import os
import platform
import subprocess
import sys

import pytest

from tests.support.project import DEADLINE_S, PROJECT

ROUNDS, BLOCKS, MEGABYTES = 10, 8, 20  # more than what glibc keeps by itself
PAGES = ROUNDS * BLOCKS * MEGABYTES * 256
FREED = f"""
import resource
from laststep.ranks.device import keep_freed_memory

keep_freed_memory()
for number in range(1 + {ROUNDS}):
    if number == 1:
        before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    blocks = [b"1" * ({MEGABYTES} << 20) for _ in range({BLOCKS})]
    del blocks
print(resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before)
"""


def page_faults(**env: str) -> int:
    """How many pages the process has taken from the kernel after the first round."""
    env = {**os.environ, "PYTHONPATH": str(PROJECT), **env}
    done = subprocess.run(
        [sys.executable, "-c", FREED], env=env, capture_output=True, text=True, timeout=DEADLINE_S, check=True
    )
    return int(done.stdout)


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="only glibc can be asked to keep memory")
def test_blocks_take_the_memory_of_those_before() -> None:
    """Else each step of a training on CPUs would get the same memory anew, page by page."""
    assert page_faults() < PAGES / 100


@pytest.mark.parametrize("chosen", [{"MALLOC_TOP_PAD_": "0"}, {"GLIBC_TUNABLES": "glibc.malloc.top_pad=0"}])
@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="only glibc can be asked to keep memory")
def test_a_users_own_choice_stays(chosen: dict[str, str]) -> None:
    """Somebody who has set the C library up, such as for a machine with little memory, knows why."""
    assert page_faults(**chosen) > PAGES / 2
