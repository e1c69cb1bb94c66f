# SPDX-License-Identifier: Apache-2.0
"""That the double is faithful: NVIDIA's own header agrees, and tools that know no double run on it.

Needs the package index: NVIDIA's header and the tools come from there, each in one release.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
import zipfile
from pathlib import Path
from typing import Any

import pytest

from tests.nvml.build import FLAGS, SOURCES, library, run_compiler, sources
from tests.nvml.cards import FIRST_BRANCH

pytestmark = [pytest.mark.install, pytest.mark.timeout(600)]

HEADER = "nvidia-nvml-dev==13.5.37"


def run(*command: str | Path, env: dict[str, str] | None = None) -> str:
    """Run a command; return what it printed."""
    done = subprocess.run(
        [str(word) for word in command],
        env={**os.environ, **(env or {})},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.fixture(scope="module")
def header(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Fetch NVIDIA's header; return its folder."""
    folder = tmp_path_factory.mktemp("vendor")
    run(sys.executable, "-m", "pip", "download", "-q", "--no-deps", "-d", folder, HEADER)
    with zipfile.ZipFile(next(folder.glob("*.whl"))) as wheel:
        name = next(n for n in wheel.namelist() if n.endswith("/nvml.h"))
        return Path(wheel.extract(name, folder)).parent


MEMBER = r"([\w.]+)(?=(?:\[\w+\])?[,;])"


def layout_program() -> str:
    """Return a C program that prints the layout of all that the double's header declares.

    Built with NVIDIA's header in its place, it must print the same. A name or a member that only
    one of them has does not compile.
    """
    own = (SOURCES / "nvml_api.h").read_text().partition("#else")[2]
    own = re.sub(r"/\*.*?\*/", "", own, flags=re.DOTALL)
    inner = r"(?<=    )(?:union|struct) \{([^{}]*)\} (\w+);"  # within a structure: `value.str`
    own = re.sub(inner, lambda one: re.sub(MEMBER, rf"{one[2]}.\1", one[1]), own)
    names = re.findall(r"^#define (nvml\w+)|\b(NVML_[A-Z0-9_]+) =", own, re.MULTILINE)
    values = {name: f"(size_t)({name})" for pair in names for name in pair if name}
    for group in re.findall(r"^typedef unsigned int ([\w, ]+);", own, re.MULTILINE):
        values |= {name: f"sizeof({name})" for name in group.split(", ")}
    structures = re.findall(r"typedef (?:struct|union) \{(.*?)\} ([\w, ]+);", own, re.DOTALL)
    for members, group in structures:
        for name in group.split(", "):
            values[name] = f"sizeof({name})"
            for member in re.findall(MEMBER, members):
                values[f"{name}.{member}"] = f"offsetof({name}, {member})"
                values[f"{name}.{member} size"] = f"sizeof((({name} *)0)->{member})"
    lines = [f'printf("{what} %zu\\n", {value});' for what, value in values.items()]
    head = f'#include <stddef.h>\n#include <stdio.h>\n#include "{SOURCES}/nvml_api.h"\n'
    return "\n".join([head, "int main(void) {", *lines, "return 0; }", ""])


def test_sizes_places_and_numbers_are_those_of_nvidias_header(header: Path, tmp_path: Path) -> None:
    layout = tmp_path / "layout.c"
    layout.write_text(layout_program())
    run_compiler(*FLAGS, layout, "-o", tmp_path / "ours")
    run_compiler(*FLAGS, "-DVENDOR_HEADER", f"-I{header}", layout, "-o", tmp_path / "theirs")
    ours = run(tmp_path / "ours").splitlines()
    assert len(ours) > 150 and ours == run(tmp_path / "theirs").splitlines()


@pytest.mark.parametrize("source", [s.name for s in sources()])
def test_every_function_has_the_prototype_of_nvidias_header(source: str, header: Path) -> None:
    # A definition that the header declares otherwise, or not at all, does not compile.
    flags = ("-DVENDOR_HEADER", f"-I{header}", "-Wmissing-prototypes", "-fsyntax-only")
    run_compiler(*FLAGS, *flags, "-Wno-deprecated-declarations", SOURCES / source)


def test_the_library_has_every_function_that_the_binding_calls_and_no_other(header: Path) -> None:
    declared = set(re.findall(r"DECLDIR\s+(nvml\w+)\s*\(", (header / "nvml.h").read_text()))
    exported = set(re.findall(r" T (nvml\w+)", run("nm", "-D", library())))
    binding: Any = __import__("pynvml")
    text = Path(binding.__file__).read_text()
    called = set(re.findall(r'_nvmlGetFunctionPointer\("(nvml\w+)"', text))
    assert {*called, *FIRST_BRANCH} <= exported <= declared | called
    assert len(declared) > 400
