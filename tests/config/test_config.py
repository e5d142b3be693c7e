"""The configuration: loading gives what was written, and a message names each value that cannot work.

A configuration that changes on its way to the ranks trains something else than the user asked for. A wrong one that is
accepted costs a wait in the queue before it fails.
"""

from __future__ import annotations

import dataclasses
import math
import tempfile
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from laststep.config.checks import check_batch
from laststep.config.config import PACKAGED, Config, config_names, find_config
from laststep.config.errors import ConfigError, nearest
from laststep.config.keys import TIME_KEYS, fields_of

FIELDS = [pytest.param(key, field, value, id=key) for key, field, value in fields_of(Config)]


def load(text: str, *overrides: str) -> Config:
    """Load a file with this text."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "written.yaml"
        path.write_text(text)
        return Config.load(path, overrides)


def refused(*overrides: str) -> str:
    """The message with which these words are refused; it must be one line."""
    with pytest.raises(ConfigError) as error:
        Config.load(None, overrides)
    text = str(error.value)
    assert text and "\n" not in text
    return text


def test_defaults() -> None:
    """Without a file and words, the result is the schema's defaults, or the documentation would be wrong."""
    assert Config.load() == Config()


def test_layers() -> None:
    """Words override the file, the file overrides the schema, and a key that neither names keeps its default."""
    config = load("optim: {lr: 0.5, momentum: 0.8}\ntrain:\n  epochs: 3\n", "optim.lr=0.25", "optim.lr=0.125")
    assert (config.optim.lr, config.optim.momentum, config.train.epochs) == (0.125, 0.8, 3)
    assert config.optim.name == "sgd"


@pytest.mark.parametrize("name", sorted(path.stem for path in PACKAGED.glob("*.yaml")))
def test_ready_made_configs(name: str) -> None:
    """Each shipped configuration loads by name and by path; its header gives the command, the time and the result."""
    assert Config.load(name) == Config.load(PACKAGED / f"{name}.yaml")
    header = (PACKAGED / f"{name}.yaml").read_text().split("\ntask:")[0]
    assert all(word in header for word in ("command:", "time:", "result:"))


