# SPDX-License-Identifier: Apache-2.0
"""`gpulock install slurm` on a recorded Slurm: shown, made once, nothing of the cluster's."""

from __future__ import annotations

import re
import sys
from pathlib import Path

import pytest

from gpulock.errors import Refusal
from gpulock.install.files import InstallError
from gpulock.install.items import Wanted, run_items
from gpulock.install.slurm import site
from gpulock.install.slurm.site import Slurmd
from gpulock.slurm.gres_map import read_gres_map, read_shared_gres
from tests.support.install_site import ignore, tree
from tests.support.slurm_node import SlurmNode, told

pytestmark = pytest.mark.slow


def test_what_is_installed_is_there_and_a_second_run_has_nothing_to_do(node: SlurmNode) -> None:
    node.install()

    gres = node.conf.with_name("gres.conf")
    positions = "".join(f"{number}={number}\n" for number in range(8))
    text = node.map.read_text()
    assert text.startswith(f"gpulock-slurm-map 1\ngres_conf={gres}\ngres_version=")
    assert text.endswith(positions)
    assert node.map.stat().st_mode & 0o777 == 0o644
    assert len(read_gres_map(str(node.map.parent))) == 8
    assert node.paths.slurm_task.is_file()
    settings = node.config.read_text()
    assert f"SLURM_BINARIES={node.root}/slurm/bin\n" in settings
    assert f"SLURM_CONF={node.conf}\n" in settings
    assert node.differences() == []


def test_a_slurm_older_than_any_that_was_tried_is_refused(node: SlurmNode) -> None:
    (node.state / "release").write_text("21.08.8-2\n")
    before = tree(node.root)

    with pytest.raises(InstallError, match=r"this Slurm is 21\.08.* on 22\.05 and newer: nothing"):
        node.install()

    assert tree(node.root) == before


def test_a_file_with_a_key_that_is_not_known_is_corrected_before_an_installation(
    node: SlurmNode,
) -> None:
    node.install()
    node.config.write_text(f"{node.config.read_text()}GUPS=8\n")
    with pytest.raises(InstallError, match="unknown key 'GUPS'; correct the file"):
        node.install()


def test_no_hook_goes_by_a_map_whose_gres_conf_changed_while_it_is_installed(
    node: SlurmNode,
) -> None:
    parts = node.parts()
    node.conf.with_name("gres.conf").write_text("# another\n")

    run_items(parts.items, Wanted.PRESENT, node.root / "node/state", ignore)

    with pytest.raises(Refusal, match="changed, and nobody has compared"):
        read_gres_map(str(node.map.parent))


def test_a_linked_gres_conf_is_named_as_slurmd_names_it(node: SlurmNode) -> None:
    gres = node.conf.with_name("gres.conf")
    gres.rename(node.root / "shared-gres.conf")
    gres.symlink_to(node.root / "shared-gres.conf")

    node.install()

    assert f"\ngres_conf={gres}\n" in node.map.read_text()
    gres.unlink()
    gres.symlink_to(node.conf)
    with pytest.raises(Refusal, match="changed"):
        read_gres_map(str(node.map.parent))


@pytest.mark.parametrize("gres", ["gpu:8", "gpu:h200:8(S:0-1)", "shard:16,gpu:h200:8"])
def test_no_map_without_a_position_is_made_where_slurmctld_gives_out_gpus(
    node: SlurmNode, gres: str
) -> None:
    """The next job drained the node: slurmd listed none, for it was asked without its libraries."""
    node.list_gpus()
    shown = node.state / "node"
    shown.write_text(shown.read_text().replace("Gres=gpu:8", f"Gres={gres}"))

    with pytest.raises(InstallError, match=r"gives node1 gpu:(h200:)?8, and slurmd -G lists none"):
        node.parts()


