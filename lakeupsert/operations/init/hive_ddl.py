"""Hive's CREATE TABLE statements as tables: columns, partitions, properties, and how files are read.

Reads     text alone
Writes    nothing

sqlglot parses the statements. Clauses that it does not parse (SORTED BY, SKEWED BY, the state of a constraint) are cut out first.
Names of columns are lower case, as Hive keeps them.
"""

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import groupby

import sqlglot
from sqlglot import Token, TokenType, exp
from sqlglot.dialects import Hive

from lakeupsert.errors import ConfigurationError
from lakeupsert.operations.init.translation import Leftover, SourceFile
from lakeupsert.table.types import named_type

_STORAGE = (
    ("opencsv", "csv"),
    ("json", "jsonl"),
    ("parquet", "parquet"),
    ("orc", "orc"),
    ("avro", "avro"),
    ("rcfile|columnar", "rcfile"),
    ("sequence", "sequencefile"),
    ("text|lazysimple", "text"),
)
"""What the names of formats and classes contain, and the kind of files that they say."""
_SERDE_DELIMITER, _SERDE_NULL = ("field.delim", "separatorChar"), "serialization.null.format"
_UNPARSED = {
    "SORTED BY": "lakeupsert sorts files by key",
    "SKEWED BY": "a partition has no folders for single values",
    "DISABLE NOVALIDATE": "lakeupsert always keeps a key unique",
}
"""Clauses by their first two words, and why no setting stands for them."""


@dataclass(frozen=True)
class Text:
    """A text of the file, and its line."""

    value: str
    line: int


@dataclass
class HiveTable:
    """A CREATE TABLE statement.

    Attributes:
        columns, partitions: Hive's columns by name, in the order of the statement, with their types by our names; None for a type
            that has none.
        constraint: the columns of its PRIMARY KEY.
        properties: TBLPROPERTIES.
        kind: of its files: text, csv, jsonl, parquet, orc, avro, or a kind that lakeupsert does not read.
        delimiter, null: of text, as they are written; None for Hive's own.
    """

    name: str
    line: int
    columns: dict[str, str | None] = field(default_factory=dict)
    partitions: dict[str, str | None] = field(default_factory=dict)
    constraint: tuple[str, ...] = ()
    properties: dict[str, Text] = field(default_factory=dict)
    kind: str = "text"
    delimiter: str | None = None
    null: str | None = None
    escaped: bool = False
    location: Text | None = None
    leftovers: list[Leftover] = field(default_factory=list)

    @property
    def all_columns(self) -> Mapping[str, str | None]:
        return self.columns | self.partitions

    def names_in(self, name: str) -> tuple[str, ...]:
        """The columns that a property lists; none if it is not there."""
        text = self.properties[name].value if name in self.properties else ""
        return tuple(part.strip().lower() for part in text.split(",") if part.strip())


def read_tables(source: SourceFile) -> tuple[list[HiveTable], list[Leftover]]:
    """The tables of a file of statements, and the statements that make no table.

    Raises ConfigurationError if the file can't be read, or sqlglot can't parse a CREATE TABLE statement.
    """
    try:
        sql = source.read().decode("utf-8-sig")
        tokens = Hive().tokenize(sql)
    except UnicodeDecodeError as e:
        raise source.error("unreadable-source", None, f"it is not UTF-8: {e.reason} at byte {e.start}.") from e
    except sqlglot.errors.TokenError as e:
        raise source.error("unreadable-source", None, f"it is not SQL: {e}.") from e
    tables, others = [], []
    for statement in _statements(tokens):
        words = [token.text.upper() for token in statement[:4]]
        is_table = words[0] == "CREATE" and "TABLE" in words
        table = _Reader(source, sql, statement).table() if is_table else None
        if table is not None:
            tables.append(table)
            continue
        reason = "it lists no columns" if is_table else "only CREATE TABLE is read"
        text = " ".join(token.text for token in statement[:4])
        others.append(Leftover("statement", f"{text} ...", statement[0].line, reason))
    return tables, others


def _statements(tokens: Sequence[Token]) -> Iterator[list[Token]]:
    for is_end, statement in groupby(tokens, lambda token: token.token_type == TokenType.SEMICOLON):
        if not is_end:
            yield list(statement)


