"""Give the functions of a module that is imported the code of a mutant."""

import importlib
from collections.abc import Iterator
from types import CodeType, FunctionType

from tests.mutants.changes import Mutant

IS_FUNCTION = 0x02
"""CO_NEWLOCALS. Classes lack it."""


def put_live(mutant: Mutant) -> None:
    module = importlib.import_module(".".join(mutant.file.with_suffix("").parts))
    old, new = (dict(_functions(compile(code, str(module.__file__), "exec"))) for code in (mutant.source, mutant.code))
    for name in new:
        if new[name] != old[name]:
            function = _find(module, name)
            function.__code__ = new[name]


def _functions(code: CodeType) -> Iterator[tuple[str, CodeType]]:
    """The functions of a module and of its classes, by their names in full."""
    for inner in code.co_consts:
        if isinstance(inner, CodeType) and "<" not in inner.co_name:
            if inner.co_flags & IS_FUNCTION:
                yield inner.co_qualname, inner
            else:
                yield from _functions(inner)


def _find(module: object, name: str) -> FunctionType:
    found = module
    for part in name.split("."):
        found = vars(found)[part]
        for inside in (
            "fget",
            "func",
            "__func__",
            "__wrapped__",
        ):  # of properties, cached ones, class methods, decorators
            found = getattr(found, inside, found)
    assert isinstance(found, FunctionType), name
    return found
