"""Before phase one: look at a folder of files, and propose the settings of a table with the evidence for each.

Reads     the folder's listing; of a sample of its files a sample of their rows (`landing.sample`)
Writes    nothing
Repeat    safe: the same files give the same proposal

    list -> choose files -> sample rows -> folder of a table, or landing zone? -> delete, partition, order, key

What the sample does not show is left open and told; nothing is guessed without a word.
"""

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from datetime import date
from itertools import combinations
from pathlib import Path, PurePosixPath
from typing import Any
from urllib.parse import unquote

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from pyarrow.types import is_boolean, is_date, is_integer, is_nested, is_string, is_temporal, is_timestamp

from lakeupsert.config import Reading, toml_key
from lakeupsert.errors import ConfigurationError, LakeupsertError, RefusedError
from lakeupsert.landing.files import format_of
from lakeupsert.landing.formats.inference import inferred, without_nulls
from lakeupsert.landing.sample import Column, Sample, read_sample
from lakeupsert.pipeline.discover import is_landing_file
from lakeupsert.pipeline.landing_dates import received_on
from lakeupsert.pipeline.next_spec import describe_unfit
from lakeupsert.rows.convert import convert, true
from lakeupsert.storage import LocalStore, ObjectInfo, ObjectStore, open_store
from lakeupsert.table.evolution import create
from lakeupsert.table.layout import HIVE_NULL, HOME
from lakeupsert.table.spec import DeleteRule
from lakeupsert.table.types import is_key_type, named_type, type_name

THIN = 100
"""Below so many rows that have others of their partition beside them, a key that looks unique is no news."""
FEW = 0.01
"""The share of rows that may be unfit for a setting and go to quarantine: the default `quarantine_limit`."""
CANDIDATES = 10
"""Most columns of which pairs are tried as a key."""

_DATES = ("%Y-%m-%d", "%Y/%m/%d", "%m/%d/%Y", "%d/%m/%Y", "%Y%m%d", "%m-%d-%Y", "%d-%m-%Y")
_HIVE = re.compile(r"([^/=]+)=([^/]*)")
_WORDS = {
    what: frozenset(words.split())
    for what, words in {
        # words of columns' names
        "key": "id key no nr num number code uuid guid sku line isbn ean",
        "newer": "updated update modified changed change record version revision rev lsn scn offset ts timestamp epoch",
        "older": "created creation birth",
        "counter": "updated modified changed version revision rev lsn scn offset ts timestamp epoch",
        "event": "transaction event order sale sales business trade booking partition",
        "day": "day dt date",
        "arrival": "updated update modified changed record loaded load ingested ingest received arrival extracted",
        "other": "birth dob expiry expires expiration due valid until",
        "operation": "op operation action cdc dml rowkind change",
        "flag": "deleted delete removed",
        # values
        "insert": "i +i c r insert inserted create created",
        "update": "u +u -u update updated upsert upserted",
        "delete": "d -d delete deleted remove removed",
        "true": "true 1 y yes t",
        "false": "false 0 n no f",
    }.items()
}


@dataclass(frozen=True)
class Choice:
    """The value proposed for a setting, None where it is left open or at its default, and why."""

    value: Any
    evidence: tuple[str, ...]


@dataclass(frozen=True)
class Proposal:
    """Settings for one table.

    Attributes:
        hive: the folder holds a Hive-partitioned table already; it is ``processed``, else ``landing``.
        settings: choices for partition_by, key, order_by, landing_dates and delete (``{"column", "values"}``).
        schema: types that columns have to be given for these settings, by name.
        warnings: what is open, thin or was left out.
    """

    table: str
    hive: bool
    landing: str
    processed: str
    settings: dict[str, Choice]
    schema: dict[str, str]
    columns: tuple[Column, ...]
    files: int
    of_files: int
    rows: int
    warnings: tuple[str, ...]

    @property
    def open(self) -> list[str]:
        """The required settings that are left to the user."""
        return [name for name in ("partition_by", "key") if self.settings[name].value is None]


