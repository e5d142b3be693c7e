"""Why a job waits: Slurm's word for it in a sentence, with the numbers behind it, when it would start, and what would
start sooner.

Slurm says "QOSMaxGRESPerUser"; a user wants to know which limit that is, who holds it, and until when. Each reason has
a function here that asks Slurm for its numbers. Where Slurm does not answer, or keeps other users' jobs private, less
is said, and at the least Slurm's own word. What would start sooner is tried by `sbatch --test-only`, which submits
nothing: Slurm places the job behind those that wait with a higher priority.
"""

from __future__ import annotations

import contextlib
import os
import pwd
import re
import subprocess
import time
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

from laststep.config import checks
from laststep.config.config import Config, with_launch
from laststep.config.errors import ConfigError
from laststep.ranks import slurm
from laststep.ranks.slurm import (
    NEVER,
    UNFIT,
    Job,
    Partition,
    SlurmError,
    expand_nodes,
    parse_records,
    scontrol,
    show_other_job,
    show_partitions,
    unix_time,
)
from laststep.rundir import RunDir
from laststep.runs.run_status import RunStatus
from laststep.say import counted, listed

UNLIMITED = "UNLIMITED"
NO_ANSWER = (SlurmError, OSError, ValueError, KeyError, IndexError, AttributeError)  # none, or one that we cannot read
TEST_S = 20.0  # how long `sbatch --test-only` may take
SOONER_S = 60.0  # a start that is not this much earlier is no reason to change a job
UNKNOWN_AFTER_S = 365 * 86400.0  # where a job without a limit waits ahead, Slurm 22.05 answers with a year like 2537
# Reasons of squeue that waiting alone does not end (man squeue, "job reason codes").
MAY_NEVER_START = re.compile(
    r"Partition(Node|Time)Limit|Partition(Down|Inactive)|BadConstraints|Invalid(Account|QOS)|JobHeldAdmin"
    r"|(Account|QOS)NotAllowed|DependencyNeverSatisfied|.*(PerJob|WallDuration).*"
)
# Reasons that another size, limit or partition may help against.
FOR_NODES = re.compile(r"None|^$|Resources|Priority|ReqNodeNotAvail|Reserv|Nodes?(Down| required)|Partition")
# Those of a job that does not compete for nodes yet.
NOT_IN_LINE = re.compile(r"Dependency|BeginTime|JobHeld|Licenses|.*(Limit|PerUser|PerAccount|PerJob|GRES)")
LIMIT = re.compile(
    r"(?P<of>QOS|Assoc)?(?P<scope>Grp|Max|Min)(?P<what>CPU|Cpu|GRES|Mem(?:ory)?|Node|Billing|Jobs?|Wall)"
    r"(?P<time>Run|)(?P<minutes>Minutes|)(?:Duration)?(?P<per>PerJob|PerUser|PerAccount|PerNode|)(?:Limit)?$"
)


@dataclass(frozen=True)
class Sooner:
    """A change with which Slurm would start the job earlier, as one types it, and when (in Unix seconds)."""

    change: str
    starts_at: float


@dataclass(frozen=True)
class Pending:
    """Why a job waits. `reason` is Slurm's word for it, `why` a sentence; `starts_at` is in Unix seconds, None where
    Slurm does not expect a start."""

    reason: str
    why: str
    starts_at: float | None
    sooner: Sequence[Sooner]


def explain(run: RunDir, status: RunStatus) -> Pending | None:
    """Why the job of a run waits; None if it does not."""
    if status.state not in ("queued", "requeued") or status.job_id is None:
        return None
    reason, sooner = status.why, list[Sooner]()
    why = sentence(status.job_id, reason)
    if FOR_NODES.match(reason) and (script := script_of(run, status.job_id)):
        with contextlib.suppress(ConfigError, *NO_ANSWER):
            sooner = what_starts_sooner(script, Config.load(run.config), status.starts_at)
    return Pending(reason, why, None if "never starts" in why else status.starts_at, sooner)


