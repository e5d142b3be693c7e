"""Running Slurm's commands, and reading what they print."""

from __future__ import annotations

import contextlib
import json
import os
import re
import subprocess
import time
import uuid
from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple, TypeVar

from laststep.ranks.process import started

DEFAULT_KILL_WAIT_S = 30  # seconds from SIGTERM to SIGKILL unless slurm.conf says otherwise (KillWait)
PING_S = 2.0
DEFAULT_ARRAY = 1001
ANSWER_S = 10.0
AGAIN_S = 2.0  # between two tries to get an answer
NEVER = float("inf")
Job = Mapping[str, str]  # the fields of `scontrol show job`
# Slurm's job ids begin anew after a controller lost its state. So the comment of each job that Laststep submits has a
# tag, which submissions.jsonl records, and which this variable gives to the job's own processes.
TAG = re.compile(r"\blaststep:[0-9a-f]{12}\b")
TAG_VARIABLE = "LASTSTEP_JOB_TAG"
CHAIN_VARIABLE = "LASTSTEP_CHAIN"  # in a job of a chain, see launch.chain: the tag of the first of its jobs
# Whether one is left is known at the very end of the job, which says it: laststep/submission/chain.py.
BY_CHAIN = "the next job of the chain, if one is left, continues the run"
# States of a node on which no ranks are to start. "*": it does not respond.
UNFIT = re.compile(r"DOWN|DRAIN|FAIL|NOT_RESPONDING|\*")
# The states of a job that has its nodes and that nobody has ended; Slurm shows a flag in place of RUNNING. SIGNALING
# lasts from the SIGCONT right before the SIGTERM of a preemption with GraceTime until every node has confirmed it.
UNENDED = ("RUNNING", "SIGNALING", "STOPPED", "SUSPENDED", "CONFIGURING", "RESIZING")
REPLACED = "REPLACED"  # our own JobState: this process's job id is that of another job now
# A start of a job whose end the disk refused to record is noted in the job's comment: how many there were in a row, and
# the restart count of the last. Slurm keeps it where every node can read it. The batch shell writes the same.
UNRECORDED = re.compile(r"\s*\blaststep-unrecorded:(\d+)@(\d+)\b")
# What Slurm's commands say when they cannot know whether the controller has received the request, or has carried it out
# (slurm_errno.c): it is busy, or just restarting. The batch shell reads this pattern, too.
UNANSWERED = re.compile(
    r"timed out|zero bytes|unexpected message|protocol|(send|receive) failure"
    r"|connection|unable to co(ntact|nnect)|standby",
    re.I,
)
Partition = Mapping[str, str]  # the fields of `scontrol show partition`
# `sbatch --requeue=expedite`, where the site allows it: `scontrol requeue` starts such a job again without the delay of
# 2 minutes. But a job that fails is requeued, and held, so one that is to end must first be forbidden to requeue. Until
# 25.11.2 this also befell a job that had finished (Slurm's slurmctld/job_mgr.c).
EXPEDITE = "expedite"
EXPEDITE_SINCE = (25, 11, 3)
# Prefixes of the variables from which Slurm's commands take options, such as SQUEUE_STATES or SLURM_TIME_FORMAT. The
# user has set them for other purposes: they hide jobs, and make times unreadable.
OPTION_PREFIXES = ("SLURM_", "SQUEUE_", "SCONTROL_", "SCANCEL_", "SACCT_", "SINFO_")
# These say which Slurm answers, and who asks it.
KEPT = ("SLURM_CONF", "SLURM_CONF_SERVER", "SLURM_JWT")


SHELL_WORDS = "LASTSTEP_SHELL"  # set in the shell of `laststep shell`: the launch.* words typed with it, as JSON
ON_NODES = "LASTSTEP_ON_NODES"  # set in a rank that has started there


class SlurmError(RuntimeError):
    """A Slurm command failed, is missing, or did not answer."""


class Unanswered(SlurmError):
    """Slurm has not answered, and may do so later. What it was asked to do may be done."""


class SlurmMissing(SlurmError):
    """This machine has no such Slurm command."""


class UnknownJob(SlurmError):
    """Slurm has no job with this id."""


T = TypeVar("T")


def patiently(ask: Callable[[], T], patience_s: float) -> T:
    """What `ask` returns, which is called again for this long while Slurm does not answer. Only for orders that may be
    given twice. Raises SlurmError."""
    deadline = time.monotonic() + patience_s
    while True:
        try:
            return ask()
        except Unanswered:
            if time.monotonic() > deadline:
                raise
        time.sleep(AGAIN_S)