def propose(address: str, table: str | None = None) -> Proposal:
    """Look at the landing zone or Hive-partitioned folder ``address``; ``table`` is a name to take instead of its own.

    Raises:
        ConfigurationError: it is no folder, has no files, or is the processed zone of a table of ours.
        RefusedError: none of the files looked at can be read.
    """
    store = open_store(address)
    root = store.root if isinstance(store, LocalStore) else store.uri()
    files = _files(store, root)
    rows, warnings = read_sample(store, files)
    if not rows.count:
        why = warnings[0] if warnings else "they have no rows"
        raise RefusedError(
            "no-readable-file",
            f"No row can be read in the files of {root} that were looked at: {why}.",
            next="correct or remove these files, then run the same command again",
        )
    names = [f.name for f in files]
    hive = _hive_column(names, rows)
    if hive is not None:
        rows.values[hive] = _folder_values(rows.paths).take(pa.array(rows.file))
    look = _Look(rows, hive, names)
    settings = look.settings()
    beside = _beside(root, "processed", "landing") if hive else _beside(root, "landing", "processed")
    if not hive and next(open_store(beside).list("", limit=1), None) is not None:
        warnings.append(f"there is something in {beside} already, which is proposed as the processed zone: check it")
    warnings += _almost(store, rows, look)
    proposal = Proposal(
        table=table or re.sub(r"[^A-Za-z0-9_-]", "_", Path(root).name) or "table",
        hive=hive is not None,
        landing=beside if hive else root,
        processed=root if hive else beside,
        settings=settings,
        schema=look.schema,
        columns=tuple(rows.columns()),
        files=len(rows.paths),
        of_files=len(files),
        rows=rows.count,
        warnings=(*warnings, *look.warnings),
    )
    return proposal if proposal.open else _checked(proposal, rows)


def _almost(store: ObjectStore, rows: Sample, look: "_Look") -> list[str]:
    """Columns that a few values make text, for good."""
    key = look.key.value or []
    found = []
    for name, leaning in rows.leanings.items():
        if not is_string(rows.values[name].type) or name in (*key, *look.schema, look.operation):
            continue
        if leaning is not None and leaning.is_clear:
            found.append(
                f"column {name!r} would be text for good: {describe_unfit(store, leaning, Reading())}; to keep the type, set "
                f'`{toml_key(name)} = "{type_name(leaning.type)}"` in `schema` before the first run: then such rows go to '
                "quarantine"
            )
    return found


# -- the folder


def _files(store: ObjectStore, root: str) -> list[ObjectInfo]:
    if isinstance(store, LocalStore) and not Path(root).is_dir():
        raise ConfigurationError("no-landing", f"{root} is no folder.", next="name the folder that your files are in")
    if next(iter(store.list(f"{HOME}/", limit=1)), None) is not None:
        raise ConfigurationError(
            "already-a-table",
            f"{root} is the processed zone of a table of lakeupsert already.",
            next="`lakeupsert status` with its configuration tells about it; for a new table name its landing zone",
        )
    files = [f for f in store.list("") if is_landing_file(f.name)]
    if not files:
        raise ConfigurationError(
            "no-files",
            f"There is no file in {root}, so there is nothing to propose from (names that begin with _ or . do not count).",
            next="put some files there first, or begin from `lakeupsert config --example`",
        )
    return files


def _folder_values(paths: Sequence[str]) -> Any:
    """The partition values that the folders of these files name, as dates, integers or text."""
    texts = [unquote(_folder(path).partition("=")[2]) for path in paths]
    array = pa.array([None if text == HIVE_NULL else text for text in texts], pa.string())
    return convert(array, without_nulls(inferred(array, [pa.int64(), pa.date32()])))[0]


def _folder(path: str) -> str:
    return path.rpartition("/")[0]


def _hive_column(names: Sequence[str], rows: Sample) -> str | None:
    """The column of the folders' names, where the files are those of a Hive-partitioned table with one such column.

    `dt=2020-01-31` can also be the day of arrival: it is where the rows have a date of their own to go by.
    """
    matches = [_HIVE.fullmatch(_folder(name)) for name in names]
    columns = {unquote(m[1]) if m else "" for m in matches}
    if len(columns) > 1 or not all(columns) or any(format_of(n, "auto") != "parquet" for n in names):
        return None
    (column,) = columns
    arrival = column.lower() in ("dt", "ds") or _named(column, "arrival")
    dates = any(is_date(values.type) for values in rows.values.values())
    return None if column in rows.values or (arrival and dates) else column