def may_never_start(status: RunStatus) -> str:
    """A warning about a job that has just been submitted; empty if it only waits for others to end."""
    if not MAY_NEVER_START.match(status.why):
        return ""
    return f"job {status.job_id} may never start; {waiting_for(status)}"


def waiting_for(status: RunStatus) -> str:
    """For example `queued: PartitionNodeLimit, main has 4 nodes`; empty if the run does not wait in the queue."""
    if status.state not in ("queued", "requeued"):
        return ""
    parts = [status.why, meaning(status.job_id, status.why) if status.job_id and status.why else ""]
    if status.starts_at is not None and status.starts_at > time.time():
        parts.append(f"expected to start at {clock(status.starts_at)}")
    text = ", ".join(filter(None, parts))
    return f"{status.state}: {text}" if text else status.state


class WaitReport:
    """Says why a run waits, once for each reason."""

    def __init__(self, say: Callable[[str], None]) -> None:
        self._say, self._said = say, ("", "")

    def update(self, status: RunStatus) -> None:
        """Say it unless it was said before; `status` is the run's present one."""
        now = (status.state, status.why)
        if now != self._said and (text := waiting_for(status)):
            self._say(f"{status.run}: {text}")
        self._said = now


def clock(at: float) -> str:
    """A time as messages show it."""
    return time.strftime("%F %H:%M", time.localtime(at))


def sentence(job_id: str, reason: str) -> str:
    """Slurm's reason, followed by what it means for this job; the reason alone where Slurm says no more."""
    return ": ".join(filter(None, [reason, meaning(job_id, reason)]))


def meaning(job_id: str, reason: str) -> str:
    """What a reason of squeue means for this job; empty where Slurm says no more."""
    with contextlib.suppress(*NO_ANSWER):
        job = show_other_job(job_id)
        for pattern, of_job in MEANINGS.items():
            if (match := re.match(pattern, reason)) and (text := of_job(job, match)):
                return text
    return ""


# -- what the reasons mean -----------------------------------------------------------------------------------------


class _Other(NamedTuple):
    """Another job, as squeue shows it: `amounts` by resource (cpu, mem, node, gres/gpu), and when it ends at the
    latest."""

    id: str
    user: str
    account: str
    qos: str
    priority: int
    amounts: Mapping[str, float]
    ends_at: float
    reason: str

    def named(self, resource: str = "node") -> str:
        """For example `job 12 of ann (2 nodes, until 2026-11-28 07:00)`."""
        until = "" if self.ends_at == NEVER else f", until {clock(self.ends_at)}"
        return f"job {self.id} of {self.user} ({_amount(resource, self.amounts.get(resource, 0))}{until})"


def _others(*words: str) -> list[_Other]:
    """The jobs that squeue shows with these options. Raises SlurmError."""
    columns = ("JobArrayID", "UserName", "Account", "QOS", "PriorityLong", "tres-alloc", "EndTime", "Reason")
    form = ",".join(f"{column}:200|" for column in columns)
    found = []
    for line in slurm.command("squeue", "--noheader", *words, f"--Format={form}").splitlines():
        job, user, account, qos, priority, tres, ends, reason, *_ = (cell.strip() for cell in line.split("|"))
        found.append(_Other(job, user, account, qos, int(priority), _amounts(tres), unix_time(ends), reason))
    return found


def _amounts(tres: str) -> dict[str, float]:
    """The amounts in `cpu=4,mem=4000M,gres/gpu=2`; memory in MB."""
    units = {"K": 1 / 1024, "M": 1, "G": 1024, "T": 1024**2}
    found = {}
    for name, number, unit in re.findall(r"([\w/:]+)=([\d.]+)([KMGT]?)", tres):
        found[name] = float(number) * units.get(unit, 1)
    return found


