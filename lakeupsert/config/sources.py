"""`[sources.NAME]`: where `lakeupsert capture` reads rows, and for which table it lands them."""

import os
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, ClassVar
from urllib.parse import SplitResult, urlsplit

import msgspec

from lakeupsert.config.addresses import absolute_address
from lakeupsert.config.check import has_credential
from lakeupsert.config.messages import Refusal, did_you_mean, refuse_unknown_keys
from lakeupsert.config.types import Names, size_of
from lakeupsert.decoding import convert
from lakeupsert.errors import ConfigurationError

_NAME = re.compile(r"[a-z][a-z0-9_]{0,40}")
"""Slots of PostgreSQL, topics, folders and environment variables may all have such names."""


class SourceSettings(msgspec.Struct, frozen=True, kw_only=True, rename={"from_": "from"}):
    """The settings of every ``[sources.NAME]``. ``extra``, not a setting, is the one of ours that it needs."""

    extra: ClassVar[str] = "capture"
    from_: str
    """The server, without a password: ``postgresql://USER@HOST:PORT/DATABASE``."""
    table: str
    """The table of this file whose landing zone gets the rows, and whose folder keeps the position."""
    password_file: str | None = None
    """A file with the password. Default: the variable ``LAKEUPSERT__SOURCES__NAME__PASSWORD``."""
    seconds: Annotated[float, msgspec.Meta(gt=0)] = 1.0
    """A landing file ends with the first transaction that ends so long after its first row."""
    rows: Annotated[int, msgspec.Meta(ge=1)] = 100_000
    """Or with the transaction that gives it so many rows."""
    bytes: str | int = "64MiB"
    """Or so many bytes of text before compression."""

    @property
    def server(self) -> SplitResult:
        """`from` in its parts."""
        return urlsplit(self.from_)

    @property
    def most_bytes(self) -> int:
        """`bytes`."""
        return size_of(self.bytes) or 0


class DatabaseSource(SourceSettings, frozen=True, kw_only=True):
    """``[sources.NAME]`` of a database, which `lakeupsert capture` follows."""

    tables: Names
    """The tables to follow, with their schemas (MariaDB: databases), for example ``public.orders``."""
    jars: str | None = None
    """A folder with Debezium's jars. MariaDB needs it, because pip installs no connector for it."""


class KafkaSource(SourceSettings, frozen=True, kw_only=True):
    """``[sources.NAME]`` of Kafka: `from` is ``kafka://HOST:PORT,HOST:PORT``."""

    topics: Names
    """The topics to read, all partitions of each."""
    registry: str | None = None
    """The address of a schema registry. The messages are Avro in its wire format. Default: they are JSON."""
    properties: str | None = None
    """A file with more properties of librdkafka, for example for TLS and SASL, as ``client.properties`` of Java has them."""


_KINDS: dict[str, type[SourceSettings]] = {
    "postgresql": DatabaseSource,
    "mariadb": DatabaseSource,
    "kafka": KafkaSource,
}
"""The class of settings for each scheme of `from`."""


_SERVER = re.compile(
    r"(postgresql|mariadb)://([^@/?#]+@)?(\[[0-9a-fA-F:.]+\]|[^][@:/?#,]+)(:(?P<port>\d{1,5}))?/[^/?#]+"
)


def _is_server(address: str) -> bool:
    found = _SERVER.fullmatch(address)
    return found is not None and int(found["port"] or 1) in range(1, 1 << 16)


def refuse_credential(path: str, name: str, raw: Mapping[str, object]) -> None:
    if has_credential(str(raw.get("from", ""))):
        raise ConfigurationError(
            "credential-in-configuration",
            f"{path}: [sources.{name}]: from contains a credential, which no setting may. The password belongs into the "
            f"variable {password_variable(name)}, or into a password_file.",
            next=f"set {password_variable(name)}",
        )


def password_variable(name: str) -> str:
    """The environment variable of a source's password."""
    return f"LAKEUPSERT__SOURCES__{name.upper()}__PASSWORD"


def password_of(name: str, settings: SourceSettings) -> str:
    """The password, or an empty text: the server may not ask for one. No message contains it."""
    if settings.password_file is None:
        return os.environ.get(password_variable(name), "")
    try:
        return Path(settings.password_file).read_text("utf-8").rstrip("\n")
    except (OSError, ValueError) as e:
        why = e.strerror if isinstance(e, OSError) else "it is not text"
        raise ConfigurationError(
            "bad-setting",
            f"[sources.{name}]: password_file {settings.password_file} can't be read: {why}.",
            next="correct it",
        ) from e


def name_of_source(text: str) -> str:
    """A source's name like the name of a database or table."""
    name = re.sub(r"[^a-z0-9]+", "_", text.lower()).strip("_")
    return (name if name[:1].isalpha() else f"db_{name}")[:30]


def parse_source(path: str, name: str, raw: dict[str, object], tables: Mapping[str, object]) -> SourceSettings:
    """The settings below ``[sources.NAME]``, checked; ``tables``: those of the same file."""
    where = f"[sources.{name}]"
    refuse = Refusal(path, where)
    if name == "endpoint":
        refuse("its name", name, "`lakeupsert serve` has its landing files there")
    if not _NAME.fullmatch(name):
        refuse("its name", name, "expected a small letter, then up to 40 small letters, digits and _")
    refuse_credential(path, name, raw)
    address = raw.get("from", "")
    scheme = str(address).partition("://")[0]
    kind = _KINDS.get(scheme)
    if kind is None:
        refuse("from", address, f"expected an address that begins with {', '.join(f'{one}://' for one in _KINDS)}")
    refuse_unknown_keys(path, where, raw, kind.__struct_encode_fields__)
    try:
        settings = convert(raw, kind)
    except msgspec.ValidationError as e:
        raise ConfigurationError(
            "bad-setting", f"{path}: {where}: {e}.", next=f"correct that setting in {where}"
        ) from e
    if settings.table not in tables:
        refuse("table", settings.table, f"the file has no such table.{did_you_mean(settings.table, tables)}")
    if isinstance(settings, DatabaseSource) and not _is_server(settings.from_):
        refuse("from", address, f"expected {scheme}://USER@HOST:PORT/DATABASE, with nothing behind the database")
    if isinstance(settings, DatabaseSource) and scheme == "mariadb" and settings.jars is None:
        refuse("jars", None, "expected a folder with Debezium's connector for MariaDB (docs/CAPTURE.md)")
    if not settings.most_bytes:
        refuse("bytes", settings.bytes, 'expected a size, for example "64MiB"')
    given = {one: getattr(settings, one, None) for one in ("password_file", "properties", "jars")}
    paths = {one: absolute_address(path, value) for one, value in given.items() if value is not None}
    return msgspec.structs.replace(settings, **paths)