def _beside(root: str, word: str, other: str) -> str:
    """Where the other zone would be: `/lake/landing/sales` and `/lake/processed/sales`, or beside it by another name."""
    scheme, mark, rest = root.rpartition("://")
    path = PurePosixPath(rest)
    if path.name == word:
        return f"{scheme}{mark}{path.with_name(other)}"
    if path.parent.name == word:
        return f"{scheme}{mark}{path.parent.with_name(other) / path.name}"
    return f"{root}-{other}"


def _checked(proposal: Proposal, rows: Sample) -> Proposal:
    """With a warning where the table could not be created so, for what the product itself refuses."""
    value = {name: choice.value for name, choice in proposal.settings.items()}
    types = {name: values.type for name, values in rows.values.items()}
    types |= {name: named_type(text, name) for name, text in proposal.schema.items()}
    try:
        create(
            pa.schema(list(types.items())),
            table_id="",
            key=value["key"],
            order_by=value["order_by"],
            partition_by=value["partition_by"],
            delete=DeleteRule(**value["delete"]) if value["delete"] else None,
            stamped=value["order_by"][0] not in types,
        )
    except LakeupsertError as e:
        warning = f"the table can't be created so yet: {e.message} {e.next}"
        return replace(proposal, warnings=(*proposal.warnings, warning))
    return proposal


# -- what it shows


