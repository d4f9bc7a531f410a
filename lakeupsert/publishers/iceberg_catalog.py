"""The table in a catalog of pyiceberg: load it, register it, commit to it, drop it.

Catalogs that leave a table's metadata to their clients, such as SQL and Glue, write it through the table's own store, with its
credentials; settings of the catalog for file systems do not count. Every call ends: a catalog that gives no answer is an error.
"""

import io
import re
import threading
from collections.abc import Callable, Iterator
from contextlib import suppress
from contextvars import ContextVar, copy_context
from types import TracebackType
from typing import TypeVar
from urllib.parse import unquote, urlsplit

import pyiceberg.exceptions as iceberg_errors
from pyiceberg.catalog import Catalog, load_catalog
from pyiceberg.catalog.rest import RestCatalog
from pyiceberg.io import FileIO, InputFile, OutputFile
from pyiceberg.table import Table
from pyiceberg.table.metadata import TableMetadataUtil
from pyiceberg.table.update import TableRequirement, TableUpdate
from pyiceberg.typedef import EMPTY_DICT, Properties
from pyiceberg.utils.config import Config

from lakeupsert.config import IcebergSettings
from lakeupsert.errors import ConfigurationError, DamagedTableError, LakeupsertError
from lakeupsert.retries import CATALOG_ANSWER_SECONDS
from lakeupsert.storage import NotFoundError, ObjectStore, StoreUnavailableError
from lakeupsert.table.metadata import damaged

RESET = "`lakeupsert publish --to iceberg --reset` registers the table again with the published snapshot"
_STORE: ContextVar[ObjectStore] = ContextVar("store")
"""Of the table that a call is about. pyiceberg opens `TableIO` by its name, so it can't be given the store."""
_OPENED: ContextVar[str] = ContextVar("opened", default="")
"""The address of the metadata file that a call has read."""
_NOT_INSTALLED = (ImportError, iceberg_errors.NotInstalledError)
_REFUSALS = (
    iceberg_errors.UnauthorizedError,
    iceberg_errors.ForbiddenError,
    iceberg_errors.OAuthError,
    iceberg_errors.BadRequestError,
    ValueError,
    TypeError,
    KeyError,
    NotImplementedError,
)

Answer = TypeVar("Answer")


def root_address(store: ObjectStore) -> str:
    """The address of the table, not escaped, as Iceberg's paths are."""
    address = store.uri()
    return f"file://{unquote(urlsplit(address).path)}" if address.startswith("file:") else address


