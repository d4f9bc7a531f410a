"""Why rows of a block are refused, and the rows as quarantine keeps them."""

import operator
import re
import shlex
from collections.abc import Mapping

import numpy as np
import pyarrow as pa

from lakeupsert.config import of_table, toml_key
from lakeupsert.landing.formats.blocks import Block
from lakeupsert.landing.formats.dates import is_dated
from lakeupsert.rows.arrays import Mask, Rows
from lakeupsert.table.ledger import Reason

_LONGEST_REASON = 400
_FRACTION = re.compile(r":\d\d\.(\d+)")
_DIGITS = {"s": 0, "ms": 3, "us": 6, "ns": 9}
REFUSED_SCHEMA = pa.schema(
    [
        pa.field("reason_code", pa.string(), nullable=False),
        pa.field("reason", pa.string(), nullable=False),
        pa.field("file", pa.string(), nullable=False),
        ("position", pa.int64()),
        ("line", pa.int64()),
        ("raw", pa.string()),
        ("arrow", pa.binary()),
    ]
)
"""Of the rows of `Refusals.table`; in quarantine they have their batch, too."""


class Refusals:
    """Why rows of a block are refused. The first reason that is added for a row counts; faults of other values follow it."""

    def __init__(self, block: Block, path: str, table: str) -> None:
        self._block = block
        self._path = path
        self._table = table
        self._reasons: dict[int, tuple[Reason, str]] = {}
        self._faulty: dict[int, set[str]] = {}  # columns by row
        self.refused = np.zeros(len(block.places), bool)

    def add(self, code: Reason, mask: Mask, reason: str, *, of: str | None = None) -> None:
        """Refuse these rows, all for the same reason. ``of``: the column at fault; rows with other faults get the reason, too."""
        new = self._mark_refused(mask)
        for row in new if of is None else np.flatnonzero(mask).tolist():
            if of not in self._faulty.get(row, ()):
                self._tell(row, code, reason)

    def add_values(self, code: Reason, mask: Mask, name: str, what: str, type_: pa.DataType | None = None) -> None:
        """Refuse these rows for the value that each has in one column. ``type_``: the column's, if the value does not fit it."""
        if not mask.any():  # as in most of some thousand columns
            return
        if name not in self._block.names:  # no row has it
            self.add(code, mask, f"Column {name!r} {what}.")
        else:
            self._mark_refused(mask)
            rows = [row for row in np.flatnonzero(mask).tolist() if name not in self._faulty.get(row, ())]
            is_text = bool(rows) and self._block.texts(name) is not None
            for row, value in zip(rows, self._block.originals(name, rows), strict=True):
                _, before = self._reasons.get(row, (code, ""))
                hint = _hint(name, type_, value, is_text=is_text) if type_ else ""
                about = f" {hint}" if hint and hint.partition(",")[0] not in before else ""
                self._tell(row, code, f"Column {name!r}: {_shorten(value)} {what}.{about}", name)

    def add_meanings(self, name: str, meanings: Mapping[int, str]) -> None:
        """Refuse rows with an ambiguous value in a column, see `Block.ambiguous`."""
        mask = np.zeros(len(self.refused), bool)
        mask[list(meanings)] = True
        for row in self._mark_refused(mask):
            self._tell(row, "ambiguous_date", f"Column {name!r}: {meanings[row]}.", name)

    def _tell(self, row: int, code: Reason, reason: str, column: str | None = None) -> None:
        first, before = self._reasons.get(row, (code, ""))
        self._reasons[row] = first, f"{before} {reason}".lstrip()
        if column is not None:
            self._faulty.setdefault(row, set()).add(column)

    def _mark_refused(self, mask: Mask) -> list[int]:
        """Mark rows as refused, and return the new ones."""
        new = mask & ~self.refused
        self.refused |= new
        return np.flatnonzero(new).tolist()

    def table(self) -> Rows:
        """The refused rows and the malformed records, by their places."""
        rows = sorted(self._reasons)
        places = self._block.places[rows].tolist()
        block = self._block
        raws = block.raw(rows) if rows else []
        refused = [
            (*self._reasons[row], *where)
            for row, *where in zip(rows, places, block.line_numbers(rows), raws, block.arrow(rows), strict=True)
        ]
        for one in (one for one in block.malformed if one.version is None):
            raw = one.raw.decode("utf-8", "backslashreplace")
            code = "malformed" if one.truncate is None else "truncate"
            refused.append((code, one.reason, one.place, one.line, raw, None))
        refused.sort(key=operator.itemgetter(2))
        codes, reasons, *others = zip(*refused, strict=True) if refused else [()] * 6
        columns = (
            codes,
            [of_table(reason, self._table)[:_LONGEST_REASON] for reason in reasons],
            [self._path] * len(refused),
            *others,
        )
        arrays = [pa.array(values, field.type) for values, field in zip(columns, REFUSED_SCHEMA, strict=True)]
        return pa.Table.from_arrays(arrays, schema=REFUSED_SCHEMA)


def _hint(name: str, type_: pa.DataType, value: object, *, is_text: bool) -> str:
    """The advice about a value that a column of a type does not take. ``is_text``: the file has the column as text."""
    if not is_dated(type_) or not isinstance(value, str):
        return ""
    found = _FRACTION.search(value) if pa.types.is_timestamp(type_) else None
    digits = len(found[1].rstrip("0")) if found else 0
    if digits > _DIGITS[type_.unit if digits else "ns"]:
        finer = pa.timestamp("us" if digits <= _DIGITS["us"] else "ns", type_.tz)
        retype = shlex.join(["lakeupsert", "schema", "retype", name, str(finer)])
        return f"To keep its fraction: `{retype} --yes`, then `lakeupsert append --replay-quarantine`."
    example = f'dates = {{ {toml_key(name)} = "%d/%m/%Y" }}'
    return f"If it is a date, set its format under [tables.….read], for example `{example}`." if is_text else ""


def _shorten(value: object) -> str:
    try:
        text = "null" if value is None else repr(value)
    except RecursionError:
        text = "a value that is nested too deeply"
    return text if len(text) <= 80 else f"{text[:77]}..."