class _Look:
    """The choices, one after another: each stands on those before it."""

    def __init__(self, rows: Sample, hive: str | None, names: Sequence[str]) -> None:
        self.rows = rows
        self.values = rows.values
        self.hive = hive
        self.names = names
        self.warnings: list[str] = []
        self.schema: dict[str, str] = {}
        self.inserts = np.full(rows.count, True)
        """A mask of the rows of which a key can have one only."""

    def settings(self) -> dict[str, Choice]:
        delete = self._delete()
        self.operation = delete.value and delete.value["column"]
        partition_by = self._partition()
        self.partition: list[str] = partition_by.value or []
        orders = self._orders()
        self.key = key = self._key([name for name, is_sure in orders.items() if is_sure])
        return {
            "partition_by": partition_by,
            "key": key,
            "order_by": self._order(list(orders), key.value or []),
            "landing_dates": self._landing_dates(),
            "delete": delete,
        }

    def _none(self, what: str, why: str, advice: str = "") -> Choice:
        """A setting without a value, with a warning of it."""
        self.warnings.append(f"{what}: {why}{advice}")
        return Choice(None, (why,))

    # -- delete

    def _delete(self) -> Choice:
        for name, values in self.values.items():
            if is_nested(values.type) or not 0 < self.rows.distinct(name) <= 12:
                continue
            texts, _ = convert(values, pa.string())
            counts = {c["values"]: c["counts"] for c in pc.value_counts(texts.drop_null()).to_pylist()}
            seen = {text.lower() for text in counts}
            is_flag = _named(name, "flag") and seen <= _WORDS["true"] | _WORDS["false"]
            if not is_flag and not seen <= _WORDS["insert"] | _WORDS["update"] | _WORDS["delete"]:
                continue
            is_sure = is_flag or _named(name, "operation")
            deletes = [text for text in counts if text.lower() in _WORDS["true" if is_flag else "delete"]]
            told = ", ".join(f"{text} {_share(n / self.rows.count)}" for text, n in counts.items())
            # Single letters may stand for anything, such as credit and debit.
            if deletes and (is_sure or min(map(len, seen)) > 2 or seen >= {"i", "u", "d"}):
                if is_boolean(values.type) and any(format_of(n, "auto") == "csv" for n in self.names):
                    deletes = ["true", "True", "TRUE"]  # of text files the written form is compared
                is_insert = true(pc.is_in(pc.utf8_lower(texts), pa.array(sorted(_WORDS["insert"]))))
                self.inserts = is_insert if is_insert.any() else self.inserts
                return Choice({"column": name, "values": deletes}, (f"{name} tells what a row does: {told}",))
            if deletes or is_sure:
                why = "nothing but the letters says so" if deletes else "no delete is among them"
                return self._none("[delete] is left out", f"{name} may hold operations ({told}), but {why}")
        return Choice(None, ("no column looks like operations: no row deletes another",))

    # -- partition

    def _partition(self) -> Choice:
        if self.hive is not None:
            return self._partition_of_folders(self.hive)
        dates = [name for name in self.values if self._unfit(name, pa.date32()) <= FEW]
        good = [n for n in dates if not _named(n, "arrival", "other")]
        ranked = sorted(
            good, key=lambda n: (not _named(n, "event"), not _words(n) <= _WORDS["day"], self.rows.distinct(n))
        )
        if not ranked:
            found = f"only {_listed(dates)}, named like something else" if dates else "no column of dates"
            few = [
                n
                for n, v in self.values.items()
                if (is_string(v.type) or is_integer(v.type))
                and 1 < self.rows.distinct(n) <= min(1000, self.rows.count / 50)
                and n != self.operation
            ]
            hint = f"columns of few values: {_listed(few)}" if few else "no other column has few values"
            advice = ". Name the column whose value a record never changes"
            return self._none("partition_by is left open", f"{found}; {hint}", advice)
        name = ranked[0]
        days, _ = convert(self.values[name], pa.date32())
        evidence = [
            f"{name}: {_count(pc.count_distinct(days).as_py(), 'value')} {_span(days)} in the sample",
            *self._kept_as(name, "date"),
        ]
        if ranked[1:]:
            evidence.append(f"also dates: {_listed(ranked[1:])}")
            if not _named(name, "event"):
                self.warnings.append(f"partition_by is {name}, but {_listed(ranked[1:])} may be it too: check it")
        return Choice([name], tuple(evidence))

    def _partition_of_folders(self, name: str) -> Choice:
        values = _folder_values(self.names).unique()
        if values.null_count:
            self.warnings.append(f"{name} has a partition without a value ({HIVE_NULL}), which a table can't keep")
        count = f"{_count(len(values), 'partition')} of {values.type}"
        return Choice([name], (f"{name} is the column of the folders: {count} {_span(values)}",))

    def _unfit(self, name: str, type_: Any) -> float:
        """The share of rows without a value of this type: absent, or not to be converted."""
        values = self.values[name]
        if not (is_date(values.type) or is_timestamp(values.type) or is_string(values.type)):
            return 1.0
        # A bad value is slow to convert, and the first ones tell what a column is.
        if convert(values.slice(0, 1000), type_)[1].mean() > 0.5:
            return 1.0
        return float(convert(values, type_)[0].null_count / self.rows.count)

    def _kept_as(self, name: str, kept: str) -> Iterator[str]:
        """What is to be told of a chosen column that has to be given a type, or has not one of it in every row."""
        type_, found = named_type(kept, name), self.values[name].type
        if unfit := self._unfit(name, type_):
            yield f"{_share(unfit)} of the rows have no {type_} there"
        if not is_date(found):
            self.schema[name] = kept
            yield f"it is {found} in the files and is to be kept as {kept}"

    # -- order

    def _orders(self) -> dict[str, bool]:
        """Columns that may tell a newer row from an older one, the likeliest first, and whether their names say so."""
        found: dict[str, tuple[Any, ...]] = {}
        for place, (name, values) in enumerate(self.values.items()):
            if name in self.partition or name == self.operation:
                continue
            newer, older = _named(name, "newer"), _named(name, "older", "other")
            is_counter = is_integer(values.type) and _named(name, "counter")
            is_moment = is_timestamp(values.type) or (
                is_string(values.type) and self._unfit(name, pa.timestamp("us")) <= FEW
            )
            is_day = is_date(values.type) and newer
            if is_counter or is_moment or is_day:
                found[name] = (older, not newer, not is_moment, place)
        return {name: not found[name][1] for name in sorted(found, key=found.__getitem__)}

    def _order(self, candidates: list[str], key: list[str]) -> Choice:
        evidence: list[str] = []
        for i, name in enumerate(candidates):
            low, high = self.rows.range(name)
            what = f"{name}: from {low} to {high}, {_share(self.rows.nulls(name))} nulls"
            again, ties = self._ties(key, name)
            if not key:
                what += "; how it orders the rows of one key can't be told without a key"
            elif not again:
                what += "; no key comes twice in the sample, so that it orders them is not shown"
            else:
                what += f"; of {_count(again, 'row')} that come again for a key, {_share(ties)} have an equal value"
            if ties <= 0.5:
                more = [f"others: {_listed(others)}"] if (others := candidates[i + 1 :]) else []
                if is_string(self.values[name].type) and self.hive is None:
                    more += self._kept_as(name, "timestamp_ntz")
                if _named(name, "older"):
                    self.warnings.append(f"order_by is {name}, which sounds as if it never changed: check it")
                return Choice([name], (what, *more, *evidence))
            evidence.append(what)
        taken = set(map(str.lower, self.values))
        stamp = next(n for n in ("record_timestamp", "received_at", "receipt_stamp") if n not in taken)
        said = (
            "no column tells a newer row from an older one: rows are stamped on receipt, so of two rows of one key the one "
            "that arrives later wins, within a batch the later file and row"
        )
        self.warnings.append(said)
        return Choice([stamp], (*evidence, said))

    def _ties(self, key: list[str], name: str) -> tuple[int, float]:
        """How many rows come again for a key, and the share of them that another has the ordering value of."""
        if not key:
            return 0, 0.0
        use = self.rows.fresh & self.rows.present(key)
        ids = self.rows.group([*self.partition, *key])
        again = int(use.sum()) - len(np.unique(ids[use]))
        equal = int(use.sum()) - len(np.unique(self.rows.group([name], ids)[use]))
        return again, equal / again if again else 0.0

    # -- key

    def _key(self, ordering: Sequence[str]) -> Choice:
        where = "within " + " and ".join(f"one {what}" for what in (*([] if self.hive else ["file"]), *self.partition))
        scope = self.rows.group(self.partition, None if self.hive else self.rows.file)
        use = self.rows.fresh & self.inserts & self.rows.present(self.partition)
        use &= np.bincount(scope[use], minlength=scope.max(initial=0) + 1)[scope] > 1  # one alone is always unique
        compared = int(use.sum())
        candidates = [
            n
            for n, v in self.values.items()
            if is_key_type(v.type)
            and not is_boolean(v.type)
            and n not in (*ordering, *self.partition, self.operation)
            and self.rows.nulls(n) <= FEW
        ]
        if not compared or not candidates:
            named = [n for n in candidates if _named(n, "key")]
            why = f"no two rows that could be compared lie {where}" if candidates else "no column can be a key"
            return self._none("key is left open", why + (f"; {_listed(named)} may be in it by name" if named else ""))

        def share(names: Sequence[str]) -> float:
            rows = use & self.rows.present(names)
            return len(np.unique(self.rows.group(names, scope)[rows])) / max(1, int(rows.sum()))

        def doubt(names: Sequence[str]) -> tuple[int, ...]:
            """The less, the likelier a key: by its names, its length, its types, and since keys mostly come first."""
            unlike = sum(not _named(n, "key") for n in names)
            moments = sum(is_temporal(self.values[n].type) for n in names)
            return unlike, len(names), moments, sum(candidates.index(n) for n in names)

        shares: dict[tuple[str, ...], float] = {(n,): share([n]) for n in candidates}
        if not any(s == 1 and not doubt(c)[0] for c, s in shares.items()):
            parts = sorted((c for c, s in shares.items() if s < 1), key=lambda c: (doubt(c)[0], -shares[c]))
            pairs = combinations(sorted(parts[:CANDIDATES], key=doubt), 2)
            shares |= {(a, b): share([a, b]) for (a,), (b,) in pairs}
        unique = sorted((c for c, s in shares.items() if s == 1), key=doubt)
        closest = sorted((c for c, s in shares.items() if s < 1), key=lambda c: (-shares[c], doubt(c)))
        others = ", ".join(f"{' + '.join(c)} {_share(shares[c])}" for c in closest[:3])
        rows = _count(compared, "row")
        if not unique:
            why = f"no column or pair is unique {where} ({rows} compared); closest: {others}"
            return self._none("key is left open", why)
        key = unique[0]
        evidence = [f"{' + '.join(key)}: unique {where}, {rows} compared", *self._repeats(key)]
        if others:
            evidence.append(f"not unique, with the share of distinct values: {others}")
        if unique[1:]:
            evidence.append(f"unique too: {', '.join(' + '.join(c) for c in unique[1:4])}")
        if compared < THIN:
            self.warnings.append(f"key {_listed(key)} stands on thin evidence: only {rows} could be compared")
        if doubt(key)[0]:
            self.warnings.append(f"key {_listed(key)} is unique in the sample, but not named like one: check it")
        return Choice(list(key), tuple(evidence))

    def _repeats(self, key: Sequence[str]) -> Iterator[str]:
        """Keys that come again in other files are updates; with another partition value they are other rows."""
        use = self.rows.fresh & self.rows.present([*key, *self.partition])
        alone, parted = self.rows.group(key)[use], self.rows.group([*key, *self.partition])[use]
        pairs, firsts = np.unique(parted, return_index=True)
        if len(parted) > len(pairs):
            yield f"{_count(len(parted) - len(pairs), 'row')} come again for a key that is there already: the newest stays"
        moved = int((np.unique(alone[firsts], return_counts=True)[1] > 1).sum())
        if moved:
            yield f"{_count(moved, 'key')} lie in more than one partition, and stay a row of their own in each"

    # -- landing_dates

    def _landing_dates(self) -> Choice:
        if self.hive is not None:
            return Choice(None, ("how landing will be laid out is not known yet",))
        folders = _folder(self.names[0]).split("/")
        prefixes = [(m[1].replace("%", "%%") + "=") if (m := _HIVE.fullmatch(f)) else "" for f in folders]
        fits: dict[str, list[date]] = {}
        for dates in _DATES:
            parts = dates.split("/")
            if len(parts) <= len(folders):
                pattern = "/".join(prefix + part for prefix, part in zip(prefixes, parts, strict=False))
                fits[pattern] = [day for name in self.names if (day := received_on(name, pattern)) is not None]
        # Of two readings of 01/02/2020 the one whose days lie closer together is the likelier.
        whole = [p for p, days in fits.items() if len(days) == len(self.names)]
        whole.sort(key=lambda p: max(fits[p]) - min(fits[p]))
        best = whole[0] if whole else max(fits, key=lambda p: len(fits[p]), default="")
        days = fits.get(best)
        if not days:
            return Choice(None, ("the folders below are no dates: every file is taken",))
        if not whole:
            told = f"{best} fits {len(days)} of {_count(len(self.names), 'file')}; the others would not be taken"
            return self._none("landing_dates is left out", told)
        evidence = [f"{best} fits all {_count(len(days), 'file')}, {min(days)} to {max(days)}"]
        if whole[1:]:
            evidence.append(f"{whole[1]} fits as well")
            self.warnings.append(f"landing_dates may be {best} or {whole[1]}: every folder fits both; check it")
        return Choice(best, tuple(evidence))


def _words(name: str) -> set[str]:
    return set(re.split(r"[^a-z0-9]+", re.sub(r"(?<=[a-z0-9])(?=[A-Z])", "_", name).lower()))


def _named(name: str, *kinds: str) -> bool:
    """Whether one of the column's words is of one of these kinds."""
    return any(_words(name) & _WORDS[kind] for kind in kinds)


def _share(share: float) -> str:
    """As a percentage that is 0 or 100 only where it is exactly that."""
    if share in (0.0, 1.0):
        return f"{share:.0%}"
    return f"{min(max(share, 0.001), 0.999):.1%}"


def _count(n: int, noun: str) -> str:
    return f"{n:,} {noun}{'' if n == 1 else 's'}"


def _span(values: Any) -> str:
    ends = pc.min_max(values)
    low, high = ends["min"].as_py(), ends["max"].as_py()
    days = f" ({_count((high - low).days + 1, 'day')})" if is_date(values.type) else ""
    return f"from {low} to {high}{days}"


def _listed(names: Sequence[str]) -> str:
    more = len(names) - 5
    return ", ".join(names[:5]) + (f" and {more} more" if more > 0 else "")
