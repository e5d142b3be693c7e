"""Where a disturbed run is struck, and what the first difference of two runs is taken for."""

from __future__ import annotations

import math
from typing import Any

import pytest

from laststep.proof.differences import Difference, differences_of, differs_by_rank, first_of, rule_of, unsteady
from laststep.proof.runs import AT_AN_END, KILL, STOP, choose_places, missing_kinds
from laststep.records.probes import Probed, ProbedStep, ProbePlan, Strike

EPOCH = 10


def first_difference(*compared: Any, **how: Any) -> Difference | None:
    found = differences_of(*compared, **how)
    return first_of(found) if found else None


def a_step(step: int, attempt: int = 0, **changed: Any) -> ProbedStep:
    """What a rank of a script without a fault notes."""
    line = {
        "attempt": attempt,
        "step": step,
        "epoch": (step - 1) // EPOCH + 1,
        "batch": f"batch {step}",
        "inputs": [f"input {step}"],
        "updates": 1,
        "state": {"model.weight": f"weight {step}"},
        "beside": [],
        "rows": [],
        "variables": {},
    }
    return {**line, **changed}  # type: ignore[typeddict-item]


def probed(*lines: ProbedStep, validated: bool = True, ranks: int = 2, loss: float = 0.5, **metrics: Any) -> Probed:
    """A run of which each rank has noted these lines."""
    batches: Any = [{"attempt": 0, "after": EPOCH, "validation_batch": batch} for batch in (1, 2)]
    of_steps = [(True, {"step": line["step"], "loss": loss, **metrics}) for line in lines]
    return Probed([list(lines)] * ranks, batches if validated else [], of_steps)


def undisturbed(steps: int, **changed: Any) -> Probed:
    return probed(*(a_step(step, **changed) for step in range(1, steps + 1)))


@pytest.mark.parametrize("seed", range(20))
def test_every_kind_of_place(seed: int) -> None:
    """For any seed: each kind once, in order, each followed by a step; the first stop by steps of its own epoch."""
    places = choose_places(undisturbed(25), 2, seed)
    steps = [place.strike.step for place in places]
    assert steps == sorted(steps) and steps[0] > 0 and steps[-1] < 25
    assert not missing_kinds(places) and len(places) == 5
    assert [place.strike.signal for place in places].count(KILL) == 1
    within = next(place.strike.step for place in places if place.kind not in AT_AN_END and place.strike.signal == STOP)
    assert math.gcd(within, 30) == 1, "every second to sixth turn's update must be parted"
    others = [step for step in steps if step > within]
    assert within + 2 <= others[0]
    assert choose_places(undisturbed(25), 2, seed) == places


def test_no_end_of_an_epoch() -> None:
    """A run that ends within its first epoch is stopped and killed there, and the report says what was not tried."""
    places = choose_places(probed(*map(a_step, range(1, 9)), validated=False), 2, seed=0)
    assert [place.strike.signal for place in places].count(STOP) == 1 and len(places) == 2
    assert missing_kinds(places) == list(AT_AN_END)


def test_where_a_run_ends() -> None:
    """Without --steps: early in the second epoch, but after 20 to 100 steps."""
    plan = ProbePlan()
    assert not plan.ends_in(19, 3, 9) and plan.ends_in(20, 3, 9)
    assert not plan.ends_in(57, 2, 7) and plan.ends_in(58, 2, 8)
    assert not plan.ends_in(99, 1, 99) and plan.ends_in(100, 1, 100)
    plan = ProbePlan(7, Strike(STOP, 1, 3, 2))
    assert plan.ends_in(7, 1, 7) and not plan.ends_in(6, 1, 6)
    assert ProbePlan.of(plan.environment()) == plan
    assert ProbePlan.of({}) is None


def resumed(*changed: dict[str, Any], first: int = 4) -> Probed:
    """A run that was stopped after the step before `first`; its steps from there on differ by `changed`."""
    after = [a_step(first + number, 1, **more) for number, more in enumerate(changed)]
    return probed(*(a_step(step) for step in range(1, first)), *after)


SAME: dict[str, Any] = {}
OTHER_STATE: dict[str, Any] = {"state": {"model.weight": "other"}}


@pytest.mark.parametrize(
    ("expected", "found", "step", "rule"),
    [
        (undisturbed(6), resumed({"batch": "other", **OTHER_STATE}, OTHER_STATE), 4, "data set"),
        (undisturbed(6), resumed({"inputs": ["x"], **OTHER_STATE}, OTHER_STATE), 4, "prefetch"),
        (undisturbed(6), resumed({"inputs": ["x"], **OTHER_STATE}, {"inputs": ["y"]}), 4, "second loader"),
        (undisturbed(6), resumed(SAME, OTHER_STATE), 5, "unregistered"),
        (undisturbed(6, updates=0), resumed(SAME, OTHER_STATE), 5, "accumulate"),
        (undisturbed(6), probed(*(a_step(s) for s in (1, 2)), a_step(3, **OTHER_STATE)), 3, "not deterministic"),
    ],
)  # fmt: skip
def test_rules(expected: Probed, found: Probed, step: int, rule: str) -> None:
    """The first difference, and how it goes on, decide on the rule."""
    difference = first_difference(expected, found, so_far=True)
    assert difference is not None and difference.step == step
    assert rule_of(difference, expected, expected, found) == rule


