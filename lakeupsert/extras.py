"""Packages that an extra adds, which only some installations have."""

import sys
from collections.abc import Iterator
from contextlib import contextmanager

from lakeupsert.errors import ConfigurationError
from lakeupsert.phrases import install_extra


@contextmanager
def needs_extra(what: str, extra: str | None, then: str = "Nothing was done.") -> Iterator[None]:
    """Raise ConfigurationError (``extra-missing``) if an import fails in the block, which ``what`` needs.

    ``extra``: which one has the package; None: none of ours, and the message of the import names it.
    """
    try:
        yield
    except ImportError as e:
        missing = e.__cause__ if isinstance(e.__cause__, ImportError) else e
        found = f"{what} needs {missing.name or missing}, which is not installed. {then}"
        how = install_extra(extra) if extra else f"{e}; install it for {sys.executable}"
        raise ConfigurationError("extra-missing", found, next=how) from e
