"""What a configuration wants of trackers: read and checked before a submission, and what the core then asks for (see
laststep/rooms.py): the senders beside rank 0, the variables of a script that has a tracker of its own, and the links
that `status` shows. Imports no tracker."""

from __future__ import annotations

import base64
import contextlib
import http.client
import importlib
import json
import netrc
import os
import re
import secrets as random_secrets
import subprocess
import sys
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Mapping
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from laststep.config.errors import ConfigError, nearest
from laststep.config.machine import Machine, Way
from laststep.config.secret import HIDDEN, IN_URL
from laststep.ranks.beside import Beside
from laststep.records.probes import TO_TRACKERS
from laststep.rooms import PROBED
from laststep.rundir import RunDir, aside, fsync
from laststep.say import command, note, say

ANSWER_S = 10.0  # how long a submission waits for a tracker
CREATE_S = 60.0  # how long rank 0 waits for MLflow, where a script sends to it
WANDB = "https://api.wandb.ai"
VIEWER = json.dumps({"query": "query { viewer { id } }"}).encode()
# What each tracker takes: the first word must be there.
WORDS = {
    "wandb": ("project", "entity", "tags", "mode", "by"),
    "mlflow": ("experiment", "uri", "tags", "mode", "by"),
    "trackio": ("project", "mode", "by"),
}
CHOICES = {"mode": ("online", "offline"), "by": ("laststep", "script")}
NAME = re.compile(r"[^/\\#?%:]{1,128}")  # what W&B allows, and the others, too
# Of MLflow's addresses, apart from http and https.
STORES = ("sqlite", "file", "postgresql", "mysql", "mssql", "databricks")


@dataclass(frozen=True)
class Wish:
    """What a configuration says about one tracker."""

    tracker: str
    project: str  # MLflow: the experiment
    entity: str | None = None
    uri: str | None = None
    tags: tuple[str, ...] = ()
    offline: bool = False  # the sender beside the training waits; the verb `track` sends
    by_script: bool = False  # the user's script sends; we do not


def wishes(config: Any) -> list[Wish]:
    """What a configuration wants. Raises ConfigError for words that make no sense."""
    section = getattr(config, "track", None)
    if section is None:  # the configuration is older
        return []
    return [_wish(name, given) for name, given in vars(section).items() if given]


def wish_of(config: Any, tracker: str) -> Wish:
    """What a configuration wants of this tracker. Raises ConfigError."""
    found = {wish.tracker: wish for wish in wishes(config)}
    if tracker not in found:
        raise ConfigError(f"{tracker}: the run has no such tracker; {nearest(tracker, list(found))}")
    return found[tracker]


def _is_name(value: Any) -> bool:
    return isinstance(value, (str, int)) and not isinstance(value, bool) and bool(str(value).strip())


def _wish(tracker: str, given: Mapping[str, Any]) -> Wish:
    key, known = f"track.{tracker}", WORDS[tracker]
    tags = given.get("tags") or []
    tags = tags if isinstance(tags, list) else [tags]
    for word, value in given.items():
        shown = f"{key}.{word}={'null' if value is None else value}"
        if word not in known:
            raise ConfigError(f"{key}.{word}: no such word; {nearest(str(word), known)}")
        if choices := CHOICES.get(str(word)):
            if value not in choices:
                raise ConfigError(f"{shown}: must be one of {', '.join(choices)}")
        elif word == "tags":
            if not all(map(_is_name, tags)):
                raise ConfigError(f"{shown}: must be a list of words")
        elif not _is_name(value):
            raise ConfigError(f"{shown}: must be a name")
    name = given.get(known[0])
    if name is None:
        raise ConfigError(f"{key}: {known[0]} is missing; add {key}.{known[0]}=NAME")
    if not NAME.fullmatch(str(name)):
        raise ConfigError(f"{key}.{known[0]}={name}: at most 128 characters, and none of / \\ # ? % :")
    return Wish(
        tracker,
        str(name),
        entity=None if given.get("entity") is None else str(given["entity"]),
        uri=None if given.get("uri") is None else str(given["uri"]),
        tags=tuple(map(str, tags)),
        offline=given.get("mode") == "offline",
        by_script=given.get("by") == "script",
    )


def check(config: Any, machine: Machine) -> None:
    """Refuse what cannot send: a wrong word, no package, no network, a wrong key or address. Raises ConfigError."""
    launch = config.launch
    own_python = launch.python is None and launch.container is None and launch.uv is None
    for wish in wishes(config):
        if machine.way is Way.RANK:
            continue
        if own_python and find_spec(wish.tracker) is None:
            raise ConfigError(f"track.{wish.tracker}: this Python lacks {wish.tracker}: pip install {wish.tracker}")
        if wish.offline or machine.way is Way.DRY_RUN:
            continue
        try:
            if wish.tracker == "wandb" and os.environ.get("WANDB_MODE", "online") == "online":
                _check_wandb({**os.environ, **launch.env})
            if wish.tracker == "mlflow":
                _check_mlflow(wish, {**os.environ, **launch.env})
        except ConfigError as error:
            if machine.new:
                raise
            note(f"[laststep] WARNING: {error}")  # a run that has trained for days continues without its tracker


