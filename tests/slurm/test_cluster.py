"""The throwaway Slurm itself."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

from tests.slurm.cluster import Cluster, missing
from tests.support.needs import require
from tests.support.project import PROJECT, read_until, wait_until

START = """
import sys, time
from pathlib import Path
from tests.slurm.cluster import Cluster
Cluster.start(Path(sys.argv[1]), accounting=False, nodes=("n1",))
print("up", flush=True)
time.sleep(1000)
"""


def test_it_ends_with_its_owner(tmp_path: Path) -> None:
    """A test session that is killed cannot stop its clusters: they would run until the machine is restarted."""
    require(missing())
    command = [sys.executable, "-c", START, str(tmp_path)]
    with subprocess.Popen(command, cwd=PROJECT, stdout=subprocess.PIPE, text=True) as owner:
        read_until(owner, "up")
        cluster = Cluster(tmp_path)
        assert cluster.answers()
        owner.kill()
    wait_until(lambda: not list(cluster._processes()), "the daemons outlived their owner")
