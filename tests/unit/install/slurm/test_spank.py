# SPDX-License-Identifier: Apache-2.0
"""The SPANK plugin: what the hook reads is given to it, and it is compiled for one release."""

from __future__ import annotations

import re
import subprocess
from pathlib import Path

import pytest

from gpulock.install.hooks import InstallError
from gpulock.install.slurm import spank
from gpulock.install.slurm.spank import SpankPlugin, spank_source
from gpulock.job.environment import BIND_LISTS, CONTAINER_PREFIXES
from gpulock.job.mps import LOG_DIRECTORY, PIPE_DIRECTORY
from gpulock.slurm import task
from tests.support.slurm_node import SPANK_HEADER, SlurmNode


def given() -> set[str]:
    """Return the names that the plugin gives to the hook."""
    block = spank_source().read_text().partition("given[] = {")[2].partition("};")[0]
    return set(re.findall(r'"(\w+)="', block))


@pytest.fixture
def header(node: SlurmNode) -> Path:
    """Give slurmd's tree a header that declares what the plugin calls."""
    return node.give_header()


def test_the_hook_is_given_every_name_that_it_reads() -> None:
    text = "".join(
        Path(f"{Path(task.__file__).parent}/{name}.py").read_text() for name in ("task", "share")
    )
    asked = set(re.findall(r'environ(?:\.get\(|\[)"(\w+)"', text)) | {"CUDA_VISIBLE_DEVICES"}
    asked |= set(re.findall(r'"(\w+)" in environ', text))
    assert {"SLURMD_NODENAME", "SLURM_GTIDS", "SLURM_GPUS_ON_NODE"} <= asked
    asked |= {f"{twin}{PIPE_DIRECTORY}" for twin in ("", *CONTAINER_PREFIXES)}
    assert asked | {LOG_DIRECTORY, *BIND_LISTS} == given()


@pytest.mark.slow
def test_it_is_compiled_put_in_place_and_taken_away(node: SlurmNode, header: Path) -> None:
    assert header.is_file()
    assert f"SPANK plugin {node.plugin}" in node.install(spank=True).changed
    made = SpankPlugin(node.plugin).read() or ""
    assert made.startswith("Slurm 22.05 ")
    symbols = subprocess.run(["nm", "-D", node.plugin], capture_output=True, text=True, check=True)
    assert "T slurm_spank_task_init" in symbols.stdout
    assert str(node.paths.slurm_task).encode() in node.plugin.read_bytes()
    assert node.differences() == []  # once chosen it stays
    page = "\n".join("\n".join(one) for one in node.parts().pages)
    assert f"    required {node.plugin}\n" in page
    assert "TaskProlog=" not in page
    assert [path.name for path in node.plugin.parent.iterdir() if path.name.startswith(".")] == []
    node.stack(*node.spank_lines)
    (left,) = node.uninstall().remainders
    assert left.clause.startswith("Slurm still starts the hooks")
    assert [line for line in left.page if line.endswith("spank_gpulock.so again")]
    assert node.plugin.exists()
    node.stack()
    assert node.uninstall().clauses() == []
    assert not (node.root / "libexec").exists()


@pytest.mark.slow
def test_an_upgraded_slurm_gets_another_one(node: SlurmNode, header: Path) -> None:
    node.install(spank=True)
    release = node.state / "release"
    release.write_text("22.05.9\n")
    assert node.differences() == []
    release.write_text("24.11.5\n")
    with pytest.raises(InstallError, match=r"cannot be compiled: .*of another release"):
        node.install()
    assert (SpankPlugin(node.plugin).read() or "").startswith("Slurm 22.05 ")
    header.write_text(SPANK_HEADER.replace("0x160508", "0x180b05"))
    node.install()
    assert (SpankPlugin(node.plugin).read() or "").startswith("Slurm 24.11 ")


@pytest.mark.slow
def test_pyxis_without_spank_is_refused_before_anything_is_changed(node: SlurmNode) -> None:
    node.stack("required /usr/lib/slurm/spank_pyxis.so")
    with pytest.raises(InstallError, match=r"plugstack\.conf names pyxis.*--spank"):
        node.parts()
    node.stack("required /usr/lib/slurm/other.so")
    assert node.differences()


@pytest.mark.slow
def test_without_header_or_compiler_it_is_refused_with_the_reason(
    node: SlurmNode, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(spank, "_SYSTEM", ())
    with pytest.raises(InstallError, match=r"no slurm/spank\.h in .*/slurm/include.*libslurm-dev"):
        node.parts(spank=True)
    monkeypatch.setattr(spank, "_PATH", str(node.root))
    with pytest.raises(InstallError, match="no C compiler"):
        node.parts(spank=True)
    assert not node.plugin.exists()


@pytest.mark.slow
@pytest.mark.root
def test_a_header_that_others_may_change_is_not_compiled(node: SlurmNode, header: Path) -> None:
    header.chmod(0o666)
    with pytest.raises(InstallError, match=r"is not compiled: .*writable by others"):
        node.parts(spank=True)


def test_a_program_that_is_none_of_ours_is_replaced_and_not_brought_back(tmp_path: Path) -> None:
    place = SpankPlugin(tmp_path / "spank_gpulock.so")
    assert place.read() is None
    place.path.write_bytes(b"\x7fELF something")
    assert place.read() == "another program"
    with pytest.raises(InstallError, match="cannot be had again"):
        place.write("Slurm 22.05 abc")
    place.write(None)
    assert not place.path.exists()


def test_what_a_killed_compilation_left_goes_with_the_next_run(tmp_path: Path) -> None:
    place = SpankPlugin(tmp_path / "spank_gpulock.so")
    (tmp_path / ".spank.x6f").mkdir()
    (tmp_path / ".spank.x6f/spank_gpulock.so").write_text("half")
    (tmp_path / ".spank_gpulock.so.77.0123456789ab").write_text("half")

    place.discard_leftovers()

    assert list(tmp_path.iterdir()) == []
