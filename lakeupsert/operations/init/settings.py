"""Choose the settings of a table from a sample of its rows, with the evidence for each.

Reads     nothing: the sample is in memory
Writes    nothing
Repeat    safe

    delete -> partition -> order -> key -> landing dates: each choice uses those before it
"""

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from datetime import date
from urllib.parse import unquote

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from pyarrow.types import is_boolean, is_date, is_integer, is_nested, is_string, is_timestamp

from lakeupsert.config import TableSettings, cores
from lakeupsert.landing.formats.inference import infer_type, without_nulls
from lakeupsert.landing.formats.positions import EVENT_TIMES, LOG_POSITION
from lakeupsert.landing.formats.registry import UNKNOWN, format_of
from lakeupsert.operations.init.buckets import describe_rule, expression, propose_count
from lakeupsert.operations.init.key import Compared, KeySearch, KeySigns, repeats
from lakeupsert.operations.init.sample import Sample
from lakeupsert.operations.init.words import WORDS, Choice, is_named, left_open, name_list, percent, words_of
from lakeupsert.phrases import count
from lakeupsert.pipeline.append.landing_dates import received_on
from lakeupsert.rows.arrays import Column, Mask
from lakeupsert.rows.convert import as_mask, convert
from lakeupsert.table.layout import HIVE_NULL
from lakeupsert.table.roles import PartitionColumn
from lakeupsert.table.types import is_key_type, named_type, type_name

FEW = 0.01
"""The share of rows that a setting may send to quarantine: the default `quarantine_limit`."""
_DELETED_AT = ("_sdc_deleted_at", "_ab_cdc_deleted_at")
"""Columns of Singer and of Airbyte, with a value in deletes only."""
_DATES = ("%Y-%m-%d", "%Y/%m/%d", "%m/%d/%Y", "%d/%m/%Y", "%Y%m%d", "%m-%d-%Y", "%d-%m-%Y")
HIVE = re.compile(r"([^/=]+)=([^/]*)")


def folder_values(paths: Sequence[str]) -> Column:
    """The partition values in the folders' names of these files, as dates, integers or text."""
    texts = [unquote(folder_of(path).partition("=")[2]) for path in paths]
    array = pa.array([None if text == HIVE_NULL else text for text in texts], pa.string())
    return convert(array, without_nulls(infer_type(array, [pa.int64(), pa.date32()])))[0]


def folder_of(path: str) -> str:
    return path.rpartition("/")[0]


