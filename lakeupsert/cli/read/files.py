"""`lakeupsert files`: list the files that a reader opens."""

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

from lakeupsert.cli import output
from lakeupsert.cli.frame import Answer, Call
from lakeupsert.cli.options import snapshot_option, where_option
from lakeupsert.cli.program import main
from lakeupsert.errors import RefusedError
from lakeupsert.phrases import short_list

if TYPE_CHECKING:
    from lakeupsert.api import Table
    from lakeupsert.table.manifest import DataFile
    from lakeupsert.table.spec import TableSpec


@main.command()
@snapshot_option
@where_option
def files(call: Call, snapshot: str, where: str | None) -> Answer:
    """List the files that a reader of a snapshot opens.

    Prints one path per line.

    \b
    Example:
      lakeupsert files --where "transaction_date = '2020-01-01'" | xargs ls -l
    """
    from lakeupsert.read.view import latest_has_no_files  # imports Arrow

    with call.open_table() as table:
        if snapshot == "latest":
            raise latest_has_no_files()
        view = table.view(snapshot)
        names = ("partition", "path", "rows", "superseded", "bytes")
        listed = list(view.files(where))
        found = [output.fields(file, *names) for file in listed]
        result = {"snapshot": view.number, "files": found}
        superseded = sum(bool(file["superseded"]) for file in found)
        if superseded:
            return Answer(result, "", error=_superseded_rows(table, superseded, len(found)))
        paths = "\n".join(str(file["path"]) for file in found)
        return Answer(result, paths, tuple(_other_names(view.spec, [file.file for file in listed])))


def _other_names(spec: "TableSpec", listed: Sequence["DataFile"]) -> Iterator[str]:
    """Warnings about files that call columns otherwise than the table does, or have them in another type."""
    retyped = [name for file in listed for name in spec.conversions(file.renames)]
    if retyped:
        count = sum(bool(spec.conversions(file.renames)) for file in listed)
        yield (
            f"{count:,} of {len(listed):,} files were written before a retype of {short_list(sorted(set(retyped)))} and "
            "still have the old values; `lakeupsert compact --full` converts them"
        )
    older = sum(bool(spec.changed_names(file.renames)) and not spec.keeps_names(file.renames) for file in listed)
    if older:
        yield (
            f"{older:,} of {len(listed):,} files still contain renamed or dropped columns under their old names; "
            "`lakeupsert reprocess` rewrites these files"
        )
    if spec.names_written:
        names = [f"{name} is called {written}" for name, written in spec.names_written.items()]
        yield f"files keep the first name of a renamed column, for engines that need one name: {short_list(names)}"


def _superseded_rows(table: "Table", files: int, total: int) -> RefusedError:
    ways = "read the table with to_arrow or to_spark, or `lakeupsert export`"
    if "delta" in table.settings.publishers:
        ways = f"read {table.settings.processed} as a Delta table (docs/engines), or with to_arrow or to_spark"
    return RefusedError(
        "superseded-rows",
        f"{files:,} of {total:,} files of table {table.name!r} contain superseded rows. A reader that opens only the files, "
        "without their deletion vectors, would see them, so the files are not listed (--json lists them).",
        next=f"{ways}; or run `lakeupsert compact --full`, and set "
        'strategy = "rewrite" if readers open the files themselves',
    )
