"""`lakeupsert history`: list the snapshots."""

from lakeupsert.cli import output
from lakeupsert.cli.frame import Answer, Call
from lakeupsert.cli.program import main
from lakeupsert.phrases import count


@main.command()
def history(call: Call) -> Answer:
    """List the snapshots, newest first.

    \b
    Example:
      lakeupsert history
    """
    with call.open_table() as table:
        snapshots, tags, lost = table.snapshots(), table.tags(), table.lost_snapshots()
        warnings = (
            f"{count(len(lost), 'snapshot')} missing without having been expired: {', '.join(map(str, lost))}. "
            "Something other than lakeupsert deleted them. Newer snapshots do not need them.",
        )
        text = output.history_text(snapshots, tags)
        return Answer(output.history_result(snapshots, tags), text, warnings if lost else ())
