"""Ranks on this machine: --local and --debug, `submit(config, local=True)` from a program or a notebook, and
`python -m laststep --spawn N`.

The processes of --local learn their ranks from the variables that submitit's local executor would set, those of --spawn
from variables of our own (laststep/ranks/launchers.py, SPAWN).
"""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from laststep import rooms, say
from laststep.attempt import user_error
from laststep.checkpoint.files import Patience
from laststep.checkpoint.store import START_S, newest_step
from laststep.code import code_copy
from laststep.config.config import Config
from laststep.config.errors import ConfigError
from laststep.config.schema import COMMAND
from laststep.ranks.fault import ONE_LINE
from laststep.ranks.launchers import RESTARTS, STEP_RESTARTS, detect_world
from laststep.ranks.process import STOP_SIGNALS, SUPERVISED, die_with_parent, next_signal, session, started
from laststep.ranks.slurm import SlurmError, own_nodes
from laststep.records.attempt_record import in_one_line, read_ended_attempts
from laststep.records.attempts import ended_attempts, read_answer, record_abandoned_attempts
from laststep.records.metrics import is_step, last_lines
from laststep.records.retry import Next, decide
from laststep.rundir import RunDir
from laststep.runs import run_folders
from laststep.runs.run_logs import LiveLog, print_cause
from laststep.submission import allocation
from laststep.trainer import Trainer

POLL_S = 0.05
FORK_S = 60.0  # how long the start of a rank waits for a process, where the kernel has none to give
REAP_S = 1.0  # within which a supervisor has reaped a rank that was killed
# After one rank has ended, the others have this long to notice, to save their state and to exit.
GRACE_S = 60.0
REFUSED_S = 5.0  # instead of GRACE_S after a rank has refused the configuration: nothing has started then


