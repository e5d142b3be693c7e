"""Telemetry: a wrong figure of hours, energy or use is worse than none, and a wrong warning wakes somebody up."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest

from laststep.cli.main import main
from laststep.config.config import Config
from laststep.ranks.beside import Signpost, read_signpost
from laststep.records.metrics import read_lines
from laststep.rundir import RunDir
from laststep.runs.run_status import State
from laststep.telemetry import readings
from laststep.telemetry.measure import Gpus, Host, read_host
from laststep.telemetry.sampler import Board, IdleWarning, Sampler
from tests.telemetry.nvml import Nvml

BEGAN = 1_795_000_000.0


def sampled(run: RunDir, nvml: Nvml, seconds: int, began: float = BEGAN, node: str = "n1", **host: Any) -> Sampler:
    """The lines of a node that was sampled every two seconds."""
    sampler = Sampler(run, Gpus(nvml, None), node)
    for second in range(0, seconds + 1, 2):
        counters = Host(cpu_s=2.0 * second, memory=4e9, memory_limit=64e9, network={"rx": 5e6 * second})
        sampler.sample(began + second, counters)
        nvml.energy_j = [energy + 2 * 350 for energy in nvml.energy_j]
    return sampler


@pytest.fixture
def run(tmp_path: Path) -> RunDir:
    found = RunDir(tmp_path / "runs" / "seen")
    found.path.mkdir(parents=True)
    return found


def test_a_line_has_what_the_node_did(run: RunDir) -> None:
    """What status, report and trackers show is read from these lines alone."""
    run.attempt_now.write_text(json.dumps({"attempt": 4}))
    run.metrics.write_text(json.dumps({"step": 70, "time": BEGAN}) + "\n")
    nvml = Nvml()
    nvml.throttled, nvml.nvlink_kib = [0, 0x20], 1
    sampled(run, nvml, 20)
    first, second = read_lines(run.telemetry / "n1.jsonl")
    assert first["time"] == BEGAN + 10 and second["time"] == BEGAN + 20
    assert (first["node"], first["step"], first["seconds"]) == ("n1", 70, 10)
    assert first["gpu_use"] == [90, 90] and first["gpu_power_w"] == [300, 400]
    assert first["gpu_memory_gb"] == [20, 20] and first["gpu_memory_total_gb"] == [80, 80]
    assert first["gpu_temperature_c"] == [60, 60] and first["gpu_pcie_mb_s"] == [3, 3]
    assert first["gpu_nvlink_mb_s"] == [0, 0]
    assert first["gpu_throttled"] == [[], ["heat"]]
    assert (first["cpu_cores"], first["memory_gb"], first["memory_limit_gb"]) == (2, 4, 64)
    assert first["network_rx_mb_s"] == 5
    # 2 GPUs of 350 W each for 20 s, 90 % of the time busy
    assert second["total"] == {"gpu_s": 40, "busy_s": 36, "energy_j": 14_000}


def test_totals_continue_over_attempts_but_not_over_gaps(run: RunDir) -> None:
    """GPU-hours and energy are of the whole run, whatever ended its attempts. What nobody has measured, such as the
    hours of a suspended job, is not made up; nor does a driver that was loaded anew take energy back."""
    sampled(run, Nvml(), 20)
    nvml = Nvml()
    sampler = sampled(run, nvml, 10, BEGAN + 5000)
    assert readings.use_of(run).gpu_s == 60
    sampler.sample(BEGAN + 9000, Host())  # it was suspended for an hour
    assert readings.use_of(run).gpu_s == 60
    nvml.energy_j = [0.0, 0.0]
    for second in range(2, 11, 2):
        sampler.sample(BEGAN + 9000 + second, Host())
    last = readings.use_of(run)
    assert last.gpu_s == 80 and 14_000 < last.energy_j < 14_000 + 2 * 7_000 + 1, "that of the power instead"


def test_gpus_that_do_not_say(run: RunDir) -> None:
    """A GPU that falls off the bus, a driver that does not count energy, a package from before a function."""
    nvml = Nvml()
    nvml.lost, nvml.lacks = {1}, {"energy", "nvlink", "pcie"}
    sampled(run, nvml, 10)
    (line,) = read_lines(run.telemetry / "n1.jsonl")
    assert line["gpu_use"] == [90, None] and "gpu_pcie_mb_s" not in line and "gpu_nvlink_mb_s" not in line
    assert line["total"]["energy_j"] == 3000, "300 W for 10 s"
    assert Gpus(None, None).read() == [] and Gpus(Nvml(), "1").read()[0].power_w == 400
    assert Gpus(Nvml(), "MIG-1,7").read() == []


def test_what_lost_steps_have_used(run: RunDir) -> None:
    """The part of the attempt that was lost, and nothing of the other attempts."""
    sampled(run, Nvml(), 100)
    sampled(run, Nvml(), 100, BEGAN + 200)
    record = {"attempt": 0, "job_id": "7", "restart": 0, "world_size": 2, "hosts": ["n1"], "start": BEGAN}
    record |= {"end": BEGAN + 100, "start_step": 0, "end_step": 50, "reason": "lost", "lost_steps": 25, "lost_s": 50.0}
    run.attempts.write_text(json.dumps(record) + "\n")
    lost = readings.lost_use_of(run)
    assert lost.gpu_s == pytest.approx(100) and lost.energy_j == pytest.approx(50 * 2 * 350)
    assert readings.use_of(run).gpu_s == 400


def test_a_long_file_is_searched(run: RunDir) -> None:
    """`status` of a run of weeks must not read all of its lines."""
    path = run.telemetry / "n1.jsonl"
    path.parent.mkdir()
    path.write_text("".join(json.dumps({"time": 10.0 * n, "fill": "x" * 500}) + "\n" for n in range(2000)))
    for at, expected in ((-1, None), (0, 0), (5, 0), (9995, 9990), (19_990, 19_990), (1e9, 19_990)):
        assert readings.line_at(path, at).get("time") == expected
    assert readings.line_at(run.telemetry / "none.jsonl", 0) == {}


def idling(run: RunDir, seconds: int, doing: str, node: str = "n1", use: float = 1.0) -> float:
    """A node whose GPUs idle; returns the time of its last line."""
    nvml = Nvml()
    nvml.use = [use, 0.0]
    page = Signpost()
    close = page.open(run.path)
    page.show(doing)
    sampled(run, nvml, seconds, node=node)
    close()
    return BEGAN + seconds


@pytest.mark.parametrize(
    ("doing", "cause"),
    [("waiting for data", "data.workers"), ("saving", "in a save"), ("validation", "in a validation"), ("", "not say")],
)
def test_idle(run: RunDir, doing: str, cause: str) -> None:
    """Sites cancel jobs whose GPUs idle: whoever reads the warning must know what to change."""
    now = idling(run, 320, doing)
    found = readings.idle(run, now)
    assert found is not None and found.node == "n1" and found.seconds == 320 and cause in found.cause
    assert readings.idle(run, now + 3600) is None, "its lines are old: the job has ended"


def test_idle_is_a_line_in_the_log(run: RunDir) -> None:
    """Few look at `status` at night, and the log is what they read next: a line, once for each node."""
    now, warning = idling(run, 320, "saving"), IdleWarning(run)
    said = warning.look(now)
    assert said is not None
    assert said.startswith("WARNING: the GPUs of n1 have been idle for 5m 20s: the loop is in a save")
    assert [warning.look(now + seconds) for seconds in (2, 30, 61)] == [None] * 3
    idling(run, 400, "saving", "n2")
    assert "of n2" in str(IdleWarning(run).look(BEGAN + 400))


def test_not_idle(run: RunDir) -> None:
    """A GPU that works, a short pause, and a job that was suspended."""
    now = idling(run, 320, "training", use=30.0)
    assert readings.idle(run, now) is None, "one of its GPUs works"
    assert readings.idle(run, idling(run, 200, "training", "n2")) is None, "not long enough"
    nvml = Nvml()
    nvml.use = [0.0, 0.0]
    sampler = sampled(run, nvml, 200, BEGAN, "n3")
    for second in range(0, 202, 2):
        sampler.sample(BEGAN + 3000 + second, Host())
    assert readings.idle(run, BEGAN + 3200) is None, "nothing is known of the time between"


def test_idle_for_hours(run: RunDir) -> None:
    """However long it has been so, the beginning is found."""
    now = idling(run, 7200, "waiting for data")
    found = readings.idle(run, now)
    assert found is not None and found.seconds >= 4 * readings.IDLE_S


def test_status_and_report(run: RunDir, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    """All that telemetry is for."""
    monkeypatch.chdir(run.path.parent.parent)
    monkeypatch.setenv("PATH", "/nonexistent")
    monkeypatch.setattr("time.time", lambda: BEGAN + 330)
    Config.load(None, ["launch.name=seen"]).save(run.config)
    record = {"attempt": 0, "job_id": "local-1", "restart": 0, "world_size": 2, "hosts": ["n1"], "start": BEGAN}
    record |= {"start_step": 0, "end_step": 0, "reason": None, "end": None, "lost_steps": 0}
    run.attempt_now.write_text(json.dumps(record))
    steps = [{"step": n, "time": BEGAN + n, "loss": 1 / n, "epoch": 1, "samples_per_s": 64.0} for n in range(1, 100)]
    run.metrics.write_text("".join(json.dumps(line) + "\n" for line in steps))
    idling(run, 320, "waiting for data")
    monkeypatch.setattr("laststep.runs.run_status._state", lambda *_: State("running"))
    assert main(["status"]) == 0
    head, row, *_ = capsys.readouterr().out.splitlines()
    assert row[head.index("GPUs") :].split()[0] in ("0%", "1%")
    assert main(["status", "seen"]) == 0
    shown = " ".join(capsys.readouterr().out.split())
    assert "GPUs 0% busy, 0% now; 0.18 GPU hours, 0.06 kWh; none of it lost" in shown
    assert "WARNING the GPUs of n1 have been idle for 5m 20s: the loop waits for data: more data.workers" in shown
    assert main(["status", "seen", "--json"]) == 0
    (fields,) = json.loads(capsys.readouterr().out)
    assert fields["gpu_hours"] == pytest.approx(640 / 3600, abs=1e-4) and fields["gpus_idle_s"] == 320
    assert fields["energy_kwh"] == pytest.approx(2 * 320 * 350 / 3.6e6, abs=1e-4) and fields["gpu_hours_lost"] == 0
    assert main(["report", "seen"]) == 0
    page = run.report.read_text()
    for title in ("GPU use (%)", "GPU power (W)", "CPU (cores)", "kWh"):
        assert title in page


def test_tensorboard(run: RunDir) -> None:
    """A run of its own beside the training's, whose curves stay as they are."""
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    board = Board(run, "n1")
    board.add({"time": BEGAN, "gpu_use": [10.0]})
    for step in (10, 20):
        board.add({"time": BEGAN + step, "step": step, "gpu_use": [90.0, None, 70.0], "node": "n1", "cpu_cores": 2})
    read_back = EventAccumulator(str(run.tensorboard / "telemetry" / "n1")).Reload()
    found = [(scalar.step, scalar.wall_time, scalar.value) for scalar in read_back.Scalars("telemetry/gpu_use")]
    assert found == [(10, BEGAN + 10, 80), (20, BEGAN + 20, 80)]
    assert sorted(read_back.Tags()["scalars"]) == ["telemetry/cpu_cores", "telemetry/gpu_use"]


