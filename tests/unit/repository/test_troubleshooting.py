# SPDX-License-Identifier: Apache-2.0
"""docs/troubleshooting.md has each refusal, each state, and each finding of doctor."""

import ast
import importlib
import re
from collections.abc import Iterator, Sequence
from functools import cache
from pathlib import Path
from typing import NamedTuple

import pytest

from gpulock.alloc.states import STATES
from gpulock.errors import KINDS

ROOT = Path(__file__).resolve().parents[3]
PAGE = ROOT / "docs/troubleshooting.md"
DOCTOR = "gpulock/install/doctor"
SHORTEST, FEW = 6, 12  # letters of a piece to search for; of a message that needs its advice, too
DEEPEST = 4  # variables in texts in variables
# Each passes on the words of another place, or has none but the system's.
WORDLESS = {
    "gpulock/cli/claims/socket_client.py: Refusal(kind, reply.why, reply.do)",
    "gpulock/hooks/subprocess.py: Refusal(UNKNOWN, f'{self.path}: {fault}', self.hint)",
    "gpulock/store/boot.py: Refusal(BROKEN, *bad)",
}
Variables = dict[str, list[tuple[int, ast.expr]]]


class Message(NamedTuple):
    """What a call tells: its place in the code, and the fixed parts of its text."""

    place: str
    pieces: tuple[str, ...]


class Source(NamedTuple):
    """One module of the product: its path, its lines, its syntax."""

    path: str
    lines: Sequence[str]
    tree: ast.Module


@cache
def product_texts(folder: str) -> dict[str, str]:
    """Read the modules of a folder, by their paths."""
    paths = sorted((ROOT / folder).rglob("*.py"))
    return {str(path.relative_to(ROOT)): path.read_text() for path in paths}


def parse_callers(folder: str, wanted: set[str]) -> list[Source]:
    """Parse the modules that call one of some names."""
    return [
        Source(path, text.splitlines(), ast.parse(text))
        for path, text in product_texts(folder).items()
        if any(f"{name}(" in text for name in wanted)
    ]


@cache
def table_rows() -> list[str]:
    """Return the rows of the page's tables, without the marks of code."""
    rows = [line for line in PAGE.read_text().splitlines() if line.startswith("| ")]
    return [row.replace("`", "") for row in rows]


def is_on_page(pieces: tuple[str, ...]) -> bool:
    """Say whether one row has all parts of a message."""
    return any(all(piece in row for piece in pieces) for row in table_rows())


def fixed_pieces(node: ast.expr, names: Variables, deep: int = 0) -> list[str]:
    """Return the fixed parts of a text: of a variable, of what was last written into it above."""
    if isinstance(node, ast.Constant) and isinstance(node.value, str):
        return [node.value]
    if isinstance(node, ast.JoinedStr):
        return [piece for part in node.values for piece in fixed_pieces(part, names, deep)]
    if isinstance(node, ast.FormattedValue):
        return fixed_pieces(node.value, names, deep) if isinstance(node.value, ast.Name) else []
    if isinstance(node, ast.Name) and deep < DEEPEST:
        above = [value for line, value in names.get(node.id, []) if line < node.lineno]
        return fixed_pieces(above[-1], names, deep + 1) if above else []
    return []


def written_variables(function: ast.AST, module: ast.Module) -> Variables:
    """Return what is written into the names of a module (as of line 0) and of a function."""
    found: Variables = {}
    for place, of_module in ((module.body, True), (list(ast.walk(function)), False)):
        for node in place:
            if isinstance(node, ast.Assign):
                targets, value = node.targets, node.value
            elif isinstance(node, ast.AnnAssign) and node.value is not None:
                targets, value = [node.target], node.value
            else:
                continue
            for target in targets:
                if isinstance(target, ast.Name):
                    line = 0 if of_module else node.lineno
                    found.setdefault(target.id, []).append((line, value))
    return {name: sorted(values, key=lambda one: one[0]) for name, values in found.items()}


def called_name(call: ast.Call) -> str:
    """Return the name of what is called: a function, a class, or `__init__`."""
    if isinstance(call.func, ast.Name):
        return call.func.id
    return "__init__" if getattr(call.func, "attr", "") == "__init__" else ""


def functions_of(body: list[ast.stmt]) -> Iterator[ast.FunctionDef]:
    """Yield the functions and methods of a module, those within a function as part of it."""
    for node in body:
        if isinstance(node, ast.FunctionDef):
            yield node
        elif isinstance(node, ast.ClassDef):
            yield from functions_of(node.body)


def calls_in(source: Source, wanted: set[str]) -> Iterator[tuple[ast.Call, Variables]]:
    """Yield the calls of some names, with the variables around each."""
    for function in functions_of(source.tree.body):
        text = "\n".join(source.lines[function.lineno - 1 : function.end_lineno])
        if any(f"{name}(" in text for name in wanted):
            names = written_variables(function, source.tree)
            for node in ast.walk(function):
                if isinstance(node, ast.Call) and called_name(node) in wanted:
                    yield node, names


def searched_pieces(arguments: list[ast.expr], names: Variables) -> tuple[str, ...]:
    """Return the parts of a text that people can search for; with its advice where it is short."""
    found: list[str] = []
    for argument in arguments:
        for piece in fixed_pieces(argument, names):
            text = " ".join(piece.replace("`", "").split()).strip(" :;,().'=/\\|")
            if sum(letter.isalpha() for letter in text) >= SHORTEST:
                found.append(text)
        if sum(map(len, found)) >= FEW:
            break
    return tuple(found)