class LocalRanks:
    """The ranks of a run on this machine, each with its supervisor, which starts it again after a fault.

    Where no rank is left to record the end, this does what the batch shell does in a job: it records the end, and
    starts the supervisors again. The ranks write their logs themselves. In `laststep shell` they are on its nodes: one
    srun starts all supervisors, and scancel signals them.
    """

    def __init__(self, config: Config, run: RunDir) -> None:
        self._config, self._run = config, run
        self.job_id = f"local-{time.strftime('%Y%m%d-%H%M%S')}-{os.getpid()}"
        self.logs = [run.logs / f"{self.job_id}_{rank}_log.out" for rank in range(config.launch.world_size)]
        self._ranks: list[subprocess.Popen[bytes]] = []  # their supervisors, which end as they do
        self._ended, self._ended_at = 0, 0.0
        self._restarts = 0
        self._signalled = False
        self._incomplete = False  # whether some of them could not be started
        self._nodes = own_nodes()  # then one srun starts all of them there
        self._starting = threading.Lock()  # a signal is for the ranks before a restart, or for those after it

    def start(self) -> None:
        """Start them; the thread that does so, and calls `alive`, must outlive them, see `die_with_parent`."""
        commit = code_copy.look_up(self._config, self._folder).commit
        run_folders.record_submission(self._run, self.job_id, commit=commit)
        self._start()

    @property
    def _folder(self) -> Path:
        return run_folders.working_folder(self._run)

    def _start(self) -> None:
        self._ranks = []  # filled one by one: a signal whose handler raises must not lose those that have started
        try:
            self._start_supervisors()
        except OSError as error:
            self._incomplete = True
            _send(self._ranks, signal.SIGKILL)  # they would wait for the others
            _say(f"rank {len(self._ranks)} could not be started: {error.strerror or error}")

    def _start_supervisors(self) -> None:
        """Start the supervisor of each rank in a session of its own, so that it gets a terminal's Ctrl-C once.

        The signals that ask for a stop stay blocked in the ranks until Signals.catch: an earlier one would kill the
        rank.
        """
        launch, folder = self._config.launch, self._folder
        common = {
            **os.environ,
            "PYTHONPATH": code_copy.live_python_path(folder),
            say.COMMAND: say.command(),
            **launch.env,
            "SUBMITIT_EXECUTOR": "local",
            "SUBMITIT_LOCAL_JOB_ID": self.job_id,
            "SUBMITIT_LOCAL_NTASKS": str(launch.world_size),
            "SUBMITIT_LOCAL_JOB_NUM_NODES": str(launch.node_counts[0] if self._nodes else 1),
            "SUBMITIT_LOCAL_NODEID": "0",
            RESTARTS: str(self._restarts),
        }
        common.pop(STEP_RESTARTS, None)  # of a rank that starts a run itself
        # By its path: with `-m laststep`, a module of that name in the current folder would be started instead.
        command = [sys.executable, "-u", str(run_folders.PROJECT / "laststep"), SUPERVISED, str(self._run.path)]
        if self._nodes:
            words = allocation.srun(launch, self._run, self.job_id, folder, command)
            return self._ranks.append(_process(words, folder, common, self.logs[0]))
        unblocked = signal.pthread_sigmask(signal.SIG_BLOCK, STOP_SIGNALS)
        try:
            for rank, log in enumerate(self.logs):
                environment = {**common, "SUBMITIT_LOCAL_GLOBALID": str(rank), "SUBMITIT_LOCAL_LOCALID": str(rank)}
                self._ranks.append(_process(command, folder, environment, log))
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, unblocked)

    def alive(self) -> bool:
        """Whether any of them is; kills those that outlive the others for too long, and starts all again after a
        fault."""
        return self._runs() or self._start_again()

    def _runs(self) -> bool:
        ended = sum(rank.poll() is not None for rank in self._ranks)
        if ended != self._ended:
            self._ended, self._ended_at = ended, time.monotonic()
        grace_s = REFUSED_S if any(rank.returncode == 2 for rank in self._ranks) else GRACE_S
        if ended and time.monotonic() > self._ended_at + grace_s:
            _send(self._ranks, signal.SIGKILL)
        return ended < len(self._ranks)

    def _start_again(self) -> bool:
        """Start all ranks again if that is to follow the end of their attempt; returns whether it is."""
        with self._starting:
            if self._signalled or self.status() != 1 or not self._is_restart_next():
                return False
            self._restarts += 1
            _say("restarting the ranks after a fault; press Ctrl-C to stop")
            self._start()
        return True

    def _is_restart_next(self) -> bool:
        """Whether the retry policy has the ranks start again after their last attempt; records that one if it was
        lost."""

        def kept_step() -> int:
            return newest_step(self._run, _say)

        patience = Patience(START_S, _say)
        ended = patience.insist(lambda: ended_attempts(self._run, kept_step))
        of_job = [record for record in ended if record["job_id"] == self.job_id]
        answer = read_answer(self._run.step_restart)
        in_place = answer.starts if answer and answer.job_id == self.job_id else 0
        if len(of_job) <= self._restarts + in_place:  # these ranks have ended before their attempt began
            return False
        follows = decide(ended, self._config.launch, local=True).what is Next.RESTART
        continued = self.job_id if follows else None
        patience.insist(lambda: record_abandoned_attempts(self._run, kept_step, continued_job=continued))
        return follows

    def record_killed(self) -> None:
        """Record the attempt that `send` has ended with SIGKILL, if it had begun."""
        with contextlib.suppress(OSError):  # then the next attempt records it
            record_abandoned_attempts(self._run, lambda: newest_step(self._run, _say))

    def send(self, number: signal.Signals) -> None:
        """Signal each of them that is alive; they do not start again after that."""
        with self._starting:
            self._signalled = True
            if self._nodes:
                return self._send_to_nodes(number)
            _send(self._ranks, number)

    def _send_to_nodes(self, number: signal.Signals) -> None:
        """Stop all ranks that srun has started, or kill them. For them SIGTERM is Slurm's: it ends the allocation."""
        try:
            steps = allocation.signal_steps(self.job_id, number)
        except SlurmError as error:
            return _say(f"not signalled: {error}; press Ctrl-C again")
        if not steps or number == signal.SIGKILL:  # srun waits for its ranks to begin, or to be gone
            _send(self._ranks, signal.SIGTERM)

    def codes(self) -> list[int]:
        """Their exit statuses, once they have ended."""
        return [_exit_status(rank.returncode) if self._nodes else rank.returncode for rank in self._ranks]

    def status(self) -> int:
        """The attempt's exit status: a refused configuration (2) wins over the failures that followed from it."""
        codes = self.codes()
        if self._incomplete:
            return 1
        if 2 in codes:
            return 2
        return 1 if any(map(_failed, codes)) else max(codes)

    def refusal(self) -> str:
        """What the ranks that refused the configuration have printed."""
        lines = [line for log in self.logs for line in log.read_text(errors="replace").splitlines()]
        return next((line.removeprefix("error: ") for line in lines if line.startswith("error: ")), "refused")


