# SPDX-License-Identifier: Apache-2.0
"""plugstack.conf is read as slurmstepd reads it, and each wrong order of our plugin is told."""

from __future__ import annotations

from pathlib import Path

import pytest

from gpulock.install.files import InstallError
from gpulock.install.slurm.slurm_conf import SlurmConf
from gpulock.install.slurm.spank import (
    PlugStack,
    find_plugstack,
    plugstack_left,
    read_plugstack,
)

PLUGIN = Path("/usr/lib/gpulock/hooks/spank_gpulock.so")
ABOVE = f"required {PLUGIN}"
BELOW = f"required {PLUGIN} again"
PYXIS = "required /usr/lib/slurm/spank_pyxis.so runtime_path=/run/pyxis"
OTHER = "optional /opt/auks.so"


def stack(folder: Path, *lines: str) -> PlugStack:
    path = folder / "plugstack.conf"
    path.write_text("".join(f"{line}\n" for line in lines))
    return PlugStack(path, tuple(read_plugstack(path)))


def test_lines_comments_words_and_included_files_are_read_in_their_order(tmp_path: Path) -> None:
    (tmp_path / "d").mkdir()
    (tmp_path / "d/20.conf").write_text(f"{PYXIS}  # containers\n")
    (tmp_path / "d/10.conf").write_text(f"# {OTHER}\n{ABOVE}\n\nrequired\n")
    found = stack(tmp_path, OTHER, "include d/*.conf", BELOW, "include none/*")
    names = [(entry.path.name, entry.words, entry.required) for entry in found.entries]
    assert names == [
        ("auks.so", (), False),
        ("spank_gpulock.so", (), True),
        ("spank_pyxis.so", ("runtime_path=/run/pyxis",), True),
        ("spank_gpulock.so", ("again",), True),
    ]
    assert found.pyxis is not None and found.pyxis.file.name == "20.conf"


def test_no_file_is_no_plugin_and_one_that_includes_itself_is_refused(tmp_path: Path) -> None:
    assert read_plugstack(tmp_path / "none") == []
    (tmp_path / "a.conf").write_text("include a.conf\n")
    with pytest.raises(InstallError, match="without end"):
        read_plugstack(tmp_path / "a.conf")


def test_it_is_found_beside_slurm_conf_or_where_that_says(tmp_path: Path) -> None:
    stack(tmp_path, PYXIS)
    (tmp_path / "other").write_text(f"{OTHER}\n")
    beside = find_plugstack(SlurmConf({}, "x"), tmp_path / "slurm.conf")
    assert beside.pyxis is not None
    named = SlurmConf({"plugstackconfig": str(tmp_path / "other")}, "x")
    assert find_plugstack(named, tmp_path / "slurm.conf").pyxis is None
    assert find_plugstack(named, None).path == tmp_path / "other"


@pytest.mark.parametrize(
    "lines",
    [(ABOVE, PYXIS, BELOW), (OTHER, ABOVE, OTHER, PYXIS, BELOW, OTHER), (ABOVE,), (ABOVE, OTHER)],
)
def test_the_order_that_is_asked_for_is_right(tmp_path: Path, lines: tuple[str, ...]) -> None:
    found = stack(tmp_path, *lines)
    assert found.is_right(PLUGIN)
    assert plugstack_left(found, PLUGIN) is None


@pytest.mark.parametrize(
    "lines",
    [
        (),
        (PYXIS,),
        (PYXIS, ABOVE, BELOW),
        (ABOVE, PYXIS),
        (ABOVE, BELOW, PYXIS),
        (BELOW, PYXIS, ABOVE),
        (f"optional {PLUGIN}", PYXIS, BELOW),
        (ABOVE, PYXIS, f"optional {PLUGIN} again"),
        ("required /old/spank_gpulock.so", PYXIS, BELOW),
    ],
)
def test_every_other_order_is_a_fault_and_the_page_mends_it(
    tmp_path: Path, lines: tuple[str, ...]
) -> None:
    wrong = stack(tmp_path, OTHER, *lines)
    assert not wrong.is_right(PLUGIN)
    left = plugstack_left(wrong, PLUGIN)
    assert left is not None
    first, last = [line.strip() for line in left.page if line.startswith("    ")]
    others = [line for line in (OTHER, *lines) if "gpulock" not in line]
    assert stack(tmp_path, first, *others, last).is_right(PLUGIN)
