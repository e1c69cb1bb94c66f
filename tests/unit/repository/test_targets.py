# SPDX-License-Identifier: Apache-2.0
"""Every target of the Makefile runs where nothing ran before: its set-up brings what it imports."""

from __future__ import annotations

import functools
import importlib.metadata
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import grimp
import pytest
import tomli
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from tests.root.packages import LAYERS
from tests.steps import PLANS

ROOT = Path(__file__).resolve().parents[3]
PROJECT = tomli.loads((ROOT / "pyproject.toml").read_text())["project"]
SET_UP = {"setup.sh runtime": "gpulock", "setup.sh dev": "gpulock[dev]"}
ROOTED = re.compile(r"tests/root/enter\.sh (\w+) ")
PLAN = re.compile(r"python3 -m tests\.run (\w+)")
PIP = re.compile(r"-m pip install (?:-\S+ |build/\S+ )*(\S+)")
MODULE = re.compile(r"python3? -m ([\w.$]+)")
SCRIPT = re.compile(r"python (\S+)\.py")
TESTS = re.compile(r"(?<!--ignore=)\btests/(?:labs|unit|exporter|gpu|sweep|world)[\w/.]*")
WEB = {"bcrypt", "yaml"}  # which the exporter does without, unless its settings need them
OURS = {"gpulock", "gpulock_exporter", "dashboards", "tests", "packaging"}
STARTED = re.compile(r'"-m", "(tests\.[\w.]+)"')


def dry_run(target: str, folder: Path) -> str:
    """Return what make would run for a target in a clone that has nothing but its files."""
    for name in ("Makefile", "pyproject.toml"):
        shutil.copy(ROOT / name, folder)
    words = ["make", "--dry-run", target, "AS_ROOT="]
    done = subprocess.run(words, cwd=folder, capture_output=True, text=True, check=True)
    return done.stdout.replace("\\\n", " ")


def list_targets() -> list[str]:
    """Return the targets, from make's own data base."""
    words = ["make", "--print-data-base", "--dry-run", "help"]
    done = subprocess.run(words, cwd=ROOT, capture_output=True, text=True, check=True)
    (phony,) = set(re.findall(r"^\.PHONY: (.+)", done.stdout, re.M))
    return str(phony).split()


@functools.lru_cache
def imports() -> dict[str, set[str]]:
    """Return what each of this checkout's modules imports, types alone left out."""
    graph = grimp.build_graph(
        *("gpulock", "gpulock_exporter", "dashboards", "tests"),
        include_external_packages=True,
        exclude_type_checking_imports=True,
        cache_dir=None,
    )
    return {
        module: graph.find_modules_directly_imported_by(module)
        - (set() if module.startswith("tests.") else WEB)
        for module in graph.modules
    }


@functools.lru_cache
def owners() -> dict[str, set[str]]:
    """Return the distributions that have a module, or a program as `bin/NAME`."""
    result: dict[str, set[str]] = {}
    for one in importlib.metadata.distributions():
        for file in one.files or ():
            name = f"bin/{file.name}" if file.parent.name == "bin" else file.parts[0]
            name = name.partition(".")[0]
            result.setdefault(name, set()).add(canonicalize_name(one.metadata["Name"]))
    return result


def requirements(name: str, extras: set[str]) -> Iterator[Requirement]:
    """Yield what a distribution requires on this Python with some extras."""
    lines: list[str] = []
    if name == "gpulock":
        lines += PROJECT["dependencies"]
        for extra in extras:
            lines += PROJECT["optional-dependencies"][extra]
    elif any(name in names for names in owners().values()):
        lines += importlib.metadata.requires(name) or []
    for one in map(Requirement, lines):
        if not one.marker or any(one.marker.evaluate({"extra": e}) for e in {"", *extras}):
            yield one


@functools.lru_cache
def installed_by(*words: str) -> set[str]:
    """Return the distributions that pip installs for some requirements."""
    done: dict[str, set[str]] = {}
    todo = [Requirement(word) for word in words]
    while todo:
        one = todo.pop()
        name = canonicalize_name(one.name)
        if name not in done or not one.extras <= done[name]:
            done[name] = done.get(name, set()) | one.extras
            todo += requirements(name, done[name])
    return set(done)


