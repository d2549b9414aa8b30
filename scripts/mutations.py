"""The small mistakes that `mutants.py` plants: where in a file there is room for one, and what it looks like.

Messages, logs, assertions, annotations and strings are left alone. So is what is tuning: floats, numbers from
100 on, and sizes such as `32 << 20`.
"""

from __future__ import annotations

import ast
import copy
from collections.abc import Iterator
from typing import NamedTuple

COMPARISONS: dict[type[ast.cmpop], tuple[type[ast.cmpop], ...]] = {
    ast.Lt: (ast.LtE, ast.GtE), ast.LtE: (ast.Lt, ast.Gt), ast.Gt: (ast.GtE, ast.LtE),
    ast.GtE: (ast.Gt, ast.Lt), ast.Eq: (ast.NotEq,), ast.NotEq: (ast.Eq,), ast.Is: (ast.IsNot,),
    ast.IsNot: (ast.Is,), ast.In: (ast.NotIn,), ast.NotIn: (ast.In,),
}  # fmt: skip
OPERATORS: dict[type[ast.operator], type[ast.operator]] = {
    ast.Add: ast.Sub, ast.Sub: ast.Add, ast.Mult: ast.FloorDiv, ast.FloorDiv: ast.Mult, ast.Mod: ast.Mult,
    ast.LShift: ast.RShift, ast.RShift: ast.LShift, ast.BitAnd: ast.BitOr, ast.BitOr: ast.BitAnd,
    ast.BitXor: ast.BitAnd,
}  # fmt: skip
TUNING = 100
"""The least number that is a size or a limit of which nobody could say why it is not one more."""
NAMES = {"min": "max", "max": "min", "any": "all", "all": "any"}
UNTOUCHED = ("annotation", "returns", "decorator_list")


class Mutant(NamedTuple):
    """One small change of one file.

    Attributes:
        file: below the package.
        name: of the function or class that it lies in, with those around it.
        line: its first, of `lines` lines.
        was, becomes: the changed lines, without their indentation.
        text: what is written instead of the lines.
    """

    file: str
    name: str
    line: int
    lines: int
    was: str
    becomes: str
    text: str

    @property
    def package(self) -> str:
        return self.file.split("/")[0]

    @property
    def key(self) -> tuple[str, str, str, str]:
        return self.file, self.name, self.was, self.becomes

    def applied(self, source: str) -> str:
        lines = source.splitlines(keepends=True)
        return "".join([*lines[: self.line - 1], self.text, *lines[self.line - 1 + self.lines :]])


def with_fields(node: ast.AST, **fields: object) -> ast.AST:
    """A copy of `node` with other fields."""
    other = copy.copy(node)
    for name, value in fields.items():
        setattr(other, name, value)
    return other


def expressions(node: ast.AST) -> Iterator[ast.AST]:
    """What an expression may be replaced with."""
    match node:
        case ast.Compare(ops=ops):
            for index, op in enumerate(ops):
                for other in COMPARISONS[type(op)]:
                    yield with_fields(node, ops=[*ops[:index], other(), *ops[index + 1 :]])
        case ast.BoolOp(op=op, values=values):
            yield with_fields(node, op=ast.Or() if isinstance(op, ast.And) else ast.And())
            for index in range(len(values)):
                rest = values[:index] + values[index + 1 :]
                yield rest[0] if len(rest) == 1 else with_fields(node, values=rest)
        case ast.UnaryOp(op=ast.Not() | ast.USub(), operand=operand):
            yield operand
        case ast.BinOp(op=op) if type(op) in OPERATORS:
            yield with_fields(node, op=OPERATORS[type(op)]())
        case ast.Constant(value=bool(value)):
            yield ast.Constant(not value)
        case ast.Constant(value=int(value)) if value < TUNING:
            yield from (ast.Constant(other) for other in (value + 1, value - 1) if other >= 0)
        case ast.Name(id=name) if name in NAMES:
            yield ast.Name(NAMES[name])