def _amount(resource: str, number: float) -> str:
    """For example `2 nodes`, `4 GPUs`, `3.9 GB`."""
    if resource == "mem":
        return f"{number / 1024:.3g} GB"
    names = {"cpu": "CPU", "gres/gpu": "GPU", "billing": "billing unit"}
    return counted(round(number), names.get(resource, resource.removeprefix("gres/")))


def _needs(job: Job) -> int:
    """The fewest nodes with which the job starts."""
    return int(job.get("NumNodes", "1").partition("-")[0])


def _minutes(limit: str) -> float:
    """The minutes of a limit such as 1-02:30:00; NEVER for one without an end."""
    found = re.fullmatch(r"(?:(\d+)-)?(\d+):(\d+):(\d+)", limit)
    if not found:
        return NEVER
    days, hours, minutes, seconds = (int(part or 0) for part in found.groups())
    return 1440 * days + 60 * hours + minutes + seconds / 60


def _priority(job: Job, _: re.Match[str]) -> str:
    own, job_id = int(job.get("Priority", "0")), job["JobId"]
    partition = job["Partition"]
    waiting = _others("--states=PENDING", "--priority", f"--partition={partition}")
    waiting = [one for one in waiting if one.id != job_id and not NOT_IN_LINE.match(one.reason)]
    ahead = [one for one in waiting if (-one.priority, _number(one.id)) < (-own, _number(job_id))]
    if not ahead:
        return f"nobody is ahead of it in {partition} (of the jobs that Slurm shows), and Slurm looks again soon"
    nodes = round(sum(one.amounts.get("node", 0) for one in ahead))
    first = min(ahead, key=lambda one: (-one.priority, _number(one.id)))
    return (
        f"{counted(len(ahead), 'job')} for {counted(nodes, 'node')} {'is' if len(ahead) == 1 else 'are'} ahead of it "
        f"in {partition}; its priority is {own}{_factors(job_id)}, that of the first ({first.id} of {first.user}) "
        f"{first.priority}"
    )


def _number(job_id: str) -> int:
    return int(re.match(r"\d*", job_id)[0] or 0)  # type: ignore[index]


def _factors(job_id: str) -> str:
    """What a job's priority is made of; empty where Slurm gives all jobs one in the order of their submission."""
    names = ("age", "fair share", "size", "partition", "QOS")
    with contextlib.suppress(SlurmError):
        shown = slurm.command("sprio", "--noheader", f"--jobs={job_id}", "--format=%A|%F|%J|%P|%Q").splitlines()
        parts = zip(names, shown[0].split("|")) if shown else ()
        if text := ", ".join(f"{name} {value.strip()}" for name, value in parts if value.strip() not in ("", "0")):
            return f" ({text})"
    return ""


def _resources(job: Job, _: re.Match[str]) -> str:
    partition, needs = job["Partition"], _needs(job)
    states = _states(partition)
    idle = [node for node, (state, _) in states.items() if state in ("idle", "planned")]  # perhaps for this very job
    running = sorted(_others("--states=RUNNING", f"--partition={partition}"), key=lambda one: one.ends_at)
    text = (
        f"it is next in {partition}: it needs {counted(needs, 'node')}, and {len(idle)} of {len(states)} "
        f"{'is' if len(idle) == 1 else 'are'} idle"
    )
    if len(idle) >= needs:
        text += ", but not for as long, or not with as much, as it asks for"
    if out := _out(states):
        text += f"; out of service: {out}"
    return text + (f"; the first to end: {listed([one.named() for one in running])}" if running else "")


def _states(partition: str) -> dict[str, tuple[str, str]]:
    """The state of each node of these partitions, and why it is down or drained. Raises SlurmError."""
    shown = slurm.command("sinfo", "--noheader", "--Node", f"--partition={partition}", "--format=%N|%T|%E")
    found = {}
    for line in shown.splitlines():
        node, state, reason = line.split("|", 2)
        found[node.strip()] = (state.strip(), "" if reason.strip() == "none" else reason.strip())
    return found