class IcebergCatalog:
    """One table in a catalog, to be closed.

    Every call raises StoreUnavailableError (``catalog-unreachable``) if it gets no answer, and ConfigurationError
    (``catalog-refused``) if the catalog refuses it. Readers of Iceberg then see what they saw.
    """

    def __init__(self, settings: IcebergSettings, store: ObjectStore) -> None:
        self.table = settings.table
        self._namespace = settings.table.rpartition(".")[0]
        self._settings = settings
        self._store = store
        self._catalog: Catalog | None = None

    def close(self) -> None:
        if self._catalog is not None:
            self._catalog.close()

    def load(self) -> Table | None:
        """The table as it is now; None if the catalog has none of this name. Raises DamagedTableError if its metadata, which is
        in our store, can't be read."""

        def load(catalog: Catalog) -> Table | None:
            try:
                return catalog.load_table(self.table)
            except (iceberg_errors.NoSuchTableError, iceberg_errors.NoSuchNamespaceError):
                return None
            except LakeupsertError:
                raise
            except Exception as e:  # whatever a parser meets in damaged bytes
                if address := _OPENED.get():
                    raise _damaged(address, str(e)) from e
                self._check_metadata(str(e))
                raise

        return self._ask(load)

    def _check_metadata(self, error: str) -> None:
        """Raise DamagedTableError if a REST catalog could not read metadata of ours, which its error names."""
        for address in re.findall(r"[^\s'\"]+\.metadata\.json", error):
            name = _name_in(root_address(self._store), address)
            if name is None:
                continue
            try:
                TableMetadataUtil.parse_raw(self._store.get(name).decode())
            except NotFoundError as e:
                raise _damaged(address, "it is missing") from e
            except (iceberg_errors.ValidationError, UnicodeDecodeError) as e:
                raise _damaged(address, str(e)) from e

    def register(self, address: str) -> None:
        """Create the table from the metadata at ``address``, or leave the one that another publisher has just created."""

        def register(catalog: Catalog) -> None:
            if not catalog.namespace_exists(self._namespace):
                try:
                    catalog.create_namespace(self._namespace)
                except Exception:  # each catalog has an error of its own for a lost race
                    if not catalog.namespace_exists(self._namespace):
                        raise
            with suppress(iceberg_errors.TableAlreadyExistsError):
                catalog.register_table(self.table, address)

        self._ask(register)

    def commit(
        self, table: Table, requirements: tuple[TableRequirement, ...], updates: tuple[TableUpdate, ...]
    ) -> None:
        """Commit if the requirements hold. Whether they did, and whether the answer was lost, only a new `load` tells."""

        def commit(catalog: Catalog) -> None:
            with suppress(iceberg_errors.CommitFailedException, iceberg_errors.CommitStateUnknownException):
                catalog.commit_table(table, requirements, updates)

        self._ask(commit)

    def drop(self) -> None:
        """Remove the table from the catalog. Its objects stay."""
        self._ask(lambda catalog: catalog.drop_table(self.table))

    def _ask(self, call: Callable[[Catalog], Answer]) -> Answer:
        """The answer of the catalog. It is asked in a thread, because few of pyiceberg's catalogs have a time limit."""
        answers: list[Answer] = []
        errors: list[BaseException] = []

        def ask() -> None:
            try:
                _STORE.set(self._store)
                if self._catalog is None:
                    self._catalog = _open(self._settings)
                answers.append(call(self._catalog))
            except BaseException as e:
                errors.append(e)

        thread = threading.Thread(target=copy_context().run, args=(ask,), daemon=True)
        thread.start()
        thread.join(CATALOG_ANSWER_SECONDS)
        if errors:
            if isinstance(errors[0], LakeupsertError) or not isinstance(errors[0], Exception):
                raise errors[0]
            raise self._explain(errors[0]) from None  # its text may have a credential, which is removed here
        if not answers:
            raise self._unreachable(f"gave no answer in {CATALOG_ANSWER_SECONDS:g} seconds")
        return answers[0]

    def _explain(self, error: Exception) -> LakeupsertError:
        text = f"{type(error).__name__}: {' '.join(str(error).split())[:500]}"
        for secret in sorted(self._secrets(), key=len, reverse=True):
            text = text.replace(secret, "***")
        if isinstance(error, _NOT_INSTALLED):
            return ConfigurationError(
                "extra-missing",
                f"The Iceberg catalog of {self.table!r} needs a package that is not installed: {text}. Readers of Iceberg see "
                "the snapshot before.",
                next="pip install 'pyiceberg[EXTRA]' with the extra of that catalog: sql-sqlite, sql-postgres, glue, hive, …",
            )
        if isinstance(error, _REFUSALS):
            return ConfigurationError(
                "catalog-refused",
                f"The Iceberg catalog refused {self.table!r}: {text}. Readers of Iceberg still see the snapshot before.",
                next="correct `catalog` and `table` in [tables.NAME.iceberg], or the rights of this role",
            )
        return self._unreachable(f"failed: {text}")

    def _unreachable(self, why: str) -> LakeupsertError:
        return StoreUnavailableError(
            "catalog-unreachable",
            f"The Iceberg catalog of {self.table!r} {why}. Readers of Iceberg see the snapshot before, or this one.",
            next="run `lakeupsert publish --to iceberg` when the catalog answers",
        )

    def _secrets(self) -> Iterator[str]:
        """What pyiceberg's own configuration adds to the settings, which have no credential: it may be one."""
        given = Config().get_catalog_config(self._settings.catalog_name) or {}
        for value in map(str, given.values()):
            yield value
            if "://" in value and (password := urlsplit(value).password):
                yield password


