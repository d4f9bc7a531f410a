"""The extra that a kind of source needs."""

from collections.abc import Iterator
from contextlib import contextmanager

from lakeupsert.config import KafkaSource, SourceSettings
from lakeupsert.errors import ConfigurationError
from lakeupsert.phrases import install_extra


@contextmanager
def needs_extra(what: str, settings: SourceSettings) -> Iterator[None]:
    """Raise ConfigurationError (``extra-missing``) if an import fails in the block, which ``what`` needs."""
    try:
        yield
    except ImportError as e:
        missing = f"{what} needs {e.name or e}, which is not installed. Nothing was read."
        extra = "kafka" if isinstance(settings, KafkaSource) else "capture"
        raise ConfigurationError("extra-missing", missing, next=install_extra(extra)) from e