def _out(states: Mapping[str, tuple[str, str]]) -> str:
    """The nodes that cannot start a job, each with what was written down about it."""
    out = {node: why for node, why in states.items() if UNFIT.search(why[0].upper())}
    return listed([f"{node} is {state}{f' ({reason})' if reason else ''}" for node, (state, reason) in out.items()])


def _unavailable(job: Job, _: re.Match[str]) -> str:
    parts = [into.text for into in _runs_into(job["Partition"], _needs(job), _minutes(job["TimeLimit"]), job)]
    states = _states(job["Partition"])
    wanted = set(expand_nodes(job.get("ReqNodeList", "")))
    if out := _out({node: why for node, why in states.items() if not wanted or node in wanted}):
        fit = len(states) - sum(1 for state, _ in states.values() if UNFIT.search(state.upper()))
        needs = f", it needs {counted(_needs(job), 'node')} of {fit} that are left" if not wanted else ""
        parts.append(out + needs)
    return "; ".join(parts)


def _reservation(job: Job, match: re.Match[str]) -> str:
    for one in parse_records(scontrol("show", "reservation", "--oneliner")):
        if one.get("ReservationName") == job.get("Reservation"):
            begins, ends = unix_time(one["StartTime"]), unix_time(one["EndTime"])
            when = f"begins at {clock(begins)}" if begins > time.time() else "has begun, and its nodes are in use"
            return f"its reservation {one['ReservationName']} ({one.get('Nodes')}) {when}; it ends at {clock(ends)}"
    return _unavailable(job, match) or "the reservation that it asks for is gone"


def _dependency(job: Job, _: re.Match[str]) -> str:
    waits = []
    for kind, other in re.findall(r"(\w+):(\d+(?:_\d+)?)", job.get("Dependency", "")):
        with contextlib.suppress(SlurmError):
            found = show_other_job(other)
            ends = unix_time(found.get("EndTime", ""))
            until = f" until {clock(ends)} at the latest" if found["JobState"] == "RUNNING" and ends < NEVER else ""
            waits.append(f"job {other} is {found['JobState']}{until} ({kind})")
    return listed(waits)


def _begin_time(job: Job, _: re.Match[str]) -> str:
    eligible = unix_time(job.get("EligibleTime", ""))
    why = "Slurm holds a requeued job back" if job.get("Restarts", "0") != "0" else "it was asked to wait"
    return f"{why} until {time.strftime('%F %H:%M:%S', time.localtime(eligible))}" if eligible < NEVER else ""


def _held(job: Job, match: re.Match[str]) -> str:
    if match[1] == "Admin":
        return "an administrator holds it, and alone can release it"
    return f"you hold it; `scontrol release {job['JobId']}` lets it go"


def _licenses(job: Job, _: re.Match[str]) -> str:
    asked = dict(re.findall(r"([\w.-]+)(?:@[\w.-]+)?(?::(\d+))?", job.get("Licenses", "")))
    shown = parse_records(scontrol("show", "licenses", "--oneliner"))
    return ", ".join(
        f"{one['Used']} of {one['Total']} licenses {one['LicenseName']} are in use, it needs "
        f"{asked[one['LicenseName']] or 1}"
        for one in shown
        if one.get("LicenseName") in asked
    )


def _array(job: Job, _: re.Match[str]) -> str:
    most = job.get("ArrayTaskThrottle") or job.get("ArrayTaskId", "").rpartition("%")[2]
    return f"its sweep runs at most {most} at a time (--parallel)" if most else ""


def limit_of(partition: Partition, reason: str, job: Job) -> str:
    """The partition's limit that a reason of squeue is about; empty for a reason that is not about one."""
    name = partition.get("PartitionName", "")
    if reason == "PartitionNodeLimit":
        nodes = counted(partition.get("TotalNodes", "?"), "node")
        most = partition.get("MaxNodes", UNLIMITED)
        asked = f", and the job asks for {_needs(job)}" if "NumNodes" in job else ""
        return f"{name} has {nodes}" + ("" if most == UNLIMITED else f" and gives a job at most {most}") + asked
    if reason == "PartitionTimeLimit":
        asked = f", and the job asks for {job['TimeLimit']}" if "TimeLimit" in job else ""
        return f"{name} allows at most {partition.get('MaxTime', UNLIMITED)}{asked}"
    return f"{name} is {partition['State']}" if "State" in partition else ""