class _Reader:
    """Reads one statement."""

    def __init__(self, source: SourceFile, sql: str, tokens: list[Token]) -> None:
        self.source = source
        self.sql = sql
        self.tokens = tokens
        self.words = [token.text.upper() for token in tokens]
        self.made = HiveTable("", tokens[0].line)

    def table(self) -> HiveTable | None:
        """None if the statement lists no columns: LIKE, AS SELECT."""
        create = self._parse()
        schema = create.this
        if not isinstance(schema, exp.Schema):
            return None
        self.made.name = schema.this.name.lower()
        for part in schema.expressions:
            self._add_column(part)
        properties = create.args.get("properties")
        kinds: list[str] = []
        for one in properties.expressions if properties else ():
            kinds += self._add_property(one)
        if kinds:
            text = " ".join(kinds).lower()
            self.made.kind = next((kind for pattern, kind in _STORAGE if re.search(pattern, text)), kinds[0])
        return self.made

    # -- the statement

    def _parse(self) -> exp.Create:
        text = self._without_unparsed_clauses()
        try:
            create = sqlglot.parse_one(text, read="hive")
        except sqlglot.errors.ParseError as e:
            first = e.errors[0] if e.errors else {}
            line = self.tokens[0].line + int(first.get("line") or 1) - 1
            raise self._unreadable(line, f"sqlglot does not parse it: {first.get('description') or e}") from e
        if not isinstance(create, exp.Create):
            raise self._unreadable(self.tokens[0].line, "sqlglot does not parse all clauses of this CREATE TABLE")
        return create

    def _unreadable(self, line: int, why: str) -> ConfigurationError:
        return self.source.error("unreadable-source", line, f"{why}.")

    def _without_unparsed_clauses(self) -> str:
        """The statement with spaces for clauses that sqlglot refuses, so that lines stay the same."""
        start, end = self.tokens[0].start, self.tokens[-1].end + 1
        text = self.sql[start:end]
        for first in range(len(self.words)):
            name = " ".join(self.words[first : first + 2])
            if name in _UNPARSED:
                begin, close = self.tokens[first].start - start, self.tokens[self._end_of_clause(first)].end + 1 - start
                cut = text[begin:close]
                text = text[:begin] + re.sub(r"[^\n]", " ", cut) + text[close:]
                self._leave(name, " ".join(cut.split()), self.tokens[first].line, _UNPARSED[name])
        return text

    def _end_of_clause(self, first: int) -> int:
        """The last token of the clause that begins at a token: its parentheses, and those behind ON."""
        last, words = first + 1, self.words
        while words[last + 1 : last + 2] in (["("], ["ON"]):
            last = words.index(")", last) if words[last + 1] == "(" else last + 1
        for more in (["STORED", "AS", "DIRECTORIES"], ["RELY"], ["NORELY"]):
            if words[last + 1 : last + 1 + len(more)] == more:
                return last + len(more)
        return last

    def _line_of(self, *texts: str) -> int:
        """The line of the first token with one of these texts, ignoring case; else that of the statement."""
        wanted = {text.upper() for text in texts}
        return next((t.line for t, word in zip(self.tokens, self.words, strict=True) if word in wanted), self.made.line)

    def _leave(self, name: str, value: str, line: int, reason: str) -> None:
        self.made.leftovers.append(Leftover(name, value, line, reason))

    # -- its parts

    def _add_column(self, part: exp.Expression) -> None:
        if isinstance(part, exp.Constraint | exp.PrimaryKey):
            key = part if isinstance(part, exp.PrimaryKey) else part.find(exp.PrimaryKey)
            if key is not None:
                self.made.constraint = tuple(one.name.lower() for one in key.expressions)
                return
        if not isinstance(part, exp.ColumnDef):
            text = part.sql("hive")
            self._leave(
                "constraint", text, self._line_of("CONSTRAINT", *text.split()[:1]), "lakeupsert checks only the key"
            )
            return
        self._add_typed(self.made.columns, part)
        for constraint in part.args.get("constraints") or ():
            if isinstance(constraint.kind, exp.PrimaryKeyColumnConstraint):
                self.made.constraint = (part.name.lower(),)
                continue
            reason = (
                "there are no comments"
                if isinstance(constraint.kind, exp.CommentColumnConstraint)
                else "it is not checked"
            )
            self._leave(f"column {part.name}", constraint.sql("hive"), self._line_of(part.name), reason)

    def _add_typed(self, columns: dict[str, str | None], part: exp.ColumnDef) -> None:
        name, line = part.name.lower(), self._line_of(part.name)
        if name in self.made.all_columns:
            raise self.source.error("contradictory-source", line, f"table {self.made.name} has two columns {name!r}.")
        kind = part.args.get("kind")
        text = kind.sql("hive").lower() if kind else ""
        type_ = {"timestamp": "timestamp_ntz", "timestampltz": "timestamp", "decimal": "decimal(10,0)"}.get(text, text)
        if re.match(r"(var)?char\b", text):
            type_ = "string"
            self._leave(f"column {name}", text, line, "the length of a text is not checked: string")
        try:
            named_type(type_, name)
            columns[name] = type_
        except ConfigurationError:
            columns[name] = None
            self._leave(
                f"column {name}", text, line, "no name of a type in [schema]: its type is inferred from the first batch"
            )

    def _add_property(self, one: exp.Expression) -> list[str]:
        """Add a clause behind the columns. Returns what it says about the kind of the files."""
        match one:
            case exp.PartitionedByProperty():
                self._add_partitions(one.this.expressions)
            case exp.RowFormatDelimitedProperty():
                self._add_delimited(one)
            case exp.RowFormatSerdeProperty():
                serde_properties = one.args.get("serde_properties")
                for pair in serde_properties.expressions if serde_properties else ():
                    self._add_serde_property(pair.this.name, pair.args["value"].name)
                return [one.this.name]
            case exp.FileFormatProperty():
                return self._add_format(one.this)
            case exp.LocationProperty():
                self.made.location = Text(one.this.name, self._line_of("LOCATION"))
            case exp.Property() if type(one) is exp.Property:  # the base of all others
                self._add_table_property(one.this.name, one.args["value"].name)
            case _:
                self._leave_clause(one)
        return []

    def _add_partitions(self, parts: Sequence[exp.Expression]) -> None:
        for part in parts:
            if not isinstance(part, exp.ColumnDef):
                line = self._line_of("PARTITIONED")
                raise self._unreadable(line, "PARTITIONED BY names a column without its type")
            self._add_typed(self.made.partitions, part)

    def _add_format(self, formats: exp.Expression) -> list[str]:
        if not isinstance(formats, exp.InputOutputFormat):
            return [formats.name]
        names = {clause: formats.args.get(clause) for clause in ("input_format", "output_format")}
        for clause, part in names.items():
            if part is not None:
                shown = clause.replace("_", "").upper()
                self._leave(shown, part.name, self._line_of(shown), "lakeupsert reads and writes files by itself")
        return [names["input_format"].name] if names["input_format"] is not None else []

    def _add_table_property(self, name: str, value: str) -> None:
        line = self._line_of(name)
        if self.made.properties.setdefault(name, Text(value, line)).value != value:
            raise self.source.error("contradictory-source", line, f"TBLPROPERTIES has two values of {name!r}.")

    def _leave_clause(self, one: exp.Expression) -> None:
        text = one.sql("hive")
        name, value, reason = "clause", text, "no setting is like it"
        match one:
            case exp.ClusteredByProperty():
                name, reason = "CLUSTERED BY", "lakeupsert splits large partitions itself: `bucket`"
            case exp.ExternalProperty():
                name, value, reason = "EXTERNAL", self.made.name, "lakeupsert never deletes landing files"
            case exp.SchemaCommentProperty():
                name, value, reason = "COMMENT", one.this.name, "tables have no comments"
        word = (text if name == "clause" else name).split()[:1]
        self._leave(name, value, self._line_of(*word), reason)

    def _add_delimited(self, one: exp.RowFormatDelimitedProperty) -> None:
        texts = {name: part.name for name, part in one.args.items() if isinstance(part, exp.Literal)}
        self.made.delimiter, self.made.null = texts.pop("fields", None), texts.pop("null", None)
        self.made.escaped = texts.get("escaped") == "\\"
        texts = {name: text for name, text in texts.items() if (name, text) not in (("lines", "\n"), ("escaped", "\\"))}
        clauses = {
            "escaped": "ESCAPED BY",
            "collection_items": "COLLECTION ITEMS TERMINATED BY",
            "map_keys": "MAP KEYS TERMINATED BY",
            "lines": "LINES TERMINATED BY",
        }
        for name, value in texts.items():
            clause = clauses.get(name, name)
            self._leave(clause, repr(value), self._line_of(clause.split()[0]), "CSV of lakeupsert has no such sign")

    def _add_serde_property(self, name: str, value: str) -> None:
        if name in _SERDE_DELIMITER:
            self.made.delimiter = value
        elif name == _SERDE_NULL:
            self.made.null = value
        elif name == "escape.delim" and value == "\\":
            self.made.escaped = True
        elif name != "serialization.format":  # what Hive writes beside field.delim, with the same value
            self._leave(f"SERDEPROPERTIES {name}", repr(value), self._line_of(name), "no setting is like it")
