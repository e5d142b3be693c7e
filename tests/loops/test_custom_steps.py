"""The table of phases of a custom training loop is complete: `_move` looks every event up in it."""

from __future__ import annotations

from laststep.loops.custom_loop import IN_BODY, IN_UPDATE, NEXT, STEP_OPEN, Event, Phase


def reachable(start: Phase) -> set[Phase]:
    """The phases that can follow `start`, itself included."""
    found, open_phases = {start}, [start]
    while open_phases:
        phase = open_phases.pop()
        following = {after for (before, _), after in NEXT.items() if before is phase} - found
        found |= following
        open_phases += following
    return found


def test_every_phase_can_be_reached_and_left() -> None:
    """A phase without a way in is dead code. One without a way to AFTER_STEPS would never end its epoch."""
    assert reachable(Phase.SETUP) == set(Phase)
    assert all(Phase.AFTER_STEPS in reachable(phase) for phase in Phase)


def test_an_update_begins_and_ends_once_per_step() -> None:
    """`_before_update` begins the ring's update for UPDATE, `_end_step` ends it for STEP_ENDS; no other event may enter
    or leave the phases in between."""
    for (before, event), after in NEXT.items():
        assert (before not in IN_UPDATE and after in IN_UPDATE) == (event is Event.UPDATE)
        assert (before in IN_UPDATE and after not in IN_UPDATE) == (event is Event.STEP_ENDS)


def test_a_step_stays_open_until_it_is_closed() -> None:
    """A break leaves the body of the loop, not the step: its samples and its logged values are still to be counted."""
    for (before, event), after in NEXT.items():
        assert (before not in STEP_OPEN and after in STEP_OPEN) == (event is Event.BATCH)
        assert (before in STEP_OPEN and after not in STEP_OPEN) == (event is Event.STEP_ENDS)
        assert (before in IN_BODY and after in STEP_OPEN - IN_BODY) == (event is Event.BROKEN_OFF)
