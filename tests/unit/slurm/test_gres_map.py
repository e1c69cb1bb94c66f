# SPDX-License-Identifier: Apache-2.0
"""Slurm's position, the minor and the index are three numbers: the map joins them, or refuses."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from gpulock.errors import BROKEN, UNKNOWN, Refusal
from gpulock.slurm import gres_map
from tests.support.faults import refusal
from tests.support.slurm_site import Site
from tests.support.trees import bus

UNTOLD = "GPU-????????-????-????-????-????????????"


def at(site: Site, *entries: str) -> list[str]:
    """Return the ids of the devices at Slurm's positions."""
    found = gres_map.resolve_gres_devices(str(site.state), list(entries), site.node().devices())
    return [device.id for device in found]


def broken(site: Site, *entries: str) -> Refusal:
    found = refusal(lambda: at(site, *entries))
    assert found.kind == BROKEN
    return found


def test_a_uuid_needs_no_map(site: Site) -> None:
    (site.state / "slurm-map").unlink()
    assert at(site, "GPU-00000002-aaaa", "GPU-00000000-aaaa") == [bus(2), bus(0)]


@pytest.mark.parametrize("entry", ["GPU-9", "MIG-9", "GPU-", UNTOLD])
def test_a_uuid_that_nothing_tells_is_nobodys_and_breaks_no_node(site: Site, entry: str) -> None:
    site.gpu(bus(0), 0, UNTOLD)
    found = refusal(lambda: at(site, entry))
    assert (found.kind, entry in found.why, "exporter" in found.do) == (UNKNOWN, True, True)


def test_positions_and_uuids_may_stand_together(site: Site) -> None:
    assert at(site, "3", "GPU-00000000-aaaa") == [bus(3), bus(0)]


def test_a_map_that_cannot_be_believed_is_a_broken_node(site: Site) -> None:
    assert at(site, "0") == [bus(0)]
    path = site.state / "slurm-map"
    whole = path.read_text()
    for text in (whole.replace("map 1", "map 2"), "", f"{whole}\0\n", f"{whole}0=3\n"):
        path.write_text(text)
        assert "gpulock install slurm" in broken(site, "0").do
    path.unlink()
    assert "gpulock install slurm" in broken(site, "0").do


@pytest.mark.parametrize("entry", ["4", "10", "999"])
def test_a_position_beyond_the_map_breaks_no_node(site: Site, entry: str) -> None:
    found = refusal(lambda: at(site, "0", entry))
    assert (found.kind, f"position {entry}" in found.why) == (UNKNOWN, True)


def compared_map(site: Site) -> Path:
    """Have a map that was compared with a gres.conf of two cards; return that file."""
    conf = site.root / "gres.conf"
    conf.write_text("Name=gpu File=/dev/nvidia[0-1]\n")
    site.map("0", "1", gres_conf=str(conf))
    assert at(site, "1") == [bus(1)]
    return conf


def unknown(site: Site, *entries: str) -> Refusal:
    found = refusal(lambda: at(site, *entries))
    assert (found.kind, "changed" in found.why, "gpulockd" in found.do) == (UNKNOWN, True, True)
    return found


@pytest.mark.parametrize("text", ["Name=gpu File=/dev/nvidia[1,0]\n", "# of another node\n"])
def test_a_gres_conf_that_nobody_has_compared_yet_breaks_no_node(site: Site, text: str) -> None:
    conf = compared_map(site)
    with conf.open("a") as file:
        file.write(text)
    unknown(site, "1")
    site.map("0", "1", gres_conf=str(conf))
    assert at(site, "1") == [bus(1)]


def test_a_gres_conf_of_the_same_size_and_time_is_another_version(site: Site) -> None:
    conf = compared_map(site)
    times = (conf.stat().st_atime_ns, conf.stat().st_mtime_ns)
    other = conf.with_name("other")
    other.write_text("Name=gpu File=/dev/nvidia[1-0]\n")
    os.utime(other, ns=times)
    other.rename(conf)
    unknown(site, "1")


def test_a_gres_conf_that_is_gone_breaks_no_node(site: Site) -> None:
    compared_map(site).unlink()
    unknown(site, "1")


def test_a_card_that_the_driver_excludes_is_a_broken_node(site: Site) -> None:
    site.gpu(bus(1), 1, **{"GPU Excluded": "Yes"})
    assert "excludes" in broken(site, "1").why
    assert at(site, "0", "2") == [bus(0), bus(2)]


def test_a_card_whose_file_is_garbage_is_a_broken_node(site: Site) -> None:
    (site.driver / "gpus" / bus(1) / "information").write_text("garbage")
    broken(site, "1")
    assert refusal(lambda: at(site, "GPU-00000001-aaaa")).kind == UNKNOWN


@pytest.mark.parametrize("place", ["0.gi7.ci0", "1.gi1.ci0", "0.gi1"])
def test_an_instance_that_nothing_tells_breaks_no_node_and_a_whole_card_in_mig_mode_does(
    site: Site, place: str
) -> None:
    site.mig()
    site.map("0", place)
    broken(site, "0")
    assert refusal(lambda: at(site, "1")).kind == UNKNOWN


def test_without_a_map_no_gres_is_known_to_give_out_parts_of_a_card(site: Site) -> None:
    assert gres_map.read_shared_gres(str(site.root / "nowhere")) == ()
