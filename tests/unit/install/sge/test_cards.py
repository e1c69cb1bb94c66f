# SPDX-License-Identifier: Apache-2.0
"""The map of ids is the administrator's word: whole, of GPUs that are there, and kept as it is."""

from __future__ import annotations

from pathlib import Path

import pytest

from gpulock.daemon.slots.rsmap import (
    load_withdrawn_ids,
    save_withdrawn_ids,
)
from gpulock.install.files import InstallError
from gpulock.install.items import Wanted
from gpulock.install.sge.cards import (
    CardMap,
    mapped_cards,
)
from gpulock.node.settings import Settings
from gpulock.sge.card_map import MAP_NAME, format_card_map, read_card_map
from tests.support.faults import raising
from tests.support.install_site import Site, make_site
from tests.support.trees import Box, bus

VALUE = "2(GPU1 GPU2)"


@pytest.fixture
def settings(tmp_path: Path) -> Settings:
    """Return the settings of a node with four GPUs."""
    box = Box(tmp_path, 4)
    box.state.mkdir(exist_ok=True)
    return Settings(box.settings)


def text(settings: Settings, option: str = "", value: str = VALUE) -> str:
    return format_card_map("node1", mapped_cards(settings, "card", value, option))


@pytest.mark.parametrize("option", ["GPU1=0,GPU2=1", f"GPU1={bus(0)}, GPU2={bus(1)}"])
def test_a_gpu_is_named_by_index_or_address(settings: Settings, option: str) -> None:
    expected = {("card", "GPU1"): bus(0), ("card", "GPU2"): bus(1)}
    assert text(settings, option) == format_card_map("node1", expected)


@pytest.mark.parametrize(
    ("option", "value", "why"),
    [
        ("", VALUE, "say which GPU"),  # never by the order of the ids
        ("GPU1=0", VALUE, "GPU2"),  # an id without a GPU
        ("GPU1=0,GPU2=0", VALUE, "two ids"),
        ("GPU1=0,GPU2=9", VALUE, "no GPU 9"),
        *((wrong, VALUE, "once") for wrong in ("GPU1=0,GPU1=1", "GPU1", "GPU1=,GPU2=1")),
        *(("GPU1=0,GPU2=1", not_single, "the ids of card") for not_single in ("", "4", "3(A B)")),
    ],
)
def test_a_map_that_is_not_whole_is_refused(
    settings: Settings, option: str, value: str, why: str
) -> None:
    with pytest.raises(InstallError, match=why):
        text(settings, option, value)


def test_a_map_that_is_there_stays(settings: Settings) -> None:
    """While an id is withdrawn, and while its GPU is gone."""
    old = {("card", "GPU1"): bus(0), ("card", "GPU2"): "0000:ff:00.0"}
    Path(settings.state_dir, MAP_NAME).write_text(format_card_map("node1", old))
    Path(settings.state_dir, MAP_NAME).write_text(text(settings, value="1(GPU1)"))
    assert read_card_map(settings.state_dir) == ("node1", {k: old[k] for k in sorted(old, key=str)})
    with pytest.raises(InstallError, match="GPU3"):
        text(settings, value="2(GPU1 GPU3)")


@pytest.mark.slow
def test_the_installer_writes_the_map_and_leaves_complex_values_as_they_are(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    site: Site = make_site(tmp_path / "root", monkeypatch)
    theirs = "card=2(GPU1 GPU2),gpux=2(a[devices=/dev/x:rw,mem=4G] b)"
    site.edit("sc", "#name", "card card RSMAP <= YES YES NONE 0\n#name")
    line = next(one for one in site.show("se").splitlines() if one.startswith("complex_values"))
    site.edit("se", line, f"complex_values        {theirs}")
    site.config.write_text(f"{site.config.read_text()}SGE_COMPLEXES=card\n")
    with pytest.raises(InstallError, match="GPU1=0,GPU2=1"):
        site.parts()
    site.install_cluster()
    site.install(map_option="GPU1=1,GPU2=0")
    (state,) = site.root.glob(f"**/{MAP_NAME}")
    _, cards = read_card_map(str(state.parent))
    assert [*cards] == [("card", "GPU1"), ("card", "GPU2")]
    assert len({*cards.values()}) == len(cards)
    assert theirs in site.show("se")
    base = "2(GPU1 GPU2)"
    save_withdrawn_ids(str(state.parent), {"card": {"GPU2": "GPU2"}})
    site.edit("se", f"card={base}", "card=1(GPU1)")

    assert site.uninstall().remainders == []

    assert theirs in site.show("se")
    assert load_withdrawn_ids(str(state.parent)) == {}


def test_an_id_that_cannot_be_put_back_keeps_the_map(tmp_path: Path) -> None:
    noted = {"card": {"GPU2": "GPU2"}}
    save_withdrawn_ids(str(tmp_path), noted)

    mark = CardMap(str(tmp_path), "", "node1", raising(InstallError("no qmaster")))
    mark.path.touch()

    with pytest.raises(InstallError, match="stay out: no qmaster"):
        mark.write(Wanted.ABSENT)

    assert (load_withdrawn_ids(str(tmp_path)), mark.path.exists()) == (noted, True)