def modules_of_tests(text: str) -> set[str]:
    """Return the modules of the tests that a command names, their conftest modules too."""
    ignored = {ROOT / path for path in re.findall(r"--ignore=(\S+)", text)}
    files: set[Path] = set()
    for path in TESTS.findall(text):
        files |= {ROOT / path} if path.endswith(".py") else set((ROOT / path).rglob("*.py"))
    files = {file for file in files if not ignored & {file, *file.parents}}
    files |= {above / "conftest.py" for file in files for above in file.parents}
    return {
        ".".join(file.relative_to(ROOT).with_suffix("").parts)
        for file in files
        if file.is_relative_to(ROOT) and file.exists()
    }


@functools.lru_cache
def imported_by(module: str) -> set[str]:
    """Return what a module, or a script of packaging/, imports or starts, as far as is known."""
    file = ROOT / f"{module.replace('.', '/')}.py"
    if not file.exists():
        return imports().get(module, set())
    if module in imports():
        return imports()[module] | set(STARTED.findall(file.read_text()))
    names = re.findall(r"^(?:from|import) ([\w.]+)", file.read_text(), re.M)
    return {f"packaging.{one}" if (file.parent / f"{one}.py").exists() else one for one in names}


def needed_by(text: str) -> set[str]:
    """Return the modules and programs of others that commands run or import."""
    text = re.sub(r"\bfor \w+ in [^;]*;", "", text)  # which are no programs
    words = re.split(r"[\s/;&|()\"']+", text)
    programs = {f"bin/{word}" for word in words if word != "pip"} & owners().keys()
    todo = {*MODULE.findall(text), *modules_of_tests(text)} - {"pip"}
    todo |= {script.replace("/", ".") for script in SCRIPT.findall(text)}
    todo |= {"gpulock.cli"} if "bin/gpulock" in programs else set()
    seen: set[str] = set()
    while todo:
        seen |= todo
        todo = {one for module in todo for one in imported_by(module)} - seen
    top = {module.partition(".")[0] for module in seen}
    unknown = {module for module in seen if module.startswith("tests.") and module not in imports()}
    return programs | unknown | (top - OURS - sys.stdlib_module_names)


def missing(text: str, *words: str) -> set[str]:
    """Return what commands need and pip does not install for those words."""
    there = installed_by(*words)
    return {need for need in needed_by(text) if not owners().get(need, {need}) & there}


def unmet(text: str) -> dict[str, set[str]]:
    """Return what each command of make, or each step that it runs, lacks."""
    words = [word for script, word in SET_UP.items() if script in text]
    words += [word.strip("'").replace(".[", "gpulock[") for word in PIP.findall(text)]
    result: dict[str, set[str]] = {}
    for line in text.splitlines():
        if plan := PLAN.search(line):
            result[line] = missing(line)
            for step in PLANS[plan[1]]:
                command = " ".join(step.words)
                result[step.name] = missing(command, extra_of(step.root))
                if words and not step.needs_root:
                    result[step.name] |= missing(command, *words)
        elif root := ROOTED.search(line):
            result[line] = missing("python3 -m tests.root.build")
            result[line] |= missing(line[root.end() :], extra_of(root[1]))
        else:
            result[line] = missing(line, *words)
    return {name: lacks for name, lacks in result.items() if lacks}


def extra_of(root: str) -> str:
    """Return with what extra gpulock is installed in a private root."""
    layer = LAYERS[root]
    return f"gpulock[{layer.extra}]" if layer.extra else extra_of(layer.below)


@pytest.mark.parametrize("target", list_targets())
def test_what_a_target_runs_is_installed_by_its_set_up(target: str, tmp_path: Path) -> None:
    assert unmet(dry_run(target, tmp_path)) == {}


def test_the_set_up_itself_needs_nothing() -> None:
    modules = re.findall(r"-m (tests\.\S+)\)", (ROOT / "tests/setup.sh").read_text())
    assert modules == ["tests.root.pip_wheel"]
    assert missing("python3 -m tests.root.pip_wheel") == set()


def test_a_target_with_the_set_up_of_another_is_seen() -> None:
    lines = "tests/setup.sh runtime\n.venv/bin/python -m tests.bench.exporter\n.venv/bin/mypy\n"
    assert [*unmet(lines).values()] == [{"typing_extensions"}, {"bin/mypy"}]
    assert [*unmet("python3 -m tests.gone\n").values()] == [{"tests.gone"}]