def test_no_telemetry_is_no_error(run: RunDir) -> None:
    """Runs on CPUs, and all runs of older versions."""
    assert readings.facts(run) == {} and readings.cells(run) == {} and readings.figures(run) == {}
    assert set(readings.fields(run).values()) == {None}
    assert list(readings.programs(Config.load(None, ["device=cpu"]), run)) == []
    (program,) = readings.programs(Config.load(None, ["device=cpu", "telemetry.record=always"]), run)
    assert program.where == "node"
    assert list(readings.programs(Config.load(None, ["launch.gpus_per_node=8", "telemetry.record=never"]), run)) == []
    assert len(list(readings.programs(Config.load(None, ["launch.gpus_per_node=8"]), run))) == 1


def test_the_signpost(tmp_path: Path) -> None:
    """Another process sees what the loop does; nobody else's file is followed, and nothing stays behind."""
    page = Signpost()
    page.show("starting")
    assert read_signpost(tmp_path) == ""
    close = page.open(tmp_path)
    assert read_signpost(tmp_path) == "starting"
    with page.doing("saving"):
        assert read_signpost(tmp_path) == "saving"
    assert read_signpost(tmp_path) == "starting"
    close()
    close()
    page.show("over")
    assert read_signpost(tmp_path) == ""


def write(root: Path, **files: str) -> None:
    for name, text in files.items():
        path = root / name.replace("__", "/").replace("DOT", ".")
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)


