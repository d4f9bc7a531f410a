"""The small form of `python -m tests.harness.soak`."""

from pathlib import Path

import pytest

from tests.harness.readers import Readers
from tests.harness.soak import soak


@pytest.mark.parametrize("retention", ["24h", "0s"])
def test_no_read_is_wrong_while_nights_run_and_die(readers: Readers, tmp_path: Path, retention: str) -> None:
    names = ("duckdb", "delta-rs")
    tally = soak(tmp_path, readers, names, nights=7, retention=retention)
    print(tally.text())
    assert tally.wrong == []
    assert tally.broken == []
    assert {read.reader for read in tally.reads if read.failure is None} == set(names)
    assert tally.kills.total()
    assert tally.versions
    if retention != "0s":  # which lets a vacuum delete what a read of an older version needs
        assert not tally.failures