def environment(config: Any, run: RunDir, world: Any) -> dict[str, str | None]:
    """What makes a tracker in the user's script continue the run of that tracker that this run has. Of rank 0 alone.
    Where a run is only tried out, or done again, such a tracker is silent: see `without_trackers`."""
    if PROBED in os.environ:
        return dict.fromkeys(TO_TRACKERS)
    variables: dict[str, str | None] = {}
    for wish in wishes(config) if world.rank == 0 else ():
        if wish.by_script and wish.tracker == "wandb":
            variables |= {"WANDB_RUN_ID": made_once(run, "wandb"), "WANDB_RESUME": "allow", "WANDB_NAME": run.name}
            variables["WANDB_PROJECT"] = wish.project
            variables |= {"WANDB_ENTITY": wish.entity} if wish.entity else {}
            variables |= {"WANDB_RUN_GROUP": run.sweep_folder.name} if run.sweep_folder else {}
            variables |= {"WANDB_MODE": "offline"} if wish.offline else {}
        if wish.by_script and wish.tracker == "mlflow":
            variables |= {"MLFLOW_EXPERIMENT_NAME": wish.project}
            variables |= {"MLFLOW_TRACKING_URI": wish.uri} if wish.uri else {}
            if run_id := _mlflow_run(run):
                variables["MLFLOW_RUN_ID"] = run_id
            if wish.uri:
                # MLflow ends a run when the process exits, after these variables have been put back: without an
                # address, it would do so in a new database in the user's folder.
                with contextlib.suppress(Exception):
                    importlib.import_module("mlflow").set_tracking_uri(wish.uri)
    return variables


def programs(config: Any, run: RunDir) -> list[Beside]:
    """A sender for each tracker that is sent to from here."""
    wanted = [wish for wish in wishes(config) if not wish.by_script and not wish.offline]
    return [Beside(f"track-{wish.tracker}", "laststep.track.sender", words=(wish.tracker,)) for wish in wanted]


def links(run: RunDir) -> dict[str, str]:
    """Where each tracker shows the run, or what keeps it from that, by its name."""
    found = {}
    for path in sorted(run.path.glob("track/*/sent.json")):
        with contextlib.suppress(OSError, ValueError):
            sent = json.loads(path.read_text())
            place = sent["url"] or f"run {sent['id']}"
            behind = f", not sent since step {sent['step']}: {sent['error']}" if sent.get("error") else ""
            found[path.parent.name] = f"{place}{behind}" if sent["id"] else behind.removeprefix(", ")
    return {name: text for name, text in found.items() if text}


def _check_wandb(env: Mapping[str, str]) -> None:
    base = env.get("WANDB_BASE_URL") or WANDB
    host = _address("track.wandb: WANDB_BASE_URL", base).hostname
    key = env.get("WANDB_API_KEY") or _in_netrc(str(host))
    if not key:
        raise ConfigError("track.wandb: no key for W&B: type `wandb login`, or set WANDB_API_KEY")
    headers = {**_basic("api", key), "Content-Type": "application/json"}
    answer = _ask("wandb", f"{base.rstrip('/')}/graphql", headers, VIEWER)
    data = answer.get("data", {"viewer": True})
    if not isinstance(data, dict) or not data.get("viewer"):
        raise ConfigError(f"track.wandb: {base} does not know this key: type `wandb login --relogin`")


def _in_netrc(host: str) -> str | None:
    with contextlib.suppress(OSError, netrc.NetrcParseError):
        path = os.environ.get("NETRC") or str(Path.home() / ".netrc")
        found = netrc.netrc(path).authenticators(host)
        return found[2] if found else None
    return None