def ask_patiently(job_id: str, patience_s: float) -> Job | None:
    """What Slurm says about the job of this process, see `show_job`; None if it does not answer for this long."""
    deadline = time.monotonic() + patience_s
    while (job := show_job(job_id)) is None and time.monotonic() < deadline and has_scontrol():
        time.sleep(AGAIN_S)
    return job


def job_start(env: Mapping[str, str]) -> float | None:
    """When this start of the job began, in Unix seconds; None where Slurm does not say (before 23.02)."""
    began = env.get("SLURM_JOB_START_TIME", "")
    return float(began) if began.isdecimal() else None


class OwnNodes(NamedTuple):
    """The nodes of a `laststep shell`."""

    job_id: str
    nodes: int
    words: list[str]  # launch.*, as typed: they hold for what is started in it


def own_nodes() -> OwnNodes | None:
    """Those of the shell in which this command is typed; None outside of one."""
    env = os.environ
    if SHELL_WORDS not in env or "SLURM_JOB_ID" not in env or "SLURM_STEP_ID" in env:
        return None
    return OwnNodes(env["SLURM_JOB_ID"], int(env.get("SLURM_JOB_NUM_NODES", "1")), json.loads(env[SHELL_WORDS]))


def new_tag() -> str:
    """A tag for the job of one submission."""
    return f"laststep:{uuid.uuid4().hex[:12]}"


def show_job(job_id: str) -> Job | None:
    """The fields of `scontrol show job` for the job of this process; None when Slurm does not answer. JobState is
    REPLACED, and the only field, when the id is that of another job now."""
    with contextlib.suppress(SlurmError):
        shown = scontrol("show", "job", "--oneliner", job_id)
        ours, found = os.environ.get(TAG_VARIABLE), TAG.search(shown)
        if ours and found and found[0] != ours:
            return {"JobState": REPLACED}
        return _fields(shown)
    return None


def show_other_job(job_id: str) -> Job:
    """The same for any job. Raises SlurmError, and UnknownJob when Slurm has no such job: it has ended minutes ago."""
    try:
        shown = scontrol("show", "job", "--oneliner", job_id)
    except SlurmError as error:
        if "Invalid job id" in str(error):
            raise UnknownJob(str(error)) from None
        raise
    return _fields(shown)


def _fields(line: str) -> dict[str, str]:
    return dict(word.split("=", 1) for word in line.split() if "=" in word)


def node_states(names: str) -> dict[str, str]:
    """The state of each of these nodes (`n[1-4]`), such as MIXED or DOWN*. Empty if Slurm does not answer."""
    with contextlib.suppress(SlurmError):
        nodes = parse_records(scontrol("show", "node", "--oneliner", names))
        return {node["NodeName"]: node["State"] for node in nodes}
    return {}


def expand_nodes(names: str) -> list[str]:
    """The single nodes of `n[1-4]`; none of an empty list. Raises SlurmError."""
    return scontrol("show", "hostnames", names).split() if names and names != "(null)" else []


def requeue_job(job_id: str) -> None:
    """Order the requeue of the job of this process, once: `insist_on_requeue` asks again. Raises
    SlurmError, also when the id is that of another job now."""
    if TAG_VARIABLE in os.environ and (show_job(job_id) or {}).get("JobState") == REPLACED:
        raise SlurmError(f"job {job_id} is another run's now")
    scontrol("requeue", job_id)


def note_unrecorded(job_id: str, restart: int, most: int) -> int | None:
    """Note in the comment of this process's job that nothing could be recorded of this start, its `restart`-th restart,
    if that is so for at most `most` starts in a row. Returns for how many; None if Slurm refuses the note. May be
    called again for the same start. Raises SlurmError when Slurm does not answer."""
    found = re.search(r"^\s*Comment=(.*)$", scontrol("show", "job", job_id), re.MULTILINE)
    comment = found[1] if found else ""
    before = UNRECORDED.search(comment)
    count, noted = map(int, before.groups()) if before else (0, -1)
    count = {restart - 1: count + 1, restart: count}.get(noted, 1)  # of this start it may be noted already
    if count <= most:
        comment = f"{UNRECORDED.sub('', comment).strip()} laststep-unrecorded:{count}@{restart}".strip()
        try:
            scontrol("update", f"JobId={job_id}", f"Comment={comment}")
        except Unanswered:
            raise
        except SlurmError:
            return None
    return count


