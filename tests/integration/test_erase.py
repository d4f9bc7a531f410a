"""`erase`: keys that came by every path are in no byte of the table any more, and all other rows stay as they were."""

import base64
import re
from datetime import timedelta
from pathlib import Path
from typing import Any

import fastavro
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from lakeupsert import clock
from lakeupsert.errors import LakeupsertError, TryAgainError
from lakeupsert.landing.formats import limits
from tests.harness.faults import Fault, Killed
from tests.harness.lake import Lake, row

CANARY = "canary-8c1f"
KINDS: dict[str, dict[str, Any]] = {
    "rewrite": {},
    "delta": {"strategy": "delta"},
    "history": {"history": True},
    "key index": {"key_scope": "table"},
    "columns": {"mode": "columns"},
    "buckets": {"bucket": "1kB", "strategy": "delta"},
    "delta log": {"publishers": ("delta",)},
}


def written(root: Path, **settings: Any) -> Lake:
    """A table with the canary's key in bases, deltas, deletes, quarantine, a statement and older versions."""
    lake = Lake(root, **settings)
    for night in (1, 2, 3):
        rows = [row(f"{n:04d}", n % 3, night, n) for n in range(0, 200, night)]
        rows += [row(CANARY, 0, night, night), row(f"{CANARY}2", 1, night, op="D" if night == 2 else None)]
        if "key_scope" in settings:
            rows += [row(f"{CANARY}3", night % 3, night, night)]
        bad = [{**row(CANARY, 2, night), "ts": "soon"}, {**row("other", 2, night), "ts": "later"}]
        lake.land(f"{night}.jsonl", rows, refused=bad)
        lake.run()
    if settings.get("history") is None:
        lake.change("bundle", {"v": "v + 1"}, "l = 0", lambda one: {**one, "v": one["v"] + 1})
    return lake


def keys(root: Path) -> Path:
    """A list of the canary's keys, and of one that the table has never had."""
    path = root / "keys.csv"
    path.write_text("k,l\n" + "".join(f"{CANARY}{end},0\n" for end in ("", "2", "3", "4")))
    return path


def holders(folder: Path) -> list[str]:
    """The files with the canary in a byte, however it is compressed or encoded."""
    found = []
    for path in sorted(folder.rglob("*")):
        if path.is_file() and not path.name.startswith("queue.sqlite") and CANARY in _text(path):
            found.append(str(path.relative_to(folder)))
    return found