def statements(node: ast.AST, returns: str, name: str) -> Iterator[ast.AST]:
    """What a statement may be replaced with; `returns` is the annotation of the function `name` around it."""
    removed = ast.Pass()
    match node:
        case (
            ast.Expr(value=ast.Call() | ast.Await())
            | ast.Delete()
            | ast.Raise()
            | ast.Break()
            | ast.Continue()
        ):
            yield removed
        case ast.Return(value=None):
            yield removed
        case ast.Return(value=ast.Constant()):
            pass  # constants are changed as such, and None has no opposite
        case ast.Return(value=ast.expr() as value):
            yield ast.Return(ast.UnaryOp(ast.Not(), value) if returns == "bool" else ast.Constant(None))
        case ast.Assign(targets=[ast.Attribute() | ast.Subscript()]) if name != "__init__":
            yield removed
        case ast.AugAssign(op=op):
            yield removed
            if type(op) in OPERATORS:
                yield with_fields(node, op=OPERATORS[type(op)]())


def conditions(node: ast.AST) -> Iterator[ast.expr]:
    """Expressions below `node` that decide, and may be made constant."""
    if isinstance(node, ast.If | ast.While | ast.IfExp):
        yield node.test
    elif isinstance(node, ast.comprehension):
        yield from node.ifs


def is_left_out(node: ast.AST) -> bool:
    """Whether nothing at or below `node` is mutated."""
    match node:
        case ast.Assert() | ast.JoinedStr() | ast.Import() | ast.ImportFrom():
            return True
        case ast.If(test=ast.Name(id="TYPE_CHECKING")) | ast.FunctionDef(name="__repr__" | "__str__"):
            return True
        case ast.Expr(
            value=ast.Call(func=ast.Attribute(value=ast.Name(id="_log" | "log" | "logger" | "_logger")))
        ):
            return True
        case ast.keyword(arg="strict"):  # of `zip`: an assertion too
            return True
        case ast.BinOp(left=ast.Constant(), op=ast.LShift(), right=ast.Constant()):
            return True
    return False


class Mutations:
    """All mutants of one file, as keys of `found`."""

    def __init__(self, file: str, source: str) -> None:
        self.file = file
        self.lines = source.encode().splitlines(keepends=True)  # the parser counts columns in bytes
        self.found: dict[Mutant, None] = {}
        self._walk(ast.parse(source), (), "")

    def _walk(self, node: ast.AST, names: tuple[str, ...], returns: str) -> None:
        if is_left_out(node):
            return
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            names = (*names, node.name)
            annotation = getattr(node, "returns", None)
            returns = "" if annotation is None else ast.unparse(annotation)
        for other in (*expressions(node), *statements(node, returns, names[-1] if names else "")):
            self._add(node, other, names)
        for test in conditions(node):
            if not isinstance(test, ast.Constant):
                self._add(test, ast.Constant(True), names)
                self._add(test, ast.Constant(False), names)
        for field, value in ast.iter_fields(node):
            if field not in UNTOUCHED:
                for child in value if isinstance(value, list) else [value]:
                    if isinstance(child, ast.AST):
                        self._walk(child, names, returns)

    def _add(self, node: ast.AST, other: ast.AST, names: tuple[str, ...]) -> None:
        assert isinstance(node, ast.expr | ast.stmt)
        assert node.end_lineno is not None
        first, last = node.lineno - 1, node.end_lineno - 1
        text = ast.unparse(ast.fix_missing_locations(other))
        if isinstance(other, ast.expr) and not isinstance(
            other, ast.Constant | ast.Name | ast.Call | ast.Attribute
        ):
            text = f"({text})"
        before = self.lines[first][: node.col_offset]
        after = self.lines[last][node.end_col_offset :]
        changed = (before + text.encode() + after).decode()
        was = b"".join(self.lines[first : last + 1]).decode()
        words, becomes = " ".join(was.split()), " ".join(changed.split())
        self.found[
            Mutant(self.file, ".".join(names), first + 1, last - first + 1, words, becomes, changed)
        ] = None
