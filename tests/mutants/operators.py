# SPDX-License-Identifier: Apache-2.0
"""Small wrong changes of a module's functions and methods, made from its syntax tree.

Left out are a module's own statements, defaults, annotations, and what an f-string has in braces.
"""

from __future__ import annotations

import ast
from collections import Counter
from collections.abc import Iterator
from typing import NamedTuple

LONGEST = 60  # characters of a piece of code in a mutant's name
SWAPPED: dict[type, type] = {
    **{ast.Lt: ast.LtE, ast.LtE: ast.Lt, ast.Gt: ast.GtE, ast.GtE: ast.Gt},
    **{ast.Eq: ast.NotEq, ast.NotEq: ast.Eq, ast.Is: ast.IsNot, ast.IsNot: ast.Is},
    **{ast.In: ast.NotIn, ast.NotIn: ast.In, ast.And: ast.Or, ast.Or: ast.And},
    **{ast.Add: ast.Sub, ast.Sub: ast.Add, ast.Mult: ast.FloorDiv, ast.FloorDiv: ast.Mult},
}
SWAPPED_NAMES = {"min": "max", "max": "min", "any": "all", "all": "any"}
NOT_RUN = ("annotation", "returns", "decorator_list")
SKIPPED = (ast.arguments, ast.JoinedStr)


class Mutant(NamedTuple):
    """One change: `new` takes the place of the bytes from `begin` to `end` of `file`.

    It is in the lines `first` to `last` of the function or method that begins in another line.
    """

    file: str
    function: str
    function_line: int
    first: int
    last: int
    begin: int
    end: int
    new: str
    name: str

    @property
    def place(self) -> tuple[int, str]:
        """Return where its function begins, and what that is called there."""
        return self.function_line, self.function.rpartition(".")[2]

    def apply(self, source: bytes) -> bytes:
        """Return the module with the change."""
        return source[: self.begin] + self.new.encode() + source[self.end :]


class Change(NamedTuple):
    """Text that takes the place of the nodes `begin` to `end`, within a statement."""

    statement: ast.stmt
    begin: ast.stmt | ast.expr
    end: ast.stmt | ast.expr
    new: str


def generate_mutants(file: str, source: bytes) -> list[Mutant]:
    """Return every mutant of a module, each with a name that no other of that file has."""
    starts = [0]
    for line in source.splitlines(keepends=True):
        starts.append(starts[-1] + len(line))
    mutants: list[Mutant] = []
    names: Counter[str] = Counter()
    for function, node in list_functions(ast.parse(source)):
        function_line = min([node.lineno, *[d.lineno for d in node.decorator_list]])
        for statement, first, last, new in changes_below(node, node):
            begin = starts[first.lineno - 1] + first.col_offset
            last_line = last.end_lineno or last.lineno
            end = starts[last_line - 1] + (last.end_col_offset or 0)
            old = source[begin:end].decode()
            name = f"{shorten(old)} -> {shorten(new)}"
            if isinstance(first, ast.expr):
                whole = source[starts[first.lineno - 1] : starts[first.lineno]].decode()
                name = f"{shorten(whole)}: {name}"
            names[name] += 1
            name += f" ({names[name]})" if names[name] > 1 else ""
            lines = (min(statement.lineno, first.lineno), last_line)
            mutants.append(Mutant(file, function, function_line, *lines, begin, end, new, name))
    return mutants


def list_functions(module: ast.Module) -> Iterator[tuple[str, ast.FunctionDef]]:
    """Yield (name, node) of each function of a module and each method of its classes."""
    for node in module.body:
        if isinstance(node, ast.FunctionDef):
            yield node.name, node
        elif isinstance(node, ast.ClassDef):
            for method in node.body:
                if isinstance(method, ast.FunctionDef):
                    yield f"{node.name}.{method.name}", method


def changes_below(node: ast.AST, statement: ast.stmt) -> Iterator[Change]:
    """Yield each change of what is within a node, of which a statement is the innermost."""
    if isinstance(node, ast.ExceptHandler) and not isinstance(node.body[0], ast.Raise):
        yield Change(node.body[0], node.body[0], node.body[-1], "raise")
    for field, value in ast.iter_fields(node):
        if field in NOT_RUN:
            continue
        for child in value if isinstance(value, list) else [value]:
            if isinstance(child, ast.stmt):
                handled = isinstance(node, ast.ExceptHandler) and isinstance(child, ast.Continue)
                new = "" if handled else replace_statement(child)  # it is a `raise` already
                yield from [Change(child, child, child, new)] if new else []
                yield from changes_below(child, child)
            elif isinstance(child, ast.expr):
                is_test = field in ("test", "ifs") and not isinstance(node, ast.While)
                for new in replace_expression(child, is_test):
                    yield Change(statement, child, child, new)
            if isinstance(child, ast.AST) and not isinstance(child, (ast.stmt, *SKIPPED)):
                yield from changes_below(child, statement)


def replace_statement(node: ast.stmt) -> str:
    """Return what may take the place of a statement, or nothing."""
    if isinstance(node, (ast.Raise, ast.AugAssign, ast.Continue, ast.Delete)):
        return "pass"
    if isinstance(node, ast.Expr) and isinstance(node.value, ast.Call):
        return "pass"
    if isinstance(node, ast.Return) and node.value:
        falsy = isinstance(node.value, ast.Constant) and not node.value.value
        return "" if falsy else "return None"
    return ""


def replace_expression(node: ast.expr, is_test: bool) -> list[str]:
    """Return each text that may take the place of an expression."""
    if isinstance(node, ast.Compare):
        operators = [SWAPPED[type(node.ops[0])](), *node.ops[1:]]
        return [in_brackets(ast.Compare(node.left, operators, node.comparators))]
    if isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.Not):
        return [in_brackets(node.operand)]
    if isinstance(node, ast.Constant) and isinstance(node.value, bool):
        return [str(not node.value)]
    if isinstance(node, ast.Constant) and isinstance(node.value, int):
        return [str(n) for n in (node.value + 1, node.value - 1) if n >= 0]
    if isinstance(node, ast.Name) and node.id in SWAPPED_NAMES:
        return [SWAPPED_NAMES[node.id]]
    new = [in_brackets(ast.UnaryOp(ast.Not(), node))] if is_test else []
    if isinstance(node, ast.BoolOp):
        new.append(in_brackets(ast.BoolOp(SWAPPED[type(node.op)](), node.values)))
    if isinstance(node, ast.BinOp) and isinstance(node.op, ast.BitOr):
        new.append(in_brackets(node.left))
    elif isinstance(node, ast.BinOp) and type(node.op) in SWAPPED:
        new.append(in_brackets(ast.BinOp(node.left, SWAPPED[type(node.op)](), node.right)))
    return new


def in_brackets(node: ast.expr) -> str:
    """Return an expression as text that may stand within any other."""
    text = ast.unparse(node)
    return text if isinstance(node, ast.Name) else f"({text})"


def shorten(text: str) -> str:
    """Return a piece of code on one line."""
    line = " ".join(text.split())
    return line if len(line) <= LONGEST else f"{line[:LONGEST]}..."