def test_file_with_a_known_name_here_wins(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """An existing path means that file, even if configs/ has the same name."""
    monkeypatch.chdir(tmp_path)
    Path("mnist").write_text("seed: 7\n")
    assert Config.load("mnist").seed == 7
    assert find_config("cifar10") == PACKAGED / "cifar10.yaml"


def test_own_configs_come_first(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """In one's own repository, names mean one's own configurations and sites; Laststep's are still there."""
    monkeypatch.chdir(tmp_path)
    for name in ("mnist", "mine", "site/lab"):
        path = Path("configs", f"{name}.yaml")
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text("seed: 7\n")
    assert Config.load("mnist").seed == Config.load("mine").seed == Config.load(None, site="lab").seed == 7
    assert Config.load("cifar10", site="example") == Config.load(
        PACKAGED / "cifar10.yaml", site=PACKAGED / "site/example.yaml"
    )
    shipped = ["cifar10", "classics", "gpt2-124m", "imagenet", "llama-1b", "llama-8b"]
    assert config_names() == ["mine", "mnist", *shipped]
    assert config_names(of_site=True) == ["lab", "example"]
    with pytest.raises(ConfigError, match=r"--config qqq: .*; choose from mine, mnist, cifar10, classics, gpt2-124m"):
        find_config("qqq")


@pytest.mark.parametrize(("key", "field", "value"), FIELDS)
def test_every_key_is_documented_and_can_be_set(key: str, field: dataclasses.Field[Any], value: Any) -> None:
    """Each key has a help text, and setting it to its default changes nothing: so every key can be set."""
    assert field.metadata["help"]
    word = "null" if value is None else value
    assert Config.load(None, [f"{key}={word}"]) == Config()


@pytest.mark.parametrize(("key", "field", "value"), FIELDS)
def test_wrong_values_are_refused_by_name(key: str, field: dataclasses.Field[Any], value: Any) -> None:
    """For a wrong type, a number that is too small or a wrong choice, the message names the key and the value."""
    if key in TIME_KEYS:
        shown = "***" if field.metadata["secret"] else "nonsense"
        assert refused(f"{key}=nonsense").startswith(f"{key}={shown}: must be minutes, M:S, H:M:S, D-H")
    elif key == "script":  # which may be typed as one word
        assert refused(f"{key}={{a: 1}}").startswith("script.a: no such key")
    elif field.type.split(" ")[0] in ("int", "float", "bool") or field.type.startswith(("dict", "list")):
        shown = "***" if field.metadata["secret"] else "nonsense"
        assert refused(f"{key}=nonsense").startswith(f"{key}={shown}: must be of type {field.type.split('[')[0][:4]}")
    if not field.type.endswith("None"):
        assert refused(f"{key}=null").startswith(f"{key}={'***' if field.metadata['secret'] else 'null'}: must be of")
    if field.metadata["least"] is not None:
        word = "[-1]" if "list" in field.type else "-1"
        given = word if "int" in field.type else "-1.0"
        assert refused(f"{key}={word}") == f"{key}={given}: must be at least {field.metadata['least']:g}"
    if field.metadata["choices"]:
        wrong = value + "x"
        assert refused(f"{key}={wrong}") == f"{key}={wrong}: did you mean {value}?"


@pytest.mark.parametrize("text", ["1.10", "007", "123e456", "yes", "2026-01-02", "16:00:00", "0x1F", "1_000", "~x"])
def test_strings_stay_as_written(text: str) -> None:
    """YAML reads these as numbers, dates or truth values. A run called 1.10 must not be named 1.1, nor partition 007
    become 7, from the command line, from a file, or on the way through the run's folder."""
    words = [f"launch.{key}={text}" for key in ("partition", "account", "constraint", "env.A", "slurm.begin")]
    given = Config.load(None, [*words, f"launch.setup=[{text}]"])
    lines = "".join(f"  {key}: {text}\n" for key in ("partition", "account", "constraint"))
    read = load(f"launch:\n{lines}  env: {{A: {text}}}\n  slurm: {{begin: {text}}}\n  setup: [{text}]\n")
    for config in (given, read, load(given.to_yaml())):
        launch = config.launch
        assert [launch.partition, launch.account, launch.constraint] == [text] * 3
        assert (launch.env, launch.setup) == ({"A": text}, [text])
        assert launch.slurm == {"begin": True if text == "yes" else text}  # an option without a value


def test_quotes_null_and_flags_keep_their_meaning() -> None:
    """Quotes are not part of a name, null is no name, and an sbatch option without a value is a flag."""
    assert Config.load(None, ['launch.name="1.10"']).launch.name == "1.10"
    assert Config.load(None, ["launch.name=null"]).launch.name is None
    assert Config.load(None, ["launch.slurm.exclusive=true"]).launch.slurm == {"exclusive": True}


@pytest.mark.parametrize(
    ("text", "minutes"),
    [("90", 90), ("4:00", 4), ("4:01", 5), ("4:00:00", 240), ("0:90:30", 91), ("2-0", 2880), ("1-12", 2160),
     ("1-12:30", 2190), ("0-0:0:1", 1), ("00:30:00", 30)],
)  # fmt: skip
def test_time_limits_as_sbatch_takes_them(text: str, minutes: int) -> None:
    """`4:00:00` is four hours. YAML takes it for 14,400, which would be ten days."""
    assert Config.load(None, [f"launch.time_min={text}", "launch.signal_delay_s=1"]).launch.time_min == minutes
    assert load(f"launch:\n  time_min: {text}\n  signal_delay_s: 1\n").launch.time_min == minutes


@pytest.mark.parametrize("text", ["4h", "1:2:3:4", "1-", "-4:00", "1-2-3", "UNLIMITED", "1 day"])
def test_other_time_limits_are_refused(text: str) -> None:
    """A time limit that Slurm would not take is refused before it can be misread."""
    assert refused(f"launch.time_min={text}").startswith(f"launch.time_min={text}: must be minutes, M:S, H:M:S")


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (["optm.lr=1"], "optm.lr: no such key; did you mean optim.lr?"),
        (["lr=1"], "lr: no such key; did you mean optim.lr?"),
        (["name=x"], "name: no such key; did you mean model.name or data.name or optim.name or launch.name?"),
        (["optim.lr.x=1"], "optim.lr.x: no such key; did you mean optim.lr?"),
        (["launch.setup.0=x"], "launch.setup.0: no such key; did you mean launch.setup?"),
        (["optim=3"], "optim=3: optim is a section; set one of optim.name, optim.lr,"),
        (["optim=null"], "optim=null: optim is a section"),
        ([f"{'x' * 200}=1"], "no such key"),
        (["seed"], "seed: not a verb, an option or key=value; see --help"),
        (["=1"], "=1: not a verb, an option or key=value; see --help"),
        (["seed=["], "seed=[: cannot be read as key=value"),
        (["optim.lr=${foo}"], "optim.lr: Interpolation key 'foo' not found"),
        (["optim.lr=nan"], "optim.lr=nan: must be a finite number"),
        (["optim.lr=1e999"], "optim.lr=inf: must be a finite number"),
        (["optim.lr=0"], "optim.lr=0: the model would learn nothing; give a positive learning rate"),
        (["optim.clip_norm=0"], "optim.clip_norm=0: must be above 0; write optim.clip_norm=null to turn it off"),
        (["checkpoint.every_minutes=0"], "checkpoint.every_minutes=0: must be above 0"),
        (["checkpoint.every_minutes=often"], "must be of type float or auto or null, in minutes"),
        (["checkpoint.every_minutes=true"], "every_minutes=True: must be of type float or auto or null, in minutes"),
        (["checkpoint.every_minutes=-1"], "checkpoint.every_minutes=-1: must be at least 0"),
        (["launch.mem_gb=0"], "launch.mem_gb=0: must be above 0"),
        (["train.ema_decay=1"], "train.ema_decay=1.0: must be below 1, e.g. 0.999"),
        (["seed=1.5"], "seed=1.5: must be of type int"),
        (["launch.grace_s=long"], "launch.grace_s=long: must be of type int or null, in seconds"),
        (["launch.mem_gb=64GB"], "launch.mem_gb=64GB: must be of type float or null, in GB"),
        (["launch.env.A=[1]"], "launch.env.A=[1]: must be of type dict[str, str]"),
        (["launch.setup=[a,{b: 1}]"], "must be of type list[str]"),
        (["train.batch_size=65", "launch.nodes=2"], "train.batch_size=65: not divisible by 2 ranks x"),
        (["train.accumulate=3"], "train.batch_size=64: not divisible by 1 rank x train.accumulate=3; 63 would be"),
        (["launch.nodes=4-1"], "launch.nodes=4-1: the smaller number comes first"),
        (["launch.spare_nodes=-1"], "launch.spare_nodes=-1: must be at least 0"),
        (["launch.exclude_after=0"], "launch.exclude_after=0: must be at least 1"),
        (["launch.slurm.gpus=1", "launch.spare_nodes=1"], "launch.slurm.gpus=1: Slurm may spread them unevenly"),
        (["launch.nodes=0-2"], "launch.nodes=0-2: must be at least 1"),
        (["launch.nodes=1-"], "launch.nodes=1-: must be of type int or MIN-MAX"),
        (["launch.nodes=a-b"], "launch.nodes=a-b: must be of type int or MIN-MAX"),
        (["launch.nodes='1,2'"], "launch.nodes=1,2: must be of type int or MIN-MAX"),
        (["launch.nodes=1.5"], "launch.nodes=1.5: must be of type int or MIN-MAX"),
        (["launch.nodes=1-4", "launch.tasks_per_node=2"], "not divisible by 6 ranks x train.accumulate=1; 72 would be"),
        (["launch.nodes=2-5"], "64: not divisible by 3, 5 ranks x train.accumulate=1; 60 would be"),
        (["launch.nodes=1-999999999"], "23 ranks x train.accumulate=1; use fewer nodes"),
        (["launch.gpus_per_node=2", "launch.tasks_per_node=3"], "launch.tasks_per_node=3: each GPU has exactly"),
        (["launch.gpus_per_node=2", "device=cpu"], "launch.gpus_per_node=2: device=cpu uses no GPU"),
        (["launch.slurm.gres=gpu:a100:4", "launch.gpus_per_node=2"],
         "launch.gpus_per_node=2 launch.slurm.gres=gpu:a100:4: ask for 2 and for 4 GPUs per node; leave one"),
        (["launch.slurm.gres=gpu:2", "launch.slurm.gpus-per-node=v100:1"],
         "launch.slurm.gpus-per-node=v100:1 launch.slurm.gres=gpu:2: ask for 1 and for 2 GPUs per node"),
        (["launch.slurm.gres=gpu:4", "launch.tasks_per_node=1"],
         "launch.tasks_per_node=1: each GPU has exactly one rank (launch.slurm.gres=gpu:4); remove this key"),
        (["launch.slurm.gres=gpu:4", "device=cpu"], "launch.slurm.gres=gpu:4: device=cpu uses no GPU"),
        (["launch.slurm.gres=gpu:a100:many"], "launch.slurm.gres=gpu:a100:many: cannot be read; write gpu:TYPE:COUNT"),
        (["launch.slurm.gpus=8", "launch.nodes=2"],
         "launch.slurm.gpus=8: Slurm may spread them unevenly over the nodes; use launch.slurm.gpus-per-node"),
        (["launch.slurm.gpus_per_task=2"], "launch.slurm.gpus_per_task=2: each rank uses one GPU; ask for 1 per task"),
        (["launch.slurm.gpus-per-socket=2"], "launch.slurm.gpus-per-socket=2: how many a node gives is not certain"),
        (["launch.slurm.hetjob=true"], "launch.slurm.hetjob=True: a run cannot be a heterogeneous job"),
        (["launch.srun=[--het-group=0]"], "launch.srun=['--het-group=0']: a run cannot be a heterogeneous job"),
        (["launch.time_min=1"], "launch.signal_delay_s=90: must be shorter than the time limit (launch.time_min=1"),
        (["launch.name=../x"], "launch.name='../x': use up to 200 letters, digits"),
        (["launch.name=.hidden"], "launch.name='.hidden': use"),
        ([f"launch.name={'x' * 201}"], "use up to 200 letters"),
    ],
)  # fmt: skip
def test_wrong_words(words: list[str], says: str) -> None:
    """Values that cannot work anywhere are refused, with the key, the value and the fix."""
    assert says in refused(*words)


