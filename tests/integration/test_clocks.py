"""A machine whose clock is off: the store's decides what is in the future, and `run` warns."""

from collections.abc import Iterator
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest

from lakeupsert import clock
from tests.harness.lake import Lake, row

HOUR = 3600


class Off(clock.Source):
    def __init__(self, **by: float) -> None:
        self._by = timedelta(**by)

    def now(self) -> datetime:
        return super().now() + self._by


@pytest.fixture(params=["disk", "s3"])
def lake(request: pytest.FixtureRequest, folder: Path) -> Iterator[Lake]:
    """cloud: the store's clock is that of a file system, or of an S3 server."""
    if request.param == "disk":
        yield Lake(folder)
    else:
        server, new_place = request.getfixturevalue("moto"), request.getfixturevalue("new_place")
        yield Lake(folder, processed=f"{new_place(server)}/processed", queue=str(folder / "queue.sqlite"))


def later(hours: float) -> int:
    """`ts` of a row so many hours from now."""
    return int((datetime.now(UTC) - datetime(2020, 1, 1, tzinfo=UTC)).total_seconds() + hours * HOUR)


@pytest.mark.few(2)
@pytest.mark.parametrize(
    ("off", "warns"),
    [
        (Off(days=1, hours=2), "ahead of"),
        (Off(days=-1, hours=-2), "behind"),
        (Off(minutes=4), ""),
    ],
)
def test_stores_clock_decides_what_is_in_the_future(lake: Lake, off: Off, warns: str) -> None:
    lake.land("a.jsonl", [row("past", 0, later(-1)), row("soon", 0, later(20)), row("future", 0, later(30))])
    with clock.use(off):
        done = lake.table.run(host="local", workers=1)
        assert done.append is not None
        told = [warning for warning in done.append.warnings if "clock" in warning]
        assert (bool(told), all(warns in warning for warning in told)) == (bool(warns), True)
        assert sorted(r["k"] for r in lake.rows()) == ["past", "soon"]
        assert done.append.entry.quarantined == {"future_order": 1}
        # what reads the files again judges as the batch did, whatever its own clock says
        with clock.use(Off(days=3)):
            lake.reopen()
            assert all(p.balanced for p in lake.table.reconcile(deep=True).proof)
            lake.table.reprocess(source="landing", host="local", workers=1)
            assert sorted(r["k"] for r in lake.rows()) == ["past", "soon"]
        lake.reopen()
        warnings: list[str] = []
        lake.table.run(host="local", workers=1, warn=warnings.append)
        assert any("clock" in warning for warning in warnings) == bool(warns), "also without a new file"


def test_a_batch_of_a_clock_that_was_ahead_lets_no_later_one_into_the_future(folder: Path) -> None:
    lake = Lake(folder)
    lake.land("a.jsonl", [row("past", 0, later(-1))])
    with clock.use(Off(days=365)):
        lake.table.run(host="local", workers=1)
    lake.reopen()
    lake.land("b.jsonl", [row("soon", 0, later(20)), row("future", 0, later(30))])
    done = lake.table.run(host="local", workers=1)
    assert done.append is not None
    assert done.append.entry.quarantined == {"future_order": 1}
    assert any("clock" in warning for warning in done.append.warnings)
    assert sorted(r["k"] for r in lake.rows()) == ["past", "soon"]