def _text(path: Path) -> str:
    data = path.read_bytes()
    text = data.decode("latin-1")
    if data.startswith(b"PAR1"):
        table = pq.read_table(path)
        streams = table["arrow"].to_pylist() if "arrow" in table.column_names else []
        text += repr(table.to_pylist()) + repr([pa.ipc.open_stream(s).read_all().to_pylist() for s in streams if s])
    elif data.startswith(b"Obj\x01"):
        with path.open("rb") as source:
            text += repr(list(fastavro.reader(source)))
    else:  # deletes are in manifests in base64
        for encoded in re.findall(rb"[A-Za-z0-9+/]{40,}={0,2}", data):
            text += base64.b64decode(encoded[: len(encoded) // 4 * 4]).decode("latin-1")
    return text


def later(monkeypatch: pytest.MonkeyPatch, **time: float) -> None:
    real = clock.now
    monkeypatch.setattr(clock, "now", lambda: real() + timedelta(**time))


@pytest.mark.few(3)
@pytest.mark.parametrize("kind", ["rewrite", "key index", "columns"])
def test_a_key_that_lands_again(tmp_path: Path, kind: str) -> None:
    lake = written(tmp_path, **KINDS[kind])
    lake.table.erase(str(keys(tmp_path)), "asked", dry=False)
    rows = others(lake)
    lake = Lake(tmp_path, **KINDS[kind], erased_keys="refuse")
    lake.land("8.jsonl", [row(CANARY, 0, 8, 8), row("new", 1, 8, 8), row(f"{CANARY}2", 2, 8, 8)])
    lake.run()
    assert [one["k"] for one in lake.rows() if one["v"] == 8 and one["ts"].second == 8] == ["new"]
    assert not [name for name in holders(tmp_path / "processed") if "/data/" in name or name.startswith("d=")]
    assert lake.entries()[-1][1].skipped == {"row of an erased key": 2}
    lake = Lake(tmp_path, **KINDS[kind])
    lake.land("9.jsonl", [row(CANARY, 0, 9, 9)])
    lake.run()
    assert [one["k"] for one in lake.rows() if one["k"].startswith(CANARY)] == [CANARY]
    assert len(lake.rows()) == len(rows) + 2


def test_landing_files_that_are_read_again_bring_no_erased_key(tmp_path: Path) -> None:
    lake = written(tmp_path, history=True)
    lake.table.erase(str(keys(tmp_path)), "asked", dry=False)
    rows = others(lake)
    lake.land("9.jsonl", [row(f"{CANARY}3", 1, 9, 9)])
    lake.run()
    lake.reopen()
    lake.table.reprocess(source="landing", host="local")
    assert others(lake) == rows
    assert [one["k"] for one in lake.rows() if one["k"].startswith(CANARY)] == [f"{CANARY}3"], "it came afterwards"


@pytest.mark.few(len(KINDS))
@pytest.mark.parametrize("kind", list(KINDS))
def test_no_byte_is_left(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str) -> None:
    lake = written(tmp_path, **KINDS[kind])
    rows, listed = lake.rows(), str(keys(tmp_path))
    assert holders(tmp_path / "processed")
    looked = lake.table.erase(listed, "asked by letter")
    assert not looked.is_erased
    assert lake.rows() == rows
    first = lake.table.erase(listed, "asked by letter", landing=True, dry=False)
    assert first.partitions
    lake.reopen()
    assert lake.rows() == [one for one in rows if not one["k"].startswith(CANARY)]
    assert not lake.table.fsck(deep=True).findings
    assert not first.is_erased, "versions are kept for 7 days"
    assert not holders(tmp_path / "landing")
    later(monkeypatch, days=8)
    lake.run()
    if kind == "delta log":
        lake.table.publish(to="delta", reset=True)
    lake.reopen()
    again = lake.table.erase(listed, "asked by letter", dry=False)
    assert again.is_erased, again.left
    assert not holders(tmp_path / "processed")
    assert not lake.table.fsck(deep=True).findings


def others(lake: Lake) -> list[dict[str, Any]]:
    return [one for one in lake.rows() if not one["k"].startswith(CANARY)]


def test_rows_that_were_refused_beside_it_are_still_there(tmp_path: Path) -> None:
    lake = written(tmp_path)
    before = lake.table.quarantine().read_all().to_pylist()
    lake.table.erase(str(keys(tmp_path)), "asked by letter", dry=False)
    lake.reopen()
    after = lake.table.quarantine().read_all().to_pylist()
    assert [one["raw"] for one in after] == ["{}" if CANARY in one["raw"] else one["raw"] for one in before], (
        "each keeps its place"
    )
    assert {one["reason"] for one in after if one["raw"] == "{}"} == {"Its key was erased."}
    replayed = lake.table.append(replay_quarantine=True, host="local")
    assert replayed is None, "none of them passes now"


def test_a_file_of_typed_rows_is_redacted_too(tmp_path: Path) -> None:
    lake = written(tmp_path)
    bad = [{**row(name, 1, 9), "d": None} for name in ("0001", CANARY, "0002")]
    pq.write_table(
        pa.Table.from_pylist(bad).set_column(2, "d", pa.nulls(3, pa.date32())), tmp_path / "landing/9.parquet"
    )
    lake.run()
    lake.table.erase(str(keys(tmp_path)), "asked by letter", dry=False)
    lake.reopen()
    assert not [name for name in holders(tmp_path / "processed") if "/quarantine/" in name]
    raws = [one["raw"] for one in lake.table.quarantine().read_all().to_pylist() if one["file"] == "9.parquet"]
    assert ["0001" in raws[0], raws[1], "0002" in raws[2]] == [True, "{}", True]


def test_a_tag_keeps_a_key_and_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    lake, listed = written(tmp_path), str(keys(tmp_path))
    lake.table.tag("audit")
    lake.table.erase(listed, "asked by letter", dry=False)
    later(monkeypatch, days=8)
    kept = lake.table.erase(listed, "asked by letter", dry=False)
    assert kept.left
    assert any("the tag audit" in why for why in kept.left)
    lake.table.tag("audit", None)
    assert lake.table.erase(listed, "asked by letter", dry=False).is_erased


def test_a_landing_file_that_is_another_one_now_stays(tmp_path: Path) -> None:
    lake, listed = written(tmp_path), str(keys(tmp_path))
    lake.land("1.jsonl", [row("new", 1, 9, 9)])
    left = lake.table.erase(listed, "asked", landing=True, dry=False)
    assert (tmp_path / "landing/1.jsonl").exists()
    assert [why for why in left.left or () if "changed since" in why]
    assert {*left.landing} == {"2.jsonl", "3.jsonl"}


def test_a_landing_file_that_can_not_be_read_now_counts_as_left(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A later version reads files of fewer columns only."""
    lake, listed = written(tmp_path), str(keys(tmp_path))
    lake.land("9.jsonl", [row("new", 1, 9, 9)])
    lake.run()
    monkeypatch.setattr(limits, "MOST_COLUMNS", 2)
    left = lake.table.erase(listed, "asked", landing=True, dry=False)
    assert [*left.landing] == ["1.jsonl", "2.jsonl", "3.jsonl"], "quarantine names them"
    assert (tmp_path / "landing/9.jsonl").exists()
    assert [count for why, count in (left.left or {}).items() if "can't be read now" in why] == [1]


def test_a_landing_file_of_a_withdrawn_batch_stays(tmp_path: Path) -> None:
    lake, listed = written(tmp_path, history=True), str(keys(tmp_path))
    lake.table.restore(1, dry=False)
    lake.run()
    left = lake.table.erase(listed, "asked", landing=True, dry=False)
    assert {*left.landing} == {"1.jsonl"} or "1.jsonl" in left.landing
    assert [why for why in left.left or () if "withdrawn" in why]


@pytest.mark.few(2)
@pytest.mark.parametrize("names", [("",), ("", "2", "3", "4", "5")])
def test_another_list_begins_from_now(tmp_path: Path, names: tuple[str, ...]) -> None:
    """What is left of an erasure is unknown to one of other keys, which may be among them."""
    lake = written(tmp_path)
    lake.table.erase(str(keys(tmp_path)), "asked", dry=False)
    other = tmp_path / "other.csv"
    other.write_text("k,l\n" + "".join(f"{CANARY}{end},0\n" for end in names))
    assert not lake.table.erase(str(other), "asked", dry=False).is_erased


def test_a_refused_row_is_compared_in_the_types_of_the_key(tmp_path: Path) -> None:
    lake = written(tmp_path)
    lake.land("9.jsonl", [], refused=[{**row(CANARY, 1, 9), "l": "no number"}, {**row("0007", 1, 9), "l": "no number"}])
    lake.run()
    lake.table.erase(str(keys(tmp_path)), "asked", dry=False)
    lake.reopen()
    found = [one["raw"] for one in lake.table.quarantine().read_all().to_pylist() if one["file"] == "9.jsonl"]
    assert [found[0], "0007" in found[1]] == ["{}", True]


def test_a_vacuum_in_the_middle_is_no_damage(tmp_path: Path) -> None:
    settings: dict[str, Any] = {"strategy": "delta", "keep_snapshots": 1, "superseded_retention": "0s"}
    lake = written(tmp_path, **settings)
    other = Lake(tmp_path, **settings)

    def night() -> None:
        other.table.compact(full=True)
        other.table.vacuum(dry=False)

    lake.points.amid(0, night, "open _lakeupsert/data/d=")
    with pytest.raises(TryAgainError) as met:
        lake.table.erase(str(keys(tmp_path)), "asked", dry=False)
    assert met.value.code == "vacuumed-meanwhile"


def test_only_the_partition_that_a_list_names(tmp_path: Path) -> None:
    lake = written(tmp_path, key_scope="partition")
    lake.land("4.jsonl", [row(CANARY, 2, 9, 9)])
    lake.run()
    listed = tmp_path / "one.csv"
    listed.write_text(f"k,l,d\n{CANARY},0,2020-01-03\n")
    before = lake.rows()
    assert lake.table.erase(str(listed), "asked", dry=False).partitions == {"d=2020-01-03": 1}
    lake.reopen()
    assert lake.rows() == [one for one in before if (one["k"], str(one["d"])) != (CANARY, "2020-01-03")]


def test_a_batch_that_is_not_published_is_not_passed_over(tmp_path: Path) -> None:
    lake = written(tmp_path)
    lake.land("4.jsonl", [row(CANARY, 0, 9, 9)])
    lake.table.append(host="local")
    with pytest.raises(LakeupsertError) as refused:
        lake.table.erase(str(keys(tmp_path)), "asked", dry=False)
    assert refused.value.code == "unpublished-batch"


def test_a_statement_whose_rows_are_gone(tmp_path: Path) -> None:
    lake = written(tmp_path)
    [pack] = (tmp_path / "processed/_lakeupsert/statements").iterdir()
    lake.table.erase(str(keys(tmp_path)), "asked", dry=False)
    lake.reopen()
    assert not pack.exists()
    rows = lake.rows()
    lake.table.backup(str(tmp_path / "copy"))
    assert not lake.table.fsck().findings
    with pytest.raises(LakeupsertError) as gone:
        lake.table.reprocess(source="landing", host="local")
    assert gone.value.code == "source-gone"
    assert lake.rows() == rows


def test_a_kill_loses_no_refused_row(tmp_path: Path) -> None:
    lake = written(tmp_path)
    before = lake.table.quarantine().read_all().num_rows
    lake.points.arm(0, Fault.KILL_AFTER, "delete _lakeupsert/quarantine/")
    with pytest.raises(Killed):
        lake.table.erase(str(keys(tmp_path)), "asked", dry=False)
    lake.points.disarm()
    lake.reopen()
    lake.table.erase(str(keys(tmp_path)), "asked", dry=False)
    assert lake.table.quarantine().read_all().num_rows == before


@pytest.mark.long
@pytest.mark.parametrize("fault", [Fault.KILL_AFTER, pytest.param(Fault.BEFORE, marks=pytest.mark.crash)])
def test_struck_at_every_call_and_given_again(tmp_path: Path, fault: Fault) -> None:
    lake = written(tmp_path / "first")
    listed = str(keys(tmp_path))
    rows = others(lake)
    refused = lake.table.quarantine().read_all().num_rows

    def check(lake: Lake) -> None:
        assert not [one for one in lake.table.fsck().findings if "quarantine" not in one.needed_by]
        lake.table.erase(listed, "asked", dry=False)
        lake.reopen()
        assert lake.rows() == rows
        assert lake.table.quarantine().read_all().num_rows == refused
        assert not lake.table.fsck(deep=True).findings

    assert lake.strike_every_call(fault, lambda lake: lake.table.erase(listed, "asked", dry=False), check) > 100
