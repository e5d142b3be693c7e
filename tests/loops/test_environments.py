"""Gymnasium's environments are registered as they are: a resumed run continues the episodes."""

from __future__ import annotations

from typing import Any

import pytest

from laststep.loops.kinds import Unstorable, encode
from tests.loops.test_kinds import stored

gymnasium = pytest.importorskip("gymnasium")


def make(number: int = 2) -> Any:
    """Several environments with the wrappers that scripts for PPO use."""

    def one() -> Any:
        return gymnasium.wrappers.RecordEpisodeStatistics(gymnasium.make("CartPole-v1", max_episode_steps=20))

    return gymnasium.vector.SyncVectorEnv([one for _ in range(number)])


def play(envs: Any, steps: int) -> list[Any]:
    """What the steps have given, with actions that the environments draw."""
    found = []
    for _ in range(steps):
        observed, rewards, ended, cut, _ = envs.step(envs.action_space.sample())
        found += [observed.tolist(), rewards.tolist(), ended.tolist(), cut.tolist()]
    return found


def test_continues() -> None:
    """Over the ends of episodes, whose starts are drawn, and the limit of their steps."""
    envs, live = make(), make()
    envs.reset(seed=3)
    envs.action_space.seed(4)
    play(envs, 30)
    live.reset(seed=9)
    play(live, 3)
    stored(envs, live)
    assert play(live, 60) == play(envs, 60)


def test_other_processes() -> None:
    """They keep their state to themselves."""
    envs = gymnasium.vector.AsyncVectorEnv([lambda: gymnasium.make("CartPole-v1")])
    try:
        with pytest.raises(Unstorable, match=r"envs\..* is a .*, which no checkpoint can hold"):
            encode(envs, "envs")
    finally:
        envs.close()
