"""The command as a user types it: wrong input gets one line and exit status 2, and leaves nothing behind.

A traceback tells a newcomer that the tool is broken; a folder or a job left behind by a typing error is in the way of
the next try, or sits in the queue.
"""

from __future__ import annotations

import os
import re
import shlex
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from submitit.core.utils import DelayedSubmission

from laststep.cli.main import main
from laststep.cli.verbs import DEFAULT, VERBS, Verb
from laststep.config.config import Config
from laststep.rundir import RunDir
from laststep.trainer import Trainer
from tests.support.commands import REFUSING_SBATCH, fake_squeue, files, launch, refusal
from tests.support.forked import forked_python
from tests.support.needs import OPTIONAL
from tests.support.project import PROJECT

GOLDEN = Path(__file__).resolve().parent / "golden"
# Wrong input that can be recognized from the words and this machine.
WRONG = [
    (["optm.lr=1"], "optm.lr: no such key; did you mean optim.lr?"),
    (["lr=1"], "lr: no such key; did you mean optim.lr?"),
    (["optim.lr=fast"], "optim.lr=fast: must be of type float"),
    (["train.epochs=1.5"], "train.epochs=1.5: must be of type int"),
    (["--nodes", "two"], "launch.nodes=two: must be of type int or MIN-MAX"),
    (["--nodes", "1,2"], "launch.nodes=1,2: must be of type int or MIN-MAX"),
    (["--nodes", "4-1"], "launch.nodes=4-1: the smaller number comes first"),
    (["--nodes", "1-4"], "train.batch_size=64: not divisible by 3 ranks x train.accumulate=1; 60 would be"),
    (["--config", "minst"], "--config minst: no such file, and no configuration of that name; did you mean mnist?"),
    (["--config", ""], "no such file"),
    (["--config", "."], "no such file"),
    (["model.name=resnet19"], "model.name=resnet19: no such model; did you mean resnet18?"),
    (["data.name=cifar"], "data.name=cifar: no such data set; did you mean cifar10?"),
    (["data.name=zzz"], "data.name=zzz: no such data set; choose from mnist-5k, mnist,"),
    (["optim.name=adan"], "optim.name=adan: torch.optim has no such class; did you mean adam?"),
    (["optim.schedule=cosin"], "optim.schedule=cosin: did you mean cosine?"),
    (["task=clasification"], "task=clasification: did you mean classification? or give package.module.Name"),
    (["task=nowhere.Mine"], "task=nowhere.Mine: no module nowhere on the Python path"),
    (["task=laststep.task.Tusk"], "task=laststep.task.Tusk: laststep.task has no Tusk; did you mean Task?"),
    (["train.batch_size=65", "--nodes", "2"], "train.batch_size=65: not divisible by 2 ranks x train.accumulate=1"),
    (["launch.slurm.nodes=3"], "launch.slurm.nodes: Laststep sets this itself; use launch.nodes"),
    (["--nodes", "0"], "launch.nodes=0: must be at least 1"),
    (["--nodes", "-1"], "launch.nodes=-1: must be at least 1"),
    (["--tasks-per-node", "0"], "launch.tasks_per_node=0: must be at least 1"),
    (["--gpus-per-node", "-1"], "launch.gpus_per_node=-1: must be at least 0"),
    (["--time", "0"], "launch.time_min=0: must be at least 1"),
    (["train.epochs=0"], "train.epochs=0: must be at least 1"),
    (["train.batch_size=-64"], "train.batch_size=-64: must be at least 1"),
    (["--name", "../mine"], "launch.name='../mine': use up to 200 letters"),
    (["--name", "x" * 300], "use up to 200 letters"),
    (["data.args.size=3"], "data.args.size: mnist-5k has no such option; did you mean image_size?"),
    (["data.args.augment=3"], "data.args.augment=3: must be true or false"),
    (["data.args.image_size=0"], "data.args.image_size=0: must be a positive integer"),
    (["data.args.image_size=big"], "data.args.image_size=big: must be a positive integer"),
    (["data.args.samples=3"], "data.args.samples: mnist-5k has no such option"),
    (["data.args=3"], "data.args=3: must be of type dict[str, Any]"),
    (["data.args.cache=true"], "data.args.cache: mnist-5k has no such option; choose from augment, image_size"),
    (["data.name=imagefolder", "data.args.cache=3"], "data.args.cache=3: must be true or false"),
    (
        ["data.name=imagefolder", "data.args.cache=true", "data.args.decode_on_device=true"],
        "data.args.decode_on_device=true: data.args.cache keeps images off the device; leave one of them out",
    ),
    (["data.name=imagefolder"], "data.root=data: data/train is missing; imagefolder reads train/CLASS/*.jpg"),
    (["data.name=mnist", "data.root=/proc/version"], "data.root=/proc/version: is not a folder"),
    (["launch.root=/proc/version/runs"], "launch.root=/proc/version/runs: /proc/version is not a folder"),
    (["sumbit"], "sumbit: no such verb, and no such run; did you mean submit?"),
    (["submit", "resume"], "submit resume: two verbs; type one of them"),
    (["--nods", "2"], "--nods: no such option; did you mean --nodes?"),
    (["--nods=2"], "--nods=2: no such option; did you mean --nodes?"),
    (["--partition"], "argument --partition: expected one argument"),
    (["--debug", "--local"], "not allowed with argument"),
    (["resume"], "name the run, or its folder"),
    (["resume", "mine", "--watch", "--local"], "--watch: submits jobs and prints no log; leave out --local"),
    (["verify"], "name the run, or its folder"),
    (["resume", "nobody"], "nobody: no such run in runs/; there is none yet"),
    (["verify", "nobody"], "nobody: no such run in runs/; there is none yet"),
    (["verify", "x" * 300], "no such run in runs/"),
    (["verify", "a", "b"], "b: verify takes one run; for another one, type the command again"),
    (["export", "a"], "the following arguments are required: OUT"),
    (["export", "a", "out.npz"], "out.npz: the name must end in .safetensors or .pt"),
    (["export", "a", "nowhere/out.pt"], "nowhere/out.pt: there is no folder nowhere"),
    (["export", "a", "out.pt"], "a: no such run in"),
    (["export", "a", "out.pt", "--best", "--step", "3"], "not allowed with argument"),
    (["evaluate"], "name the run, or its folder"),
    (["evaluate", "a", "model.name=resnet18"], "model.name=resnet18: evaluate changes only data.*, train.batch_size"),
    (["model.weights=nowhere"], "model.weights=nowhere: no such run in"),
    (["model.weights=nowhere.pt"], "model.weights=nowhere.pt: no such file"),
    (["model.weights=/proc/version"], "model.weights=/proc/version: no such format; weights are in .safetensors, .pt"),
    (["model.weights=DEFAULT"], "model.weights=DEFAULT: no such weights; torchvision has no weights for convnet"),
    (
        ["model.name=resnet18", "model.weights=IMAGENET1K_V2"],
        "model.weights=IMAGENET1K_V2: no such weights; did you mean IMAGENET1K_V1?",
    ),
    (["task=language"], "data.name=mnist-5k: holds images; task=language takes classics or tokens"),
    (["data.name=classics"], "data.name=classics: is text, for task=language; task=classification takes images"),
    (["model.name=gpt2-124", "--config", "classics"], "no such size of a language model; did you mean gpt2-124m?"),
    (
        ["model.args.heads=3", "--config", "classics"],
        "model.args.heads=3: model.args.width=128 must be a multiple of 2 x heads",
    ),
    (["data.args.window=999999", "--config", "classics"], "longer than the data: data.name=classics has 694,021"),
    (["optim.decay_share=0"], "optim.decay_share=0.0: must be above 0 and at most 1"),
    (["prepare", "out"], "the following arguments are required: OUT"),
    (["generate"], "name the run, or its folder"),
    (["generate", "a", "--tokens", "0"], "--tokens 0: must be at least 1"),
    (["verify", "a", "--jsn"], "--jsn: no such option; did you mean --json?"),
    (["verify", "a", "launch.root=/proc/1/root/runs"], "/proc/1/root/runs"),  # it may not be read, or is not there
]  # fmt: skip


