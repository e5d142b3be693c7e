"""Nothing that opens a door leaves the run folder."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from laststep.config.config import Config
from laststep.config.secret import HIDDEN, Secrets
from laststep.rundir import RunDir
from laststep.track import describe

DOORS = {
    "launch.env.ANY_NAME": "value-of-a-variable",
    "alert.to": "https://hooks.slack.com/services/T0/B0/abcdef",
    "args.api_key": "0123456789abcdef",
    "args.login.password": "pass-word-1",
    "args.hf_token": "plain-token-1",
    "data.args.webhook": "https://example.org/hook/1234",
}


def nested(flat: dict[str, str]) -> dict[str, object]:
    tree: dict[str, object] = {"optim": {"lr": 0.1}, "args": {"tokens": 5, "max_tokens": 7, "tokenizer": "bpe-large"}}
    for key, value in flat.items():
        *sections, name = key.split(".")
        place = tree
        for section in sections:
            place = place.setdefault(section, {})  # type: ignore[assignment]
        place[name] = [value] if key == "alert.to" else value
    return tree


def test_values_of_secret_keys(monkeypatch: pytest.MonkeyPatch) -> None:
    """In the configuration, and wherever else they are quoted: in the command, in an error, in a diff."""
    monkeypatch.setenv("WANDB_API_KEY", "key-of-the-environment")
    tree = nested(DOORS)
    secrets = Secrets(tree)
    shown = json.dumps(secrets.without(tree))
    for value in DOORS.values():
        assert value not in shown
        assert value not in secrets.hide(f"launch.py submit x={value} failed at {value}.")
    assert "key-of-the-environment" not in secrets.hide("wandb: key-of-the-environment is wrong")
    kept = secrets.without(tree)
    assert kept["optim"] == {"lr": 0.1} and kept["args"]["max_tokens"] == 7
    assert kept["args"]["tokenizer"] == "bpe-large", "no secret, though its name begins like one"


@pytest.mark.parametrize(
    "text",
    [
        "hf_" + "a" * 30,
        "ghp_" + "b" * 36,
        "AKIA" + "C" * 16,
        "sk-ant-" + "d" * 24,
        "https://hooks.slack.com/services/T0/B1/xyz",
        "https://discord.com/api/webhooks/1/abc",
        "postgresql://me:word123@host/db",
        '+API_KEY = "abcdef123456"',
        "python train.py --api-key abcdef123456 --lr 1",
        '{"password": "abcdef123456"}',
        "-----BEGIN RSA PRIVATE KEY-----\nabcdef123456\n-----END RSA PRIVATE KEY-----",
    ],
)
def test_secrets_by_their_looks(text: str) -> None:
    """A diff holds what a user has typed into a script, and no key of ours names it."""
    hidden = Secrets({}).hide(f"before {text} after")
    assert HIDDEN in hidden and hidden.startswith("before") and hidden.endswith("after")
    for part in ("aaaa", "bbbb", "CCCC", "dddd", "xyz", "webhooks", "word123", "abcdef"):
        assert part not in hidden


def test_words_of_a_script() -> None:
    """They are a list, in which the value follows its option."""
    config = {"script": ["train.py", "--api-key", "abc123456", "--lr", "3e-4"]}
    assert Secrets(config).without(config)["script"] == ["train.py", "--api-key", HIDDEN, "--lr", "3e-4"]


def test_what_a_run_would_send(tmp_path: Path) -> None:
    """The whole of it, as a sender gives it to a tracker."""
    run = RunDir(tmp_path / "mine")
    run.path.mkdir()
    words = ["launch.env.MY=value-of-a-variable", "args.api_key=0123456789abcdef", "launch.name=mine"]
    config = Config.load(None, [*words, f"launch.root={tmp_path}"])
    config.save(run.config)
    submission = {"job_id": "1", "time": 1.0, "command": ["launch.py", *words], "config": config.to_yaml()}
    run.submissions.write_text(json.dumps(submission) + "\n")
    run.diff.write_text('+KEY = "0123456789abcdef"\n+password = "hunter2hunter2"\n')
    text = json.dumps(describe.facts(run))
    assert "launch.env.MY" in text and HIDDEN in text
    for secret in ("value-of-a-variable", "0123456789abcdef", "hunter2hunter2"):
        assert secret not in text
