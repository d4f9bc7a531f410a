"""`${VAR}` in texts of a configuration: the value of an environment variable. No message of this module has a value in it."""

import re
from collections.abc import Iterator, Mapping

from lakeupsert.errors import ConfigurationError

_REFERENCE = re.compile(r"\$(\$\{)|\$\{([^}]*)\}")
"""An escaped `$${`, or a variable."""
_NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")
_SECRET_NAME = re.compile(
    r"(?i)secret|token|passw|credential|connection_?string|(access|account|api|private|shared|storage)_?key"
    r"|(^|_)(pass|sas)(_|$)|[a-z0-9]_pwd$"  # PWD alone is the folder of a shell
)


def expand(value: object, where: str, environment: Mapping[str, str], *, secrets: bool = False) -> object:
    """The value with every `${VAR}` in its texts replaced; `$${` becomes `${`. Keys stay as they are.

    Args:
        where: of the value, for messages: the file and the place in it.
        secrets: whether variables may be credentials, because nobody prints the value.
    Raises:
        ConfigurationError: a variable is not set or empty, or is a credential by its name.
    """
    if isinstance(value, dict):
        return {k: expand(v, f"{where}.{k}", environment, secrets=secrets) for k, v in value.items()}
    if isinstance(value, list):
        return [expand(item, where, environment, secrets=secrets) for item in value]
    if not isinstance(value, str):
        return value

    def replace(match: re.Match[str]) -> str:
        return "${" if match[1] else _value_of(match[2], where, environment, secrets=secrets)

    return _REFERENCE.sub(replace, value)


def references(value: object) -> list[str]:
    """The names of the variables in the texts of a value, each once, in their order."""
    return list(dict.fromkeys(_references(value)))


def without_references(text: str) -> str:
    """The text without its variables."""
    return _REFERENCE.sub("", text)


def _references(value: object) -> Iterator[str]:
    if isinstance(value, str):
        yield from (match[2] for match in _REFERENCE.finditer(value) if not match[1])
    elif isinstance(value, dict | list):
        for item in value.values() if isinstance(value, dict) else value:
            yield from _references(item)


def _value_of(name: str, where: str, environment: Mapping[str, str], *, secrets: bool) -> str:
    if not _NAME.fullmatch(name):
        raise ConfigurationError(
            "unset-variable",
            f"{where}: `${{{name}}}` does not name an environment variable.",
            next="write the name of a variable, for example ${LAKE}; a literal ${ is written $${",
        )
    if not secrets and _SECRET_NAME.search(name):
        raise ConfigurationError(
            "credential-in-configuration",
            f"{where}: ${{{name}}} is a credential by its name, which only `on_success` and `on_failure` may use: other "
            "settings are printed.",
            next="remove it; credentials come from the default chains of boto3 and DefaultAzureCredential",
        )
    if value := environment.get(name):
        return value
    state = "is empty" if name in environment else "is not set"
    raise ConfigurationError(
        "unset-variable",
        f"{where}: environment variable {name} {state}.",
        next=f"set {name} and run the same command again; for a literal ${{{name}}}, write $${{{name}}}",
    )
