"""launch.container: which program starts an image, what it sees, and what is refused before it costs anything."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

from laststep.config.config import Config
from laststep.config.errors import ConfigError
from laststep.config.machine import Machine, Way
from laststep.rundir import RunDir
from laststep.submission import container, sbatch


@pytest.fixture
def programs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The folder of all programs that this machine has: none yet."""
    folder = tmp_path / "bin"
    folder.mkdir()
    monkeypatch.setenv("PATH", f"{folder}")
    return folder


def has(programs: Path, name: str, text: str) -> None:
    (programs / name).write_text(f"#!/bin/bash\n{text}\n")
    (programs / name).chmod(0o755)


def configured(tmp_path: Path, image: object, *words: str) -> Config:
    return Config.load(
        None, [f"launch.root={tmp_path / 'runs'}", "launch.name=one", f"launch.container={image}", *words]
    )


@pytest.mark.parametrize(
    ("image", "way", "says"),
    [
        ("{folder}/missing.sif", Way.SLURM, r"there is no .*/missing\.sif"),
        ("docker://ubuntu", Way.SLURM, r"pull it once, `apptainer pull image\.sif docker://ubuntu`"),
        ("nvcr.io#nvidia/pytorch:1", Way.SLURM, r"pull it once, .*enroot import"),
        ("{folder}", Way.SLURM, "no Apptainer and no Singularity on this machine"),
        ("{folder}/a.sqsh", Way.SLURM, "no Pyxis in this Slurm"),
        ("{folder}", Way.LOCAL, "--local and --debug train without an image; add launch.container=null"),
    ],
)
def test_refused(image: str, way: Way, says: str, tmp_path: Path, programs: Path) -> None:
    """In one line that says what to do, before anything is submitted."""
    (tmp_path / "a.sqsh").touch()
    with pytest.raises(ConfigError, match=says) as caught:
        container.check(configured(tmp_path, image.format(folder=tmp_path)), Machine(way))
    assert "\n" not in str(caught.value)


def test_singularity_and_pyxis(tmp_path: Path, programs: Path) -> None:
    """Whichever is there: Singularity in place of Apptainer, and srun's own options for an image of Enroot's."""
    has(programs, "singularity", "exit")
    has(programs, "srun", "echo '      --container-image=[USER@][REGISTRY#]IMAGE[:TAG]|PATH'")
    (tmp_path / "a.sqsh").touch()
    (tmp_path / "code").mkdir()
    folder, run = configured(tmp_path, tmp_path), RunDir(tmp_path / "runs" / "one")
    container.check(folder, Machine(Way.SLURM))
    assert "SINGULARITYENV_" in container.python(folder, run) and container.srun_args(folder, run) == []
    squash = configured(tmp_path, tmp_path / "a.sqsh", "launch.python=python3.12")
    container.check(squash, Machine(Way.SLURM))
    script = sbatch.run_executor(squash, run).script()
    assert f"--container-image={tmp_path}/a.sqsh" in script and f"{run.path.parent}:{run.path.parent}" in script
    assert (
        "inside=--container-env=${LASTSTEP_INSIDE// /,}" in script and 'exec srun $size $share $inside "$@"' in script
    )
    assert " python3.12 -u -m laststep.job.supervisor" in script


def test_every_variable_reaches_the_inside(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whoever has set it: the configuration, the setup, or srun; but not what only makes sense outside. The image may
    set the same, which the runtime would prefer."""
    monkeypatch.setenv("SAME", "as before")
    config = configured(tmp_path, tmp_path, "launch.env.MINE=a 'b' c", "launch.env.SAME=as before")
    lines = [
        "set -eu",
        *container.before_setup(config),
        'export MINE="a \'b\' c" SAME="as before"',
        "export FROM_SETUP='two\nlines' PATH=/modules:$PATH",
        *container.after_setup(config, config.launch.env),
        "export SLURM_PROCID=3 UNRELATED=1",
        container.python(config, RunDir(tmp_path / "runs" / "one")) + " -m module 'a word'",
    ]
    programs = tmp_path / "bin"
    programs.mkdir()
    has(programs, "apptainer", 'echo "runs ${*: -4}"; env -0 | grep -z ^APPTAINERENV_ | tr "\\0\\n" "\\n|"')
    monkeypatch.setenv("PATH", f"{programs}:/usr/bin:/bin")
    done = subprocess.run(["bash", "-c", "\n".join(lines)], capture_output=True, text=True, check=True)
    assert "runs python3 -m module a word" in done.stdout
    found = {line.partition("=")[0].removeprefix("APPTAINERENV_") for line in done.stdout.splitlines()[1:]}
    assert {"MINE", "SAME", "FROM_SETUP", "SLURM_PROCID", "LASTSTEP_INSIDE"} <= found
    assert not {"PATH", "UNRELATED", "HOME"} & found
    assert "APPTAINERENV_MINE=a 'b' c" in done.stdout and "APPTAINERENV_FROM_SETUP=two|lines" in done.stdout


def test_what_the_image_sees(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The runs, the folder of the command, the data and the weights, each once; also behind a link."""
    for name in ("work", "big/data", "weights"):
        (tmp_path / name).mkdir(parents=True)
    (tmp_path / "weights" / "a.pt").touch()
    (tmp_path / "link").symlink_to("big")
    monkeypatch.chdir(tmp_path / "work")
    words = (f"data.root={tmp_path}/link/data", f"model.weights={tmp_path}/weights/a.pt")
    seen = container.mounts(configured(tmp_path, tmp_path, *words), RunDir(tmp_path / "runs" / "one"))
    wanted = {"runs", "work", "link/data", "big/data", "weights"}
    assert {str(path.relative_to(tmp_path)) for path in seen} == wanted and len(seen) == len(wanted)
