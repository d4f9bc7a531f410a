"""What a table is declared to be: ordering columns, partition columns, and what is refused at creation and later."""

import re
from typing import Any

import msgspec
import pyarrow as pa
import pytest

from lakeupsert.errors import ConfigurationError, DamagedTableError
from lakeupsert.table.evolution import drop, evolve, rename, roles
from lakeupsert.table.roles import DeleteRule, Ordering, PartitionColumn
from lakeupsert.table.spec import TableSpec, check_spec
from tests.harness.specs import create

SCHEMA = pa.schema(
    [("id", pa.string()), ("at", pa.timestamp("us", "UTC")), ("version", pa.int64()), ("day", pa.date32())]
)


def made(schema: Any = SCHEMA, **changes: Any) -> TableSpec:
    declared = {"key": ["id"], "order_by": ["version"], "partition_by": ["day"], "delete": None, "stamped": False}
    return create(schema, table_id="t", **{**declared, **changes})


@pytest.mark.parametrize(
    ("text", "ordering"),
    [
        ("version", Ordering("version")),
        ("version desc", Ordering("version")),
        ("version DESC NULLS LAST", Ordering("version")),
        ("version asc", Ordering("version", ascending=True)),
        ("version nulls first", Ordering("version", nulls_first=True)),
        ("sort order  ASC  nulls FIRST ", Ordering("sort order", ascending=True, nulls_first=True)),
        ("`the desc` asc", Ordering("the desc", ascending=True)),
        ("`asc`", Ordering("asc")),
        ("asc", Ordering("asc")),
    ],
)
def test_ordering_is_parsed_as_sql_has_it(text: str, ordering: Ordering) -> None:
    assert Ordering.parse(text) == ordering


@pytest.mark.parametrize(
    ("text", "column"),
    [
        ("day", PartitionColumn("day")),
        ("date(created_at)", PartitionColumn("created_at_date", "date", "created_at")),
        ("Month( created at ) AS  month", PartitionColumn("month", "month", "created at")),
        ("upper(name)", PartitionColumn("upper(name)")),
        ("date(at), month(at)", PartitionColumn("date(at), month(at)")),
        ("date(price (EUR) at) as day", PartitionColumn("day", "date", "price (EUR) at")),
        ("bucket(64, id)", PartitionColumn("id_bucket", "bucket", None, ("id",), 64)),
        (" BUCKET( 7 ,line no,`a, b` ) As part ", PartitionColumn("part", "bucket", None, ("line no", "a, b"), 7)),
        ("bucket(id, 64)", PartitionColumn("bucket(id, 64)")),
        ("bucket(64)", PartitionColumn("bucket(64)")),
        ("bucket(64, f(id))", PartitionColumn("bucket(64, f(id))")),
    ],
)
def test_partition_column_is_parsed(text: str, column: PartitionColumn) -> None:
    assert PartitionColumn.parse(text) == column


@pytest.mark.parametrize("text", ["day", "date(at) as day", "bucket(64, id)", "bucket(7, line no, `a, b`) as part"])
def test_partition_column_is_the_same_when_it_is_parsed_again(text: str) -> None:
    parsed = PartitionColumn.parse(text)
    assert PartitionColumn.parse(str(parsed)) == parsed


def test_hash_of_the_key_is_a_column_of_the_table() -> None:
    spec = made(partition_by=["day", "bucket(8, id)"])
    assert spec.partition_by == ("day", "id_bucket")
    assert spec.schema.field("id_bucket").type == pa.int32()
    assert "id_bucket" not in spec.stored_schema.names
    assert not spec.key_decides_partition
    assert made(partition_by=["bucket(8, id)"]).key_decides_partition
    assert made(partition_by=[]).key_decides_partition
    with pytest.raises(ConfigurationError) as raised:
        rename(spec, "id", "other")
    assert raised.value.code == "column-in-use"


def test_made_column_is_one_of_the_table() -> None:
    spec = made(partition_by=["day", "hour(at)"])
    assert spec.partition_by == ("day", "at_hour")
    assert spec.schema.field("at_hour").type == pa.string()
    assert "at" in spec.stored_schema.names
    assert "at_hour" not in spec.stored_schema.names


