"""`lakeupsert report`: write a page about a table's last nights."""

import re
from pathlib import Path

import click

from lakeupsert import clock
from lakeupsert.cli.frame import Answer, Call
from lakeupsert.cli.program import main
from lakeupsert.config import refuse_in_zones
from lakeupsert.errors import ConfigurationError
from lakeupsert.phrases import no_folder, size


@main.command()
@click.option(
    "--output",
    metavar="X",
    help="The HTML file to write (.html). An existing file is replaced. Default: report-TABLE.html in this folder.",
)
@click.option(
    "--nights",
    type=click.IntRange(min=1),
    default=30,
    show_default=True,
    metavar="N",
    help="Number of batches to show.",
)
def report(call: Call, output: str | None, nights: int) -> Answer:
    """Write one HTML page about the table and its last batches.

    The page loads nothing and runs no script: mail it, print it, open it anywhere.

    \b
    Example:
      lakeupsert report
      lakeupsert report --output /var/www/nights.html --nights 90
    """
    with call.open_table() as table, call.progress(table.name) as progress:
        output = output or f"report-{re.sub(r'[^A-Za-z0-9_-]', '_', table.name)}.html"
        target = _target(output)
        refuse_in_zones(table.settings, output)
        progress(f"reading the last {nights} batches")
        page = table.report(nights).encode("utf-8", "replace")
        temporary = target.with_name(f".{target.name}.{clock.new_id()}.tmp")
        try:
            temporary.write_bytes(page)
            temporary.replace(target)  # until then readers see the old page, complete
        finally:
            temporary.unlink(missing_ok=True)
        return Answer({"output": output, "bytes": len(page)}, f"{size(len(page))} to {output}")


def _target(output: str) -> Path:
    target = Path(output).expanduser().resolve()
    if target.suffix.lower() not in (".html", ".htm") or target.is_dir():
        raise ConfigurationError(
            "unknown-format",
            f"--output {output!r} is not a file ending in .html. Nothing was written.",
            next="give a file name ending in .html, for example report.html",
        )
    if not target.parent.is_dir():
        raise ConfigurationError(
            "no-folder", f"{target.parent} {no_folder(target.parent)}.", next="create it, or correct --output"
        )
    return target