@pytest.mark.parametrize(
    ("words", "gpus"),
    [
        (["launch.slurm.gres=gpu:a100:4"], 4),
        (["launch.slurm.gres=gpu:4"], 4),
        (["launch.slurm.gres=gpu:a100"], 1),
        (["launch.slurm.gres=gpu"], 1),
        (["launch.slurm.gres='gpu:2,license:1'"], 2),
        (["launch.slurm.gres='license:3,gpu:a100:1,gpu:v100:2'"], 3),
        (["launch.slurm.gres=gpu:a100:4(S:0-1)"], 4),
        (["launch.slurm.gres=license:1"], 0),
        (["launch.slurm.gres=none"], 0),
        (["launch.slurm.gres=null"], 0),
        (["launch.slurm.gpus-per-node=a100:4"], 4),
        (["launch.slurm.gpus_per_node=4"], 4),
        (["launch.slurm.gpus=4"], 4),
        (["launch.slurm.gpus=a100:4"], 4),
        (["launch.slurm.gpus-per-task=1", "launch.tasks_per_node=4"], 4),
        (["launch.slurm.gpus_per_task=a100:1"], 1),
        (["launch.slurm.gpus-per-socket=a100:2", "launch.slurm.sockets-per-node=2"], 4),
        (["launch.slurm.tres-per-node=gres:gpu:4"], 4),
        (["launch.slurm.tres_per_task='cpu:2,gres/gpu:1'", "launch.tasks_per_node=2"], 2),
        (["launch.slurm.gres=gpu:a100:4", "launch.gpus_per_node=4"], 4),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)
def test_gpus_that_sbatchs_own_options_ask_for(words: list[str], gpus: int) -> None:
    """With fewer ranks than GPUs the rest of a node would stand idle for days, and nothing would say so."""
    launch = Config.load(None, ["train.batch_size=48", *words]).launch
    assert (launch.gpus, launch.ranks_per_node) == (gpus, gpus or 1)


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("a: [", "cannot be read as YAML: line "),
        ("seed: 1\nseed: 2\n", "found duplicate key"),
        ("- 1\n", "must consist of `key: value` lines"),
        ("just words", "just words: no such key"),
        ("\0", "cannot be read as YAML"),
        ("1: 2\n", "1: no such key"),
        ("optim: 3\n", "optim=3: optim is a section"),
        ("optim:\n  lr:\n    a: 1\n", "optim.lr.a: no such key; did you mean optim.lr?"),
        ("optimm:\n  lr: 1\n", "optimm.lr: no such key; did you mean optim.lr?"),
        ("task: a\ntrain: {epochs: x}\n", "train.epochs=x: must be of type int"),
        ("root:x:0:0:root:/root:/bin/bash\n" * 100, "...: no such key"),
    ],
)
def test_wrong_files(text: str, says: str) -> None:
    """A file that is not a configuration gets one short line, with the line number where it is known."""
    with pytest.raises(ConfigError) as error:
        load(text)
    assert says in str(error.value)
    assert "\n" not in str(error.value) and len(str(error.value)) < 400


