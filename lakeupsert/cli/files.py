"""`lakeupsert files`: list the files that a reader opens."""

import click

from lakeupsert.cli.frame import Answer, Call, common
from lakeupsert.cli.options import snapshot_option, where_option
from lakeupsert.cli.program import main
from lakeupsert.errors import RefusedError


@main.command()
@snapshot_option
@where_option
@common
@click.pass_obj
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
        found = [{name: getattr(file, name) for name in names} for file in listed]
        result = {"snapshot": view.number, "files": found}
        superseded = sum(bool(file["superseded"]) for file in found)
        if superseded:
            return Answer(result, "", error=_superseded_rows(table.name, superseded, len(found)))
        older = sum(bool(view.spec.changed_names(file.file.renames)) for file in listed)
        warnings = (
            (
                f"{older:,} of {len(found):,} files still contain renamed or dropped columns under their old names; "
                "`lakeupsert reprocess` rewrites these files",
            )
            if older
            else ()
        )
        return Answer(result, "\n".join(str(file["path"]) for file in found), warnings)


def _superseded_rows(table: str, files: int, total: int) -> RefusedError:
    return RefusedError(
        "superseded-rows",
        f"{files:,} of {total:,} files of table {table!r} contain superseded rows. A reader that opens only the files, "
        "without their deletion vectors, would see them, so the files are not listed (--json lists them).",
        next="read the table with to_arrow or to_spark, or `lakeupsert export`; or run `lakeupsert compact --full`, and set "
        'strategy = "rewrite" if readers open the files themselves',
    )
