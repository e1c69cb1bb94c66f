# SPDX-License-Identifier: Apache-2.0
"""Every target of the Makefile runs where nothing ran before: its set-up brings what it imports."""

from __future__ import annotations

import functools
import importlib.metadata
import json
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

ROOT = Path(__file__).resolve().parents[3]
RUNTIME, DEV = "tests/setup.sh runtime", "tests/setup.sh dev"
OURS = ("gpulock", "pip", "setuptools")
STARTED = re.compile(r"(\S*python3?) (?:-m ([\w.]+)|(\S+\.py))")
# Imports a module, or a script as one, where some others are not installed.
IMPORTING = """
import importlib, json, runpy, sys
blocked, one = json.loads(sys.argv[1])
sys.modules.update(dict.fromkeys(blocked))
sys.path.insert(0, one.rpartition("/")[0])
runpy.run_path(one) if one.endswith(".py") else importlib.import_module(one)
"""


def dry_run(target: str, folder: Path) -> str:
    """Return what make would run for a target in a clone that has nothing but its files."""
    for name in ("Makefile", "pyproject.toml"):
        shutil.copy(ROOT / name, folder)
    words = ["make", "--dry-run", target, "AS_ROOT="]
    done = subprocess.run(words, cwd=folder, capture_output=True, text=True, check=True)
    return done.stdout


def list_targets() -> list[str]:
    """Return the targets, from make's own data base."""
    words = ["make", "--print-data-base", "--dry-run", "help"]
    done = subprocess.run(words, cwd=ROOT, capture_output=True, text=True, check=True)
    (phony,) = set(re.findall(r"^\.PHONY: (.+)", done.stdout, re.M))
    return str(phony).split()


@functools.cache
def required_by(name: str) -> set[str]:
    """Return the distributions that a distribution, without extras, needs to run."""
    names: set[str] = {canonicalize_name(name)}
    for line in importlib.metadata.requires(name) or ():
        one = Requirement(line)
        if not one.marker or one.marker.evaluate({"extra": ""}):
            names |= required_by(one.name)
    return names


@functools.cache
def owners_of_modules() -> dict[str, set[str]]:
    """Return the distributions that have each installed module."""
    owners: dict[str, set[str]] = {}
    for one in importlib.metadata.distributions():
        for file in one.files or ():
            name = file.parts[0].partition(".")[0]
            owners.setdefault(name, set()).add(canonicalize_name(one.metadata["Name"]))
    return owners


def fault_of_import(one: str, wanted: set[str]) -> str:
    """Import what is started, without the distributions that are not wanted; return the fault."""
    blocked = [name for name, of in owners_of_modules().items() if not of & {*wanted, *OURS}]
    words = [sys.executable, "-c", IMPORTING, json.dumps([blocked, one])]
    done = subprocess.run(words, cwd=ROOT, capture_output=True, text=True, check=False)
    return done.stderr


@pytest.mark.parametrize("target", list_targets())
def test_what_a_target_runs_is_installed_by_its_set_up(target: str, tmp_path: Path) -> None:
    lines = dry_run(target, tmp_path).splitlines(keepends=True)
    commands = "".join(line for line in lines if "tests/root/enter.sh" not in line)
    programs = set(re.findall(r"\.venv/bin/([\w-]+)", commands))
    if DEV not in commands:
        assert RUNTIME in commands or not programs
        assert programs <= {"python"}
        for python, module, script in set(STARTED.findall(commands)):
            if module not in {"pip", "mkdocs"} and "pytest" not in module:
                wanted = required_by("gpulock") if python.startswith(".venv") else set()
                assert fault_of_import(module or script, wanted) == ""


@pytest.mark.parametrize("module", ["tests.root.build", "tests.root.pip_wheel", "tests.run"])
def test_what_makes_a_private_root_and_the_set_up_itself_need_nothing(module: str) -> None:
    assert fault_of_import(module, set()) == ""


def test_what_only_the_tests_need_is_not_there_for_the_runtime_set_up() -> None:
    assert "hypothesis" in fault_of_import("tests.support.mutations", required_by("gpulock"))
    assert "click" in fault_of_import("tests.demo.__main__", set())