class LocalJob:
    """The ranks of a run on this machine. They train in the background; a program that ends waits for them first."""

    def __init__(self, config: Config, run: RunDir) -> None:
        self.run = run
        self._ranks = LocalRanks(config, run)
        # A thread of its own, because ranks stop when the thread that started them ends. Python waits for it at exit.
        with_one_thread = ThreadPoolExecutor(1, thread_name_prefix="ranks")
        self._end = with_one_thread.submit(self._train)
        with_one_thread.shutdown(wait=False)

    @property
    def job_id(self) -> str:
        """The id of this start, as in submissions.jsonl and in the names of the logs."""
        return self._ranks.job_id

    def done(self) -> bool:
        """Whether the ranks have ended."""
        return self._end.done()

    def cancel(self) -> None:
        """Ask the ranks to stop after the present step and to save it; `python launch.py resume` continues the run."""
        self._ranks.send(signal.SIGINT)

    def result(self) -> dict[str, float]:
        """Print rank 0's log until the run ends; returns the metrics of the last epoch.

        An interrupt (Ctrl-C, or a notebook's stop button) stops the ranks, which save their last step; a second one
        kills them. Raises ConfigError when the ranks refuse the configuration, RuntimeError when the run did not
        finish.
        """
        try:
            self._follow()
        except KeyboardInterrupt:
            self.cancel()
            try:
                self._follow()
            except KeyboardInterrupt:
                self._ranks.send(signal.SIGKILL)
            raise
        return self._end.result()

    def _follow(self) -> None:
        with LiveLog(self.run, self._ranks.logs[0]) as log:
            while not self._end.done():
                log.update()
                time.sleep(POLL_S)
            log.update()

    def _train(self) -> dict[str, float]:
        self._ranks.start()
        while self._ranks.alive():
            time.sleep(POLL_S)
        status = self._ranks.status()
        rooms.look_on(self.run)
        if status == 2:
            refusal = self._ranks.refusal()
            if not self.run.checkpoints.exists():
                run_folders.remove(self.run)
            raise ConfigError(refusal)
        if status:
            how = "stopped" if status > 128 else "failed"
            ended = [one for one in read_ended_attempts(self.run.attempts)[-1:] if one["job_id"] == self.job_id]
            why = f": {in_one_line(ended[0]['error'])}" if ended and ended[0]["error"] else ""
            raise RuntimeError(f"{self.run.name} {how} before its end{why}; the ranks' logs are in {self.run.logs}")
        return next((line for line in reversed(last_lines(self.run.metrics)) if not is_step(line)), {})


def run_local(config: Config, run: RunDir) -> int:
    """Run all ranks here, with rank 0's output on the terminal and each rank's in `logs/`; returns the exit status.

    Ctrl-C, SIGTERM, SIGUSR2 and a closed terminal are forwarded to the ranks as a stop; a second Ctrl-C kills them.
    """
    ranks = LocalRanks(config, run)
    with _forwarded_signals() as received, LiveLog(run, ranks.logs[0]) as log:
        ranks.start()
        sent = 0
        while ranks.alive():
            log.update()
            if len(received) > sent:
                sent = len(received)
                kill = received.count(signal.SIGINT) > 1
                ranks.send(signal.SIGKILL if kill else received[-1])
                when = "" if config.task == COMMAND else " after this step"
                _say("killed" if kill else f"stopping{when}; press Ctrl-C again to kill")
            time.sleep(POLL_S)
        log.update()
        error = log.take_error() if ranks.status() == 1 else ""
    if received.count(signal.SIGINT) > 1:
        ranks.record_killed()
        return 130
    rooms.look_on(run)
    status = ranks.status()
    if status in (1, 2):
        _show_failure(ranks.codes(), ranks.logs)
    if status == 1:
        print_cause(run, local=True, in_log=error)
    return status


def train_here(config: Config, run: RunDir) -> str | None:
    """Train one attempt here, without a word; returns why its ranks refused, if they did. Leaves no process behind."""
    ranks = LocalRanks(config, run)
    try:
        ranks.start()
        while ranks.alive():
            time.sleep(POLL_S)
    finally:
        ranks.send(signal.SIGKILL)
        while ranks.alive():
            time.sleep(POLL_S)
    return ranks.refusal() if ranks.status() == 2 else None


def run_debug(config: Config) -> int:
    """Run one rank in this process; an error opens the post-mortem debugger where it was raised. Returns the exit
    status."""
    run = run_folders.folder_of(config)
    folder = run_folders.working_folder(run)
    run_folders.record_submission(run, detect_world().job_id)
    os.chdir(folder)
    sys.path.append(str(folder))
    user_error.main_is_ours = user_error.is_debugged = True
    try:
        Trainer(config)()
    except ONE_LINE:
        raise
    except SystemExit as leaving:  # stopped by a signal
        return leaving.code if isinstance(leaving.code, int) else 1
    except Exception as error:
        import pdb  # here, because it would slow down every other command

        sys.excepthook(type(error), error, error.__traceback__)  # unless it is in the log above already
        signal.signal(signal.SIGINT, signal.default_int_handler)  # Ctrl-C belongs to the debugger from here on
        pdb.post_mortem()
        return 1
    return 0


def _exit_status(code: int) -> int:
    """The exit status of srun as that of the rank: negative for one that a signal killed. Those of a stop stay."""
    return 128 - code if code > 128 and code - 128 not in STOP_SIGNALS else code