def test_unknown_file_names_the_nearest() -> None:
    """The message for a mistyped configuration name suggests the right one."""
    with pytest.raises(
        ConfigError, match=r"--config minst: no such file, and no configuration of that name; did you mean mnist\?"
    ):
        Config.load("minst")
    known = "choose from cifar10, classics, gpt2-124m, imagenet, llama-1b, llama-8b, mnist"
    with pytest.raises(ConfigError, match=known):
        Config.load("zzz")


def test_nearest() -> None:
    """The hint is the most similar name, or a short list of names to choose from."""
    assert nearest("resnet19", ["resnet18", "vgg11"]) == "did you mean resnet18?"
    assert nearest("q", ["a", "b"]) == "choose from a, b"
    assert nearest("q", [f"name{i}" for i in range(100)]).endswith("name11, ...")


# Anything that a user may write, except "???": OmegaConf's mark for a missing value.
TEXT = st.text(st.characters(exclude_categories=["Cs"]), max_size=12).filter(lambda text: text != "???")
AWKWARD = st.sampled_from(
    ["null", "1e3", "yes", "2020-01-01", "12:30", "~", "${HOME}", "\\${a}", "cd ${", "a: b", "#", ""]
)
WORDS = TEXT | AWKWARD
NAMES = st.from_regex(r"[a-z][a-z_0-9]{0,8}", fullmatch=True)
SCALARS = st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | WORDS
ARGS = st.dictionaries(
    NAMES, st.recursive(SCALARS, lambda inner: st.lists(inner, max_size=3), max_leaves=4), max_size=3
)
SBATCH_OPTIONS = st.dictionaries(NAMES, st.booleans() | WORDS, max_size=3)  # texts, or flags
POSITIVE = st.floats(min_value=1e-300, allow_infinity=False)


