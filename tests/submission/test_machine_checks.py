"""The checks before a start: they ask this machine, in milliseconds, what a rank would find out after minutes."""

from __future__ import annotations

import importlib
import os
import re
from collections.abc import Iterator
from pathlib import Path
from unittest import mock

import pytest
import torch

from laststep.config.config import Config
from laststep.config.errors import ConfigError
from laststep.config.machine import Machine, Way
from laststep.data.catalog import DATASETS
from laststep.ranks import device as device_module
from laststep.ranks import nccl
from laststep.ranks.device import changed_numerics, describe_numerics, set_up_device
from laststep.ranks.world import World
from laststep.runs import run_folders
from laststep.submission import machine_checks
from laststep.submission.submission import NAME_CHECKS
from tests.support.records import a_world
from tests.support.states import torch_setting

WORLD = a_world()


@pytest.fixture(autouse=True)
def torchs_defaults() -> Iterator[None]:
    """What `set_up_device` has set for a GPU does not outlast the test."""
    fills = torch.utils.deterministic.fill_uninitialized_memory  # type: ignore[attr-defined]
    with mock.patch.dict(os.environ):
        yield
    torch.backends.cuda.matmul.allow_tf32, torch.backends.cudnn.allow_tf32 = False, True
    torch.backends.cudnn.benchmark = False
    torch.set_deterministic_debug_mode("default")
    torch.utils.deterministic.fill_uninitialized_memory = fills  # type: ignore[attr-defined]


def config(*words: str) -> Config:
    return Config.load(None, words)


def check_names(given: Config) -> None:
    for check in NAME_CHECKS:
        check(given, Machine(Way.SLURM))