@pytest.mark.parametrize(
    ("changes", "code", "told"),
    [
        ({"partition_by": ["date(version)"]}, "unfit-type", "int64"),
        ({"partition_by": ["date(nothing)"]}, "missing-column", "nothing"),
        ({"partition_by": ["date(at) as day"]}, "partition-in-files", "'day'"),
        *(
            (
                {"partition_by": [text]},
                "missing-column",
                named,
            )
            for text in ("upper(id)", "date(at", "date(at), month(at)")
            for named in (repr(text), "year(COLUMN)")
        ),
        ({"partition_by": ["bucket(8, version)"]}, "bad-setting", "'version' is not in `key`"),
        ({"partition_by": ["bucket(0, id)"]}, "bad-setting", "1 to 65,536"),
        ({"partition_by": ["bucket(8, id, id)"]}, "bad-setting", "twice"),
        ({"partition_by": ["bucket(8, id) as at"]}, "partition-in-files", "'at'"),
        ({"partition_by": [], "key_scope": "table"}, "bad-setting", "one partition"),
        ({"partition_by": ["bucket(8, id)"], "key_scope": "table"}, "bad-setting", "bucket(8, id)"),
        ({"order_by": ["version asc", "version"]}, "bad-setting", "version, version"),
        ({"key": ["ID_"]}, "missing-column", "Did you mean 'id'?"),
        ({"order_by": ["nothing asc"]}, "missing-column", "'nothing'"),
        ({"order_by": ["version descending"]}, "missing-column", "'version descending'"),
        ({"order_by": ["arrived"], "stamped": True, "ties": "content"}, "bad-setting", "'arrived'"),
        ({"order_by": ["day asc"]}, "useless-order", "'day'"),
        ({"ties": "content", "schema": SCHEMA.append(pa.field("tags", pa.list_(pa.string())))}, "unfit-type", "'tags'"),
    ],
)
def test_what_can_not_be_is_refused(changes: dict[str, Any], code: str, told: str) -> None:
    with pytest.raises(ConfigurationError, match=re.escape(told)) as raised:
        made(**changes)
    assert raised.value.code == code


def test_nested_column_that_comes_later_is_refused_where_content_decides() -> None:
    wider = SCHEMA.append(pa.field("tags", pa.list_(pa.string())))
    assert "tags" in evolve(made(), wider).schema.names
    with pytest.raises(ConfigurationError, match="'tags'"):
        evolve(made(ties="content"), wider)


def test_content_decides_by_names_which_do_not_go_by_arrival() -> None:
    spec = made(SCHEMA.append(pa.field("b", pa.int8())), ties="content")
    later = evolve(spec, pa.schema([("a", pa.int8())]))
    assert later.content == ("a", "at", "b")


def test_names_in_old_files_follow_from_the_renames_since() -> None:
    first = made(SCHEMA.append(pa.field("a", pa.int8())).append(pa.field("b", pa.int8())))
    swapped = rename(rename(rename(first, "a", "x"), "b", "a"), "x", "b")
    anew = evolve(drop(swapped, "a"), pa.schema([("A", pa.string())]))
    assert [f.name for f in anew.fields if f.id > 4] == ["b", "A"]
    assert anew.changed_names(0) == {"a": "b", "b": None}
    assert anew.names_in(0) == {"b": "a", "A": f"_lakeupsert_{anew.last_field_id}"}, (
        "`a` is b's there, to Spark `A` too"
    )
    assert anew.names_in(1) == {"b": "x"}
    assert anew.names_in(3) == {"A": f"_lakeupsert_{anew.last_field_id}"}
    assert anew.names_in(4) == first.names_in(0) == {}


def test_spec_that_renames_without_saying_so_is_not_written() -> None:
    first = made(SCHEMA.append(pa.field("a", pa.int8())))
    second = rename(first, "a", "b")
    for old, new in (
        (first, second),
        (first, drop(second, "b")),
        (second, evolve(second, pa.schema([("a", pa.int8())]))),
    ):
        check_spec(old, new)
    unsaid = msgspec.structs.replace(second, renames=())
    for old, new in ((first, unsaid), (second, unsaid), (second, first), (second, rename(first, "a", "c"))):
        with pytest.raises(
            DamagedTableError, match=r"change fixed properties: field|change fixed properties: renames"
        ) as raised:
            check_spec(old, new)
        assert raised.value.code == "broken-invariant"


def test_a_column_keeps_its_name_in_files_and_no_other_gets_it() -> None:
    first = made(pa.schema([*SCHEMA, ("a", pa.int8()), ("b", pa.int8())]))
    old = rename(first, "b", "c")  # before the table had a publisher
    kept = rename(old, "a", "x", one_name=True)
    assert kept.names_in(0) == {"c": "b", "x": "a"}
    assert kept.names_in(1) == kept.names_written == {"x": "a"}
    anew = drop(evolve(kept, pa.schema([("A", pa.int8())])), "c")
    assert anew.names_written == {"x": "a", "A": f"A_{anew.last_field_id}"}
    again = evolve(anew, pa.schema([(f"a_{anew.last_field_id}", pa.int8()), ("c", pa.string())]))
    written = [again.names_written.get(name, name).lower() for name in again.schema.names]
    assert len({*written, "c"}) == len(written) + 1, "the dropped column is still in files"
    for before, after in ((first, old), (old, kept), (kept, anew), (anew, again)):
        check_spec(before, after)


def test_columns_that_settings_name() -> None:
    spec = made(
        partition_by=["day", "hour(at)"],
        delete=DeleteRule(column="op", values=("D",)),
        schema=SCHEMA.append(pa.field("op", pa.string())),
    )
    assert roles(spec) == {
        "id": "key",
        "version": "order_by",
        "day": "partition_by",
        "at_hour": "partition_by",
        "at": "partition_by",
        "op": "delete",
    }
