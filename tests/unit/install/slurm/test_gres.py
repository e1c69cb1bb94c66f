# SPDX-License-Identifier: Apache-2.0
"""The map says which card stands at which position of slurmd's own list."""

from __future__ import annotations

from pathlib import Path

import pytest

from gpulock.install.files import InstallError
from gpulock.install.slurm.gres import (
    device_of_position,
    devices_of_positions,
    has_gres_flag,
    parse_gres_list,
)
from gpulock.install.slurm.site import Slurmd, SlurmSite
from gpulock.install.slurm.slurm_conf import expand_bracket_ranges
from gpulock.node.settings import Settings
from gpulock.node.settings_file import read_settings
from gpulock.simulate.node import write_simulated_node
from tests.support.pairs import zip_equal

# Printed by slurmd 22.05.8.
ONE_LINE = (
    "slurmd: Gres Name=gpu Type=(null) Count=4 Index=0 ID=7696487 File=/dev/nvidia[3,0-2] (null)\n"
)
TYPES = """\
slurmd: WARNING: A line in gres.conf for GRES gpu has 2 more configured than expected in slurm.conf.
slurmd: Gres Name=gpu Type=v100 Count=2 Index=0 ID=7696487 File=/dev/nvidia[0-1] (null)
slurmd: Gres Name=gpu Type=v100 Count=1 Index=5 ID=7696487 File=/dev/nvidia5 Links=0,-1
slurmd: Gres Name=gpu Type=a100 Count=1 Index=3 ID=7 File=/dev/nvidia3 Cores=0-3 CoreCnt=16 (null)
"""
OTHERS = """\
slurmd: Gres Name=shard Type=(null) Count=2 Index=0 ID=1918986455 File=/dev/nvidia0 (null)
slurmd: Gres Name=gpu Type=(null) Count=1 Index=0 ID=7696487 File=/dev/nvidia0 (null)
slurmd: Gres Name=gpux Type=(null) Count=4 ID=2020962407 (null)
"""
MIG = (
    "slurmd: Gres Name=gpu Type=(null) Count=1 Index=22 ID=7696487"
    " File=/dev/nvidia0,/dev/nvidia-caps/nvidia-cap21,/dev/nvidia-caps/nvidia-cap22 (null)\n"
    "slurmd: Gres Name=gpu Type=(null) Count=2 Index=2 ID=7696487 File=/dev/nvidia1,/dev/nvidia2 "
    "(null)\n"
)


MPS = "slurmd: Gres Name=mps Type=(null) Count={} Index=0 ID=7565421 File=/dev/nvidia0 (null)\n"
NONE = "slurmd: Can not stat gres.conf file (/etc/gres.conf), using slurm.conf data"
CAPS = ("/dev/nvidia-caps/nvidia-cap21", "/dev/nvidia-caps/nvidia-cap22")


@pytest.mark.parametrize(
    ("text", "files", "shared"),
    [
        (ONE_LINE, [(n,) for n in (3, 0, 1, 2)], ()),  # slurmd's order, not that of minors
        (TYPES, [(n,) for n in (0, 1, 5, 3)], ()),
        (MIG, [(0, *CAPS), (1,), (2,)], ()),  # an instance is one position, two cards are two
        (OTHERS, [(0,)], ("shard",)),
        (MPS.format(100) + OTHERS, [(0,)], ("mps", "shard")),
        (MPS.format(0) + NONE, [], ()),
    ],
)
def test_positions_and_parts_of_gpus_are_read_as_slurmd_lists_them(
    text: str, files: list[tuple[object, ...]], shared: tuple[str, ...]
) -> None:
    listed = parse_gres_list(text)

    cards = [tuple(f"/dev/nvidia{n}" if isinstance(n, int) else n for n in one) for one in files]
    assert ([*listed.positions], listed.shared) == (cards, shared)
    with pytest.raises(InstallError, match=r"Count=9 .*report this line"):
        parse_gres_list(f"{text}slurmd: Gres Name=gpu Type=(null) Count=9 ID=7 File=/dev/nvidia0\n")


@pytest.mark.parametrize(
    ("text", "names"),
    [
        ("/d/a[00-02]x", ["/d/a00x", "/d/a01x", "/d/a02x"]),
        ("/d/a0,/e/b[1-2]", ["/d/a0", "/e/b1", "/e/b2"]),
        ("/a[0-1]/b[0-1]", ["/a0/b0", "/a0/b1", "/a1/b0", "/a1/b1"]),
    ],
)
def test_expressions_are_expanded_in_their_order(text: str, names: list[str]) -> None:
    assert expand_bracket_ranges(text, "gres.conf") == names