# -- limits of a QOS or an account ---------------------------------------------------------------------------------


class _Limit(NamedTuple):
    """A limit as the controller counts it: which resource, how much of it, how much is in use, whose limit it is (as
    in `QOS long allows a user`), and the squeue options that show who is using it."""

    resource: str
    most: float
    used: float
    whose: str
    holders: Sequence[str]


def _limit(job: Job, match: re.Match[str]) -> str:
    """The limit of a QOS or an association that a job waits for."""
    found = next(_limits(job, match), None)
    if found is None:
        return ""
    if match["what"] == "Wall":
        most, asked = f"{found.most:g} min", f"{_minutes(job['TimeLimit']):g} min"
        if match["scope"] == "Grp":
            return f"{found.whose} {most} of jobs together, {found.used:g} are used"
        fix = f"; at most --time {found.most:g}, or another QOS" if found.most else ""
        return f"{found.whose} at most {most} for a job, and it asks for {asked}, so it never starts{fix}"
    resource = "job" if match["what"].startswith("Job") else found.resource
    own = 1.0 if resource == "job" else _asked(job).get(resource, 0.0)
    limit = f"{found.whose} at most {_amount(resource, found.most)}"
    if match["minutes"]:
        return f"{found.whose} {found.most:g} minutes of {_amount(resource, 2)[2:]}, {found.used:g} are used"
    if match["per"] in ("PerJob", "PerNode"):
        where = "in one job" if match["per"] == "PerJob" else "on one node"
        return f"{limit} {where}, and it asks for {_amount(resource, own)}, so it never starts; ask for less"
    if own > found.most:
        return f"{limit}, and it asks for {_amount(resource, own)}, so it never starts; ask for less"
    running = sorted(_others("--states=RUNNING", *found.holders), key=lambda one: one.ends_at)
    key = "node" if resource == "job" else resource
    held = [one.named(key) for one in running if resource == "job" or one.amounts.get(key)]
    asks = "" if resource == "job" else f", it asks for {_amount(resource, own)}"
    return f"{limit} at a time, {found.used:g} in use{asks}" + (f"; held by {listed(held)}" if held else "")


def _asked(job: Job) -> dict[str, float]:
    return _amounts(job.get("ReqTRES") or job.get("TRES", ""))


def _limits(job: Job, match: re.Match[str]) -> Iterator[_Limit]:
    """The limits that this reason may be about, the likeliest first. Raises SlurmError."""
    user, uid = re.match(r"(.*)\((\d+)\)", job["UserId"]).groups()  # type: ignore[union-attr]
    account, qos = job.get("Account", ""), job.get("QOS", "")
    if match["of"] != "Assoc":
        of_partitions = (one.get("QoS", "") for one in show_partitions(job["Partition"]))  # which may have their own
        names = [name for name in dict.fromkeys([qos, *of_partitions]) if name not in ("", "N/A", "(null)")]
        blocks = _blocks(scontrol("show", "assoc_mgr", "flags=qos", f"qos={','.join(names)}"))
        per, whose, options = {
            "PerUser": (f"user {uid}", " a user", [f"--user={user}"]),
            "PerAccount": (f"account {account}", " an account", [f"--account={account}"]),
        }.get(match["per"], ("", "", []))
        for name in names:
            for resource, most, used in _values(blocks.get((name, per)) or {}, match):
                yield _Limit(resource, most, used, f"QOS {name} allows{whose}", [f"--qos={name}", *options])
        if match["of"]:
            return
    shown = scontrol("show", "assoc_mgr", "flags=assoc")
    blocks = _blocks(shown)
    parents = dict(re.findall(r"Account=(\S+) UserName= .*(?:\n .*)*?ParentAccount=([^(\s]*)", shown))
    places, above = [(account, user)], account
    while above and len(places) < 20:
        places.append((above, ""))
        above = parents.get(above, "")
    for name, person in places:
        options = [f"--account={name}", *([f"--user={user}"] if person else [])]
        for resource, most, used in _values(blocks.get((name, person)) or {}, match):
            yield _Limit(resource, most, used, f"account {name} allows" + (f" {user}" if person else ""), options)


