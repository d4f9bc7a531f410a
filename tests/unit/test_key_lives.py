"""The table of what a record does to the life of its key: `engine.keys.lives.STEPS`."""

from itertools import product

import pytest

from lakeupsert.engine.keys.lives import DEAD, LIVES, NEWER, OLDER, STEPS

EVENTS = ["delete here", "delete elsewhere", "record alone", "record here", "record elsewhere"]


def test_every_state_has_a_step_for_every_record(capsys: pytest.CaptureFixture[str]) -> None:
    for state, event in STEPS:
        print(f"{state:<6} {event:<17} older: {STEPS[state, event][OLDER]:<6} newer: {STEPS[state, event][NEWER]}")
    assert [*STEPS] == [*product((LIVES, DEAD), EVENTS)]
    assert all([*ages] == [OLDER, NEWER] for ages in STEPS.values())
    assert len(capsys.readouterr().out.splitlines()) == 10


def test_only_a_newer_record_changes_whether_a_key_lives() -> None:
    kills = {"kill", "copy and kill"}
    for (state, _), ages in STEPS.items():
        assert not {ages[OLDER]} & {*kills, "revive", "move"}
        assert state == LIVES or ages[NEWER] not in ("join", "move", "copy and kill")
        assert state == DEAD or ages[NEWER] not in ("revive", "go unknown")