@pytest.mark.parametrize(("words", "says"), WRONG, ids=[" ".join(words)[:40] for words, _ in WRONG])
def test_wrong_input(words: list[str], says: str, slurm: Path, here: Path, capfd: pytest.CaptureFixture[str]) -> None:
    """Every wrong input of the table, on a machine that has Slurm: one line that says what to do, no folder, no job."""
    assert says in refusal(words, capfd, here)
    if "=" in words[0]:
        assert says in refusal([*words, "--local"], capfd, here)
    assert not (slurm / "submitted.sh").exists()


@pytest.mark.parametrize(
    "words",
    [["optm.lr=1", "--local"], ["--nods", "2"], ["sumbit"], ["model.name=resnet19", "--local"], ["--name", "x" * 300]],
    ids=lambda words: words[0],
)
def test_wrong_input_of_the_script(words: list[str], here: Path) -> None:
    """launch.py itself hands the line to stderr and the status to the shell."""
    done = launch(*words)
    assert (done.returncode, done.stdout, done.stderr.count("\n")) == (2, "", 1)
    assert done.stderr.startswith("error: ")
    assert files(here) == []


@pytest.mark.parametrize("words", [[], ["--follow"]], ids=["submit", "follow"])
def test_no_slurm(
    words: list[str], here: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    """A newcomer without a cluster is shown how to continue; in a clone there are two ways."""
    says = refusal(words, capfd, here)
    assert "no Slurm on this machine" in says and says.endswith(": add --local to train here")
    monkeypatch.chdir(PROJECT)
    assert "--local" in (says := refusal(words, capfd, here)) and "`make slurm`" in says


def test_run_exists(here: Path, slurm: Path, capfd: pytest.CaptureFixture[str]) -> None:
    """A second run of the same name would mix two trainings in one folder; the message says how to continue it."""
    (here / "runs" / "mine").mkdir(parents=True)
    says = refusal(["--name", "mine"], capfd, here)
    assert "runs/mine is there without a config.yaml" in says and "`rm -r runs/mine`" in says, (
        "there is no run to resume"
    )
    (here / "runs" / "mine" / "config.yaml").touch()
    for way in ([], ["--local"], ["--debug"], ["--dry-run"]):
        says = refusal(["--name", "mine", *way], capfd, here)
        assert "launch.name=mine: this run exists" in says and "`python launch.py resume mine`" in says


def test_imagefolder_is_looked_at(here: Path, capfd: pytest.CaptureFixture[str]) -> None:
    """A missing and an empty folder each get their own line, before a job waits in the queue."""
    (here / "data" / "train").mkdir(parents=True)
    says = refusal(["data.name=imagefolder", "--local"], capfd, here)
    assert says == "data.root=data: data/train is empty; it must hold one folder of images per class"
    (here / "data" / "train" / "cat").mkdir()
    assert "data/val is missing" in refusal(["data.name=imagefolder", "--local"], capfd, here)


@pytest.mark.parametrize("root", ["/proc/nobody", "below/a/file"])
def test_folder_not_writable(root: str, here: Path, capfd: pytest.CaptureFixture[str]) -> None:
    """Not even root can write there; this is found before the start, not at the first checkpoint."""
    (here / "below").mkdir()
    (here / "below" / "a").write_text("")
    says = refusal([f"launch.root={root}", "--local"], capfd, here)
    assert f"launch.root={'' if root[0] == '/' else here}" in says


def test_folder_of_somebody_else(
    here: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A folder without the permission to write is refused by its name. (Root, who may run the tests, may write
    anywhere, so the permission itself is what is played.)"""
    (here / "runs").mkdir()
    monkeypatch.setattr(os, "access", lambda path, mode: False)
    assert "is not writable" in refusal(["--local"], capfd, here)


@pytest.mark.parametrize(
    ("words", "visible", "says"),
    [
        (["device=cuda", "--local"], "", "device=cuda: this machine has no GPU; use device=cpu or device=auto"),
        (["device=cuda", "--debug"], "", "device=cuda: this machine has no GPU"),
        (["--gpus-per-node", "1", "--local"], "", "launch.gpus_per_node=1: this machine has 0 GPUs; leave it out"),
        (["--gpus-per-node", "4", "--local"], "0,1", "launch.gpus_per_node=4: this machine has 2 GPUs; use --gpus"),
        (["device=cuda"], "", "device=cuda: the job asks for no GPU; add --gpus-per-node N"),
    ],
)  # fmt: skip
def test_gpus_that_are_not_there(
    words: list[str],
    visible: str,
    says: str,
    slurm: Path,
    here: Path,
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
) -> None:
    """Asking for a device that the machine or the job lacks is refused; training on the CPU instead takes days."""
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    assert says in refusal(words, capfd, here)
    assert not (slurm / "submitted.sh").exists()


@pytest.mark.parametrize(
    ("name", "text", "says"),
    [
        ("broken", "def (", "broken.py, line 1: invalid syntax"),
        ("binary", "\0", "binary.py"),
        ("empty", "", "empty has no Mine"),
        ("raising.inner", "", "task=raising.inner.Mine: raising.inner cannot be imported: NameError: no luck"),
    ],
)
def test_task_that_cannot_be(
    name: str, text: str, says: str, here: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    """A user's Task is checked before the start, and the message names the user's file."""
    (here / "raising").mkdir()
    (here / "raising" / "__init__.py").write_text("raise NameError('no luck')")
    (here / f"{name}.py").write_text(text)
    monkeypatch.syspath_prepend(str(here))
    monkeypatch.setattr(sys, "dont_write_bytecode", True)
    assert says in refusal([f"task={name}.Mine", "--local"], capfd, here)


def test_slurm_refuses(slurm: Path, here: Path, capfd: pytest.CaptureFixture[str]) -> None:
    """sbatch's message is shown, and the run's folder is removed, so that the name is free for the next try."""
    (slurm / "sbatch").write_text(REFUSING_SBATCH)
    (here / "runs").mkdir()
    says = refusal(["--name", "mine", "--partition", "nope"], capfd, here)
    assert says.startswith("Slurm refused the job: ")
    assert says.endswith("Batch job submission failed: Invalid partition name specified")


def test_submit(slurm: Path, here: Path, capfd: pytest.CaptureFixture[str]) -> None:
    """A submission prints run, job, log and the next commands; the job gets the run's configuration."""
    assert main(["--nodes", "2", "--name", "mine", "seed=3"]) == 0
    out, err = capfd.readouterr()
    assert err == ""
    said = ("run    mine", "job    4711: 2 nodes x 1 rank", "4711_0_log.out", "launch.py cancel mine")
    assert all(text in out for text in said)
    run = RunDir(here / "runs" / "mine")
    config = Config.load(run.config)
    assert (config.seed, config.launch.nodes, config.launch.root) == (3, 2, str(here / "runs"))
    submission = DelayedSubmission.load(run.logs / "4711_submitted.pkl")
    assert isinstance(submission.function, Trainer) and submission.function.config == config
    assert "#SBATCH --nodes=2" in (slurm / "submitted.sh").read_text()


def test_submit_a_range(slurm: Path, here: Path, capfd: pytest.CaptureFixture[str]) -> None:
    """Slurm is asked for the range, and the range is printed."""
    assert main(["--nodes", "1-4", "--tasks-per-node", "2", "--name", "mine", "train.batch_size=48"]) == 0
    assert "job    4711: 1-4 nodes x 2 ranks" in capfd.readouterr().out
    assert "#SBATCH --nodes=1-4\n" in (slurm / "submitted.sh").read_text()
    assert Config.load(RunDir(here / "runs" / "mine").config).launch.nodes == "1-4"


def test_resume_while_the_job_lives(slurm: Path, here: Path, capfd: pytest.CaptureFixture[str]) -> None:
    """Two jobs of one run would write one folder: the second is refused, with how to end the first."""
    assert main(["--name", "mine"]) == 0
    capfd.readouterr()
    assert "end it first: `python launch.py cancel mine`" in refusal(["resume", "mine"], capfd, here)
    (slurm / "squeue").write_text("#!/bin/sh\n")
    assert main(["resume", "mine", "--nodes", "2"]) == 0
    assert Config.load(RunDir(here / "runs" / "mine").config).launch.nodes == 2


def test_resume_changes_the_launch_alone(slurm: Path, here: Path, capfd: pytest.CaptureFixture[str]) -> None:
    """A resumed run with another learning rate would be neither the old run nor a new one."""
    assert main(["--name", "mine"]) == 0
    (slurm / "squeue").write_text("#!/bin/sh\n")
    capfd.readouterr()
    for word in ("optim.lr=1", "launch.name=other"):
        assert f"{word}: a resumed run keeps its configuration" in refusal(["resume", "mine", word], capfd, here)
    assert "did you mean mine?" in refusal(["resume", "mime"], capfd, here)
    assert "launch.nodes=0: must be at least 1" in refusal(["resume", "mine", "--nodes", "0"], capfd, here)


def test_name_from_a_file(here: Path, capfd: pytest.CaptureFixture[str]) -> None:
    """The run is named after its configuration's file, which may be called anything: the name must be a valid one."""
    for name in ("my config.yaml", "-.yaml", f"{'x' * 240}.yaml"):
        (here / name).write_text("seed: 1\n")
        assert main(["--dry-run", "--config", str(here / name)]) == 0
        found = re.search(r"^  name: (\S+-\d{8}-\d{6})$", capfd.readouterr().out, re.MULTILINE)
        assert found and Config.load(None, [f"launch.name={found[1]}"])


def test_options_win_over_words(here: Path, capfd: pytest.CaptureFixture[str]) -> None:
    """Each option sets the key that --help names, and wins over a key=value word."""
    options = ["--nodes", "2", "--tasks-per-node", "4", "--partition", "high", "--time", "30", "--name", "mine"]
    assert main(["--dry-run", "launch.nodes=8", *options]) == 0
    out = capfd.readouterr().out
    for line in ("nodes: 2", "tasks_per_node: 4", "partition: high", "time_min: 30", "name: mine"):
        assert f"\n  {line}\n" in out


def test_dry_run_leaves_nothing(slurm: Path, here: Path, capfd: pytest.CaptureFixture[str]) -> None:
    """--dry-run creates no folder and no job."""
    assert main(["--dry-run"]) == 0
    assert files(here) == []
    assert not (slurm / "submitted.sh").exists()


@pytest.mark.parametrize("way", ["--local", "--debug"])
def test_dry_run_of_a_run_on_this_machine(way: str, here: Path, capfd: pytest.CaptureFixture[str]) -> None:
    """What `--local` would train is shown as what a job would: the configuration, checked for this machine. There is no
    sbatch script, and no Slurm is needed."""
    assert main([way, "--dry-run", "--name", "first", "launch.tasks_per_node=2", "device=cpu"]) == 0
    said = capfd.readouterr().out
    ranks = "2 ranks" if way == "--local" else "1 rank"
    assert "\n# runs/first/config.yaml\n" in said and said.endswith(f"# {ranks} on this machine\n")
    assert files(here) == []


def test_dry_run_of_a_sweep(slurm: Path, here: Path, capfd: pytest.CaptureFixture[str]) -> None:
    """Which runs there would be, under which names, before a thousand of them are in the queue."""
    assert main(["sweep", "--dry-run", "--name", "scan", "optim.lr=0.1,0.03", "seed=0..1"]) == 0
    said = capfd.readouterr().out
    assert "\n# sweep scan: 4 runs\nscan-lr_0.1-seed_0  optim.lr=0.1 seed=0\n" in said
    assert "\nscan-lr_0.03-seed_1  optim.lr=0.03 seed=1\n" in said and "\n#SBATCH " in said
    assert files(here) == []
    assert not (slurm / "submitted.sh").exists()
    wrong = refusal(["sweep", "--dry-run", "--name", "scan", "optim.lr=0.1,fast"], capfd, here)
    assert "optim.lr=fast: must be of type float" in wrong


@pytest.mark.parametrize(
    ("parameters", "words", "option"),
    [
        ("enable_expedited_requeue", [], "--requeue=expedite"),
        ("enable_expedited_requeue", ["launch.slurm.requeue=true"], "--requeue"),
        ("(null)", [], "--requeue"),
        ("(null)", ["launch.slurm.requeue=expedite"], "--requeue"),
    ],
)
def test_how_it_is_requeued(
    parameters: str, words: list[str], option: str, slurm: Path, here: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    """Slurm refuses an expedited requeue where the site does not allow it, as it may have done before a resume."""
    said = f"KillWait = 30 sec\nSLURM_VERSION = 26.05.1\nSlurmctldParameters = {parameters}"
    programs = {"scontrol": f"#!/bin/sh\necho '{said}'\n", "sbatch": "#!/bin/sh\necho slurm 26.05.1\n"}
    for name, text in programs.items():
        (slurm / name).write_text(text)
        (slurm / name).chmod(0o755)
    assert main(["--dry-run", *words]) == 0
    assert f"#SBATCH {option}\n" in capfd.readouterr().out


GOLDEN_COMMANDS: dict[str, list[list[str]]] = {
    "help.txt": [
        ["--help"],
        *([verb, "--help"] for verb in VERBS if verb != DEFAULT),
    ],
    "sbatch.txt": [
        ["--dry-run", "--name", "small", "--nodes", "2", "--tasks-per-node", "2"],
        [
            "--dry-run", "--name", "range", "--nodes", "1-4", "--tasks-per-node", "2", "train.batch_size=48",
            "launch.setup=[module load cuda]",
        ],
        [
            "--dry-run", "--name", "large", "--config", "imagenet", "--nodes", "4", "--partition", "gpu",
            "--time", "90", "data.name=fake", "launch.account=lab", "launch.qos=long", "launch.constraint=a100",
            "launch.exclude=n[7,9]", "launch.mem_gb=64", "launch.signal_delay_s=120", "launch.setup=[module load cuda]",
            "launch.env.DATA=$HOME/a \"b\"", "launch.slurm.reservation=course",
            "launch.python=apptainer exec --nv /images/torch.sif python", "launch.srun=[--mpi=none]",
        ],
    ],
}  # fmt: skip


@pytest.mark.parametrize("name", GOLDEN_COMMANDS)
def test_golden(name: str, here: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Users' scripts and clusters depend on the command line and the sbatch script: no change goes unnoticed.

    After an intended change: LASTSTEP_UPDATE_GOLDEN=1 python -m pytest tests/cli/test_command.py -k golden
    """
    monkeypatch.setenv("COLUMNS", "80")
    monkeypatch.setenv("NO_COLOR", "1")
    text = ""
    for words in GOLDEN_COMMANDS[name]:
        done = launch(*words)
        assert (done.returncode, done.stderr) == (0, "")
        said = done.stdout.split("# sbatch script\n")[-1]
        assert "--help" not in words or all(len(line) <= 80 for line in said.splitlines())
        for path, label in ((sys.executable, "<python>"), (str(PROJECT), "<project>"), (str(here), "<here>")):
            said = said.replace(path, label)
        text += f"$ python launch.py {' '.join(words)}\n{said}\n"
    golden = GOLDEN / name
    if os.environ.get("LASTSTEP_UPDATE_GOLDEN"):
        golden.write_text(text)
    assert text == golden.read_text()


def test_table_of_verbs() -> None:
    """Each verb is the module of its name, which says so in its first line and describes itself in --help."""
    for name, verb in VERBS.items():
        module = verb.module()
        assert str(module.__doc__).startswith(f"{name}: ") and verb.usage.split()[0] == name
        assert module.DESCRIPTION in verb.parser().format_help()


def test_parsers_are_cheap() -> None:
    """--help and the Tab key wait for a verb's module: what takes long to import must wait until the verb runs."""
    code = (
        "import sys\n"
        "from laststep.cli.verbs import VERBS\n"
        "VERBS['submit'].parser()\n"
        "assert 'omegaconf' not in sys.modules\n"
        "for verb in VERBS.values(): verb.parser()\n"
        "sys.exit(str({name.split('.')[0] for name in sys.modules} & {'torch', 'numpy', 'submitit', 'rich'} or ''))\n"
    )
    done = subprocess.run([sys.executable, "-c", code], cwd=PROJECT, capture_output=True, text=True)
    assert done.stderr.strip() == ""


@pytest.mark.parametrize(
    "words",
    [
        ["--help"],
        ["--dry-run", "--nodes", "2"],
        ["--dry-run", "model.name=resnet18", "model.weights=DEFAULT"],
        ["--name", "mine"],
        ["resume", "mine"],
        ["status"],
        ["report", "mine"],
    ],
    ids=" ".join,
)
def test_torch_stays_away(words: list[str], slurm: Path, here: Path) -> None:
    """Importing torch takes seconds, and on a login node minutes: these commands answer at once."""
    if words[0] in ("resume", "report"):
        assert main(["--name", "mine"]) == 0
        (slurm / "squeue").write_text("#!/bin/sh\n")
    code = (
        "import sys\n"
        "from laststep.cli.main import main\n"
        "try: status = main(sys.argv[1:])\n"
        "except SystemExit as end: status = end.code\n"
        f"heavy = {{name.split('.')[0] for name in sys.modules}} & { {'torch', 'torchvision', 'numpy', *OPTIONAL} }\n"
        "sys.exit(f'imported {heavy}' if heavy else status)\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", code, *words],
        env={**os.environ, "PYTHONPATH": str(PROJECT)},
        capture_output=True,
        text=True,
    )
    assert (done.returncode, done.stderr) == (0, "")


def test_without_torch(
    slurm: Path, here: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    """Where the ranks run in an image, the Python that submits has neither torch nor torchvision: it cannot know the
    models, and what it cannot do itself gets one line."""
    for name in ("torch", "torchvision"):
        monkeypatch.setitem(sys.modules, name, None)
    assert main(["--name", "mine", "model.name=resnet18", "launch.python=apptainer exec torch.sif python"]) == 0
    ranks = " apptainer exec torch.sif python -u -m laststep.job.supervisor -u -m submitit"
    assert ranks in (slurm / "submitted.sh").read_text()
    capfd.readouterr()
    assert "doctor needs torch" in refusal(["doctor"], capfd, here)


@pytest.fixture(scope="module")
def python() -> str:
    """Forks processes with torch loaded. It is compiled, which `here` would prevent: it hides all programs."""
    return forked_python()


def test_debug_opens_the_debugger(python: str, here: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """--debug stops where the error was raised, with its variables at hand, and ends as a failed run."""
    (here / "mine.py").write_text(
        "from laststep import Task\n"
        "class Broken(Task):\n"
        "    def datasets(self):\n"
        "        answer = 6 * 7\n"
        "        raise RuntimeError('boom')\n"
    )
    monkeypatch.setenv("PYTHONPATH", str(here))
    monkeypatch.setenv("PYTHONDONTWRITEBYTECODE", "1")
    done = launch("--debug", "task=mine.Broken", "--name", "mine", stdin="p answer * 100\nq\n", python=python)
    assert (done.stdout + done.stderr).count("\nRuntimeError: boom") == 1, "one traceback"
    assert "(Pdb)" in done.stdout and "4200" in done.stdout
    assert done.returncode == 1


def test_refused_by_the_rank(python: str, here: Path) -> None:
    """The rank refuses what only torch can check: with the same one line and status, and the name is free again. From
    another folder than the project's, too."""
    done = launch("--local", "--name", "mine", "model.args.depth=3", python=python)
    assert done.returncode == 2
    assert re.fullmatch(r"error: model.args=\{'depth': 3\}: convnet does not take them: .+\n", done.stderr)
    assert not (here / "runs" / "mine").exists()


def test_interrupted(here: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]) -> None:
    """Ctrl-C ends the command with the shell's status for it, not with a traceback."""

    def interrupted(*_: object) -> None:
        signal.raise_signal(signal.SIGINT)

    monkeypatch.setattr("laststep.cli.submit.run", interrupted)
    assert main(["--local"]) == 130
    assert capfd.readouterr().err == ""


def test_site_profile(here: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]) -> None:
    """A site named in the environment applies to every verb: runs are found in the site's root too."""
    (here / "lab.yaml").write_text(f"launch: {{partition: gpu, root: {here}/scratch}}\n")
    assert main(["--site", "lab.yaml", "--dry-run", "--name", "x"]) == 0
    assert "#SBATCH --partition=gpu" in capfd.readouterr().out
    monkeypatch.setenv("LASTSTEP_SITE", str(here / "lab.yaml"))
    assert main(["--dry-run", "--name", "x"]) == 0
    assert f"--output={here}/scratch/x/logs" in capfd.readouterr().out
    assert main(["status"]) == 0
    assert f"no run in {here}/scratch/ yet" in capfd.readouterr().out.replace("\n", "")


def test_printed_commands_work(slurm: Path, here: Path, capfd: pytest.CaptureFixture[str]) -> None:
    """Typed as they are printed, and where: a run in another folder than runs/ is named by its path."""
    for words, typed in (
        ([], "a"),
        (["launch.root=other/runs"], "other/runs/a"),
        (["launch.root=my runs"], "'my runs/a'"),
    ):
        assert main(["--name", "a", *words]) == 0
        found = re.findall(r"next   python \S*launch.py (.*)", capfd.readouterr().out)
        assert found == [f"logs -f {typed}", f"status {typed}", f"cancel {typed}"]
        assert main(shlex.split(found[1])) == 0
        capfd.readouterr()
        assert f"launch.py resume {typed}`" in refusal(["--name", "a", *words], capfd, here)


def test_a_job_that_never_starts(slurm: Path, here: Path, capfd: pytest.CaptureFixture[str]) -> None:
    """More nodes than the partition has are refused; a limit that Slurm alone knows is a warning, with the limit."""
    partition = "PartitionName=main Default=YES MaxNodes=2 MaxTime=1:00:00 State=UP TotalNodes=4"
    (slurm / "scontrol").write_text(
        f"#!/bin/sh\nif [ $2 = config ]; then echo 'KillWait  = 30 sec'; else echo '{partition}'; fi\n"
    )
    (slurm / "scontrol").chmod(0o755)
    assert refusal(["--nodes", "8"], capfd, here) == (
        "launch.nodes=8: partition main has 4 nodes, so the job would never start; use at most --nodes 4, or another "
        "--partition"
    )
    assert refusal(["--nodes", "4", "launch.spare_nodes=1"], capfd, here) == (
        "launch.nodes=4 launch.spare_nodes=1: partition main has 4 nodes, so the job would never start; use fewer, or "
        "another --partition"
    )
    scontrol = (slurm / "scontrol").read_text()
    (slurm / "scontrol").write_text(scontrol.replace("TotalNodes=4", "TotalNodes=1"))
    assert "partition main has 1 node, so" in refusal(["--nodes", "8"], capfd, here)
    (slurm / "scontrol").write_text(scontrol)
    (slurm / "squeue").write_text(fake_squeue(_4711="PartitionNodeLimit"))
    assert main(["--nodes", "4", "--name", "mine"]) == 0
    warning = "job 4711 may never start; queued: PartitionNodeLimit, main has 4 nodes and gives a job at most 2"
    assert warning in capfd.readouterr().err
    (slurm / "squeue").write_text(fake_squeue(_4711="Resources"))
    assert main(["--nodes", "4", "--name", "other"]) == 0
    assert capfd.readouterr().err == ""


def test_outside_the_environment(
    here: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    """The system's Python lacks everything: one line has the command to type."""

    def lacks(name: str) -> None:
        raise ModuleNotFoundError(name=name)

    monkeypatch.setattr(sys, "argv", ["launch.py", "status", "my run"])
    monkeypatch.setattr(Verb, "run", lambda verb, words: lacks("submitit"))
    (here / ".venv" / "bin").mkdir(parents=True)
    (here / ".venv" / "bin" / "python").touch()
    assert refusal(["status", "my run"], capfd, here) == (
        f"status needs submitit, which {sys.executable} lacks: type `.venv/bin/python launch.py status 'my run'`"
    )
    monkeypatch.setattr(Verb, "run", lambda verb, words: lacks("of_the_user"))
    with pytest.raises(ModuleNotFoundError):  # not ours to explain
        main(["status"])


def test_list(here: Path, capfd: pytest.CaptureFixture[str]) -> None:
    """For scripts: `for run in $(launch.py list)`."""
    assert main(["list"]) == 0
    for name in ("b", "a"):
        RunDir(here / "runs" / name).path.mkdir(parents=True)
        RunDir(here / "runs" / name).config.write_text("")
        os.utime(RunDir(here / "runs" / name).config, (0, ord(name)))
    assert main(["list", "launch.root=runs"]) == 0
    assert capfd.readouterr().out == "a\nb\n"


def test_help_is_a_verb_too(here: Path, capfd: pytest.CaptureFixture[str]) -> None:
    """Many tools have it, so people type it."""
    assert main(["help", "logs"]) == 0
    assert capfd.readouterr().out == VERBS["logs"].parser().format_help()
    assert main(["help"]) == 0
    assert "verbs (default: submit" in capfd.readouterr().out
    assert refusal(["help", "lgos"], capfd, here) == "lgos: no such verb; did you mean logs?"