Block = dict[str, str]


def _blocks(shown: str) -> dict[tuple[str, str], Block]:
    """The values in `scontrol show assoc_mgr`: of a QOS by (name, ""), (name, "user 1000") and (name, "account a"); of
    an association by (account, user)."""
    blocks: dict[tuple[str, str], Block] = {}
    record, group, block = "", "", Block()
    for line in shown.splitlines():
        depth, text = len(line) - len(line.lstrip()), line.strip()
        if found := re.match(r"QOS=(.*)\(\d+\)$", text):
            record, group = found[1], ""
            block = blocks.setdefault((record, ""), {})
        elif found := re.match(r"ClusterName=\S+ Account=(\S+) UserName=([^(\s]*)", text):
            block = blocks.setdefault((found[1], found[2]), {})
        elif found := re.match(r"(Account|User) Limits$", text):
            group = found[1].lower()
        elif depth == 6 and group and "=" not in text:
            name = re.sub(r".*\((\d+)\)$", r"\1", text) if group == "user" else text
            block = blocks.setdefault((record, f"{group} {name}"), {})
        elif "TRES" in text:
            key, _, value = text.partition("=")
            block[key] = value
        else:
            block.update(re.findall(r"(\w+)=(\S*)", text))
    return blocks


def _values(block: Mapping[str, str], match: re.Match[str]) -> Iterator[tuple[str, float, float]]:
    """The limits that a reason is about, in a block of `_blocks`: the resource, how much of it, how much is in use."""
    grp, per = match["scope"] == "Grp", {"PerUser": "PU", "PerAccount": "PA", "PerNode": "PN"}.get(match["per"], "PJ")
    if match["what"] == "Wall":
        keys = ["GrpWall"] if grp else ["MaxWallPJ"]
    elif match["what"].startswith("Job"):
        keys = ["GrpJobs"] if grp else [f"MaxJobs{per}", "MaxJobs"]
    else:
        minutes = f"{match['time']}Mins" if match["minutes"] else ""
        keys = [f"{'Grp' if grp else 'Max'}TRES{minutes}{'' if grp else per}"]
    kind = {"CPU": "cpu", "Cpu": "cpu", "Mem": "mem", "Memory": "mem", "Node": "node", "Billing": "billing"}
    for key in keys:
        for part in block.get(key, "").split(","):
            found = re.fullmatch(r"(?:([\w/:.-]+)=)?([\d.]+)(?:\(([\d.]+)\))?", part)
            if not found:
                continue  # no limit: N(0)
            resource = found[1] or ""
            if resource and match["what"] in kind and resource != kind[match["what"]]:
                continue
            if resource and match["what"] == "GRES" and not resource.startswith("gres/"):
                continue
            yield resource, float(found[2]), float(found[3] or 0)


MEANINGS: Mapping[str, Callable[[Job, re.Match[str]], str]] = {
    r"Priority$": _priority,
    r"Resources$": _resources,
    r"ReqNodeNotAvail|Nodes required for job|NodeDown|Reserved for maintenance": _unavailable,
    r"Reservation": _reservation,
    r"DependencyNeverSatisfied": lambda job, _: (
        f"the job that it depends on has ended otherwise ({job.get('Dependency')}), so it never starts; cancel it"
    ),
    r"Dependency": _dependency,
    r"BeginTime": _begin_time,
    r"JobHeld(User|Admin)": _held,
    r"Licenses": _licenses,
    r"JobArrayTaskLimit": _array,
    r"Partition\w*": lambda job, match: ", ".join(
        filter(None, (limit_of(one, match[0], job) for one in show_partitions(job.get("Partition"))))
    ),
    LIMIT.pattern: _limit,
    r"(None)?$": lambda *_: "Slurm has not considered it yet",
}