@pytest.mark.parametrize(
    "text",
    ["n[1-99999999]", "n[1-40000,1-40000]", "n[0-999]r[0-999]", "a[1-40000],b[1-40000]"],
)
def test_an_expression_of_more_names_than_slurm_takes_is_refused_unread(text: str) -> None:
    with pytest.raises(InstallError, match=r"more than 65536 names; look at slurm\.conf"):
        expand_bracket_ranges(text, "slurm.conf")


@pytest.mark.parametrize("text", ["/d/a[x]", "/d/a[0-]", "/d/a[]"])
def test_an_expression_that_is_no_list_of_numbers_is_refused(text: str) -> None:
    with pytest.raises(InstallError, match=r"gres\.conf"):
        expand_bracket_ranges(text, "gres.conf")


# --- from files to devices -----------------------------------------------------------------------


def node(folder: Path, preset: str) -> Settings:
    return read_settings(str(write_simulated_node(folder / "node", preset).config))


def test_a_mig_instance_is_named_by_its_card_and_its_capabilities(tmp_path: Path) -> None:
    settings = node(tmp_path, "a100-mig")
    table = Path(f"{settings.driver_root}-caps/mig-minors").read_text().split()
    of = dict(zip_equal(table[::2], table[1::2]))

    def caps(*names: str) -> tuple[str, ...]:
        found = [f"{settings.dev_root}/nvidia-caps/nvidia-cap{of[f'{n}/access']}" for n in names]
        for path in found:  # also of an instance that is not there
            Path(path).touch()
        return tuple(found)

    first = caps("gpu2/gi10", "gpu2/gi10/ci0")
    card, other = (f"{settings.dev_root}/nvidia{number}" for number in (2, 3))

    assert devices_of_positions(settings, [(card, *first)]) == ["2.gi10.ci0"]

    for wrong, says in [
        ((card, first[1], *caps("gpu2/gi9")), "is not one MIG instance"),
        ((card, first[0]), "is not one MIG instance"),
        ((card, *caps("gpu2/gi5", "gpu2/gi5/ci0")), "is not one .* that card 2 has: make it"),
        ((other, *first), "is not one MIG instance that card 3 has"),
        ((card, other), "holds 2 cards"),
    ]:
        with pytest.raises(InstallError, match=says):
            device_of_position(settings, wrong)


def test_one_card_at_two_positions_is_refused_and_none_needs_no_driver(tmp_path: Path) -> None:
    settings = node(tmp_path, "workstation")
    Path(settings.dev_root, "other").symlink_to("nvidia0")
    both = [(f"{settings.dev_root}/nvidia0",), (f"{settings.dev_root}/other",)]

    with pytest.raises(InstallError, match="positions 0 and 1"):
        devices_of_positions(settings, both)
    assert devices_of_positions(Settings({"DRIVER_ROOT": "/nowhere"}), []) == []


def test_on_a_real_node_only_an_nvidia_device_is_one(tmp_path: Path) -> None:
    settings = Settings({"DRIVER_ROOT": str(tmp_path)})
    (tmp_path / "nvidia0").touch()

    for name in ("/dev/null", str(tmp_path / "nvidia0")):
        with pytest.raises(InstallError, match="is no NVIDIA device"):
            device_of_position(settings, (name,))


@pytest.mark.parametrize(
    ("lines", "flagged"),
    [
        ("Name=gpu File=/dev/nvidia0 Flags=no_gpu_env", True),
        ("NodeName=n[1-3],m Name=gpu File=/dev/nvidia0 Flags=one,NO_GPU_ENV", True),
        ("NodeName=n2 Name=gpu Flags=no_gpu_env\nNodeName=other Name=gpu File=/x", True),
        ("NodeName=n2 Name=gpu Flags=no_gpu_env\nName=gpu File=/x", False),
        ("NodeName=other Name=gpu Flags=no_gpu_env", False),
        ("# Name=gpu Flags=no_gpu_env", False),
    ],
)
def test_a_flag_counts_on_the_lines_of_this_node(
    tmp_path: Path, lines: str, *, flagged: bool
) -> None:
    conf = tmp_path / "slurm.conf"
    conf.with_name("gres.conf").write_text(f"{lines}\n")
    site = SlurmSite(tmp_path, conf, Slurmd(1, tmp_path / "slurmd", node="n2"))
    assert has_gres_flag(site, "no_gpu_env") is flagged
