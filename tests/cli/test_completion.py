"""The Tab key, in a real bash and a real zsh on a terminal, checked by the line that the user then sees."""

from __future__ import annotations

import contextlib
import os
import select
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from laststep.runs.run_folders import PROJECT
from tests.support.needs import require_program
from tests.support.project import DEADLINE_S

ALL, SHOW, CLEAR = "\x0f", "\x14", "\x15"  # Ctrl-O inserts all candidates, Ctrl-T writes the line to a file
KEYS = {
    "bash": r"""
bind '"\C-o": insert-completions'
show() { printf '%s\n' "$READLINE_LINE" >shown.tmp; mv shown.tmp shown; }
bind -x '"\C-t": show'
""",
    "zsh": r"""
autoload -Uz compinit && compinit -u
zle -C all-matches complete-word _generic
zstyle ':completion:all-matches:*' completer _all_matches _complete
zstyle ':completion:all-matches:*' insert yes
show() { print -r -- $BUFFER >shown.tmp; mv shown.tmp shown }
zle -N show
bindkey -e
bindkey '^O' all-matches
bindkey '^T' show
""",
}
SOURCE = f"source <({sys.executable} {PROJECT / 'launch.py'} completion {{shell}})\n"
# The script that pip puts into an environment's bin/, here for a clone that is not installed.
LASTSTEP = f"""#!{sys.executable}
import sys
sys.path.insert(0, {str(PROJECT)!r})
from laststep import main
sys.exit(main())
"""


class Shell:
    """An interactive shell on a terminal of its own."""

    def __init__(self, shell: str, home: Path, rc: str) -> None:
        self._home = home
        (home / ".bashrc").write_text(rc)
        (home / ".zshrc").write_text(rc)
        env = {
            "PATH": f"{home / 'bin'}:{os.environ['PATH']}",
            "HOME": str(home),
            "ZDOTDIR": str(home),
            "TERM": "vt100",
            "INPUTRC": "/dev/null",
        }
        self._screen, terminal = os.openpty()
        self._process = subprocess.Popen(
            [shell, "-i"], cwd=home, env=env, stdin=terminal, stdout=terminal, stderr=terminal, start_new_session=True
        )
        os.close(terminal)

    def line_after(self, *typed: str) -> str:
        """The line, with the cursor at its end, once these keys have been pressed on an empty one."""
        shown = self._home / "shown"
        os.write(self._screen, "".join([CLEAR, *typed, SHOW]).encode())
        deadline, seen = time.monotonic() + DEADLINE_S, b""
        while not shown.exists():
            assert time.monotonic() < deadline, f"no answer; the terminal shows {seen!r}"
            if select.select([self._screen], [], [], 0.02)[0]:
                seen += os.read(self._screen, 65536)
        line = shown.read_text().removesuffix("\n")
        shown.unlink()
        return line

    def close(self) -> None:
        """End it."""
        self._process.kill()
        self._process.wait()
        os.close(self._screen)