def refusal_classes() -> set[str]:
    """Return Refusal and what is made of it."""
    found = {"Refusal"}
    classes = re.compile(r"^class (\w+)\((\w+)\):", re.MULTILINE)
    pairs = [pair for text in product_texts("gpulock").values() for pair in classes.findall(text)]
    for name, base in pairs * 2:
        if base in found:
            found.add(name)
    return found


def collect_refusals() -> tuple[list[Message], set[str]]:
    """Return the refusals of the code, and those that have no words of their own."""
    classes = refusal_classes()
    made = tuple(f"class {name}(" for name in classes - {"Refusal"})
    found: list[Message] = []
    wordless: set[str] = set()
    for source in parse_callers("gpulock", classes):
        makes = any(line.startswith(made) for line in source.lines)
        wanted = classes | {"__init__"} if makes else classes
        for call, names in calls_in(source, wanted):
            kind = len(call.args) > 1  # the first says no more than the kind
            if pieces := searched_pieces(call.args[kind:], names):
                found.append(Message(f"{source.path}: {ast.unparse(call)}", pieces))
            elif called_name(call) == "Refusal":
                wordless.add(f"{source.path}: {ast.unparse(call)}")
    return found, wordless


def collect_faults() -> list[Message]:
    """Return the faults of doctor that have words of their own; the others tell a refusal's."""
    return [
        Message(f"{source.path}: {ast.unparse(call)}", pieces)
        for source in parse_callers(DOCTOR, {"fault"})
        for call, names in calls_in(source, {"fault"})
        if (pieces := searched_pieces(call.args[:2], names))
    ]


def collect_check_names() -> set[str]:
    """Return the names, or how they begin, under which doctor tells what it finds."""
    found: set[str] = set()
    wanted = {"fault", "warning", "run_all", "run_checks"}
    for source in parse_callers(DOCTOR, wanted):
        module = importlib.import_module(source.path.removesuffix(".py").replace("/", "."))
        known: Variables = {
            name: [(0, ast.Constant(value))]
            for name, value in vars(module).items()
            if name.isupper() and isinstance(value, str)
        }
        for call, names in calls_in(source, wanted):
            by_name = called_name(call).startswith("run_")
            for argument in call.args[:1] if by_name else call.args[2:]:
                keys = argument.keys if isinstance(argument, ast.Dict) else [argument]
                texts = [fixed_pieces(key, {**known, **names}) for key in keys if key]
                found |= {"".join(text).strip(" :") for text in texts}
    return found - {""}


def test_each_refusal_of_the_code_is_found() -> None:
    found, wordless = collect_refusals()
    assert len(found) > 150
    assert [one for one in found if not is_on_page(one.pieces)] == []
    assert wordless == WORDLESS, "give it words of its own, or name it above"


def test_each_message_of_the_scripts_and_of_the_spank_plugin_is_found() -> None:
    scripts = [path for path in (ROOT / "prolog").iterdir() if path.is_file()]
    found = re.findall(r'echo "gpulock: ([^"]+)"', "".join(path.read_text() for path in scripts))
    plugin = (ROOT / "prolog/spank/spank_gpulock.c").read_text()
    found += re.findall(r'\bstop\(.+, "([^"]+)"\);', plugin)
    launcher = (ROOT / "prolog/drop-env.c").read_text()
    found += re.findall(r'"(run gpulock[^"]+|[^"]*(?:started|taken|no room)[^"]*)"', launcher)
    assert len(found) > 11
    parts = [re.split(r"\$\{[^}]*\}|\$\w+", text) for text in found]
    fixed = [tuple(part.strip(" :;,(") for part in text if len(part) > FEW) for text in parts]
    assert [one for one in fixed if not one or not is_on_page(one)] == []


def test_each_fault_of_doctor_is_found() -> None:
    found = collect_faults()
    assert len(found) > 60
    assert [one for one in found if not is_on_page(one.pieces)] == []


def test_each_thing_that_doctor_looks_at_has_a_row() -> None:
    names = collect_check_names()
    assert {"hooks", "queue states", "Prolog", "LOCK_DIR", "driver", "isolation: PAM"} <= names
    first = re.findall(r"^\| (`.*?`) \|", PAGE.read_text(), flags=re.MULTILINE)
    told = re.findall(r"`([^`]+)`", "\n".join(first))
    assert sorted(name for name in names if not any(one.startswith(name) for one in told)) == []


@pytest.mark.parametrize("word", [*STATES, *KINDS])
def test_each_state_and_each_kind_has_a_row(word: str) -> None:
    assert f"\n| `{word}` |" in PAGE.read_text()


def test_a_message_in_a_variable_is_collected_with_its_advice_where_it_is_short() -> None:
    code = "def f(n):\n what = f'{n} is odd'\n raise Refusal(UNKNOWN, f'{what}, so', 'see there')\n"
    longer = code.replace("is odd", "is odd, as we know")
    found: list[tuple[str, ...]] = []
    for text in (code, longer):
        source = Source("", text.splitlines(), ast.parse(text))
        ((call, names),) = calls_in(source, {"Refusal"})
        found.append(searched_pieces(call.args[1:], names))
    assert found == [("see there",), ("is odd, as we know",)]