def _open(settings: IcebergSettings) -> Catalog:
    properties = {**settings.properties, "py-io-impl": f"{__name__}.TableIO"}
    try:
        catalog = load_catalog(settings.catalog_name, **properties)
    except (*_NOT_INSTALLED, *_REFUSALS):
        raise
    except Exception:  # of SQL, if another process has just created the catalog's own tables
        catalog = load_catalog(settings.catalog_name, **properties)
    if settings.format_version == 3 and not isinstance(catalog, RestCatalog):
        raise ConfigurationError(
            "bad-setting",
            f"`format_version = 3` needs a REST catalog, and {settings.catalog_name!r} is not one: pyiceberg can't write "
            "metadata of version 3. Readers of Iceberg still see the snapshot before.",
            next="set format_version = 2 in [tables.NAME.iceberg], or name a REST catalog",
        )
    return catalog


class TableIO(FileIO):
    """Reads and writes metadata files through the table's store."""

    def __init__(self, properties: Properties = EMPTY_DICT) -> None:
        super().__init__(properties)
        self._store = _STORE.get()
        self._root = root_address(self._store)

    def new_input(self, location: str) -> "_Object":
        return _Object(location, self._store, self._name(location))

    def new_output(self, location: str) -> "_Object":
        return _Object(location, self._store, self._name(location))

    def delete(self, location: str | InputFile | OutputFile) -> None:
        self._store.delete([self._name(location if isinstance(location, str) else location.location)])

    def _name(self, location: str) -> str:
        name = _name_in(self._root, location)
        if name is None:
            raise table_taken(location)
        return name


def _name_in(root: str, location: str) -> str | None:
    """The name of an object of the table; None if it is not below its root."""
    # Other programs spell the address in their own way, as file:/ and s3a://.
    address = re.sub(r"^s3[an]:", "s3:", re.sub(r"^file:/+", "file:///", location))
    return address.removeprefix(f"{root}/") if address.startswith(f"{root}/") else None


def _damaged(address: str, why: str) -> DamagedTableError:
    return damaged(address, "the metadata of the Iceberg table", why[:500], next=RESET)


def table_taken(where: str) -> ConfigurationError:
    return ConfigurationError(
        "iceberg-table-taken",
        f"The Iceberg catalog has another table of this name: {where}. It was not changed.",
        next="choose another `table` in [tables.NAME.iceberg]; if that is this table at its old place, drop it from the catalog",
    )


class _Object(InputFile, OutputFile):
    """An object of the store, as pyiceberg's two kinds of files."""

    def __init__(self, location: str, store: ObjectStore, name: str) -> None:
        super().__init__(location)
        self._store = store
        self._name = name

    def __len__(self) -> int:
        found = self._store.head(self._name)
        if found is None:
            raise FileNotFoundError(self.location)
        return found.size

    def exists(self) -> bool:
        return self._store.head(self._name) is not None

    def open(self, seekable: bool = True) -> io.BytesIO:
        try:
            data = self._store.get(self._name)
        except NotFoundError as e:
            raise _damaged(self.location, "it is missing") from e
        _OPENED.set(self.location)
        return io.BytesIO(data)

    def to_input_file(self) -> "_Object":
        return self

    def create(self, overwrite: bool = False) -> "_Upload":
        return _Upload(self._store, self._name)


class _Upload(io.BytesIO):
    """An object that appears in the store when it is closed without an error."""

    def __init__(self, store: ObjectStore, name: str) -> None:
        super().__init__()
        self._store = store
        self._name = name

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if error is None:
            with self._store.write(self._name) as sink:
                sink.write(self.getvalue())
        super().__exit__(kind, error, trace)