@pytest.mark.parametrize(
    ("visible", "count"),
    [("", 0), ("0", 1), ("0,1,3", 3), (" 0 , 1 ", 2), ("-1", 0), ("GPU-8932f937,MIG-5c2e", 2), (",", 0)],
)
def test_gpus_that_the_environment_grants(visible: str, count: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """CUDA_VISIBLE_DEVICES says what CUDA will see: more ranks than that would share a GPU or die."""
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    assert machine_checks.count_gpus() == count


def test_gpus_without_a_driver(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without CUDA_VISIBLE_DEVICES the driver is asked; without a driver there are no GPUs."""
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    monkeypatch.setattr(Path, "is_dir", lambda self: False)
    assert machine_checks.count_gpus() == 0


def test_local(monkeypatch: pytest.MonkeyPatch) -> None:
    """A local run takes the GPUs that are there and no more."""
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0,1")
    machine_checks.check_local(config("launch.gpus_per_node=2", "device=cuda"))
    machine_checks.check_local(config())
    with pytest.raises(ConfigError, match="this machine has 2 GPUs; use --gpus-per-node 2"):
        machine_checks.check_local(config("launch.gpus_per_node=3", "train.batch_size=63"))
    with pytest.raises(ConfigError, match=r"launch\.slurm\.gres=gpu:4: .* 2 GPUs; launch\.slurm\.gres=null"):
        machine_checks.check_local(config("launch.slurm.gres=gpu:4"))
    with pytest.raises(ConfigError, match=r"launch\.spare_nodes=1: --local has no other nodes; add"):
        machine_checks.check_local(config("launch.spare_nodes=1"))


@pytest.mark.parametrize(
    "words", [["launch.gpus_per_node=1"], ["launch.slurm.gres=gpu:1"], ["launch.slurm.gpus=2"], ["device=auto"]]
)
def test_a_job_that_gets_a_gpu(words: list[str]) -> None:
    """However the job asks for GPUs, the submission is accepted."""
    machine_checks.check_submission(config("device=cuda", *words))


def test_data_sets() -> None:
    """Each data set of the catalogue is accepted, with the options that it understands."""
    for name in DATASETS:
        if name != "imagefolder":
            check_names(config(f"data.name={name}", "data.args.augment=true", "data.args.image_size=32"))
    check_names(config("data.name=fake", "data.args.classes=3", "data.args.samples=5"))


def test_image_folder(tmp_path: Path) -> None:
    """A folder per class in train/ and val/ is enough to start."""
    for part in ("train", "val"):
        (tmp_path / part / "cat").mkdir(parents=True)
    check_names(config("data.name=imagefolder", f"data.root={tmp_path}"))


@pytest.mark.parametrize(
    "source",
    [
        "class Mine(Base): ...",
        "class Mine(metaclass=Meta): ...",
        "Mine = make()",
        "from elsewhere import Mine",
        "import elsewhere as Mine",
        "Mine = object",
        "from elsewhere import *",
        "def Mine(run): ...",
        "def Mine(run, epochs=3): ...",
        "@decorated\ndef Mine(): ...",
    ],
)
def test_task_is_found_however_it_is_named(source: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The check reads the module instead of importing it: it must not refuse what an import would find."""
    (tmp_path / "elsewhere_task.py").write_text(source)
    monkeypatch.syspath_prepend(str(tmp_path))
    check_names(config("task=elsewhere_task.Mine"))


@pytest.mark.parametrize(
    ("source", "wrong"),
    [
        ("def Mine(): ...", r"must take the run, and perhaps args: def Mine\(run\)"),
        ("def Mine(run, epochs): ...", "must take the run"),
        ("def Mine(run, *, epochs): ...", "must take the run"),
        ("class Mine: ...", r"is not a subclass of laststep\.Task: class Mine\(Task\)"),
        ("class Base(Task): ...\nMine = Base(config)", r"is an instance; name its class: task=wrong_task\.Base"),
        ("Mine = 3", "is neither a subclass of laststep.Task nor a function"),
    ],
)
def test_what_cannot_be_trained(source: str, wrong: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without this check it would fail on the node, after a day in the queue."""
    (tmp_path / "wrong_task.py").write_text(source)
    monkeypatch.syspath_prepend(str(tmp_path))
    with pytest.raises(ConfigError, match=wrong):
        check_names(config("task=wrong_task.Mine"))


def test_writable(tmp_path: Path) -> None:
    """A missing folder is created later; the check must not create it."""
    run_folders.check_writable(tmp_path)
    run_folders.check_writable(tmp_path / "a" / "b")
    assert list(tmp_path.iterdir()) == []
    (tmp_path / "a").write_text("")
    with pytest.raises(ConfigError, match="is not a folder"):
        run_folders.check_writable(tmp_path / "a" / "b")


def test_slurm(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Both commands are needed: the one that submits and the one that starts the ranks."""
    monkeypatch.setenv("PATH", str(tmp_path))
    for name in ("sbatch", "srun"):
        with pytest.raises(ConfigError, match="no Slurm on this machine"):
            machine_checks.check_slurm()
        (tmp_path / name).write_text("#!/bin/sh\n")
        (tmp_path / name).chmod(0o755)
    machine_checks.check_slurm()


def gpus(count: int, monkeypatch: pytest.MonkeyPatch, bf16: bool = True) -> None:
    """A machine with GPUs, as far as choosing one goes."""
    monkeypatch.setattr(torch.cuda, "device_count", lambda: count)
    monkeypatch.setattr(torch.cuda, "set_device", lambda device: None)
    monkeypatch.setattr(torch.cuda, "is_bf16_supported", lambda including_emulation=True: bf16)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "Tesla P100")


def test_device(monkeypatch: pytest.MonkeyPatch) -> None:
    """auto takes the GPU that is there, else the CPU; a GPU that is not there is refused, not replaced."""
    gpus(0, monkeypatch)
    assert set_up_device(config(), WORLD) == torch.device("cpu")
    with pytest.raises(ConfigError, match=r"device=cuda.*torch finds no GPU on this machine; use device=cpu"):
        set_up_device(config("device=cuda"), WORLD)
    gpus(1, monkeypatch)
    assert set_up_device(config(), WORLD) == torch.device("cuda", 0)
    assert set_up_device(config("device=cpu"), WORLD) == torch.device("cpu")
    gpus(2, monkeypatch)
    assert set_up_device(config(), a_world(1, 2)) == torch.device("cuda", 1)
    with pytest.raises(ConfigError, match="it has 2 GPUs: use --gpus-per-node 2"):
        set_up_device(config("launch.gpus_per_node=4"), a_world(size=4))


def test_gpus_that_no_rank_uses(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    """A batch script asked for four GPUs and started one rank: the node's first rank says that three stay idle. Outside
    a job the machine's other GPUs may be somebody else's."""
    gpus(4, monkeypatch)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0,1,2,3")
    for rank in (0, 1):
        set_up_device(config(), a_world(rank, 2, launcher="srun"))
    (said,) = capsys.readouterr().out.splitlines()
    assert "has 4 GPUs, but 2 ranks of this run: the other GPUs stay idle; set launch.gpus_per_node=4" in said
    set_up_device(config(), a_world(0, 2))
    set_up_device(config(), a_world(0, 4, launcher="srun"))
    assert not capsys.readouterr().out


def test_gpus_of_others_are_left_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """On a node without enforced limits a CPU job sees GPUs that Slurm gave to somebody else."""
    gpus(4, monkeypatch)
    world = a_world(launcher="submitit-slurm")
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    assert set_up_device(config(), world) == torch.device("cpu")
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "2")
    assert set_up_device(config(), world).type == "cuda"


def tf32() -> list[bool]:
    """Whether products and convolutions may use TF32, by torch's old attributes and by its new ones."""
    return [
        torch.backends.cuda.matmul.allow_tf32,
        torch.backends.cuda.matmul.fp32_precision == "tf32",
        torch.backends.cudnn.allow_tf32,
        torch.backends.cudnn.conv.fp32_precision == "tf32",  # type: ignore[attr-defined]
        torch.backends.cudnn.rnn.fp32_precision == "tf32",  # type: ignore[attr-defined]
    ]


@pytest.mark.filterwarnings("error")
def test_tf32(monkeypatch: pytest.MonkeyPatch) -> None:
    """fp32 means fp32: torch's default would round in convolutions. Code that reads either kind of attribute, such as
    torch's compiler, gets an answer, as torch raises an error where they contradict each other."""
    gpus(1, monkeypatch)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (8, 0))
    for precision, allowed in (("fp32", False), ("tf32", True), ("bf16", False)):
        set_up_device(config(f"train.precision={precision}"), WORLD)
        assert tf32() == [allowed] * 5, precision


def test_tf32_where_there_is_none(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without the hardware the run would silently be as slow as fp32."""
    with pytest.raises(ConfigError, match=r"^train\.precision=tf32: only GPUs have TF32, but device=cpu; use fp32 or"):
        config("train.precision=tf32", "device=cpu")
    gpus(0, monkeypatch)
    with pytest.raises(ConfigError, match=r"^train\.precision=tf32: only GPUs have TF32, but this rank uses the CPU;"):
        set_up_device(config("train.precision=tf32"), WORLD)
    gpus(1, monkeypatch)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (7, 0))
    with pytest.raises(
        ConfigError, match=r"^train\.precision=tf32: Tesla P100 has no tf32 arithmetic; use fp16 or fp32"
    ):
        set_up_device(config("train.precision=tf32"), WORLD)


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ("", "records what torch.compile makes; set train.compile=true, too"),
        ("train.compile=true device=cpu", "only GPUs have CUDA graphs, but device=cpu; remove this key"),
        (
            "train.compile=true train.activation_checkpointing=true",
            "no graph can record how recomputed activations",
        ),
        ("train.compile=true train.sharding=full", "needs weights that stay where they are, and train.sharding=full"),
        (
            "train.compile=true train.accumulate=2",
            "needs exactly one backward pass per step, and with train.accumulate=2",
        ),
        (
            "train.compile=true train.shares=2",
            "needs exactly one backward pass per step, and with train.shares=2 a rank",
        ),
    ],
)
def test_cuda_graphs_that_cannot_be(words: str, said: str) -> None:
    """A second backward pass would write its gradients over those of the first."""
    with pytest.raises(ConfigError, match=f"^{re.escape(f'train.cuda_graphs=true: {said}')}"):
        config("train.cuda_graphs=true", "launch.tasks_per_node=2", *words.split())


def test_cuda_graphs_on_a_machine_without_gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    """torch would leave them out silently, and the run would be slower than its configuration says."""
    gpus(0, monkeypatch)
    with pytest.raises(ConfigError, match=r"^train\.cuda_graphs=true: only GPUs have CUDA graphs, but this rank uses"):
        set_up_device(config("train.cuda_graphs=true", "train.compile=true"), WORLD)


@pytest.mark.parametrize("deterministic", [False, True])
def test_kernels_are_chosen_without_timing(deterministic: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """torch's deterministic algorithms alone would leave the compiler a choice by time, e.g. of the padding of matrix
    products: another one in each attempt, with other last bits."""
    gpus(1, monkeypatch)
    os.environ.pop("TORCHINDUCTOR_DETERMINISTIC", None)
    os.environ.pop("CUBLAS_WORKSPACE_CONFIG", None)
    set_up_device(config(f"train.deterministic={str(deterministic).lower()}"), WORLD)
    assert (os.environ.get("TORCHINDUCTOR_DETERMINISTIC") == "1") == deterministic
    assert (os.environ.get("CUBLAS_WORKSPACE_CONFIG") == ":4096:8") == deterministic
    assert torch.are_deterministic_algorithms_enabled() == deterministic
    assert torch.backends.cudnn.benchmark != deterministic


def test_random_numbers_of_recomputed_activations(monkeypatch: pytest.MonkeyPatch) -> None:
    """On a GPU, torch's compiler would draw them from generators that no seed before a step reaches: dropout would
    differ after a resume. Custom loops compile by themselves, so this does not depend on train.compile."""
    gpus(1, monkeypatch)
    functorch = importlib.import_module("torch._functorch.config")
    with torch_setting(functorch, "graphsafe_rng_functionalization", True):
        set_up_device(config(), WORLD)
        assert not functorch.graphsafe_rng_functionalization


def test_deterministic_fills_no_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    """torch would write to each new tensor once more, without any effect on the results."""
    gpus(1, monkeypatch)
    monkeypatch.setenv("TORCHINDUCTOR_DETERMINISTIC", "0")
    set_up_device(config("train.deterministic=true"), WORLD)
    assert not torch.utils.deterministic.fill_uninitialized_memory  # type: ignore[attr-defined]


def numerics(world: World, monkeypatch: pytest.MonkeyPatch, backend: str = "nccl") -> dict[str, str | int]:
    """What a run records on GPUs."""
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "H200")
    monkeypatch.setattr(torch.backends.cudnn, "version", lambda: 92000)
    monkeypatch.setattr(torch.cuda.nccl, "version", lambda: (2, 28, 3))
    return describe_numerics(torch.device("cuda", 0), world, backend)


def test_other_gpus_nodes_or_libraries_are_reported(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """NCCL adds along the links between GPUs, so the layout of the ranks decides the last bits, as do the libraries."""
    monkeypatch.setattr(device_module, "DRIVER", tmp_path / "version")
    device_module.DRIVER.write_text("580.65.06\n")
    for name in (*nccl.PINNED, *nccl.CHANNELS):
        monkeypatch.delenv(name, raising=False)
    two, one = a_world(size=8, local_size=4, nodes=2), a_world(size=8, local_size=8)
    before = numerics(two, monkeypatch)
    assert before == {
        "torch": torch.__version__,
        "device": "H200",
        "driver": "580.65.06",
        "cuDNN": 92000,
        "TF32": "off",
        "layout": "2 nodes x 4 GPUs",
        "NCCL": "2.28.3",
    }
    assert changed_numerics(before, numerics(two, monkeypatch)) is None
    moved = "resuming with layout 1 node x 8 GPUs (was 2 nodes x 4 GPUs): the last bits may differ"
    assert changed_numerics(before, numerics(one, monkeypatch)) == moved
    device_module.DRIVER.write_text("590.10\n")
    monkeypatch.setenv("NCCL_ALGO", "Tree")
    assert changed_numerics(before, numerics(two, monkeypatch)) == (
        "resuming with driver 590.10 (was 580.65.06), NCCL 2.28.3 NCCL_ALGO=Tree (was 2.28.3): the last bits may differ"
    )


def test_what_an_older_version_has_not_recorded_is_not_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    """A warning after each update of Laststep would hide the one that matters. Nor does a single rank need NCCL."""
    now = numerics(a_world(), monkeypatch)
    assert changed_numerics({"torch": now["torch"], "device": "H200"}, now) is None
    assert "NCCL" not in now
    assert set(describe_numerics(torch.device("cpu"), WORLD, "gloo")) == {"torch", "device", "threads"}


def test_precision_that_the_gpu_lacks(monkeypatch: pytest.MonkeyPatch) -> None:
    """A GPU without bf16 would emulate it, slower than fp32, without any sign of the reason."""
    gpus(1, monkeypatch, bf16=False)
    with pytest.raises(
        ConfigError, match=r"train\.precision=bf16: Tesla P100 has no bf16 arithmetic; use fp16 or fp32"
    ):
        set_up_device(config("train.precision=bf16"), WORLD)
    set_up_device(config("train.precision=fp16"), WORLD)
