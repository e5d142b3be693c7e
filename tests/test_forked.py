"""The stand-in for `python` behaves as Python does: otherwise tests that use it would prove nothing."""

from __future__ import annotations

import json
import os
import resource
import signal
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import pytest

from tests.support.forked import forked_python
from tests.support.forked.server import Server
from tests.support.needs import require_root
from tests.support.project import DEADLINE_S, read_until, wait_until

LOOK = """
import json, os, random, resource, signal, socket, sys, tempfile, time
mask = lambda numbers: sorted(map(int, numbers))
print(json.dumps({
    "words": sys.argv, "path": sys.path, "name": __name__, "folder": os.getcwd(), "environment": dict(os.environ),
    "umask": os.umask(0), "files": resource.getrlimit(resource.RLIMIT_NOFILE), "cores": mask(os.sched_getaffinity(0)),
    "blocked": mask(signal.pthread_sigmask(signal.SIG_BLOCK, ())), "read": sys.stdin.read(), "zone": time.tzname,
    "handlers": {int(number): str(signal.getsignal(number)).split(" at ")[0] for number in signal.valid_signals()},
    "streams": [[s.fileno(), s.encoding, s.errors, s.line_buffering, s.write_through]
                for s in (sys.stdin, sys.stdout, sys.stderr)],
    "network": os.readlink("/proc/self/ns/net"), "host": socket.gethostname(), "temporary": tempfile.gettempdir(),
}))
print(sys.executable, random.random(), file=sys.stderr)
"""


@pytest.fixture(scope="module")
def python() -> str:
    forked = forked_python()
    if forked == sys.executable:
        pytest.skip("no C compiler, so every test starts Python itself")
    return forked


def ends(*words: str, **more: Any) -> subprocess.CompletedProcess[str]:
    """Run a command to its end."""
    return subprocess.run(words, capture_output=True, text=True, timeout=DEADLINE_S, **more)


def limited() -> None:
    """What a process may inherit from the one that starts it."""
    resource.setrlimit(resource.RLIMIT_NOFILE, (100, 200))
    signal.signal(signal.SIGHUP, signal.SIG_IGN)
    signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGUSR1])
    os.sched_setaffinity(0, [min(os.sched_getaffinity(0))])


@pytest.mark.parametrize("start", [["-m", "look"], ["look.py"], ["-u", "look.py"], ["-c", LOOK]], ids=lambda s: s[0])
def test_a_process_finds_what_it_would_find(python: str, start: list[str], tmp_path: Path) -> None:
    """A path, a variable or an open file of the server's would make a test pass, or fail, for a wrong reason."""
    (tmp_path / "look.py").write_text(LOOK)
    usual = {key: value for key, value in os.environ.items() if not key.startswith("PYTHON")}
    env = {**usual, "PYTHONPATH": f"{tmp_path}:relative", "TMPDIR": str(tmp_path), "TZ": "UTC+3", "EMPTY": ""}
    more: dict[str, Any] = {"cwd": tmp_path, "env": env, "umask": 0o27, "input": "said", "preexec_fn": limited}
    forked, real = (ends(word, *start, "a word", "--option", **more) for word in (python, sys.executable))
    assert (forked.returncode, real.returncode) == (0, 0), forked.stderr
    assert json.loads(forked.stdout) == json.loads(real.stdout)
    assert forked.stderr.split()[0] == python, "it starts others of its kind"
    assert forked.stderr != ends(python, *start, "a word", **more).stderr, "no two processes draw the same numbers"


def test_it_enters_the_network_of_its_host(python: str) -> None:
    """Tests simulate hosts by namespaces: a rank must be on the host where it was started."""
    require_root("it makes a network namespace")
    look = "import os, socket; print(os.readlink('/proc/self/ns/net'), socket.gethostname())"
    inside = ends("unshare", "--net", "--uts", "sh", "-c", f'hostname elsewhere; {python} -c "{look}"').stdout.split()
    assert inside[1] == "elsewhere" and inside[0] != os.readlink("/proc/self/ns/net")


@pytest.mark.parametrize(
    "code",
    [
        "pass",
        "import sys; print('partial', end=''); sys.exit(7)",
        "import sys; sys.exit('a reason')",
        "raise ValueError('wrong')",
        "raise KeyboardInterrupt",
        "import os; os.kill(os.getpid(), 9)",
        "import os; os.abort()",
        "import os, signal; os.kill(os.getpid(), signal.SIGTERM)",
        "import atexit; atexit.register(print, 'at exit')",
        "import threading, time; threading.Thread(target=lambda: (time.sleep(0.2), print('late'))).start()",
    ],
)
def test_it_ends_as_the_process_did(python: str, code: str) -> None:
    """By the same status or signal, with the same output."""
    forked, real = (ends(word, "-c", code) for word in (python, sys.executable))
    assert (forked.returncode, forked.stdout) == (real.returncode, real.stdout)
    assert forked.stderr.splitlines()[-1:] == real.stderr.splitlines()[-1:]


