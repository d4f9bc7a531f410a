"""How many rows of a batch may be refused before it is refused as a whole (ADR 0024)."""

from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from lakeupsert import Table
from lakeupsert.errors import RefusedError

GOOD = "".join(f"k{i},2020-01-01,1\n" for i in range(500))


class Feed:
    def __init__(self, root: Path, more: str = "") -> None:
        self.root = root
        (root / "landing").mkdir()
        (root / "lakeupsert.toml").write_text(
            '[tables.t]\nlanding = "landing"\nprocessed = "processed"\nkey = ["id"]\npartition_by = ["day"]\n'
            f'order_by = ["version"]\n{more}[tables.t.schema]\nversion = "int64"\n'
        )
        self.table = Table.open(root / "lakeupsert.toml")

    def land(self, name: str, rows: str) -> None:
        (self.root / "landing" / name).write_text(f"id,day,version\n{rows}")

    def append(self, host: Any = "local") -> dict[str, int]:
        """Refused rows by reason."""
        appended = self.table.append(host=host)
        assert appended is not None
        return appended.entry.quarantined

    def refused(self, host: Any = "local") -> str:
        """The code with which a batch is refused, of which nothing is there then."""
        return self.refusal(host).code

    def refusal(self, host: Any = "local") -> RefusedError:
        before = self.table.objects.ledger.head()
        with pytest.raises(RefusedError) as caught:
            self.table.append(host=host)
        after = self.table.objects.ledger.head()
        assert (before and before.number) == (after and after.number)
        return caught.value


def bad(rows: int) -> str:
    return "".join(f"b{i},2020-01-01,x\n" for i in range(rows))


@pytest.mark.parametrize("rows", [1, 10, 1000])
def test_batch_of_which_every_row_is_refused_is_over_a_share(rows: int, tmp_path: Path) -> None:
    feed = Feed(tmp_path)
    feed.land("1.csv", GOOD)
    assert feed.append() == {}
    feed.land("2.csv", bad(rows))
    assert feed.refused() == "quarantine-limit"


def test_floor_of_ten_rows(tmp_path: Path) -> None:
    feed = Feed(tmp_path)
    feed.land("1.csv", GOOD)
    assert feed.append() == {}
    feed.land("2.csv", "k1,2020-01-01,2\n" + bad(10))
    assert feed.append() == {"bad_type": 10}
    feed.land("3.csv", "k1,2020-01-01,3\n" + bad(11))
    assert feed.refused() == "quarantine-limit"


@pytest.mark.parametrize("again", [False, True])
def test_no_floor_in_the_first_batch(again: bool, tmp_path: Path) -> None:
    feed = Feed(tmp_path)
    feed.land("1.csv", "a,2020-01-01,1\n" + bad(1))
    assert feed.refused() == "quarantine-limit"
    if again:  # the next call is still the first batch
        assert feed.refused() == "quarantine-limit"
    feed.land("1.csv", "a,2020-01-01,1\n")
    assert feed.append() == {}
    feed.land("2.csv", "b,2020-01-01,1\n" + bad(1))
    assert feed.append() == {"bad_type": 1}


def test_malformed_rows_make_no_table(tmp_path: Path) -> None:
    feed = Feed(tmp_path)
    feed.land("1.csv", "a,2020-01-01,1,1\nb,2020-01-01,1,1\n")
    assert feed.refused() == "no-readable-file"
    assert not feed.table.exists()


def test_share_holds_in_the_first_batch(tmp_path: Path) -> None:
    feed = Feed(tmp_path)
    feed.land("1.csv", GOOD + bad(5))
    assert feed.append() == {"bad_type": 5}


def test_first_batch_of_an_adopted_table_has_the_floor(tmp_path: Path) -> None:
    feed = Feed(tmp_path)
    folder = tmp_path / "processed/day=2020-01-01"
    folder.mkdir(parents=True)
    pq.write_table(pa.table({"id": ["a"], "version": [1]}), folder / "a.parquet")
    feed.table.adopt()
    feed.land("1.csv", "b,2020-01-01,1\n" + bad(1))
    assert feed.append() == {"bad_type": 1}


def test_unreadable_file_is_no_row(tmp_path: Path) -> None:
    feed = Feed(tmp_path)
    feed.land("1.csv", GOOD)
    assert feed.append() == {}
    (tmp_path / "landing/2.parquet").write_bytes(b"PAR1")
    assert feed.append() == {"unreadable_file": 1}
    (tmp_path / "landing/3.parquet").write_bytes(b"PAR1")
    feed.land("4.csv", bad(3))
    assert feed.refused() == "quarantine-limit"


def test_number_of_rows_is_a_limit_as_it_stands(tmp_path: Path) -> None:
    feed = Feed(tmp_path, "quarantine_limit = 2\n")
    feed.land("1.csv", "a,2020-01-01,1\n" + bad(2))
    assert feed.append() == {"bad_type": 2}
    feed.land("2.csv", bad(2))
    assert feed.append() == {"bad_type": 2}
    feed.land("3.csv", GOOD + bad(3))
    assert feed.refused() == "quarantine-limit"


@pytest.mark.parametrize("none", ["0", '"0%"', '"0.00%"'])
def test_nothing_is_allowed(none: str, tmp_path: Path) -> None:
    feed = Feed(tmp_path, f"quarantine_limit = {none}\n")
    feed.land("1.csv", GOOD)
    assert feed.append() == {}
    feed.land("2.csv", GOOD + bad(1))
    assert feed.refused() == "quarantine-limit"


def test_floor_is_told_where_it_applies(tmp_path: Path) -> None:
    feed = Feed(tmp_path)
    feed.land("1.csv", "a,2020-01-01,1\n" + bad(1))
    assert "first batch" in feed.refusal().message
    feed.land("1.csv", "a,2020-01-01,1\n" + bad(11))
    assert "10 rows" not in feed.refusal().message
    feed.land("1.csv", GOOD)
    assert feed.append() == {}
    feed.land("2.csv", bad(10))
    assert "all rows" in feed.refusal().message
    feed.land("2.csv", "a,2020-01-01,1\n" + bad(11))
    message = feed.refusal().message
    assert ("10 rows" in message, "first batch" in message, "all rows" in message) == (True, False, False)


def test_hundred_percent_is_no_limit(tmp_path: Path) -> None:
    feed = Feed(tmp_path, 'quarantine_limit = "100%"\n')
    feed.land("1.csv", bad(3))
    assert feed.append() == {"bad_type": 3}


def test_run_finishes_what_was_there_and_is_refused(tmp_path: Path) -> None:
    feed = Feed(tmp_path)
    feed.land("1.csv", GOOD)
    assert feed.append() == {}
    feed.land("2.csv", bad(1000))
    with pytest.raises(RefusedError) as caught:
        feed.table.run(host="local")
    assert caught.value.code == "quarantine-limit"
    assert feed.table.to_arrow().read_all().num_rows == 500


@pytest.mark.long
@pytest.mark.usefixtures("spark")
def test_the_same_with_spark(tmp_path: Path) -> None:
    feed = Feed(tmp_path)
    feed.land("1.csv", "a,2020-01-01,1\n" + bad(1))
    assert feed.refused("spark") == "quarantine-limit"
    feed.land("1.csv", GOOD)
    assert feed.append("spark") == {}
    feed.land("2.csv", "k1,2020-01-01,2\n" + bad(10))
    assert feed.append("spark") == {"bad_type": 10}
    feed.land("3.csv", bad(10))
    assert feed.refused("spark") == "quarantine-limit"