def _check_mlflow(wish: Wish, env: Mapping[str, str]) -> None:
    uri = wish.uri or env.get("MLFLOW_TRACKING_URI")
    if uri is None:
        raise ConfigError("track.mlflow: where is its server? add track.mlflow.uri=http://HOST:PORT")
    shown = f"track.mlflow.uri={IN_URL.sub(f'{HIDDEN}@', uri)}"
    scheme, _, rest = uri.partition("://")
    if scheme == "sqlite" and not rest.startswith("//"):
        raise ConfigError(f"{shown}: needs a whole path, with four slashes: sqlite:////PATH")
    if scheme == "sqlite" and not (folder := Path(rest[1:]).parent).is_dir():
        raise ConfigError(f"{shown}: there is no folder {folder}")
    if rest and scheme.partition("+")[0] in STORES:
        return
    place = _address("track.mlflow.uri", uri, ", or be sqlite:////PATH")
    headers = {}
    user = place.username or env.get("MLFLOW_TRACKING_USERNAME")
    if user:
        headers = _basic(user, place.password or env.get("MLFLOW_TRACKING_PASSWORD") or "")
    elif token := env.get("MLFLOW_TRACKING_TOKEN"):
        headers["Authorization"] = f"Bearer {token}"
    name = urllib.parse.urlencode({"experiment_name": wish.project})
    path = urllib.parse.quote(place.path.rstrip("/"), safe="/%")
    host = place.netloc.rpartition("@")[2]
    answer = _ask("mlflow", f"{place.scheme}://{host}{path}/api/2.0/mlflow/experiments/get-by-name?{name}", headers)
    experiment = answer.get("experiment")
    if isinstance(experiment, dict) and experiment.get("lifecycle_stage") == "deleted":
        raise ConfigError(f"track.mlflow.experiment={wish.project}: was deleted there; name another, or restore it")


def _address(key: str, url: str, others: str = "") -> urllib.parse.SplitResult:
    """The parts of an address by HTTP. Raises ConfigError."""
    shown = f"{key}={IN_URL.sub(f'{HIDDEN}@', url)}"
    if not url.startswith(("http://", "https://")):
        raise ConfigError(f"{shown}: must begin with http:// or https://{others}")
    with contextlib.suppress(ValueError):  # a port that is none, half a bracket
        place = urllib.parse.urlsplit(url)
        if place.hostname and place.port != 0:
            return place
    raise ConfigError(f"{shown}: no address; write http://HOST:PORT")


def _basic(user: str, password: str) -> dict[str, str]:
    return {"Authorization": "Basic " + base64.b64encode(f"{user}:{password}".encode()).decode()}


def _ask(tracker: str, url: str, headers: Mapping[str, str], data: bytes | None = None) -> dict[str, Any]:
    """The answer of a tracker's server, as JSON; {} for one that may be better in a minute. Raises ConfigError."""
    key, place = f"track.{tracker}", "/".join(url.split("/")[:3])
    none = ConfigError(f"{key}: {place} answers, but is no {'W&B' if tracker == 'wandb' else 'MLflow'} server")
    try:
        request = urllib.request.Request(url, data, dict(headers))
        with urllib.request.urlopen(request, timeout=ANSWER_S) as answer:
            found = json.loads(answer.read(1 << 20))
    except urllib.error.HTTPError as error:
        with error:
            text = error.read(1000).decode(errors="replace")
        if error.code in (401, 403):
            raise ConfigError(f"{key}: {place} refuses this key or password ({error.code})") from None
        if error.code == 404 and "RESOURCE_DOES_NOT_EXIST" not in text:
            raise none from None
        return {}
    except (ValueError, http.client.HTTPException):
        raise none from None
    except OSError as error:
        reason = getattr(error, "reason", error)
        why = getattr(reason, "strerror", None) or reason
        raise ConfigError(
            f"{key}: {place} does not answer ({why}); with {key}.mode=offline the run waits for "
            f"`{command('track RUN')}`, typed where it does"
        ) from None
    if not isinstance(found, dict):
        raise none
    return found


def made_once(run: RunDir, tracker: str) -> str:
    """The id of the tracker's run, made by the first process that asks; of W&B and trackio. Raises OSError."""
    folder = run.track(tracker)
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / "id"
    if not path.exists():
        temporary = aside(path)
        temporary.write_text(random_secrets.token_hex(6))
        fsync(temporary)
        with contextlib.suppress(FileExistsError):  # of two that are first, one is
            os.link(temporary, path)
        temporary.unlink()
    return path.read_text().strip()


def _mlflow_run(run: RunDir) -> str:
    """The id of MLflow's run, which only its server makes; once. Empty where it does not answer, which is said."""
    with contextlib.suppress(OSError, ValueError):
        if found := json.loads((run.track("mlflow") / "sent.json").read_text())["id"]:
            return str(found)
    code = "import sys; sys.path[:0] = [sys.argv.pop(1)]; from laststep.track.sender import create; create()"
    words = [sys.executable, "-c", code, str(Path(__file__).parent.parent.parent), str(run.path), "mlflow"]
    try:
        done = subprocess.run(words, capture_output=True, text=True, timeout=CREATE_S, start_new_session=True)
        if done.returncode == 0:
            return done.stdout.split()[-1]
        why = (done.stderr.strip().splitlines() or ["it failed"])[-1]
    except (OSError, subprocess.SubprocessError) as error:
        why = str(error)
    say(f"WARNING: MLflow has made no run for this one ({why[:200]}): the script's own calls begin another")
    return ""