def _process(command: list[str], folder: Path, environment: dict[str, str], log: Path) -> subprocess.Popen[bytes]:
    """Start a process in a session of its own, with its output in a log. Raises OSError."""
    how: dict[str, Any] = {"cwd": folder, "env": environment, "start_new_session": True, "stdin": subprocess.DEVNULL}
    with log.open("ab") as output:
        return started(lambda: subprocess.Popen(command, stdout=output, stderr=output, **how), FORK_S)


@contextlib.contextmanager
def _forwarded_signals() -> Iterator[list[signal.Signals]]:
    """Collect the signals that ask for a stop instead of dying of them. Ignored ones (nohup) stay ignored."""
    received: list[signal.Signals] = []
    numbers = (signal.SIGINT, signal.SIGTERM, signal.SIGUSR2, signal.SIGHUP)
    before = {n: handler for n in numbers if (handler := signal.getsignal(n)) is not signal.SIG_IGN}
    for number in before:
        stop = signal.SIGTERM if number == signal.SIGHUP else number
        signal.signal(number, lambda _n, _f, stop=stop: received.append(stop))  # type: ignore[misc]
    try:
        yield received
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _send(ranks: list[subprocess.Popen[bytes]], number: signal.Signals) -> None:
    """Signal every living rank; SIGKILL goes to all that it has started, too."""
    alive = [rank for rank in ranks if rank.poll() is None]
    if number == signal.SIGKILL:
        # The supervisors last: they reap their ranks.
        for pid in [pid for rank in alive for pid in session(rank.pid)]:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, number)
        deadline = time.monotonic() + REAP_S
        while any(session(rank.pid) for rank in alive) and time.monotonic() < deadline:
            time.sleep(POLL_S)
    for rank in alive:
        rank.send_signal(number)


def _failed(code: int | None) -> bool:
    """Not running, not done, not stopped."""
    return code is not None and (code < 0 or 0 < code <= 128)


def _show_failure(codes: Sequence[int], logs: Sequence[Path]) -> None:
    """Print the ends of the failed ranks' logs, unless rank 0 failed too: its log is on the terminal already."""
    for rank, code in enumerate(codes):
        if rank and code and not codes[0]:
            print(logs[rank].read_text(errors="replace")[-4000:], file=sys.stderr)
        if code < 0:
            _say(f"rank {rank} was killed by {signal.Signals(-code).name}")
    if 2 not in codes:  # else the one line about the configuration is enough
        _say(f"failed; the ranks' logs are in {logs[0].parent}")


def _say(text: str) -> None:
    with contextlib.suppress(OSError):  # the terminal may be gone
        say.note(f"[laststep] {text}")


def spawn(ranks: int, work: Callable[[], int]) -> int:
    """Call `work` in this many processes, each with its rank in the environment, see `SPAWN` in
    laststep.ranks.launchers. Returns in each of them what `work` returns.

    Signals that ask for a stop are forwarded. Returns 0, or the exit status of the first rank that failed. Raises the
    ConfigError that `work` raised.
    """
    if ranks < 1:
        raise ConfigError(f"--spawn {ranks}: must be at least 1")
    job = f"{time.strftime('%Y%m%d-%H%M%S')}-{os.getpid()}"
    refusals, refuse = os.pipe()
    os.set_blocking(refusals, False)
    held = (*STOP_SIGNALS, signal.SIGCHLD)
    before = signal.pthread_sigmask(signal.SIG_BLOCK, held)  # in the ranks until Signals.catch
    alive: list[int] = []
    for rank in range(ranks):
        say.flush_output()
        pid = started(os.fork, FORK_S)
        if not pid:
            os.environ |= {"LASTSTEP_RANK": str(rank), "LASTSTEP_WORLD_SIZE": str(ranks), "LASTSTEP_JOB": job}
            die_with_parent(signal.SIGINT)
            signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGCHLD})
            try:
                return work()
            except ConfigError as error:
                os.write(refuse, str(error).encode())  # one process is to print it
                raise SystemExit(2) from None
        alive.append(pid)
    os.close(refuse)
    first, kill_at = 0, float("inf")
    while alive:
        number = next_signal(held, POLL_S)
        for pid in list(alive):
            ended, status = os.waitpid(pid, os.WNOHANG)
            if ended:
                alive.remove(pid)
                code = os.waitstatus_to_exitcode(status)
                first = first or (code if code >= 0 else 1)
                if code:
                    kill_at = min(kill_at, time.monotonic() + (REFUSED_S if code == 2 else GRACE_S))
            elif time.monotonic() > kill_at:
                os.kill(pid, signal.SIGKILL)
            elif number is not None and number != signal.SIGCHLD:
                os.kill(pid, number)
    signal.pthread_sigmask(signal.SIG_SETMASK, before)
    with contextlib.suppress(BlockingIOError):  # none, and something that a rank has started lives
        if refusal := os.read(refusals, 1 << 16).decode():
            raise ConfigError(refusal)
    return first
