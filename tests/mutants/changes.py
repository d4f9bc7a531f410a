"""The mutants of a module: by operators of cosmic-ray, and by two more."""

import ast
import hashlib
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

import parso.python.tree
from cosmic_ray.ast import ast_nodes, get_ast
from cosmic_ray.mutating import mutate_code
from cosmic_ray.operators.operator import Operator
from cosmic_ray.operators.provider import OperatorProvider

Node = parso.tree.BaseNode
Place = tuple[int, int]
"""A line, from 1 on, and a column, from 0 on."""
Span = tuple[Place, Place]

COMPARED = {"Eq": ["NotEq"], "NotEq": ["Eq"], "Is": ["IsNot"], "IsNot": ["Is"]}
COMPARED |= {"Lt": ["LtE", "GtE"], "LtE": ["Lt", "Gt"], "Gt": ["GtE", "LtE"], "GtE": ["Gt", "Lt"]}
BINARY = {"Add": "Sub", "Sub": "Add", "Mul": "Div", "Div": "Mul", "FloorDiv": "Mul", "Mod": "Mul", "Pow": "Mul"}
BINARY |= {"RShift": "LShift", "LShift": "RShift", "BitOr": "BitAnd", "BitAnd": "BitOr", "BitXor": "BitAnd"}
"""What becomes of an operator. To try all others would fill a sample with easy mutants."""
NAMES = [
    *(f"ReplaceComparisonOperator_{old}_{new}" for old, news in COMPARED.items() for new in news),
    *(f"ReplaceBinaryOperator_{old}_{new}" for old, new in BINARY.items()),
    *("ReplaceUnaryOperator_Delete_Not", "ReplaceUnaryOperator_Delete_Invert", "ReplaceUnaryOperator_USub_UAdd"),
    *("ReplaceTrueWithFalse", "ReplaceFalseWithTrue", "ReplaceAndWithOr", "ReplaceOrWithAnd"),
    *("ReplaceBreakWithContinue", "ReplaceContinueWithBreak", "ZeroIterationForLoop"),
    *("NumberReplacer", "ExceptionReplacer"),
]


class DropStatement(Operator):
    """Leave out a call, or an assignment to a part of an object."""

    def mutation_positions(self, node: Node) -> Iterator[Span]:
        if node.type != "simple_stmt":
            return
        first = node.children[0]
        sign = first.children[1] if first.type == "expr_stmt" else None
        if first.type == "atom_expr" or (
            sign is not None
            and sign.type == "operator"
            and (sign.value != "=" or first.children[0].type == "atom_expr")
        ):
            yield node.start_pos, node.end_pos

    def mutate(self, node: Node, index: int) -> Node:
        return _with_child(node, 0, "pass")

    @classmethod
    def examples(cls) -> tuple[()]:
        return ()


class Negate(DropStatement):
    """Negate a condition that no other operator negates; swap `in` and `not in`."""

    CONDITIONS = {"if_stmt": 1, "while_stmt": 1, "comp_if": 1, "test": 2}  # noqa: RUF012

    def mutation_positions(self, node: Node) -> Iterator[Span]:
        at = self.CONDITIONS.get(node.type)
        if at is not None and node.children[at].type not in ("comparison", "not_test"):
            yield node.children[at].start_pos, node.end_pos
        elif node.type == "comparison" and node.children[1].get_code().split() in (["in"], ["not", "in"]):
            yield node.start_pos, node.end_pos

    def mutate(self, node: Node, index: int) -> Node:
        if node.type == "comparison":
            return _with_child(node, 1, "not in" if node.children[1].get_code().strip() == "in" else "in")
        at = self.CONDITIONS[node.type]
        return _with_child(node, at, f"not ({node.children[at].get_code().strip()})")


def _with_child(node: Node, at: int, code: str) -> Node:
    prefix = node.children[at].get_first_leaf().prefix
    node.children[at] = parso.python.tree.Keyword(code, node.children[at].start_pos, prefix)
    return node


@dataclass(frozen=True)
class Mutant:
    """A module with one change.

    Attributes:
        lot: the change, without its place in the file.
        occurrence: the number of the place among all of the operator, from 0 on.
    """

    file: Path
    lot: str
    line: int
    source: str
    operator: Operator
    occurrence: int

    @cached_property
    def code(self) -> str | None:
        """None if there is no change, or one that Python can't compile."""
        try:
            code = mutate_code(self.source, self.operator, self.occurrence)
            compile(code, str(self.file), "exec", dont_inherit=True)
        except (AttributeError, SyntaxError):  # the first one is cosmic-ray's, of `*names` in an `except`
            return None
        return None if code == self.source else code

    @cached_property
    def hash(self) -> str:
        return hashlib.sha256(f"{self.file}\n{self.code}".encode()).hexdigest()[:16]

    @cached_property
    def change(self) -> tuple[str, str]:
        """The first line that differs, before and after."""
        pairs = zip(self.source.splitlines(), (self.code or "").splitlines(), strict=False)
        old, new = next((old, new) for old, new in pairs if old != new)
        return " ".join(old.split()), " ".join(new.split())

    def __str__(self) -> str:
        return f"{self.file}:{self.line}: {'  ->  '.join(self.change)}"


def mutants(file: Path, source: str) -> Iterator[Mutant]:
    """All mutants of the functions of a module, except those where nothing is to judge. Some have no code."""
    tree, lines = get_ast(source), source.splitlines()
    bodies, silent = places(source)
    seen = Counter[str]()
    operators = [OperatorProvider()[name]() for name in NAMES]
    for operator in (*operators, DropStatement(), Negate()):
        starts = [start for node in ast_nodes(tree) for start, _ in operator.mutation_positions(node)]
        for occurrence, start in enumerate(starts):
            change = f"{type(operator).__name__} {lines[start[0] - 1].strip()}"
            seen[change] += 1
            if _within(start, bodies) and not _within(start, silent):
                yield Mutant(file, f"{file} {change} {seen[change]}", start[0], source, operator, occurrence)


def places(source: str) -> tuple[list[Span], list[Span]]:
    """The bodies of functions, and where no test can judge a change there, or should: texts for people, arguments of errors,
    progress, how long a pause is, annotations, and assertions, which are for mypy.

    What is outside of functions are values of constants and fields: `unit/test_stored_fields.py` and `golden/` pin those that
    are stored."""
    lines = source.splitlines()

    def span(first: ast.AST, last: ast.AST) -> Span:
        begin, end = (first.lineno, first.col_offset), (last.end_lineno, last.end_col_offset)
        return tuple((line, len(lines[line - 1].encode()[:column].decode())) for line, column in (begin, end))

    bodies, silent = [], []
    for node in ast.walk(ast.parse(source)):
        match node:
            case ast.FunctionDef(body=[first, *_]):
                bodies.append(span(first, node))
            case ast.Raise() | ast.Assert() | ast.Expr(value=ast.Call(func=ast.Name(id="progress"))):
                silent.append(span(node, node))
            case ast.JoinedStr(values=parts) if any(
                isinstance(p, ast.Constant) and " " in p.value.strip() for p in parts
            ):
                silent.append(span(node, node))
            case ast.arg(annotation=ast.expr() as of) | ast.AnnAssign(annotation=of):
                silent.append(span(of, of))
            case ast.Call(func=ast.Attribute(attr="sleep"), args=[first, *_]):
                silent.append(span(first, first))
    return bodies, silent


def _within(place: Place, spans: list[Span]) -> bool:
    return any(begin <= place < end for begin, end in spans)