def test_torch_is_loaded_and_the_project_is_not(python: str, tmp_path: Path) -> None:
    """The project's code is that of the process's own PYTHONPATH: a rank runs the copy that was made at submission."""
    (tmp_path / "laststep.py").write_text("print('my own')")
    code = "import sys; print('torch' in sys.modules); import laststep, torch; print(torch.get_num_threads())"
    env = {**os.environ, "PYTHONPATH": str(tmp_path)}
    assert ends(python, "-c", code, cwd=tmp_path, env=env).stdout.split("\n")[:3] == ["True", "my own", "1"]


def test_it_is_found_on_the_path(python: str) -> None:
    """What it starts as sys.executable must be the program that was typed."""
    env = {**os.environ, "PATH": f"{Path(python).parent}:{os.environ['PATH']}"}
    assert ends("python", "-c", "import sys; print(sys.executable)", env=env).stdout.strip() == python


@pytest.mark.parametrize("early", [{"PYTHONHASHSEED": "0"}, {"LD_PRELOAD": ""}, {"OMP_NUM_THREADS": "2"}])
def test_what_is_read_early_starts_python_itself(python: str, early: dict[str, str]) -> None:
    code = "import sys; print(sys.executable, 'torch' in sys.modules)"
    assert ends(python, "-c", code, env={**os.environ, **early}).stdout.split() == [sys.executable, "False"]
    assert ends(python, "-X", "dev", "-c", code).stdout.split()[0] == sys.executable


REPORT = """
import signal, subprocess, sys
for number in map(int, sys.argv[1:]):
    signal.signal(number, lambda number, _: print("got", number, flush=True))
worker = subprocess.Popen(["sleep", "1000"])
print("ready", signal.sigpending() and "blocked", worker.pid, flush=True)
while True:
    signal.pause()
"""


def begins(python: str, *numbers: signal.Signals) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [python, "-u", "-c", REPORT, *(str(int(number)) for number in numbers)], stdout=subprocess.PIPE, text=True
    )


def test_signals_are_passed_on(python: str) -> None:
    """Slurm and users signal the process that they started."""
    numbers = [signal.SIGTERM, signal.SIGINT, signal.SIGUSR1, signal.SIGUSR2, signal.SIGHUP, signal.SIGCONT]
    with begins(python, *numbers) as client:
        worker = int(read_until(client, "ready").split()[-1])
        for number in numbers:
            client.send_signal(number)
            assert read_until(client, "got").split()[-1] == str(int(number))
        client.send_signal(signal.SIGALRM)
        assert client.wait(DEADLINE_S) == -signal.SIGALRM, "without a handler it kills"
    os.kill(worker, signal.SIGKILL)


def test_a_signal_before_there_is_a_process(python: str) -> None:
    """It must not be lost, and neither may the mask with which a launcher holds it back."""
    before = signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGTERM])
    try:
        client = begins(python)
        client.send_signal(signal.SIGTERM)
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
    with client:
        assert "blocked" in read_until(client, "ready")
        client.kill()
    with subprocess.Popen([python, "-c", "import signal; signal.pause()"]) as pausing:
        pausing.send_signal(signal.SIGTERM)
        assert pausing.wait(DEADLINE_S) == -signal.SIGTERM


def test_a_killed_client(python: str) -> None:
    """Its process dies with it, and what that has started: Slurm kills them all."""
    with begins(python) as client:
        worker = Path("/proc", read_until(client, "ready").split()[-1])
        process = Path("/proc", (worker / "stat").read_text().rpartition(")")[2].split()[1])
        client.kill()
    assert process.name != str(client.pid)
    wait_until(lambda: not alive(process) and not alive(worker), "the process outlived its client")


def alive(place: Path) -> bool:
    """Whether a process runs; one that nobody has waited for does not."""
    try:
        return (place / "stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def test_the_server_ends_with_the_tests(tmp_path: Path) -> None:
    with subprocess.Popen(["sleep", "1000"]) as owner:
        server = threading.Thread(target=Server(str(tmp_path / "socket"), owner.pid).serve, daemon=True)
        server.start()
        owner.kill()
        server.join(DEADLINE_S)
        assert not server.is_alive()