def show_partitions(names: str | None) -> list[Partition]:
    """The fields of `scontrol show partition` for each of these (`main,long`); None: the default one. Empty when Slurm
    does not answer."""
    with contextlib.suppress(SlurmError):
        known = parse_records(scontrol("show", "partition", "--oneliner"))
        wanted = names.split(",") if names else [p["PartitionName"] for p in known if p.get("Default") == "YES"]
        return [partition for partition in known if partition["PartitionName"] in wanted]
    return []


def parse_records(text: str) -> list[Mapping[str, str]]:
    """Parse the output of `scontrol show ... --oneliner`, which has one record per line."""
    return [fields for line in text.splitlines() if (fields := _fields(line))]


def parse_config(text: str) -> dict[str, str]:
    """Parse `scontrol show config` into name -> value, without the names that are not set."""
    pairs = (line.split(" = ", 1) for line in text.splitlines() if " = " in line)
    return {name.strip(): value.strip() for name, value in pairs if not value.strip().startswith("(null")}


def _kill_wait(config: Mapping[str, str]) -> int | None:
    found = re.match(r"\d+", config.get("KillWait", ""))  # such as "30 sec"
    return int(found[0]) if found else None


class ClusterSettings(NamedTuple):
    """What a submission asks the cluster for, in one call."""

    kill_wait_s: int | None = None  # KillWait: seconds between SIGTERM and SIGKILL; None when Slurm does not answer
    expedites: bool = False  # whether a job may ask for an expedited requeue, see `EXPEDITE`


def cluster_settings() -> ClusterSettings:
    """Ask Slurm for its settings."""
    with contextlib.suppress(SlurmError):
        config = parse_config(scontrol("show", "config"))
        allowed = "enable_expedited_requeue" in config.get("SlurmctldParameters", "")
        # Where the controller allows it, sbatch is asked too: it may be older.
        allowed = allowed and can_expedite(config.get("SLURM_VERSION", ""))
        return ClusterSettings(_kill_wait(config), allowed and can_expedite(command("sbatch", "--version")))
    return ClusterSettings()


def most_in_array() -> int:
    """The most jobs that Slurm takes as one array (MaxArraySize, max_array_tasks); its default if it does not say."""
    with contextlib.suppress(SlurmError):
        config = parse_config(scontrol("show", "config"))
        found = re.findall(r"^\d+", config.get("MaxArraySize", ""))
        found += re.findall(r"\bmax_array_tasks=(\d+)", config.get("SchedulerParameters", ""))
        return max(1, min(map(int, found), default=DEFAULT_ARRAY))
    return DEFAULT_ARRAY


class KillLimits(NamedTuple):
    """What decides when Slurm kills a job that has been told to end."""

    kill_wait_s: float = DEFAULT_KILL_WAIT_S  # KillWait
    over_s: float = 0.0  # OverTimeLimit: how long a job may outlive its EndTime
    clock_ahead_s: float = 0.0  # the controller's clock minus this node's


def kill_limits(partition: str | None = None) -> KillLimits:
    """Ask Slurm for the limits of a job in this partition; the usual ones if it does not answer. None: those that hold
    where a partition has none of its own."""
    with contextlib.suppress(SlurmError):
        answer, here = scontrol("show", "config"), time.time()
        config, said_at = parse_config(answer), re.match(r"Configuration data as of (\S+)", answer)
        kill_wait, over_limit = _kill_wait(config), config.get("OverTimeLimit", "0").partition(" ")[0]
        for shown in show_partitions(partition) if partition else []:
            over_limit = own if (own := shown.get("OverTimeLimit", "NONE")) != "NONE" else over_limit
        controller = unix_time(said_at[1]) if said_at else NEVER  # the controller's time of this answer
        # Slurm's times have no fraction; a difference of a second or two is none.
        ahead_s = controller + 0.5 - here if controller < NEVER else 0.0
        return KillLimits(
            DEFAULT_KILL_WAIT_S if kill_wait is None else kill_wait,
            NEVER if over_limit == "UNLIMITED" else 60.0 * int(over_limit) if over_limit.isdecimal() else 0.0,
            ahead_s if abs(ahead_s) > 2 else 0.0,
        )
    return KillLimits()


def can_expedite(version: str) -> bool:
    """Whether this version of Slurm (26.05.1) has an expedited requeue that leaves a job alone which has finished."""
    numbers = tuple(map(int, re.findall(r"\d+", version)[:3]))
    return numbers >= EXPEDITE_SINCE


def forbid_requeue(job_id: str) -> None:
    """Have Slurm end the job of this process for good, however it exits. Raises SlurmError."""
    scontrol("update", f"JobId={job_id}", "Requeue=0")


