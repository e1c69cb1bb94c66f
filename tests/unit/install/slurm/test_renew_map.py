# SPDX-License-Identifier: Apache-2.0
"""The map goes on where gres.conf says the same of this node; slurmd is asked where it does not."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

import psutil
import pytest

from gpulock.errors import Refusal
from gpulock.install.files import InstallError
from gpulock.install.slurm import renew_map
from gpulock.install.slurm.renew_map import renew_gres_map
from gpulock.slurm.gres_map import read_gres_map, read_shared_gres
from tests.support.faults import returning
from tests.support.slurm_node import SlurmNode, make_slurm_node

SAME = {str(number): str(number) for number in range(8)}
OLD, NEW = 1.0, 1e12  # when slurmd started: before each change of a file, and after it


@pytest.fixture
def node(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> SlurmNode:
    """Return a node with a map that was compared with gres.conf."""
    made = make_slurm_node(tmp_path, monkeypatch)
    started(monkeypatch, OLD)
    made.install()
    assert positions(made) == SAME
    return made


def started(patch: pytest.MonkeyPatch, when: float) -> None:
    patch.setattr(psutil.Process, "create_time", returning(when))


def positions(node: SlurmNode) -> dict[str, str]:
    return read_gres_map(str(node.map.parent))


def is_believed(node: SlurmNode) -> bool:
    try:
        positions(node)
    except Refusal:
        return False
    return True


def edit(node: SlurmNode, text: str) -> None:
    with node.conf.with_name("gres.conf").open("a") as file:
        file.write(text)
    assert not is_believed(node)


def never_ask(node: SlurmNode) -> None:
    """Let `slurmd -G` fail."""
    (node.root / "slurm/sbin/slurmd").write_text("#!/bin/sh\nexit 1\n")


@pytest.mark.parametrize(
    "text",
    [
        "# a comment\n",
        "NodeName=other[1-9] Name=gpu File=/dev/nvidia[0-3]\n",
        "\n   \nNodeName=other Name=gpu \\\n   File=/dev/nvidia9 # two lines\n",
    ],
)
def test_a_line_that_is_not_this_nodes_is_compared_without_slurmd(
    node: SlurmNode, text: str
) -> None:
    edit(node, text)
    never_ask(node)

    assert "8 positions" in renew_gres_map(node.config, ask=False)

    assert positions(node) == SAME
    assert renew_gres_map(node.config, ask=False) == ""


@pytest.mark.parametrize("in_words", [True, False])
def test_the_same_list_goes_on_whenever_slurmd_started(node: SlurmNode, in_words: bool) -> None:
    """In other words; or where only NVML could tell it, and gres.conf says the same."""
    if in_words:
        gres = node.conf.with_name("gres.conf")
        gres.write_text("".join(f"Name=gpu File={node.device(n)}\n" for n in range(8)))
    else:
        edit(node, "# a comment\n")
        node.list_gpus()

    renew_gres_map(node.config, ask=not in_words)

    assert positions(node) == SAME


def swap(node: SlurmNode) -> None:
    """Let gres.conf, and so `slurmd -G`, name two cards the other way round."""
    gres = node.conf.with_name("gres.conf")
    gres.write_text(f"Name=gpu File={node.device('[1,0]')}\n")
    node.list_gpus(f"Type=(null) Count=2 Index=0 ID=7 File={node.device('[1,0]')}")


def test_another_list_counts_once_slurmd_started_after_slurm_conf_changed(
    node: SlurmNode, monkeypatch: pytest.MonkeyPatch
) -> None:
    node.list_gpus(f"Type=(null) Count=2 Index=0 ID=7 File={node.device('[1,0]')}")
    before = node.conf.with_name("gres.conf").stat().st_ctime
    while node.conf.stat().st_ctime <= before:
        os.utime(node.conf)
    started(monkeypatch, (before + node.conf.stat().st_ctime) / 2)
    with pytest.raises(InstallError, match="restart slurmd; or scontrol reconfigure"):
        renew_gres_map(node.config, ask=True)
    assert "\n0=0\n1=1\n" in node.map.read_text()
    started(monkeypatch, node.conf.stat().st_ctime + 1)

    renew_gres_map(node.config, ask=True)

    assert positions(node) == {"0": "1", "1": "0"}


@pytest.mark.parametrize("spoil", [SlurmNode.list_gpus, never_ask])
def test_a_slurmd_that_lists_nothing_makes_no_empty_map(
    node: SlurmNode, monkeypatch: pytest.MonkeyPatch, spoil: Callable[[SlurmNode], None]
) -> None:
    started(monkeypatch, NEW)
    before = node.map.read_text()
    edit(node, "Name=gpu File=/dev/nvidia8\n")
    spoil(node)

    with pytest.raises(InstallError):
        renew_gres_map(node.config, ask=False)

    assert node.map.read_text() == before


def test_parts_of_gpus_are_kept_and_noticed(
    node: SlurmNode, monkeypatch: pytest.MonkeyPatch
) -> None:
    started(monkeypatch, NEW)
    node.give_shards()
    renew_gres_map(node.config, ask=True)
    assert read_shared_gres(str(node.map.parent)) == ("shard",)
    edit(node, "# a comment\n")
    renew_gres_map(node.config, ask=False)
    assert read_shared_gres(str(node.map.parent)) == ("shard",)


def test_the_program_says_one_line(node: SlurmNode, capsys: pytest.CaptureFixture[str]) -> None:
    edit(node, "# a comment\n")
    assert renew_map.main([str(node.config)]) == renew_map.DONE
    swap(node)
    assert renew_map.main(["--ask", str(node.config)]) == renew_map.NOT_DONE
    node.map.unlink()
    assert renew_map.main([str(node.config)]) == renew_map.NOT_DONE
    lines = capsys.readouterr().out.splitlines()
    assert [line[:11] for line in lines] == ["8 positions", "slurmd has ", "slurm-map: "]
