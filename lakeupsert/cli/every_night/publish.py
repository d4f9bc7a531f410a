"""`lakeupsert publish`: show readers what is complete."""

from typing import get_args

import click

from lakeupsert.cli import output
from lakeupsert.cli.frame import Answer, Call
from lakeupsert.cli.options import log_option
from lakeupsert.cli.problems import merge_error, publish_warnings
from lakeupsert.cli.program import main
from lakeupsert.config import PublisherName


@main.command()
@click.option("--tag", metavar="NAME", help="Tag the published snapshot. A tagged snapshot is never expired.")
@click.option(
    "--to", type=click.Choice(get_args(PublisherName)), help="Fail if this publisher can't show the snapshot."
)
@click.option("--reset", is_flag=True, help="Delete what the publisher has written, and start over.")
@click.option("--untag", metavar="NAME", help="Remove this tag.")
@click.option("--without-audit", is_flag=True, help="Do not ask the queries of the setting `audit`.")
@log_option
def publish(
    call: Call, tag: str | None, to: PublisherName | None, reset: bool, untag: str | None, without_audit: bool
) -> Answer:
    """Show readers the newest batch merged in every partition.

    \b
    Example:
      lakeupsert publish --tag before-migration
    """
    with call.open_table() as table:
        if tag is not None:
            from lakeupsert.operations.snapshots import refuse_unfit_tag  # brings Arrow

            refuse_unfit_tag(tag)
        if untag is not None:
            table.tag(untag, None)
        published = table.publish(to=to, reset=reset, audited=not without_audit)
        if tag is not None:
            table.tag(tag)
        result, facts = output.publish_result(published), output.publish_facts(published)
        if tag is not None or untag is not None:
            tags = result["tags"] = table.tags()
            if tag is not None:
                again = f", which snapshot {published.snapshot} shows again" if tags[tag] != published.snapshot else ""
                facts.append((tag, f"tag of snapshot {tags[tag]}{again}"))
            facts += [(untag, "no snapshot has this tag now")] if untag is not None else []
        error = merge_error(call, table, [], published)
        return Answer(result, output.block(f"Table {table.name}", facts), publish_warnings(published), error=error)
