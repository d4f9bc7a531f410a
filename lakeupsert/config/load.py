"""The configuration: a file is found, read and parsed, and overridden by a profile and environment variables."""

import os
import re
import tomllib
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Literal, TypeVar
from urllib.parse import urlsplit

import msgspec

from lakeupsert.config.addresses import refuse_overlaps
from lakeupsert.config.check import has_credential
from lakeupsert.config.messages import did_you_mean, refuse_unknown_keys, toml_key
from lakeupsert.config.sources import SourceSettings, parse_source, refuse_credential
from lakeupsert.config.table import parse_table, table_of, tables_of
from lakeupsert.config.types import HOOKS, Hook, Hooks, TableSettings
from lakeupsert.decoding import convert
from lakeupsert.errors import ConfigurationError
from lakeupsert.variables import expand, references, without_references

FILE_NAME = "lakeupsert.toml"
ENVIRONMENT_PREFIX = "LAKEUPSERT__TABLES__"
PROFILE_VARIABLE = "LAKEUPSERT_PROFILE"
Settings = TypeVar("Settings")


class Config(msgspec.Struct, frozen=True, kw_only=True):
    """A configuration file, with its chosen profile and the environment's settings, and with absolute local paths."""

    path: str
    profile: str | None
    hooks: Hooks
    tables: dict[str, TableSettings]
    origins: dict[str, dict[str, str]]
    """By table and setting: ``file``, a profile, or environment variables. A setting that is not listed has its default."""
    sources: dict[str, SourceSettings]

    def refuse_unset_hooks(self, environment: Mapping[str, str]) -> None:
        """Raise ConfigurationError (``unset-variable``) if a variable of a hook is not set. Only a run calls hooks."""
        for name in HOOKS:
            hook: Hook = getattr(self.hooks, name) or ""
            expand(hook if isinstance(hook, str) else list(hook), f"{self.path}: {name}", environment, secrets=True)

    def table(self, name: str | None) -> tuple[str, TableSettings]:
        """A table by name; None: the only table."""
        if name is None:
            if len(self.tables) == 1:
                return next(iter(self.tables.items()))
            raise ConfigurationError(
                "which-table",
                f"{self.path} has {len(self.tables)} tables: {', '.join(self.tables)}.",
                next="choose one with --table NAME",
            )
        if name not in self.tables:
            raise ConfigurationError(
                "unknown-table",
                f"{self.path} has no table {name!r}.{did_you_mean(name, self.tables)} It has {', '.join(self.tables)}.",
                next="give one of these names with --table",
            )
        return name, self.tables[name]

    def sources_of(self, table: str) -> dict[str, SourceSettings]:
        """The sources that land files for this table."""
        return {name: source for name, source in self.sources.items() if source.table == table}


def load(path: str | None, environment: Mapping[str, str] = os.environ, *, profile: str | None = None) -> Config:
    """Read ``path``, which may be a URL like `s3://lake/lakeupsert.toml`. By default, search `lakeupsert.toml` from the working
    directory upwards. ``profile``: by default that of the environment variable LAKEUPSERT_PROFILE, if it is set."""
    if path and "://" in path:
        where, content = path, _remote(path)
    else:
        file = Path(path).expanduser().absolute() if path else _search()
        where, content = str(file), _local(file)
    return parse(where, content, environment, profile=profile)


def names_in(path: str | None) -> dict[str, list[str]]:
    """The names of the ``tables`` and ``profiles`` in a local configuration file, which is not checked further."""
    document = tomllib.loads(_local(Path(path).expanduser() if path else _search()).decode())
    return {kind: list(document.get(kind, {})) for kind in ("tables", "profiles")}


def parse(
    path: str, content: bytes, environment: Mapping[str, str] = os.environ, *, profile: str | None = None
) -> Config:
    """Parse the ``content`` of a configuration file; ``path`` is its path or URL. ``profile`` as in `load`."""
    try:
        document = tomllib.loads(content.decode())
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as e:
        raise ConfigurationError(
            "unreadable-configuration", f"{path} is not TOML: {e}.", next="correct that line"
        ) from e
    refuse_unknown_keys(path, "the file", document, ("tables", "sources", "profiles", *HOOKS))
    listed = tables_of(path, document, "tables")
    chosen = _choose_profile(path, document, profile or environment.get(PROFILE_VARIABLE) or None, listed)
    tables: dict[str, TableSettings] = {}
    origins: dict[str, dict[str, str]] = {}
    for name, written in listed.items():
        written = _merge(written, chosen.settings_of(name))
        try:
            tables[name], merged, variables = _Place(path, "tables", name).parse(written, environment, parse_table)
        except ConfigurationError as e:
            raise chosen.named_in(e, path) from e
        origins[name] = {
            setting: ", ".join(sorted(variables.get(setting, []))) or chosen.origin(name, setting, written)
            for setting in merged
        }
    if not tables:
        raise ConfigurationError(
            "no-table", f"{path} has no table.", next="add [tables.NAME] with landing, processed, key and partition_by"
        )
    refuse_overlaps(path, tables)
    hooks = _hooks(path, {**document, **chosen.hooks}, environment)
    sources: dict[str, SourceSettings] = {}
    for name, given in tables_of(path, document, "sources").items():
        refuse_credential(path, name, given)  # also one in a variable
        parse_given = partial(parse_source, tables=tables)
        sources[name], _, _ = _Place(path, "sources", name).parse(given, environment, parse_given)
    return Config(path=path, profile=chosen.name, hooks=hooks, tables=tables, origins=origins, sources=sources)


