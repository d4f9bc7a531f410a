"""`lakeupsert serve`: take rows by HTTP."""

import os
import socket
from pathlib import Path

import click

from lakeupsert.cli.frame import Answer, Call
from lakeupsert.cli.options import parse_size
from lakeupsert.cli.program import main
from lakeupsert.cli.signals import no_signals
from lakeupsert.errors import ConfigurationError
from lakeupsert.extras import needs_extra

_TOKEN = "LAKEUPSERT_TOKEN"
_file = click.Path(exists=True, dir_okay=False, path_type=Path)


@main.command()
@click.option("--host", default="127.0.0.1", show_default=True, metavar="ADDRESS", help="Listen on this address.")
@click.option("--port", type=click.IntRange(0, 65535), default=8421, show_default=True, help="0: any free port.")
@click.option("--token-file", type=_file, help=f"The token that clients send. Default: the variable {_TOKEN}.")
@click.option("--max-bytes", default="16MiB", show_default=True, callback=parse_size, help="Refuse larger bodies.")
@click.option("--max-open", type=click.IntRange(1), default=16, show_default=True, help="Requests at the same time.")
@click.option("--max-rate", type=click.IntRange(1), default=100, show_default=True, help="Requests a second.")
def serve(
    call: Call, host: str, port: int, token_file: Path | None, max_bytes: int, max_open: int, max_rate: int
) -> Answer:
    """Take rows by HTTP and land them as files.

    A client sends each batch with an id, and gets the answer when the rows are durable. The same id again counts once. The next
    `run` takes the rows. Works on all tables of the configuration unless you give --table. SIGTERM finishes open requests.

    \b
    Example:
      lakeupsert serve --port 8421
    """
    token = _token(host, token_file)
    with needs_extra("`serve`", "serve", "The server was not started."):
        from lakeupsert.endpoint.server import run_server
    from lakeupsert.endpoint.batches import Batches
    from lakeupsert.endpoint.gate import Gate
    from lakeupsert.pipeline.opened import OpenTable

    config, gate = call.config(), Gate(token, max_bytes, max_open, max_rate)
    names = list(config.tables) if call.table is None else [config.table(call.table)[0]]
    tables = {name: Batches(OpenTable(name, config.tables[name], origins=config.origins[name])) for name in names}
    with _listen(host, port) as listening, no_signals():  # the server has handlers while it runs
        where = f"http://{host}:{listening.getsockname()[1]}"
        click.echo(f"Serving {', '.join(names)} at {where}", err=True)
        run_server(tables, gate, listening)
    return Answer({"url": where, "tables": names}, "Stopped. Every open request was answered.")


def _token(host: str, file: Path | None) -> str | None:
    """The token of the server; None: it has none. No message contains it."""
    token = file.read_text("utf-8", "replace").strip() if file else os.environ.get(_TOKEN)
    if token or (file is None and host in ("localhost", "127.0.0.1")):
        return token
    raise ConfigurationError(
        "token-needed",
        f"The server has no token, so everybody who reaches {host} could write to the tables. It was not started.",
        next=f"set {_TOKEN} or give --token-file, for example with the output of `openssl rand -hex 32`",
    )


def _listen(host: str, port: int) -> socket.socket:
    try:
        return socket.create_server((host, port))
    except OSError as e:
        raise ConfigurationError(
            "unusable-address",
            f"The server can't listen on {host}, port {port}: {e.strerror or e}. It was not started.",
            next="give another --host or --port",
        ) from e
