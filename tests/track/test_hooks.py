"""What the core asks the trackers for: variables of a script that sends by itself, senders, links."""

from __future__ import annotations

import json
from pathlib import Path

from laststep.config.config import Config
from laststep.rundir import RunDir
from laststep.track import hooks
from tests.support.records import a_world


def test_a_script_that_sends_by_itself(tmp_path: Path) -> None:
    """Rank 0 finds the same run in each attempt, or there would be one per attempt; the other ranks find nothing, or
    they would write to that run, too. And no sender of ours does."""
    run = RunDir(tmp_path / "own")
    words = ["track.wandb={project: p, entity: e, by: script}", f"launch.root={tmp_path}", "launch.name=own"]
    config = Config.load(None, words)
    run.path.mkdir()
    first = hooks.environment(config, run, a_world(0, 2))
    assert first == hooks.environment(config, run, a_world(0, 2))
    assert hooks.environment(config, run, a_world(1, 2)) == {}
    assert first["WANDB_RESUME"] == "allow" and len(first["WANDB_RUN_ID"]) == 12
    assert (first["WANDB_PROJECT"], first["WANDB_ENTITY"], first["WANDB_NAME"]) == ("p", "e", "own")
    assert hooks.programs(config, run) == []


def test_who_sends(tmp_path: Path) -> None:
    """A process of its own for each tracker, as one that hangs would hold up the others; none where the job cannot."""
    words = ["track.wandb={project: p, mode: offline}", "track.mlflow={experiment: e, uri: 'http://h'}"]
    config = Config.load(None, [*words, "track.trackio.project=p"])
    assert [one.name for one in hooks.programs(config, RunDir(tmp_path))] == ["track-mlflow", "track-trackio"]


def test_links(tmp_path: Path) -> None:
    """Where the run is, or why it is not there."""
    run = RunDir(tmp_path)
    for tracker, sent in {
        "mlflow": {"id": "1", "url": "http://h/#/1", "step": 5, "error": None},
        "trackio": {"id": "2", "url": None, "step": 5, "error": "OSError: full"},
        "wandb": {"id": None, "url": None, "step": 0, "error": "CommError: 403"},
    }.items():
        run.track(tracker).mkdir(parents=True)
        (run.track(tracker) / "sent.json").write_text(json.dumps(sent))
    assert hooks.links(run) == {
        "mlflow": "http://h/#/1",
        "trackio": "run 2, not sent since step 5: OSError: full",
        "wandb": "not sent since step 0: CommError: 403",
    }