class SettingChoices:
    """Chooses settings, one after another; each choice uses those before it."""

    def __init__(
        self,
        rows: Sample,
        hive: str | None,
        names: Sequence[str],
        size: int,
        dated: Sequence[str],
        folders: Sequence[str],
    ) -> None:
        """``hive``: the column of the folders' names, in a Hive-partitioned table; ``names``: of all files; ``size``: their
        bytes; ``dated``: columns whose dates have formats, some of which the sample may not settle; ``folders``: columns that
        only the folders of landing files have."""
        self.rows = rows
        self.is_wal2json = "__action" in rows.values and "__table" in rows.values
        is_debezium = "__op" in rows.values and any(name.startswith("__source_") for name in rows.values)
        self.is_events = is_debezium or self.is_wal2json
        """Whether rows are events, whose own fields begin with two underscores."""
        self.values = {n: v for n, v in rows.values.items() if not (self.is_events and n.startswith("__"))}
        self.hive = hive
        self.names = names
        self.size = size
        self.dated = dated
        self.folders = list(folders)
        self.schema: dict[str, str] = {}
        self.inserts: Mask = np.full(rows.count, True)
        """The rows of which each key can have only one."""
        self.sources: tuple[str, ...] = ()
        """The column that the partition column is computed from."""
        self.signs = KeySigns(rows)

    def settings(self) -> dict[str, Choice]:
        delete = self._delete()
        self.operation = delete.value and (delete.value.get("column") or delete.value["not_null"])
        partition_by = self._partition()
        self.partition: list[str] = [PartitionColumn.parse(text).column for text in partition_by.value or ()]
        orders = self._orders()
        partition_by, series = self._series(partition_by)
        key = series or self._key(orders)
        columns = key.value or []
        moving = [
            f"partition_by is the day of {name}: if an update changes {name}, the key gets a row in another day and "
            "keeps the old one: check it"
            for name in self.sources
            if name not in columns and is_named(name, "newer") and not is_named(name, "event", "older")
        ]
        self.key = key = replace(key, warnings=(*key.warnings, *moving))
        for name in set(self.sources) & set(columns) - set(self.schema):
            self.schema[name] = type_name(self.values[name].type)  # else a key column of a text file is text
        if not self.partition and partition_by.value is not None and columns:
            partition_by = self._hashed(partition_by, columns)
        return {
            "partition_by": partition_by,
            "key": key,
            "order_by": self._order_of_events() or self._order([n for n in orders if n not in columns], columns),
            "landing_dates": self._landing_dates(),
            "delete": delete,
        }

    # -- delete

    def _delete(self) -> Choice:
        if self.is_wal2json:
            self.inserts = as_mask(pc.equal(self.rows.values["__action"], "I"))
            return Choice({"column": "__action", "values": ["D"]}, ("__action is the operation of each event",))
        if self.is_events:
            self.inserts = self._events_of_distinct_keys()
            return Choice({"column": "__op", "values": ["d"]}, ("__op is the operation of each event",))
        if (gone := next((name for name in self.values if name.lower() in _DELETED_AT), None)) is not None:
            return Choice(
                {"not_null": gone}, (f"{gone} is the time at which a row was deleted; rows that live have none",)
            )
        for name, values in self.values.items():
            if is_nested(values.type) or not 0 < self.rows.distinct(name) <= 12:
                continue
            texts, _ = convert(values, pa.string())
            counts = {c["values"]: c["counts"] for c in pc.value_counts(texts.drop_null()).to_pylist()}
            seen = {text.lower() for text in counts}
            is_flag = is_named(name, "flag") and seen <= WORDS["true"] | WORDS["false"]
            if not is_flag and not seen <= WORDS["insert"] | WORDS["update"] | WORDS["delete"]:
                continue
            is_sure = is_flag or is_named(name, "operation")
            deletes = [text for text in counts if text.lower() in WORDS["true" if is_flag else "delete"]]
            shares = ", ".join(f"{text} {percent(n / self.rows.count)}" for text, n in counts.items())
            # Single letters may stand for anything, for example credit and debit.
            if deletes and (is_sure or min(map(len, seen)) > 2 or seen >= {"i", "u", "d"}):
                if is_boolean(values.type) and any(format_of(n, "auto").delimited for n in self.names):
                    deletes = ["true", "True", "TRUE"]  # in text files, the text as written is compared
                is_insert = as_mask(pc.is_in(pc.utf8_lower(texts), pa.array(sorted(WORDS["insert"]))))
                self.inserts = is_insert if is_insert.any() else self.inserts
                return Choice({"column": name, "values": deletes}, (f"{name} says what a row does: {shares}",))
            if deletes or is_sure:
                why = "only the letters say so" if deletes else "none of them is a delete"
                return left_open("[delete] is left out", f"{name} may hold operations ({shares}), but {why}")
        return Choice(None, ("no column looks like operations: rows delete nothing",))

    def _events_of_distinct_keys(self) -> Mask:
        """The events of the largest snapshot, which has each key once; without one, those that create a row."""
        is_read = as_mask(pc.equal(self.rows.values["__op"], "r"))
        if is_read.any() and LOG_POSITION in self.rows.values:
            positions = self.rows.codes(LOG_POSITION)
            is_read &= positions == np.bincount(positions[is_read]).argmax()
            return is_read
        is_insert = as_mask(pc.is_in(self.rows.values["__op"], pa.array(["c", "r"])))
        return is_insert if is_insert.any() else np.full(self.rows.count, True)

    # -- partition

    def _partition(self) -> Choice:
        if self.hive is not None:
            return self._partition_of_folders(self.hive)
        if self.folders:
            has, no = ("is a column", "has it") if len(self.folders) == 1 else ("are columns", "has them")
            return Choice(self.folders, (f"{name_list(self.folders)} {has} of the landing folders; no file {no}",))
        dates = [name for name in self.values if self._unfit(name, pa.date32()) <= FEW]
        good = [n for n in dates if not is_named(n, "arrival", "other")]
        ranked = sorted(
            good, key=lambda n: (not is_named(n, "event"), not words_of(n) <= WORDS["day"], self.rows.distinct(n))
        )
        if not ranked and (moments := self._moments()):
            return self._partition_by_day(moments)
        if not ranked:
            few = [
                n
                for n, v in self.values.items()
                if (is_string(v.type) or is_integer(v.type))
                and 1 < self.rows.distinct(n) <= min(1000, self.rows.count / 50)
                and n != self.operation
            ]
            hint = f"columns of few values: {name_list(few)}" if few else "no other column has few values"
            if not dates and not self.dated:
                return Choice([], (f"no column of dates, so the table is one partition; {hint}",))
            found = f"only {name_list(dates)}, which have the names of other dates"
            if not dates:
                found = f"the format of the dates in {name_list(self.dated)} is not clear"
            advice = ". Name the column whose value a record never changes"
            return left_open("partition_by is left open", f"{found}; {hint}", advice)
        name = ranked[0]
        days, _ = convert(self.values[name], pa.date32())
        evidence = [
            f"{name}: {count(pc.count_distinct(days).as_py(), 'value')} {_span(days)} in the sample",
            *self._kept_as(name, "date"),
        ]
        if not (others := name_list(ranked[1:])):
            return Choice([name], tuple(evidence))
        unsure = f"partition_by is {name}, but it could also be {others}: check it"
        return Choice([name], (*evidence, f"also dates: {others}"), () if is_named(name, "event") else (unsure,))

    def _hashed(self, one_partition: Choice, key: Sequence[str]) -> Choice:
        """Partitions by hash of the key, if the files are too large for one partition."""
        workers, bucket_bytes = cores(), TableSettings(landing="", processed="", key=(), partition_by=()).bucket_bytes
        number = propose_count(self.size, bucket_bytes, workers)
        if number == 1:
            return one_partition
        why = f"{self.size / 1e6:,.0f} MB of files: {describe_rule(bucket_bytes, workers)}. The number can't be changed later"
        return replace(one_partition, value=[expression(number, key)], evidence=(*one_partition.evidence, why))

    def _moments(self) -> list[str]:
        """Columns of timestamps whose day may be a partition, the likeliest first."""
        good = [
            name
            for name, values in self.values.items()
            if (is_timestamp(values.type) or is_string(values.type))
            and not is_named(name, "arrival", "other")
            and self._unfit(name, pa.timestamp("us")) <= FEW
        ]
        return sorted(good, key=lambda n: (not is_named(n, "event", "older"), is_named(n, "newer")))

    def _partition_by_day(self, moments: Sequence[str]) -> Choice:
        """Partition by the day of a timestamp, as no column is a date."""
        name = moments[0]
        column = "day" if "day" not in map(str.lower, self.values) else f"{name}_date"
        values, _ = convert(self.values[name], pa.timestamp("us"))
        days = pc.floor_temporal(values, unit="day").cast(pa.date32())
        self.rows.derived[column] = days
        self.sources = (name,)
        evidence = [
            f"no column is a date, so rows are kept by the day of {name}: {count(pc.count_distinct(days).as_py(), 'value')} "
            f"{_span(days)} in the sample"
        ]
        if is_string(self.values[name].type):
            evidence += self._kept_as(name, "timestamp_ntz")
        if moments[1:]:
            evidence.append(f"also timestamps: {name_list(moments[1:])}")
        return Choice([f"date({name}) as {column}" if column == "day" else f"date({name})"], tuple(evidence))

    def _partition_of_folders(self, name: str) -> Choice:
        values = folder_values(self.names).unique()
        found = f"{count(len(values), 'partition')} of {values.type} {_span(values)}"
        unfit = f"{name} has a partition without a value ({HIVE_NULL}), which a table can't keep"
        why = f"{name} is the column of the folders: {found}"
        return Choice([name], (why,), (unfit,) if values.null_count else ())

    def _unfit(self, name: str, type_: pa.DataType) -> float:
        """The share of rows without a value of this type: null, or impossible to convert."""
        values = self.values[name]
        if not (is_date(values.type) or is_timestamp(values.type) or is_string(values.type)):
            return 1.0
        # Bad values are slow to convert, and the first rows show what a column is.
        if convert(values.slice(0, 1000), type_)[1].mean() > 0.5:
            return 1.0
        return float(convert(values, type_)[0].null_count / self.rows.count)

    def _kept_as(self, name: str, kept: str) -> Iterator[str]:
        """Evidence about a chosen column: whether it needs a type in `schema`, and whether rows lack a value of that type."""
        type_, found = named_type(kept, name), self.values[name].type
        if unfit := self._unfit(name, type_):
            yield f"{percent(unfit)} of the rows have no {type_} there"
        if not is_date(found):
            self.schema[name] = kept
            yield f"it is {found} in the files and should be kept as {kept}"

    def _series(self, partition_by: Choice) -> tuple[Choice, Choice | None]:
        """The partition and the key if the table is a series: its dates or times are the key. Else the partition as it is."""
        if self.hive is not None or self.folders or not self.partition or not partition_by.value:
            return partition_by, None
        [name] = self.sources or self.partition
        use = self.rows.fresh & self.inserts & self.rows.present([name])
        key = self.signs.series(name, use, is_day=not self.sources)
        if key is None:
            return partition_by, None
        files, rows = len(np.unique(self.rows.file[use])), int(use.sum())
        again = rows - len(np.unique(self.rows.group([name])[use]))
        if again >= rows / 2:
            why = f"each file has one row for each {name}, but the files have the same ones: no column says what a file is about"
            return partition_by, left_open("key is left open", why)
        why = f"{name}: each value is in one row of its file, {count(rows, 'row')} in {count(files, 'file')}: a series"
        evidence = [
            why,
            *(f"{n} has one value here, which may name the series" for n in key[:-1]),
            *repeats(self.rows, key, self.partition),
        ]
        if not self.sources:
            self.sources, self.partition = (name,), []
            years = (*partition_by.evidence, "one row a day, so partitions are years")
            partition_by = replace(partition_by, value=[f"year({name})"], evidence=years)
        return partition_by, Choice(key, tuple(evidence))

    # -- order

    def _orders(self) -> dict[str, bool]:
        """Columns that may say which row is newer, the likeliest first, and whether their names say so."""
        doubts: dict[str, tuple[bool, bool, bool, int]] = {}
        for place, (name, values) in enumerate(self.values.items()):
            if name in self.partition or name == self.operation:
                continue
            if name in self.sources and not is_named(name, "newer"):
                continue  # it has the same value in all versions of a row
            newer, older = is_named(name, "newer"), is_named(name, "older", "other")
            is_counter = is_integer(values.type) and is_named(name, "counter")
            is_moment = is_timestamp(values.type) or (
                is_string(values.type) and self._unfit(name, pa.timestamp("us")) <= FEW
            )
            is_day = is_date(values.type) and newer
            if is_counter or is_moment or is_day:
                doubts[name] = (older, not newer, not is_moment, place)
        return {name: not doubts[name][1] for name in sorted(doubts, key=doubts.__getitem__)}

    def _order_of_events(self) -> Choice | None:
        """The order of Debezium's events, whole or flattened; None if rows are no such events."""
        values = self.rows.values
        if LOG_POSITION in values and not self.rows.nulls(LOG_POSITION):
            low, high = self.rows.range(LOG_POSITION)
            return Choice(
                [LOG_POSITION],
                (f"{LOG_POSITION}: the place of each event in the database's log, from {low} to {high}",),
            )
        lsn, time = (
            next((n for n in names if n in values), None) for names in (("__source_lsn", "__lsn"), EVENT_TIMES)
        )
        if lsn is None or time is None:
            return None
        warning = (
            f"order_by is {time}, {lsn}: rows of an incremental snapshot, and changes during a first snapshot, may lose or win "
            "wrongly. Land whole events of Debezium, which are not flattened, and their order is exact"
        )
        why = f"{time} is the time of the commit, {lsn} the place of the change within it"
        return Choice([time, lsn], (why,), (warning,))

    def _order(self, candidates: list[str], key: list[str]) -> Choice:
        evidence: list[str] = []
        for i, name in enumerate(candidates):
            low, high = self.rows.range(name)
            what = f"{name}: from {low} to {high}, {percent(self.rows.nulls(name))} nulls"
            again, ties = self._ties(key, name)
            if not key:
                what += "; without a key, it is not known how it orders the rows of a key"
            elif not again:
                what += "; no key is there twice in the sample, so it is not known how it orders the rows of a key"
            else:
                what += f"; of {count(again, 'row')} that repeat a key, {percent(ties)} have an equal value"
            if ties <= 0.5:
                more = [f"others: {name_list(others)}"] if (others := candidates[i + 1 :]) else []
                if is_string(self.values[name].type) and self.hive is None:
                    more += self._kept_as(name, "timestamp_ntz")
                older = f"order_by is {name}, which sounds like a column that never changes: check it"
                return Choice([name], (what, *more, *evidence), (older,) if is_named(name, "older") else ())
            evidence.append(what)
        taken = set(map(str.lower, self.values))
        stamp = next(n for n in ("record_timestamp", "received_at", "receipt_stamp") if n not in taken)
        warning = (
            "no column says which row is newer: rows are stamped on receipt, so of two rows of one key the one that arrives "
            "later wins, and within a batch the one in the later file or later in the file"
        )
        return Choice([stamp], (*evidence, warning), (warning,))

    def _ties(self, key: list[str], name: str) -> tuple[int, float]:
        """How many rows repeat a key, and the share of them with the ordering value of another row of the key."""
        if not key:
            return 0, 0.0
        use = self.rows.fresh & self.rows.present(key)
        ids = self.rows.group([*self.partition, *key])
        again = int(use.sum()) - len(np.unique(ids[use]))
        equal = int(use.sum()) - len(np.unique(self.rows.group([name], ids)[use]))
        return again, equal / again if again else 0.0

    # -- key

    def _key(self, orders: Mapping[str, bool]) -> Choice:
        """``orders``: the columns that may order versions, and whether their names say so."""
        candidates = [
            n
            for n, v in self.values.items()
            if is_key_type(v.type)
            and not is_boolean(v.type)
            and n not in (*self.partition, self.operation)
            and (not orders.get(n) or (n in self.sources and self.signs.is_clock(n)))
            and self.rows.nulls(n) <= (FEW if is_named(n, "key") else 0)  # rows without a key can't be taken
        ]
        compared = Compared.of(self.rows, self.inserts, self.partition, is_table=self.hive is not None)
        is_whole = self.rows.whole and len(self.rows.paths) == len(self.names)
        return KeySearch(self.signs, candidates, compared, self.partition, list(orders), is_whole).choose()

    # -- landing_dates

    def _landing_dates(self) -> Choice:
        if self.hive is not None:
            return Choice(None, ("the folders of the landing zone are not known yet",))
        if self.folders:
            return Choice(None, ("the folders are columns of the table: every file is taken",))
        names = [name for name in self.names if format_of(name, "auto") is not UNKNOWN] or self.names
        folders = folder_of(names[0]).split("/")
        prefixes = [(m[1].replace("%", "%%") + "=") if (m := HIVE.fullmatch(f)) else "" for f in folders]
        fits: dict[str, list[date]] = {}
        for dates in _DATES:
            parts = dates.split("/")
            if len(parts) <= len(folders):
                pattern = "/".join(prefix + part for prefix, part in zip(prefixes, parts, strict=False))
                fits[pattern] = [day for name in names if (day := received_on(name, pattern)) is not None]
        # 01/02/2020 can be read in two ways: the one whose days are closer together is the likelier.
        whole = [p for p, days in fits.items() if len(days) == len(names)]
        whole.sort(key=lambda p: max(fits[p]) - min(fits[p]))
        best = whole[0] if whole else max(fits, key=lambda p: len(fits[p]), default="")
        days = fits.get(best)
        if not days:
            return Choice(None, ("the folders are not dates: every file is taken",))
        if not whole:
            others = name_list([name for name in names if received_on(name, best) is None], 2)
            why = f"{best} fits {len(days)} of {count(len(names), 'file')}; the others would not be taken: {others}"
            return left_open("landing_dates is left out", why)
        why = f"{best} fits all {count(len(days), 'file')}, {min(days)} to {max(days)}"
        if not whole[1:]:
            return Choice(best, (why,))
        warning = f"landing_dates may be {best} or {whole[1]}, which both fit every folder: check it"
        return Choice(best, (why, f"{whole[1]} fits as well"), (warning,))


def _span(values: Column) -> str:
    ends = pc.min_max(values)
    low, high = ends["min"].as_py(), ends["max"].as_py()
    days = f" ({count((high - low).days + 1, 'day')})" if is_date(values.type) else ""
    return f"from {low} to {high}{days}"
