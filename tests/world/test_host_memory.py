"""Memory that a step frees stays with the process, for the next step."""

from __future__ import annotations

import os
import platform
import subprocess
import sys

import pytest

from tests.support.project import PROJECT
from tests.support.waiting import DEADLINE_S

BLOCKS, MEGABYTES = 20, 40  # larger than what glibc keeps by itself
PAGES = BLOCKS * MEGABYTES * 256
FREED = f"""
import resource
from trainer.world.host_memory import keep_freed_memory

keep_freed_memory()
b"1" * ({MEGABYTES} << 20)
before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
for _ in range({BLOCKS}):
    b"1" * ({MEGABYTES} << 20)
print(resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before)
"""


def page_faults(**env: str) -> int:
    """How many pages the process has taken from the kernel for blocks after the first."""
    env = {**os.environ, "PYTHONPATH": str(PROJECT), **env}
    done = subprocess.run(
        [sys.executable, "-c", FREED], env=env, capture_output=True, text=True, timeout=DEADLINE_S, check=True
    )
    return int(done.stdout)


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="only glibc can be asked to keep memory")
def test_a_block_takes_the_memory_of_the_one_before() -> None:
    """Else each step of a training on CPUs would get the same memory anew, page by page."""
    assert page_faults() < PAGES / 100


@pytest.mark.parametrize("chosen", [{"MALLOC_TOP_PAD_": "0"}, {"GLIBC_TUNABLES": "glibc.malloc.top_pad=0"}])
@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="only glibc can be asked to keep memory")
def test_a_users_own_choice_stays(chosen: dict[str, str]) -> None:
    """Somebody who has set the C library up, such as for a machine with little memory, knows why."""
    assert page_faults(**chosen) > PAGES / 2