def _hooks(path: str, content: Mapping[str, object], environment: Mapping[str, str]) -> Hooks:
    """The hooks as they are written. No message quotes a value, which may have a secret in it."""
    written = {name: content[name] for name in HOOKS if name in content}
    for name, value in written.items():
        _refuse_secret(path, name, value)
        is_command = isinstance(value, list) and value and all(isinstance(part, str) and part for part in value)
        is_address = isinstance(value, str)
        if is_address and all(map(environment.get, references(value))):  # else see `Config.refuse_unset_hooks`
            is_address = _is_web_address(str(expand(value, f"{path}: {name}", environment, secrets=True)))
        if not is_address and not is_command:
            raise ConfigurationError(
                "bad-setting",
                f"{path}: {name} is not an https or http address, and not a command as a list of texts.",
                next=f'write for example {name} = ["/usr/local/bin/page", "lake"], or {name} = "${{HOOK_URL}}"',
            )
    return convert(written, Hooks)


def _refuse_secret(path: str, name: str, written: object) -> None:
    """Refuse addresses, also among the arguments of a command, with a credential in them that is not a variable."""
    texts = [text for text in (written if isinstance(written, list) else [written]) if isinstance(text, str)]
    if any(map(has_credential, re.findall(r"\w+://\S+", without_references(" ".join(texts))))):
        raise ConfigurationError(
            "credential-in-configuration",
            f"{path}: {name} contains a credential, which the file may not.",
            next=f"put it into an environment variable and write ${{VARIABLE}} in {name}",
        )


def _is_web_address(text: str) -> bool:
    try:
        parts = urlsplit(text)
        return parts.scheme in ("https", "http") and bool(parts.hostname) and parts.port != 0
    except ValueError:  # for example `http://[::1/x`, and a port that is not a number
        return False


def _local(file: Path) -> bytes:
    try:
        return file.read_bytes()
    except FileNotFoundError as e:
        raise ConfigurationError(
            "no-configuration",
            f"There is no {file}.",
            next="name a file with --config, or in Python with `Table.open`, which also takes the folder of a table",
        ) from e
    except OSError as e:
        raise ConfigurationError(
            "unreadable-configuration",
            f"{file} can't be read: {e.strerror}.",
            next="pass a readable file with --config",
        ) from e


def _remote(address: str) -> bytes:
    from lakeupsert.storage import NotFoundError, open_store  # imports Arrow, which a local file does not need

    folder, _, name = address.rpartition("/")
    if not name or folder.endswith("/"):
        raise ConfigurationError(
            "no-configuration",
            f"{address} does not name a file.",
            next=f"write for example {address.rstrip('/')}/{FILE_NAME}",
        )
    try:
        return open_store(f"{folder}/").get(name)
    except NotFoundError as e:
        raise ConfigurationError(
            "no-configuration", f"There is no {address}.", next="create it, or correct the URL"
        ) from e


def _search() -> Path:
    here = Path.cwd()
    for folder in (here, *here.parents):
        if (folder / FILE_NAME).is_file():
            return folder / FILE_NAME
    raise ConfigurationError(
        "no-configuration",
        f"There is no {FILE_NAME} in {here} or above it.",
        next=f"write one (`lakeupsert init` with the folder of your files, or `lakeupsert config --example > {FILE_NAME}`), "
        "or pass one with --config",
    )


@dataclass(frozen=True)
class _Profile:
    """What ``[profiles.NAME]`` says: settings of all tables, of single tables, and hooks. Without a name, nothing."""

    name: str | None
    settings: Mapping[str, object]
    tables: Mapping[str, Mapping[str, object]]
    hooks: Mapping[str, object]

    def named_in(self, error: ConfigurationError, path: str) -> ConfigurationError:
        """The error of a table's settings, which may come from this profile."""
        if self.name is None:
            return error
        message = error.message.replace(path, f"{path} with profile {self.name}", 1)
        return ConfigurationError(error.code, message, next=error.next)

    def settings_of(self, table: str) -> dict[str, object]:
        return _merge(self.settings, self.tables.get(table, {}))

    def origin(self, table: str, setting: str, written: Mapping[str, object]) -> str:
        """Where a setting comes from, and the variables that are in it."""
        source = f"profile {self.name}" if setting in self.settings_of(table) else "file"
        names = "".join(f" with ${{{name}}}" for name in references(written[setting]))
        return f"{source}{names}"


