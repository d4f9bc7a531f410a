"""`propose` in another process, since a file of the sample may end the process that reads it (ADR 0069)."""

from collections.abc import Callable

from lakeupsert.config import Reading
from lakeupsert.engine.hosts import LocalHost
from lakeupsert.errors import RefusedError
from lakeupsert.landing.formats.blocks import LandingInput
from lakeupsert.operations.init.propose import Proposal, landing_files, propose
from lakeupsert.operations.init.sample import choose_files
from lakeupsert.pipeline.append.trial import ending_files
from lakeupsert.pipeline.child import Child, EndedError
from lakeupsert.storage import ObjectReader, open_landing

SECONDS = 300.0
"""A sample takes a few seconds. Less: a busy machine reads each file of it once more."""


def propose_apart(address: str, table: str | None, alive: Callable[[], object]) -> Proposal:
    """See `propose`. Files that end the process are left out, with a warning. ``alive``: called every second."""
    try:
        return _call(address, table, {}, alive)
    except EndedError:
        ended = _ending_files(open_landing(address), address, alive)
    try:
        return _call(address, table, ended, alive)
    except EndedError as e:
        raise RefusedError(
            "no-readable-file",
            f"The sample files of {address} end the process that reads them together: {e}",
            next="run this for a folder with a few of the files, and write the other settings yourself",
        ) from e


def _call(address: str, table: str | None, ended: dict[str, str], alive: Callable[[], object]) -> Proposal:
    child = Child()
    try:
        return child.call(SECONDS, propose, address, table, ended, alive=alive)
    finally:
        child.end()


def _ending_files(store: ObjectReader, root: str, alive: Callable[[], object]) -> dict[str, str]:
    """The files of the sample that end a process which reads them, with the reasons."""
    chosen = choose_files(landing_files(store, root)[0])
    inputs = [LandingInput(file.name, file.size, file.etag, place=i) for i, file in enumerate(chosen)]
    return {path: why for (path, _), why in ending_files(LocalHost(), store, inputs, Reading(), alive).items()}