@settings(deadline=None, max_examples=80)
@given(
    seed=st.integers(min_value=0, max_value=2**63 - 1),
    strings=st.tuples(WORDS, WORDS, WORDS, st.none() | WORDS, st.none() | WORDS),
    args=st.tuples(ARGS, ARGS, SBATCH_OPTIONS),
    env=st.dictionaries(NAMES, WORDS, max_size=3),
    setup=st.lists(WORDS, max_size=3),
    floats=st.tuples(POSITIVE, POSITIVE, st.none() | POSITIVE),
)
def test_round_trip(
    seed: int,
    strings: tuple[Any, ...],
    args: tuple[Any, ...],
    env: dict[str, str],
    setup: list[str],
    floats: tuple[Any, ...],
) -> None:
    """The file in the run folder must match the command: every attempt reads its configuration there."""
    config = Config(seed=seed, task=strings[0])
    config.model.name, config.data.root, config.launch.partition, config.launch.account = strings[1:]
    config.model.args, config.data.args, config.launch.slurm = args
    config.launch.env, config.launch.setup = env, setup
    config.optim.lr, config.optim.weight_decay, config.optim.clip_norm = floats
    assert load(config.to_yaml()) == config


def test_interpolation_is_resolved_once() -> None:
    """OmegaConf interpolates `${...}` once. The result, and an escaped `${...}` for the shell, stay as they are."""
    config = load("seed: 3\nlaunch: {partition: 'p${seed}', setup: ['cd \\${HOME}']}\n")
    assert (config.launch.partition, config.launch.setup) == ("p3", ["cd ${HOME}"])
    assert load(config.to_yaml()) == config