def _choose_profile(
    path: str, document: Mapping[str, object], name: str | None, tables: Mapping[str, object]
) -> _Profile:
    """The profile of this name. Keys of all profiles are checked, so that a slip shows before its profile is needed."""
    profiles = tables_of(path, document, "profiles")
    settings = TableSettings.__struct_fields__
    for profile, content in profiles.items():
        refuse_unknown_keys(path, f"[profiles.{profile}]", content, (*settings, "tables", *HOOKS))
        for table in tables_of(f"{path}: [profiles.{profile}]", content, "tables"):
            if table not in tables:
                raise ConfigurationError(
                    "unknown-table",
                    f"{path}: [profiles.{profile}.tables.{table}] is for a table that the file does not have."
                    f"{did_you_mean(table, tables)}",
                    next=f"correct the name, or add [tables.{toml_key(table)}]",
                )
    if name is None:
        return _Profile(None, {}, {}, {})
    if name not in profiles:
        raise ConfigurationError(
            "unknown-profile",
            f"{path} has no [profiles.{toml_key(name)}].{did_you_mean(name, profiles)} It has "
            f"{', '.join(profiles) or 'no profile'}.",
            next=f"give one of these with --profile or {PROFILE_VARIABLE}, or none",
        )
    content = profiles[name]
    own = {key: value for key, value in content.items() if key in settings}
    hooks = {key: value for key, value in content.items() if key in HOOKS}
    return _Profile(name, own, tables_of(path, content, "tables"), hooks)


def _merge(base: Mapping[str, object], over: Mapping[str, object]) -> dict[str, object]:
    """``base`` with the settings of ``over``. Tables are merged; everything else is replaced."""
    merged = dict(base)
    for key, value in over.items():
        before = base.get(key)
        merged[key] = _merge(before, value) if isinstance(before, dict) and isinstance(value, dict) else value
    return merged


@dataclass(frozen=True)
class _Place:
    """``[tables.NAME]`` or ``[sources.NAME]`` of the file ``path``, which environment variables override."""

    path: str
    kind: Literal["tables", "sources"]
    name: str

    @property
    def prefix(self) -> str:
        """Of these variables, in upper case."""
        return f"LAKEUPSERT__{self.kind}__{re.sub(r'[^A-Za-z0-9]', '_', self.name)}__".upper()

    def parse(
        self, written: Mapping[str, object], environment: Mapping[str, str], convert: Callable[..., Settings]
    ) -> tuple[Settings, dict[str, object], dict[str, list[str]]]:
        """The settings, as ``convert`` makes them, and as they are merged, and the variables that set each."""
        where = f"{self.path}: [{self.kind}.{self.name}]"
        raw = {key: expand(value, f"{where}: {key}", environment) for key, value in written.items()}

        def differs(error: ConfigurationError, variable: str) -> bool:
            try:
                others = {v: text for v, text in environment.items() if v != variable}
                convert(self.path, self.name, self._overlay(raw, others)[0])
            except ConfigurationError as other:
                return other.message != error.message
            return True

        try:
            merged, variables = self._overlay(raw, environment)
            return convert(self.path, self.name, merged), merged, variables
        except ConfigurationError as e:
            named = ", ".join(sorted(v for v in environment if self._sets(v) and differs(e, v)))
            if not named:  # the file is at fault
                raise
            text = f"Environment variable {named}{e.message.removeprefix(self.path)}"
            raise ConfigurationError(e.code, text, next=f"correct {named} or unset it: it overrides {self.path}") from e

    def _sets(self, variable: str) -> bool:
        """Whether a variable overrides a setting. The password of a source is none: no setting may have it."""
        name = variable.upper()
        return name.startswith(self.prefix) and (self.kind, name) != ("sources", f"{self.prefix}PASSWORD")

    def _overlay(
        self, raw: Mapping[str, object], environment: Mapping[str, str]
    ) -> tuple[dict[str, object], dict[str, list[str]]]:
        """The settings after ``LAKEUPSERT__<KIND>__<NAME>__<SETTING>[__<PART>]``, and the variables that set each.

        Values are TOML, or plain text.
        """
        merged = dict(raw)
        variables: dict[str, list[str]] = {}
        header = f"{self.kind}.{self.name}"
        for variable, text in environment.items():
            if self._sets(variable):
                setting, _, part = variable[len(self.prefix) :].lower().partition("__")
                try:
                    value = tomllib.loads(f"value = {text}")["value"]
                except tomllib.TOMLDecodeError:
                    value = text
                if part:
                    before = table_of(f"{self.path}: [{header}]", merged, setting, f"[{header}.{setting}]")
                    value = {**before, part: value}
                merged[setting] = value
                variables.setdefault(setting, []).append(variable)
        return merged, variables