def is_silent() -> bool:
    """Whether Slurm's controller leaves a ping unanswered. A busy one answers it at once."""
    with contextlib.suppress(OSError):
        try:
            run(["scontrol", "ping"], PING_S)
        except subprocess.TimeoutExpired:
            return True
    return False


def answers(words: Sequence[str], timeout_s: float) -> bool:
    """Whether a Slurm command succeeds within this time. Raises OSError."""
    try:
        return run(words, timeout_s).returncode == 0
    except subprocess.TimeoutExpired:
        return False


def is_job_id(text: str) -> bool:
    """Whether this is a Slurm job id, such as 12 or (in an array) 12_3, not another launcher's name for a job."""
    return re.fullmatch(r"\d+(_\d+)?", text) is not None


def scontrol(*words: str) -> str:
    """The output of scontrol. Raises SlurmError as `command` does."""
    return command("scontrol", *words)


def has_scontrol() -> bool:
    """Whether this machine has Slurm's commands, e.g. a compute node."""
    try:
        scontrol("--version")
    except SlurmError as error:
        return not isinstance(error, SlurmMissing)
    return True


def check_conf() -> None:
    """Raise SlurmError if there is no file at $SLURM_CONF: every Slurm command would look for it for a minute."""
    path = os.environ.get("SLURM_CONF")
    if path and not os.path.exists(path):
        raise SlurmError(f"SLURM_CONF={path}: no such file; correct or unset this variable")


def command(*words: str) -> str:
    """The output of a Slurm command. Raises SlurmError when it fails or is missing, and Unanswered when it has no
    answer, or none in ANSWER_S."""
    check_conf()
    for _ in range(3):
        try:
            done = run(words, ANSWER_S)
        except FileNotFoundError:
            raise SlurmMissing(f"no {words[0]} on this machine") from None
        except subprocess.TimeoutExpired:
            raise Unanswered(f"no answer within {ANSWER_S:.0f} s") from None
        except OSError as error:  # no process could be started: the machine is out of them, or out of memory
            raise Unanswered(f"{words[0]} could not be started: {error.strerror or error}") from None
        if done.returncode >= 0:
            break
        # Else a signal killed it: Slurm signals every process of the job, so a second SIGTERM may hit this one too.
    if done.returncode:
        said = " ".join(done.stderr.split())
        unclear = done.returncode < 0 or UNANSWERED.search(said)
        raise (Unanswered if unclear else SlurmError)(said or f"{words[0]} exited with {done.returncode}")
    if is_half(done.stdout):
        raise Unanswered(f"{words[0]} has answered only in part")
    return done.stdout


def is_half(answer: str) -> bool:
    """Whether the end of an answer is missing: each line of Slurm's commands ends with a newline. What half an answer
    does not show may be there: a job, or the state of one."""
    return bool(answer) and not answer.endswith("\n")


def run(words: Sequence[str], timeout_s: float, stdin: str | None = None) -> subprocess.CompletedProcess[str]:
    """Run a Slurm command to its end. Raises OSError, and subprocess.TimeoutExpired after `timeout_s`. It and `start`
    are the only places that start one, but for the sbatch that submits (see laststep.submission.sbatch)."""
    return started(
        lambda: subprocess.run(
            _with_all(words),
            input=stdin,
            capture_output=True,
            text=True,
            timeout=timeout_s,
            env=_environment(words),
        )
    )


def start(words: Sequence[str]) -> subprocess.Popen[str]:
    """Start a Slurm command whose answer may take long; its errors are dropped. Raises OSError."""
    null = subprocess.DEVNULL
    return started(
        lambda: subprocess.Popen(
            _with_all(words), stdout=subprocess.PIPE, stderr=null, text=True, env=_environment(words)
        )
    )


def _with_all(words: Sequence[str]) -> list[str]:
    """The command with the option that shows hidden partitions and their jobs, too."""
    shows = words[0] == "squeue" or list(words[:2]) == ["scontrol", "show"]
    return [*words, "--all"] if shows else list(words)


def _environment(words: Sequence[str]) -> dict[str, str]:
    """The environment of a Slurm command: without the user's options for it. srun finds its job by SLURM_*."""
    prefixes = () if words[0] == "srun" else OPTION_PREFIXES
    return {name: value for name, value in os.environ.items() if name in KEPT or not name.startswith(prefixes)}


def unix_time(text: str) -> float:
    """Seconds since 1970 from Slurm's local time, such as 2026-11-22T05:17:24; NEVER for Unknown, None and N/A."""
    try:
        return time.mktime(time.strptime(text, "%Y-%m-%dT%H:%M:%S"))
    except ValueError:
        return NEVER
