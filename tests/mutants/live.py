"""Give the functions of a module that is imported the code of a mutant, so that a mutant needs no new process."""

import functools
import importlib
from collections.abc import Iterator
from types import CodeType, FunctionType, ModuleType

from tests.mutants.changes import Mutant


def put_live(mutant: Mutant) -> bool:
    """Whether it could be done: the change is in a function, which is where its name says."""
    module = importlib.import_module(".".join(mutant.file.with_suffix("").parts))
    before, after = (compile(code, str(module.__file__), "exec", dont_inherit=True) for code in (mutant.source, mutant.code))
    old, new = dict(_functions(before)), dict(_functions(after))
    if old.keys() != new.keys() or _outside(before) != _outside(after):
        return False
    for name in [name for name in new if new[name] != old[name]]:
        function = _live(module, name)
        if function is None:
            return False
        function.__code__ = new[name]
    return True


def _functions(code: CodeType) -> Iterator[tuple[str, CodeType]]:
    """The functions of a module and of its classes, by their names in full."""
    for inner in code.co_consts:
        if isinstance(inner, CodeType):
            if inner.co_flags & 0x02:  # CO_NEWLOCALS: a function; a class has none
                yield inner.co_qualname, inner
            else:
                yield from _functions(inner)


def _outside(code: CodeType) -> list[object]:
    """What the module and its classes do when they are imported."""
    found: list[object] = [code.co_code, code.co_names]
    for inner in code.co_consts:
        if not isinstance(inner, CodeType):
            found.append(repr(inner))
        elif not inner.co_flags & 0x02:
            found += _outside(inner)
    return found


def _live(module: ModuleType, name: str) -> FunctionType | None:
    found: object = module
    for part in name.split("."):
        found = vars(found).get(part)
        if isinstance(found, property):
            found = found.fget
        elif isinstance(found, functools.cached_property):
            found = found.func
        found = getattr(found, "__func__", found)
        found = getattr(found, "__wrapped__", found)
    return found if isinstance(found, FunctionType) else None
