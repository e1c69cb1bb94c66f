# SPDX-License-Identifier: Apache-2.0
"""That the double is faithful: NVIDIA's own header agrees, and tools that know no double run on it.

Needs the package index: NVIDIA's header and the tools come from there, each in one release.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import venv
import zipfile
from importlib.metadata import version
from pathlib import Path
from typing import Any

import pytest

from tests.nvml.build import FLAGS, SOURCES, library, run_compiler, sources
from tests.nvml.double import ERROR_GPU_IS_LOST, Double, Process
from tests.nvml.drivers import FIRST_BRANCH

pytestmark = [pytest.mark.install, pytest.mark.timeout(600)]

HEADER = "nvidia-nvml-dev==13.5.37"
BINDING = f"nvidia-ml-py=={version('nvidia-ml-py')}"
TOOLS = ("gpustat==1.1.1", "nvitop==1.7.2")


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


@pytest.fixture(scope="module")
def tools(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Install gpustat and nvitop as anybody would; return where their programs are."""
    place = tmp_path_factory.mktemp("tools")
    venv.create(place, with_pip=False)
    python = place / "bin/python3"
    run(sys.executable, "-m", "pip", "--python", python, "install", "-q", BINDING, *TOOLS)
    return place / "bin"


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


def busy(folder: Path, preset: str) -> Double:
    nvml = Double(folder / preset, preset=preset, gpus=2)
    nvml.load(0, 87, 12)
    nvml.update({"gpu0.memory.used": "5000M", "gpu0.temperature": 71, "gpu0.power": 123_000})
    nvml.processes(0, [Process(os.getpid(), "4321M")])
    return nvml


# Not on the K80 node: with a driver from before 455 the binding of today refuses gpustat's calls.
@pytest.mark.parametrize("preset", ["dgx1", "dgx-h200", "workstation"])
def test_gpustat_prints_what_the_double_was_told(tools: Path, tmp_path: Path, preset: str) -> None:
    with busy(tmp_path, preset) as nvml:
        told = json.loads(run(tools / "gpustat", "--json", env=nvml.env))
    first, second = told["gpus"]
    assert told["driver_version"] == nvml.driver
    assert (first["utilization.gpu"], second["utilization.gpu"]) == (87, 0)
    assert (first["temperature.gpu"], first["power.draw"]) == (71, 123)
    assert first["memory.used"] == 5000
    assert [(p["pid"], p["gpu_memory_usage"]) for p in first["processes"]] == [(os.getpid(), 4321)]
    assert second["processes"] == []


@pytest.mark.parametrize("preset", ["dgx1", "dgx-h200", "k80-node", "workstation"])
def test_nvitop_prints_what_the_double_was_told(tools: Path, tmp_path: Path, preset: str) -> None:
    with busy(tmp_path, preset) as nvml:
        shown = run(tools / "nvitop", "--once", "--ascii", env=nvml.env)
    assert nvml.driver in shown
    assert re.search(r"71C +P\d +123W / \d+W \| +5000MiB / .* \| +87% ", shown)
    assert re.search(rf"\| +0 +{os.getpid()} C .* 4321MiB ", shown)


def test_nvitop_shows_mig_devices(tools: Path, tmp_path: Path) -> None:
    with Double(tmp_path / "nvml", preset="a100-mig", gpus=1) as nvml:
        nvml.set("gpu0.mig2.memory.used", "1000M")
        shown = run(tools / "nvitop", "--once", "--ascii", env=nvml.env)
    assert re.search(r"0:0 +3g\.40gb @ GI/CI: 2/0 \| +0B / +39\.25GiB ", shown)
    assert re.search(r"0:2 +1g\.10gb @ GI/CI: 9/0 \| +1000MiB / +9728MiB ", shown)
    assert re.search(r"\| +N/A +Default \|", shown)


def test_both_tools_go_on_when_a_card_is_lost(tools: Path, tmp_path: Path) -> None:
    with Double(tmp_path / "nvml", gpus=2) as nvml:
        nvml.fail("*", ERROR_GPU_IS_LOST, gpu=1)
        assert "GPU is lost" in run(tools / "gpustat", env=nvml.env)
        assert "GPU is Lost" in run(tools / "nvitop", "--once", "--ascii", env=nvml.env)