# -- reservations and maintenance ----------------------------------------------------------------------------------


class _Into(NamedTuple):
    """A reservation into which a job would run, and that in a sentence."""

    starts_at: float
    ends_at: float
    text: str


def _runs_into(partition: str | None, needs: int, minutes: float, job: Job) -> list[_Into]:
    """The reservations because of which a job of this size and length cannot start now. Raises SlurmError."""
    now, found = time.time(), list[_Into]()
    records = parse_records(scontrol("show", "reservation", "--oneliner"))
    others = [one for one in records if "ReservationName" in one and one["ReservationName"] != job.get("Reservation")]
    ahead = [
        one for one in others if unix_time(one["EndTime"]) > now and unix_time(one["StartTime"]) < now + 60 * minutes
    ]
    if not ahead:
        return []
    names = partition or ",".join(one["PartitionName"] for one in show_partitions(None))
    left = {node for node, (state, _) in _states(names).items() if not UNFIT.search(state.upper())}
    for one in sorted(ahead, key=lambda one: unix_time(one["StartTime"])):
        reserved = left & set(expand_nodes(one.get("Nodes", "")))
        left -= reserved
        if not reserved or len(left) >= needs:
            continue
        begins, ends = unix_time(one["StartTime"]), unix_time(one["EndTime"])
        kind = "maintenance" if "MAINT" in one.get("Flags", "") else "reservation"
        has = f"{kind} {one['ReservationName']} has {one['Nodes']}"
        when = f"from {clock(begins)} to {clock(ends)}"
        fits = int((begins - now) / 60) - 1
        limit = "without a time limit" if minutes == NEVER else f"of {minutes:g} min"
        into = f", and a job {limit} would run into it" if begins > now else ""
        fix = f"; at most --time {fits} ends before" if fits > 1 else ""
        found.append(_Into(begins, ends, f"{has} {when}{into}{fix}"))
    return found


def reserved_ahead(config: Config) -> str:
    """That a job with this configuration would run into a reservation, so that it starts after that; empty if not, or
    where Slurm does not say."""
    launch = config.launch
    words = {key.replace("_", "-"): str(value) for key, value in launch.slurm.items()}
    if {"clusters", "M"} & set(words):
        return ""
    with contextlib.suppress(*NO_ANSWER):
        partition = launch.partition or os.environ.get("SBATCH_PARTITION")
        needs, job = int(launch.job_nodes.partition("-")[0]), {"Reservation": words.get("reservation", "")}
        into = _runs_into(partition, needs, float(launch.time_min), job)
        if into:
            return f"{into[0].text}; it starts at {clock(max(one.ends_at for one in into))} at the earliest"
    return ""


# -- what would start, and when ------------------------------------------------------------------------------------


def script_of(run: RunDir, job_id: str) -> str:
    """The batch script of a job of this run; empty where submitit has not kept it."""
    with contextlib.suppress(OSError):
        return Path(run.logs / f"{job_id.partition('_')[0]}_submission.sh").read_text()
    return ""


class Tried(NamedTuple):
    """What `sbatch --test-only` has answered: when the job would start (NEVER: unknown), or why it is refused."""

    starts_at: float
    refused: str = ""


def try_it(script: str, *options: str) -> Tried:
    """Ask Slurm when a job with this script would start, with further options of sbatch. Submits nothing."""
    kept = re.sub(r"^#SBATCH --(array|dependency|begin)=.*\n", "", script, flags=re.MULTILINE)
    try:
        done = slurm.run(["sbatch", "--test-only", *options], TEST_S, stdin=kept)
    except (OSError, subprocess.TimeoutExpired) as error:
        return Tried(NEVER, str(error))
    if found := re.search(r"to start at (\S+)", done.stderr):
        at = unix_time(found[1])
        return Tried(at if at < time.time() + UNKNOWN_AFTER_S else NEVER)
    lines = [
        line.removeprefix("sbatch: error: ").removeprefix("allocation failure: ") for line in done.stderr.splitlines()
    ]
    return Tried(NEVER, "; ".join(filter(None, lines)) or "sbatch has not answered")


