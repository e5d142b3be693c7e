"""The packages of a uv project, and an image: on a node that reaches nothing but its controller, through a requeue."""

from __future__ import annotations

import os
import shutil
import sys
import sysconfig
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.code.test_uv import locks
from tests.slurm.cluster import Cluster
from tests.slurm.cluster import missing as missing_slurm
from tests.slurm.hosts import Hosts, missing
from tests.slurm.user import User
from tests.support.needs import require
from tests.support.project import PROJECT

SCRIPT = """\
import os, socket, sys, time
import torch
import laststep

run = laststep.run()
try:
    socket.create_connection(("192.0.2.1", 80), timeout=5)
except OSError as error:
    print("no network:", error.strerror, flush=True)
print("sees", os.environ.get("GREETING"), os.environ.get("FROM_SETUP"), os.environ["OMP_NUM_THREADS"], flush=True)
print("project visible", os.path.exists({project!r}), flush=True)
if os.path.exists("/from_the_image"):
    print("in the image", flush=True)
else:
    import shade
    print("shade", shade.NAME, sys.prefix, flush=True)
model = torch.nn.Linear(4, 1)
optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
run.restore(model=model, optimizer=optimizer)
for step in run.steps(count=80):
    x = torch.randn(8, 4)
    loss = (model(x) - x.sum(1, keepdim=True)).square().mean()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    run.log(loss=loss.detach())
    time.sleep(0.05)
"""


@pytest.fixture(scope="module")
def isolated(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    """A Slurm whose node reaches its controller, and nothing else."""
    require(missing() or missing_slurm())
    folder = tmp_path_factory.mktemp("isolated")
    with Hosts(1) as hosts:
        cluster = Cluster.start(folder / "slurm", owner=os.getpid(), accounting=False, hosts=hosts)
        yield cluster
        cluster.stop()


@pytest.fixture
def user(isolated: Cluster, tmp_path: Path) -> User:
    """A user in their own project, with a script."""
    folder = tmp_path / "project"
    folder.mkdir()
    (folder / "train.py").write_text(SCRIPT.format(project=str(PROJECT / "laststep")))
    user = User(isolated, folder / "runs", sys.executable, folder=folder)
    Path(user.site).write_text("launch: {cpus_per_task: 1}\n")
    return user


def submits(user: User, name: str, *words: str) -> str:
    """Submit a held run of the script; returns what the command says."""
    more = ("device=cpu", "launch.slurm.hold=true", *words)
    return user.types("--name", name, *more, "train.py")


def preempts(user: User, name: str) -> None:
    """Release the run's job, and requeue it once it trains."""
    user.cluster.run("scontrol", "release", user.job_of(name))
    user.waits_for(name, "step 20/80")
    user.cluster.run("scontrol", "requeue", user.job_of(name))


def ends_after_one_requeue(user: User, name: str) -> None:
    """Wait until the run has finished, and check that its job was requeued once and no step was lost."""
    first, second = user.waits_for_end(name, "finished")
    assert (first["reason"], first["lost_steps"], second["job_id"]) == ("preempted", 0, first["job_id"])
    assert second["start_step"] == first["end_step"] >= 20


def test_a_uv_project(user: User) -> None:
    """The job trains with the packages of the lock file of its submission, next week too. The second run with the same
    lock file installs nothing."""
    locks(user.folder, "red")
    # Where Laststep's own packages would be installed from.
    user.env["PYTHONPATH"] = sysconfig.get_path("purelib")
    said = submits(user, "uv", "launch.uv=true")
    assert "installing the packages of" in said
    user.env["UV"] = "/bin/false"
    assert "installing" not in submits(user, "uv-again", "launch.uv=true")
    user.types("cancel", "uv-again")
    del user.env["UV"]
    locks(user.folder, "blue")
    preempts(user, "uv")
    ends_after_one_requeue(user, "uv")
    logs = user.types("logs", "uv")
    environment = user.run("uv").environment.resolve()
    assert logs.count(f"shade red {environment}") == 2 and "no network:" in logs and "shade blue" not in logs


def test_an_image(user: User) -> None:
    """All that the run needs is visible in the image, at its path outside, and every variable that was set, although
    the image sets some of them too and the site passes none on. A requeue continues in the image."""
    image = user.folder.parent / "image"
    image.mkdir()
    for name in ("bin", "lib", "lib64", "sbin"):
        (image / name).symlink_to(f"usr/{name}")
    (image / "from_the_image").touch()
    (image / "etc").mkdir()
    shutil.copy("/etc/passwd", image / "etc/passwd")
    contents = dict.fromkeys(("/usr", sys.base_prefix, sys.prefix))
    (image / ".contents").write_text("".join(f"{folder}\n" for folder in contents))
    (image / ".singularity.d").mkdir()
    (image / ".singularity.d/env").write_text("GREETING=of the image\nOMP_NUM_THREADS=7\n")
    programs = user.folder.parent / "bin"
    programs.mkdir()
    shutil.copy(Path(__file__).parent / "apptainer", programs)
    user.env |= {"PATH": f"{programs}:{user.env['PATH']}", "APPTAINER_CLEANENV": "1"}
    words = ("launch.setup=['export FROM_SETUP=\"a b\"']", "launch.env.GREETING=hello", f"launch.container={image}")
    submits(user, "image", *words, f"launch.python={sys.executable}")
    preempts(user, "image")
    ends_after_one_requeue(user, "image")
    logs = user.types("logs", "image")
    assert logs.count("sees hello a b 1") == 2 and logs.count("in the image") == 2, logs
    assert "no network:" in logs and "project visible True" not in logs