def test_cgroups(tmp_path: Path) -> None:
    """The memory and the CPU time of the whole job, not of the step in which the program runs, nor of the machine."""
    proc, sys = tmp_path / "proc", tmp_path / "sys"
    job = "system.slice/slurmstepd.scope/job_71"
    write(proc, self__cgroup=f"0::/{job}/step_0/user/task_0\n", meminfo="MemTotal: 100000000 kB\nMemAvailable: 1 kB\n")
    write(proc, net__dev="a\nb\n  lo: 9 0 0 0 0 0 0 0 9 0\n eth0: 1000 0 0 0 0 0 0 0 2000 0\n")
    write(proc, diskstats="8 0 sda 1 0 10 0 1 0 20 0\n8 1 sda1 1 0 10 0 1 0 20 0\n7 0 loop0 1 0 99 0 1 0 99 0\n")
    write(sys / "class/infiniband/mlx5_0/ports/1/counters", port_rcv_data="25\n", port_xmit_data="50\n")
    write(sys / "fs/cgroup" / job, **{"cpuDOTstat": "usage_usec 5000000\n", "memoryDOTcurrent": "3000\n"})
    write(sys / "fs/cgroup" / job, **{"memoryDOTmax": "max\n", "memoryDOTstat": "anon 1\ninactive_file 1000\n"})
    host = read_host(proc, sys)
    assert (host.cpu_s, host.memory, host.memory_limit) == (5.0, 2000.0, 1024 * 100_000_000)
    assert host.network == {"rx": 1100, "tx": 2200} and host.disk == {"read": 5120, "write": 10240}
    write(proc, self__cgroup="4:memory:/slurm/uid_0/job_71/step_0\n2:cpuacct,cpu:/slurm/uid_0/job_71/step_0\n")
    first = sys / "fs/cgroup/memory/slurm/uid_0/job_71"
    write(first, **{"memoryDOTusage_in_bytes": "9000", "memoryDOTlimit_in_bytes": "10000"})
    write(first, **{"memoryDOTstat": "total_inactive_file 4000\n"})
    write(sys / "fs/cgroup/cpuacct/slurm/uid_0/job_71", **{"cpuacctDOTusage": "7000000000"})
    host = read_host(proc, sys)
    assert (host.cpu_s, host.memory, host.memory_limit) == (7.0, 5000.0, 10000.0)
    assert read_host(tmp_path / "none", tmp_path / "none") == Host()


def test_this_machine() -> None:
    """Whatever this machine has, it is read without an error."""
    host = read_host()
    assert host.cpu_s is None or host.cpu_s > 0
    assert os.path.isdir("/proc") is False or host.memory is not None