def what_starts_sooner(script: str, config: Config, starts_at: float | None = None) -> list[Sooner]:
    """The changes with which Slurm would start the job clearly earlier than as it is, the earliest first. `starts_at`:
    when Slurm expects it to start as it is, if it does."""
    changes = _changes(config)
    with ThreadPoolExecutor(4) as pool:
        as_is, *tried = pool.map(lambda options: try_it(script, *options), [(), *changes.values()])
    before = min(as_is.starts_at, NEVER if starts_at is None else starts_at) - SOONER_S
    found = [Sooner(change, one.starts_at) for change, one in zip(changes, tried) if one.starts_at < before]
    return sorted(found, key=lambda one: one.starts_at)


def _changes(config: Config) -> dict[str, tuple[str, ...]]:
    """What may be tried instead: as one types it, and as sbatch has it. Half of the nodes or one, a shorter limit,
    another partition."""
    launch, changes = config.launch, dict[str, tuple[str, ...]]()
    fewest = launch.node_counts[0]
    for nodes in dict.fromkeys((fewest // 2, 1)):
        with contextlib.suppress(ConfigError):
            if 0 < nodes < fewest:
                checks.validate(with_launch(config, nodes=nodes))
                changes[f"--nodes {nodes}"] = (f"--nodes={nodes + launch.spare_nodes}",)
    for minutes in (launch.time_min // 2, launch.time_min // 8):
        if 60 * minutes > 2 * launch.signal_delay_s:
            changes[f"--time {minutes}"] = (f"--time={minutes}",)
    with contextlib.suppress(SlurmError):
        asked = (launch.partition or os.environ.get("SBATCH_PARTITION") or "").split(",")
        needs = int(launch.job_nodes.partition("-")[0])
        for one in parse_records(scontrol("show", "partition", "--oneliner")):
            name = one["PartitionName"]
            if name in asked or (not any(asked) and one.get("Default") == "YES") or one.get("State") != "UP":
                continue
            if _may_use(one) and int(one.get("TotalNodes", "0")) >= needs:
                changes[f"--partition {name}"] = (f"--partition={name}",)
    return dict(list(changes.items())[:8])


def _may_use(partition: Partition) -> bool:
    """Whether its groups let this user in. What else it forbids, sbatch says."""
    groups = partition.get("AllowGroups", "ALL")
    if groups == "ALL" or os.getuid() == 0:
        return True
    import grp

    own: Collection[str] = {
        grp.getgrgid(gid).gr_name for gid in os.getgrouplist(pwd.getpwuid(os.getuid()).pw_name, os.getgid())
    }
    return bool(set(groups.split(",")) & set(own))


def forecast(script: str, config: Config) -> list[str]:
    """For --dry-run: when the job would start, and what would start sooner. Empty where no Slurm answers."""
    with contextlib.suppress(*NO_ANSWER):
        slurm.check_conf()
        as_is = try_it(script)
        lines = [f"sbatch --test-only: {as_is.refused or f'Slurm would start it {when(as_is.starts_at)}'}"]
        if ahead := reserved_ahead(config):
            lines.append(ahead)
        if as_is.starts_at > time.time() + SOONER_S:
            lines += [f"sooner with {one.change}: {when(one.starts_at)}" for one in what_starts_sooner(script, config)]
        return lines
    return []


def when(at: float) -> str:
    """For example `at 2026-11-28 07:30`, or `now`."""
    if at == NEVER:
        return "at a time that it does not know: a job without a time limit waits ahead"
    return "now" if at <= time.time() + SOONER_S else f"at {clock(at)}"