@pytest.fixture(scope="module", params=["bash", "zsh"])
def name(request: pytest.FixtureRequest) -> str:
    require_program(request.param, f"apt-get install {request.param}")
    return str(request.param)


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with Laststep's launch.py in it, some runs, and some files of the user's."""
    folder = tmp_path_factory.mktemp("home")
    (folder / "launch.py").symlink_to(PROJECT / "launch.py")
    script = folder / "bin" / "laststep"
    script.parent.mkdir()
    script.write_text(LASTSTEP)
    script.chmod(0o755)
    for run in ("runs/first", "runs/second", "elsewhere/other"):
        (folder / run).mkdir(parents=True)
        (folder / run / "config.yaml").write_text("{}\n")
    for file in ("mine.yaml", "other.py", "data.txt"):
        (folder / file).write_text("")
    return folder


@pytest.fixture(scope="module")
def shell(name: str, home: Path) -> Iterator[Shell]:
    with contextlib.closing(Shell(name, home, KEYS[name] + SOURCE.format(shell=name))) as started:
        yield started


@pytest.mark.parametrize(
    ("typed", "becomes"),
    [
        ("python launch.py lo", "python launch.py logs "),
        ("python3 launch.py --dry", "python3 launch.py --dry-run "),
        ("./launch.py sweep --para", "./launch.py sweep --parallel "),
        ("~/launch.py drill fi", "~/launch.py drill first "),
        ("laststep lo", "laststep logs "),
        ("bin/laststep logs fi", "bin/laststep logs first "),
        ("laststep --config=cif", "laststep --config=cifar10 "),
        ("python launch.py logs launch.root=elsewhere -f ot", "python launch.py logs launch.root=elsewhere -f other "),
        ("python launch.py resume first --nodes 2 launch.no", "python launch.py resume first --nodes 2 launch.nodes="),
        ("python launch.py report first sec", "python launch.py report first second "),
        ("python launch.py --config cif", "python launch.py --config cifar10 "),
        ("python launch.py --config=cif", "python launch.py --config=cifar10 "),
        ("python launch.py --site exa", "python launch.py --site example "),
        ("python launch.py opt", "python launch.py optim."),
        ("python launch.py optim.l", "python launch.py optim.lr="),
        ("python launch.py seed=1 launch.env", "python launch.py seed=1 launch.env."),
        ("python launch.py train.precision=b", "python launch.py train.precision=bf16 "),
        ("python launch.py train.compile=t", "python launch.py train.compile=true "),
        ("python launch.py optim.lr=", "python launch.py optim.lr="),
        ("python launch.py logs first sec", "python launch.py logs first sec"),
        ("python launch.py completion z", "python launch.py completion zsh "),
        # Where a path fits, and no name does.
        ("python launch.py --config mi", "python launch.py --config mine.yaml "),
        ("python launch.py report first -o da", "python launch.py report first -o data.txt "),
        ("python launch.py launch.root=else", "python launch.py launch.root=elsewhere/"),
        ("python launch.py verify ./run", "python launch.py verify ./runs/"),
        # What is not Laststep's.
        ("python la", "python launch.py "),
        ("python other.py da", "python other.py data.txt "),
    ],
)
def test_one_fits(shell: Shell, typed: str, becomes: str) -> None:
    """The Tab key completes the word: with a space if it is complete, without one if more follows."""
    assert shell.line_after(typed, "\t") == becomes


@pytest.mark.parametrize(
    ("typed", "candidates"),
    [
        ("python launch.py train.precision=", "fp32 tf32 bf16 fp16"),
        ("python launch.py --config ", "mnist cifar10 imagenet classics gpt2-124m llama-1b llama-8b"),
        ("python launch.py logs ", "first second launch.root="),
        ("python launch.py status first ", "first second launch.root="),
        ("python launch.py cancel --", "--help --sweep"),
        ("python launch.py optim.w", "optim.weight_decay= optim.warmup_steps="),
        ("python launch.py completion ", "bash zsh"),
        ("python launch.py status --state lost,s", "lost,starting lost,stopping lost,stopped"),
        ("python launch.py d", "delete diff disk doctor drill device= data."),
    ],
)
def test_several_fit(shell: Shell, typed: str, candidates: str) -> None:
    """All that the verb accepts in this place, and nothing else."""
    before, _, _ = typed.rpartition(" ")
    inserted = shell.line_after(typed, ALL).removeprefix(before).split()
    # bash replaces what stands behind the =, zsh the whole word.
    assert sorted(word.rpartition("=")[2] or word for word in inserted) == sorted(candidates.split())


OWN = {  # how else the words of python may be completed: by whom -> (what an rc file has of it, what it makes of `x`)
    "bash function": ("_own() { COMPREPLY=(own-$2); }; complete -o nospace -F _own python", "own-x"),
    "bash words": ("complete -W 'xx yy' python", "xx "),
    "bash loader": ("_load() { complete -W 'xx yy' python python3; return 124; }; complete -D -F _load", "xx "),
    "zsh function": ("_own() { compadd -U -S '' own-$PREFIX }; compdef _own python", "own-x"),
    "zsh pattern": ("_own() { compadd -U -S '' own-$PREFIX }; compdef -P _own 'python*'", "own-x"),
}


@pytest.mark.parametrize("whose", OWN)
def test_others_go_on(whose: str, home: Path) -> None:
    """The earlier completion of `python other.py` keeps working, also after ~/.bashrc was read again."""
    name = whose.split()[0]
    require_program(name, f"apt-get install {name}")
    own, becomes = OWN[whose]
    rc = "\n".join([KEYS[name], own, 2 * SOURCE.format(shell=name)])
    with contextlib.closing(Shell(name, home, rc)) as shell:
        for _ in range(2):
            assert shell.line_after("python other.py x\t") == f"python other.py {becomes}"
            for python in ("python", "python3"):
                assert shell.line_after(f"{python} launch.py logs fi\t") == f"{python} launch.py logs first "


def test_starts_no_other_program(shell: Shell, home: Path) -> None:
    """Other projects have a program of that name too, which may do harm as soon as it is started."""
    folder = home / "theirs"
    folder.mkdir(exist_ok=True)
    for name in ("launch.py", "laststep"):
        program = folder / name
        program.write_text("#!/bin/sh\ntouch started\n")
        program.chmod(0o755)
    for command in ("python theirs/launch.py", "theirs/launch.py", "theirs/laststep"):
        assert shell.line_after(f"{command} da\t") == f"{command} data.txt "
    assert not (home / "started").exists()


def test_answers_at_once(home: Path) -> None:
    """Each Tab starts the command: importing torch or submitit would freeze the shell."""
    code = (
        "import sys\n"
        "from laststep.cli.main import main\n"
        "main(['__complete', ' logs '])\n"
        "main(['__complete', ' model.name=resnet18'])\n"
        "print({name.split('.')[0] for name in sys.modules} & {'torch', 'torchvision', 'submitit', 'rich'})\n"
    )
    env = {**os.environ, "PYTHONPATH": str(PROJECT)}
    done = subprocess.run([sys.executable, "-c", code], cwd=home, env=env, capture_output=True, text=True)
    assert done.stderr == ""
    assert done.stdout.splitlines() == ["first", "second", "launch.root=", "model.name=resnet18", "set()"]
