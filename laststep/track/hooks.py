"""What the core calls, see laststep/rooms.py: the check before a submission, the variables of a script that has a
tracker of its own, the senders beside rank 0, and the links that `status` shows. Imports no tracker."""

from __future__ import annotations

import base64
import contextlib
import importlib
import json
import netrc
import os
import subprocess
import sys
import urllib.error
import urllib.parse
import urllib.request
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from laststep.config.errors import ConfigError
from laststep.config.machine import Machine, Way
from laststep.ranks.beside import Beside
from laststep.rundir import RunDir
from laststep.say import command, note, say
from laststep.track.secrets import HIDDEN, IN_URL
from laststep.track.section import PACKAGES, Wish, wishes

ANSWER_S = 10.0  # how long a submission waits for a tracker
CREATE_S = 60.0  # how long rank 0 waits for MLflow, where a script sends to it
WANDB = "https://api.wandb.ai"
VIEWER = json.dumps({"query": "query { viewer { id } }"}).encode()


def check(config: Any, machine: Machine) -> None:
    """Refuse what cannot send: a wrong word, no package, no network, a wrong key or address. Raises ConfigError."""
    for wish in wishes(config):
        if machine.way is Way.RANK:
            continue
        if config.launch.python is None and find_spec(PACKAGES[wish.tracker]) is None:
            raise ConfigError(
                f"track.{wish.tracker}: this Python lacks {wish.tracker}: pip install 'laststep[{wish.tracker}]'"
            )
        if wish.offline or machine.way is Way.DRY_RUN:
            continue
        try:
            if wish.tracker == "wandb" and os.environ.get("WANDB_MODE", "online") == "online":
                _check_wandb(wish, config.launch.env)
            if wish.tracker == "mlflow":
                _check_mlflow(wish, config.launch.env)
        except ConfigError as error:
            if machine.new:
                raise
            note(f"[laststep] WARNING: {error}")  # a run that has trained for days continues without its tracker


def environment(config: Any, run: RunDir, world: Any) -> dict[str, str]:
    """What makes a tracker in the user's script continue the run of that tracker that this run has. Of rank 0 alone."""
    variables: dict[str, str] = {}
    for wish in wishes(config) if world.rank == 0 else ():
        if wish.by_script and wish.tracker == "wandb":
            from laststep.track.sender import made_once

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


def _check_wandb(wish: Wish, env: dict[str, str]) -> None:
    base = env.get("WANDB_BASE_URL") or os.environ.get("WANDB_BASE_URL") or WANDB
    key = env.get("WANDB_API_KEY") or os.environ.get("WANDB_API_KEY") or _in_netrc(base)
    if not key:
        raise ConfigError("track.wandb: no key for W&B: type `wandb login`, or set WANDB_API_KEY")
    headers = {"Authorization": "Basic " + base64.b64encode(f"api:{key}".encode()).decode()}
    headers["Content-Type"] = "application/json"
    answer = _ask("wandb", f"{base.rstrip('/')}/graphql", headers, VIEWER)
    if isinstance(answer, dict) and "data" in answer and not (answer["data"] or {}).get("viewer"):
        raise ConfigError(f"track.wandb: {base} does not know this key: type `wandb login --relogin`")


def _in_netrc(base: str) -> str | None:
    with contextlib.suppress(OSError, netrc.NetrcParseError):
        path = os.environ.get("NETRC") or str(Path.home() / ".netrc")
        found = netrc.netrc(path).authenticators(urllib.parse.urlsplit(base).hostname or "")
        return found[2] if found else None
    return None


def _check_mlflow(wish: Wish, env: dict[str, str]) -> None:
    uri = wish.uri or env.get("MLFLOW_TRACKING_URI") or os.environ.get("MLFLOW_TRACKING_URI")
    if uri is None:
        raise ConfigError("track.mlflow: where is its server? add track.mlflow.uri=http://HOST:PORT")
    place = urllib.parse.urlsplit(uri)
    if place.scheme not in ("http", "https"):
        folder = Path(urllib.parse.urlsplit(uri.replace("sqlite:///", "file://")).path).parent
        if place.scheme == "sqlite" and not folder.is_dir():
            raise ConfigError(f"track.mlflow.uri={_shown(uri)}: there is no folder {folder}")
        if place.scheme == "":
            raise ConfigError(f"track.mlflow.uri={uri}: must begin with http:// or https://, or be sqlite:////PATH")
        return
    headers = {}
    user = place.username or env.get("MLFLOW_TRACKING_USERNAME") or os.environ.get("MLFLOW_TRACKING_USERNAME")
    password = place.password or env.get("MLFLOW_TRACKING_PASSWORD") or os.environ.get("MLFLOW_TRACKING_PASSWORD") or ""
    token = env.get("MLFLOW_TRACKING_TOKEN") or os.environ.get("MLFLOW_TRACKING_TOKEN")
    if user:
        headers["Authorization"] = "Basic " + base64.b64encode(f"{user}:{password}".encode()).decode()
    elif token:
        headers["Authorization"] = f"Bearer {token}"
    host = place.netloc.rpartition("@")[2]
    name = urllib.parse.quote(wish.project)
    query = (
        f"{place.scheme}://{host}{place.path.rstrip('/')}/api/2.0/mlflow/experiments/get-by-name?experiment_name={name}"
    )
    answer = _ask("mlflow", query, headers)
    stage = (answer or {}).get("experiment", {}).get("lifecycle_stage")
    if stage == "deleted":
        raise ConfigError(f"track.mlflow.experiment={wish.project}: was deleted there; name another, or restore it")


def _ask(tracker: str, url: str, headers: dict[str, str], data: bytes | None = None) -> dict[str, Any]:
    """The answer of a tracker's server, as JSON; {} where it is none that we know. Raises ConfigError."""
    key, place = f"track.{tracker}", "/".join(url.split("/")[:3])
    try:
        with urllib.request.urlopen(urllib.request.Request(url, data, headers), timeout=ANSWER_S) as answer:
            found = json.loads(answer.read(1 << 20))
            return found if isinstance(found, dict) else {}
    except urllib.error.HTTPError as error:
        with error:
            text = error.read(1000).decode(errors="replace")
        if error.code in (401, 403):
            raise ConfigError(f"{key}: {place} refuses this key or password ({error.code})") from None
        if error.code == 404 and "RESOURCE_DOES_NOT_EXIST" not in text and tracker == "mlflow":
            raise ConfigError(f"{key}: {place} answers, but is no MLflow server ({error.code})") from None
        return {}
    except ValueError:
        raise ConfigError(f"{key}: {place} answers, but is no {tracker} server") from None
    except OSError as error:
        reason = getattr(error, "reason", error)
        why = getattr(reason, "strerror", None) or reason
        raise ConfigError(
            f"{key}: {place} does not answer ({why}); with {key}.mode=offline the run waits for "
            f"`{command('track RUN')}`, typed where it does"
        ) from None


def _mlflow_run(run: RunDir) -> str:
    """The id of MLflow's run, which only its server makes; once. Empty where it does not answer, which is said."""
    with contextlib.suppress(OSError, ValueError):
        if found := json.loads((run.track("mlflow") / "sent.json").read_text())["id"]:
            return str(found)
    code = "import sys; sys.path[:0] = [sys.argv.pop(1)]; from laststep.track.create import main; sys.exit(main())"
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


def _shown(uri: str) -> str:
    return IN_URL.sub(f"{HIDDEN}@", uri)