def test_a_generator_is_named_before_the_values_that_follow_from_it() -> None:
    noise = [{"noise": {"kind": "generator", "digest": digest}} for digest in "ab"]
    expected = undisturbed(6, variables=noise[0])
    found = resumed({"inputs": ["x"], "variables": noise[1]}, {"inputs": ["y"], "variables": noise[1]})
    difference = first_difference(expected, found, so_far=True)
    assert difference is not None and rule_of(difference, expected, expected, found) == "generator"


def test_a_step_that_was_done_again() -> None:
    """Both times it must have the same bits, and the earlier attempt comes first."""
    found = probed(*map(a_step, (1, 2, 3)), a_step(2, 1, **OTHER_STATE), a_step(3, 1), a_step(4, 1))
    difference = first_difference(undisturbed(4), found)
    assert difference is not None and (difference.attempt, difference.step) == (1, 2)


def test_an_epoch_that_differs() -> None:
    """A validation that is repeated after a stop belongs to the attempt that repeats it, not to the one that did the
    steps before it: else the script would look as if it were not deterministic."""
    expected, found = undisturbed(EPOCH), undisturbed(EPOCH)
    found.batches.append({"attempt": 1, "after": EPOCH, "validation_batch": 1})
    for run, loss in ((expected, 0.5), (found, 0.6)):
        run.metrics.append((False, {"epoch": 1, "step": EPOCH, "val_loss": loss}))
    difference = first_difference(expected, found)
    assert difference is not None and (difference.attempt, difference.what) == (1, "epoch")
    assert rule_of(difference, expected, expected, found) == "unregistered"


def test_missing_steps() -> None:
    """A run that ends early is not exact, even if all that it did is the same."""
    found = probed(*map(a_step, (1, 2, 3)))
    assert first_difference(undisturbed(4), found, so_far=True) is None
    difference = first_difference(undisturbed(4), found)
    assert difference is not None and (difference.what, difference.step) == ("missing", 4)


def test_a_clock_in_the_metrics() -> None:
    """Seconds differ between any two runs: they are left out. A loss that differs while the bits are the same is not a
    clock in one run alone."""
    one, other = probed(a_step(1), seconds=1.0), probed(a_step(1), seconds=1.1)
    assert unsteady(one, other) == {"seconds"}
    assert first_difference(one, other, {"seconds"}) is None
    difference = first_difference(one, probed(a_step(1), seconds=1.1, loss=0.6), {"seconds"})
    assert difference is not None and difference.names == ("loss",)


def test_a_sequence_of_durations() -> None:
    """As in the statistics of an environment. One of them is the same in two undisturbed runs by chance, and differs in
    the third: the proof of an exact run failed one time in ten. An entry that is no duration still counts."""

    def run(times: list[float], pair: list[float] = [1.0, 7.0]) -> Probed:  # noqa: B006
        state = {f"game.times.{place}": str(value) for place, value in enumerate(times)}
        state |= {f"game.pair.{place}": str(value) for place, value in enumerate(pair)}
        return probed(a_step(1, state=state, beside=[*state]))

    undisturbed, again = run([0.1, 0.2, 0.3, 0.4], [1.0, 7.0]), run([0.5, 0.2, 0.6, 0.7], [2.0, 7.0])
    ignored = unsteady(undisturbed, again)
    assert first_difference(undisturbed, run([0.8, 0.9, 0.3, 0.1]), ignored) is None
    difference = first_difference(undisturbed, run([0.1, 0.2, 0.3, 0.4], [3.0, 8.0]), ignored)
    assert difference is not None and difference.names == ("game.pair.1",)


def test_a_list_of_seconds() -> None:
    """A clock may show the same twice: of a hundred episodes' seconds some were the same in both undisturbed runs, and
    one of ten proofs of an exact script failed. A number that stands beside a clock does not become one."""

    def of(*values: str) -> Probed:
        state = {f"game.{n}.{key}": value for n, pair in enumerate(values) for key, value in zip("01", pair)}
        return probed(a_step(1, state={**OTHER_STATE["state"], **state}, beside=list(state)))

    found = unsteady(of("ac", "ad", "ae"), of("ac", "ax", "ay"))
    assert found == {"game.0.1", "game.1.1", "game.2.1"}
    assert unsteady(of("ac", "ad", "ae"), of("ac", "ad", "ay")) == {"game.2.1"}, "one of three: no clock"


def test_what_stands_in_a_list_beside_seconds() -> None:
    """Only plain values become a clock's: a tensor or a count in the same list that a resume loses is still found."""

    def run(seconds: str, weights: str = "w", count: str = "3") -> Probed:
        beside = {"game.0": f"{seconds}0", "game.1": f"{seconds}1", "game.2.count": count}
        return probed(a_step(1, state={"game.3": weights, **beside}, beside=list(beside)))

    ignored = unsteady(run("a"), run("b"))
    assert first_difference(run("a"), run("c"), ignored) is None
    for lost, what, name in (
        (run("c", weights="x"), "state", "game.3"),
        (run("c", count="0"), "beside", "game.2.count"),
    ):
        difference = first_difference(run("a"), lost, ignored)
        assert difference is not None and (difference.what, difference.names) == (what, (name,))


def test_state_that_differs_by_rank() -> None:
    run = Probed([[a_step(1)], [a_step(1, **OTHER_STATE)]], [], [])
    difference = differs_by_rank(run)
    assert difference is not None and (difference.rank, difference.names) == (1, ("model.weight",))
    assert differs_by_rank(undisturbed(3)) is None