def test_save_is_whole_or_absent(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A resume rewrites config.yaml. If it is interrupted, the run must still have the old file."""
    path = tmp_path / "config.yaml"
    Config(seed=1).save(path)

    def full(self: Path, target: Path) -> None:
        raise OSError("no space left")

    monkeypatch.setattr(Path, "replace", full)
    with pytest.raises(OSError, match="no space left"):
        Config(seed=2).save(path)
    assert Config.load(path).seed == 1


@given(st.integers(1, 5000), st.integers(1, 64), st.integers(0, 3), st.integers(1, 8))
def test_the_batch_size_that_is_proposed_divides(batch_size: int, least: int, more: int, accumulate: int) -> None:
    """The proposed batch size must work, or the user would try twice. The message names the sizes that fail."""
    sizes = range(least, least + more + 1)
    wrong = [size for size in sizes if batch_size % (size * accumulate)]
    try:
        check_batch(batch_size, sizes, accumulate)
    except ConfigError as error:
        assert f"not divisible by {', '.join(map(str, wrong))} rank" in str(error)
        proposed = int(str(error).split("; ")[1].split(" ")[0])
        check_batch(proposed, sizes, accumulate)
        step = math.lcm(*sizes) * accumulate
        assert abs(proposed - batch_size) <= max(step / 2, step - batch_size)
    else:
        assert not wrong


def test_ranks() -> None:
    """One rank per GPU, else tasks_per_node, else one per node: Slurm starts this number, and DDP relies on it."""
    sizes = {
        (): 1,
        ("launch.nodes=4",): 4,
        ("launch.nodes=2", "launch.tasks_per_node=4"): 8,
        ("launch.nodes=2", "launch.gpus_per_node=8"): 16,
        ("launch.nodes=2-4", "launch.tasks_per_node=8", "train.batch_size=96"): 16,
    }
    for words, size in sizes.items():
        assert Config.load(None, words).launch.world_size == size


def test_nodes_are_a_number_or_a_range() -> None:
    """A single number stays an int, as programs expect; a range survives saving and loading."""
    assert Config.load(None, ["launch.nodes=2"]).launch.nodes == 2
    config = Config.load(None, ["launch.nodes=1-4", "train.batch_size=48"])
    assert config.launch.nodes == "1-4" and list(config.launch.world_sizes) == [1, 2, 3, 4]
    assert load(config.to_yaml()) == config


def test_a_site_is_overridden(tmp_path: Path) -> None:
    """A lab sets its partition and modules once; the configuration file and the user's words override them."""
    site, training = tmp_path / "lab.yaml", tmp_path / "training.yaml"
    site.write_text("launch: {partition: gpu, cpus_per_task: 8, setup: [module load cuda], root: /scratch/runs}\n")
    training.write_text("launch: {cpus_per_task: 4}\n")
    launch = Config.load(training, ["launch.root=here"], site).launch
    assert (launch.partition, launch.cpus_per_task, launch.setup) == ("gpu", 4, ["module load cuda"])
    assert launch.root == "here"
    with pytest.raises(
        ConfigError, match=r"--site exmple: no such file, and no site profile of that name; did you mean"
    ):
        Config.load(None, [], "exmple")


def test_the_example_of_a_site_changes_nothing() -> None:
    """The example is there to be copied. Using it as it is gives the defaults."""
    assert Config.load("mnist", [], "example") == Config.load("mnist")