def test_of_positions_that_are_only_counted_an_empty_list_is_told(node: SlurmNode) -> None:
    node.set(SLURM_DEVICE_SELECTION="gpulock")
    node.list_gpus()

    assert "gives node1 gpu:8, and slurmd -G lists none" in told(node)


def test_slurmd_is_asked_with_the_libraries_of_the_one_that_runs(
    node: SlurmNode, monkeypatch: pytest.MonkeyPatch
) -> None:
    program = node.root / "slurm/sbin/slurmd"
    started = Slurmd(1, program, str(node.conf), libraries="/opt/driver/lib")
    monkeypatch.setattr(site, "find_slurmds", lambda: [started])
    real = node.root / "slurm/sbin/slurmd-real"
    program.rename(real)
    wanted = '[ "$1" != -G ] || [ "$LD_LIBRARY_PATH" = /opt/driver/lib ]'
    program.write_text(f'#!/bin/sh\n{wanted} || exit 9\nexec {sys.executable} -IS {real} "$@"\n')
    program.chmod(0o755)

    node.install()

    assert node.map.read_text().endswith("\n7=7\n")


def test_a_node_without_gpus_gets_an_empty_map_and_is_told(node: SlurmNode) -> None:
    node.count_none()

    assert "no gres/gpu with File= on this node" in told(node)
    node.install()

    assert read_gres_map(str(node.map.parent)) == {}


def test_several_slurmds_of_one_machine_are_refused_with_what_they_go_by(
    node: SlurmNode, monkeypatch: pytest.MonkeyPatch
) -> None:
    slurmds = [Slurmd(1, node.root / "slurm/sbin/slurmd", str(node.conf), n) for n in ("n1", "n2")]
    monkeypatch.setattr(site, "find_slurmds", lambda: slurmds)

    with pytest.raises(InstallError, match=r"\(n1 of .*slurm.conf, n2 of .*\); set SLURM_CONF"):
        node.parts()
    node.map.touch()  # of an installation before
    assert "cannot be found out: several slurmds" in node.uninstall().clauses()[0]
    assert node.uninstall(force=True).clauses() == []


def test_parts_of_gpus_stop_the_installation_until_the_site_says_what_becomes_of_their_jobs(
    node: SlurmNode,
) -> None:
    node.install()
    node.give_shards()

    with pytest.raises(InstallError, match=r"parts of GPUs here \(gres/shard\).*SLURM_SHARDS="):
        node.parts()

    node.set(SLURM_SHARDS="refuse")
    node.install()
    assert "\nshared=shard\n" in node.map.read_text()
    assert node.differences() == []


def test_a_card_that_gres_conf_names_and_the_driver_lacks_stops_the_installation(
    node: SlurmNode,
) -> None:
    Path(node.device(9)).touch()
    node.list_gpus(f"Type=(null) Count=1 Index=9 ID=7 File={node.device(9)}")

    with pytest.raises(InstallError, match="the driver shows no GPU with this minor"):
        node.parts()

    node.set(SLURM_DEVICE_SELECTION="gpulock")
    assert "no map of Slurm's positions" in told(node)

    first = min(node.root.glob("node/proc/driver/nvidia/gpus/*/information"))
    first.write_text(re.sub(r"(?m)^Model:.*$", "Model: NVIDIA H200", first.read_text()))
    with pytest.raises(InstallError, match="the driver shows no GPU with this minor"):
        node.parts()


def test_a_map_without_positions_names_the_parts_of_gpus_all_the_same(node: SlurmNode) -> None:
    """The Prolog asks slurmctld for such a job only where the map names them."""
    Path(node.device(9)).touch()
    node.list_gpus(f"Type=(null) Count=1 Index=9 ID=7 File={node.device(9)}")
    node.give_shards()
    node.set(SLURM_DEVICE_SELECTION="gpulock", SLURM_SHARDS="refuse")
    node.install()
    assert read_shared_gres(str(node.map.parent)) == ("shard",)
    assert read_gres_map(str(node.map.parent)) == {}
    assert node.differences() == []
