# SPDX-License-Identifier: Apache-2.0
"""Ids of an RSMAP leave while their cards are out of service, come back, and nothing else moves."""

from __future__ import annotations

from pathlib import Path

import pytest

from gpulock.daemon.reconcile.reconcile import ReconcileReport
from gpulock.daemon.slots import rsmap
from gpulock.daemon.slots.rsmap import (
    RsmapSync,
    next_rsmap,
    parse_complex_values,
    parse_rsmap,
    split_sge_elements,
)
from gpulock.sge import card_map
from gpulock.store import quarantine
from tests.support.journal import HeardJournal
from tests.support.scripts import write_script
from tests.support.trees import Box, bus

THEIRS = "slots=16,gpu=2(gpu0[devices=/dev/nvidia0:rw,mem=4G] gpu1[devices=/dev/x]),mem=4G"
NAMED = "4(GPU1 GPU2 GPU3 GPU4)"
# Like the real one: -mattr sets one element, and refuses a count without its ids. `-rattr` of the
# line would drop what we do not parse, such as properties of ids.
QCONF = """\
cd {root}
echo "$@" >> asked
case "$1" in
-se)
    test -e down && exit 1
    echo "hostname $2"; echo "complex_values {theirs},card=$(cat card)" ;;
-mattr) test -e deaf && exit 1; test -e vain || printf %s "${{4#card=}}" > card ;;
esac
"""


class Site:
    """A node whose ids are mapped, its gpulockd's chore, and a qmaster of files."""

    def __init__(self, root: Path, value: str = NAMED, host: str = "node1") -> None:
        self.root = root
        write_script(root / "qconf", QCONF.format(root=root, theirs=THEIRS))
        (root / "card").write_text(value)
        self.box = Box(root / "box", 4, SGE_ROOT="/opt/ocs", SGE_BINARIES=str(root))
        self.box.state.mkdir(exist_ok=True)
        names = [*parse_rsmap(value)]
        cards = {("card", one): bus(n) for n, one in enumerate(names)}
        (self.box.state / card_map.MAP_NAME).write_text(card_map.format_card_map(host, cards))
        self.journal = HeardJournal()
        self.chore = RsmapSync(self.journal)
        self.now = 0.0

    def value(self) -> str:
        return (self.root / "card").read_text()

    def set(self, value: str) -> None:
        (self.root / "card").write_text(value)

    def out(self, *cards: int) -> None:
        """Have just these cards in quarantine."""
        state, kind = str(self.box.state), quarantine.QUARANTINE
        (self.box.state / quarantine.FOLDER).mkdir(exist_ok=True)
        for device in quarantine.list_noted_devices(state, kind):
            quarantine.remove_device_note(state, kind, device)
        for card in cards:
            quarantine.write_device_note(state, kind, bus(card), "me", "XID 79")

    def round(self) -> None:
        """Let one round be asked for and answered."""
        for _ in range(2):
            self.now += rsmap.EVERY
            self.chore.run(self.box.node(), ReconcileReport([], []), self.now)
            asking = self.chore.asking
            assert asking is None or asking.wait(20.0)
        self.chore.run(self.box.node(), ReconcileReport([], []), self.now)

    def notes(self) -> dict[str, dict[str, str]]:
        return rsmap.load_withdrawn_ids(str(self.box.state))

    def asked(self) -> list[str]:
        asked = self.root / "asked"
        lines = asked.read_text().splitlines() if asked.exists() else []
        return [line for line in lines if "-mattr" in line]


@pytest.fixture
def site(tmp_path: Path) -> Site:
    return Site(tmp_path)


@pytest.mark.parametrize(
    ("value", "ids"),
    [
        (NAMED, ["GPU1", "GPU2", "GPU3", "GPU4"]),
        ("4(0-3)", ["0", "1", "2", "3"]),
        ("3(0-1 7)", ["0", "1", "7"]),
        ("2(gpu0[devices=/dev/nvidia0:rw,mem=4G] gpu1[a=b])", ["gpu0", "gpu1"]),
        ("0", []),
    ],
)
def test_the_ids_are_read_as_qconf_shows_them(value: str, ids: list[str]) -> None:
    assert [*parse_rsmap(value)] == ids
    assert parse_rsmap(rsmap.format_rsmap(parse_rsmap(value))).keys() == {*ids}
    assert next_rsmap(value, {}, ["GPU9"]) == (value, {}), "what is right is not written anew"


@pytest.mark.parametrize("value", ["", "4", "NONE", "3(0 1)", "1(0 1)", "4.5", "2(0-1) x"])
def test_a_value_that_is_no_list_of_single_ids_is_refused(value: str) -> None:
    """`3(0 0 1)` is shown as `3(0 1)`: which id is there twice, nobody can tell."""
    with pytest.raises(ValueError):
        parse_rsmap(value)


def test_commas_in_parentheses_part_no_elements() -> None:
    assert [one.partition("=")[0] for one in split_sge_elements(THEIRS)] == ["slots", "gpu", "mem"]
    shown = f"complex_values        {THEIRS}, \\\n                      card=4(0-3)\n"
    assert parse_complex_values(shown)["card"] == "4(0-3)"
    assert parse_complex_values(shown)["gpu"].endswith("gpu1[devices=/dev/x])")


def test_while_all_is_well_nothing_is_changed(site: Site) -> None:
    site.round()
    assert (site.value(), site.notes(), site.asked()) == (NAMED, {}, [])
    assert not (site.root / "asked").exists(), "of a thousand nodes none asks qmaster"


@pytest.mark.parametrize(
    ("value", "out", "left", "back"),
    [
        (NAMED, (1, 3), "2(GPU1 GPU3)", NAMED),
        ("4(8-11)", (1,), "3(8 10 11)", "4(8 9 10 11)"),
        ("2(a[m=4G,n=1] b[x=y])", (0,), "1(b[x=y])", "2(a[m=4G,n=1] b[x=y])"),
    ],
)
def test_an_id_leaves_with_its_card_and_comes_back_as_it_was(
    tmp_path: Path, value: str, out: tuple[int, ...], left: str, back: str
) -> None:
    site = Site(tmp_path, value)
    site.out(*out)
    site.round()
    assert site.value() == left
    assert len(site.notes()["card"]) == len(out)
    site.out()
    site.round()
    assert (site.value(), site.notes()) == (back, {})


def test_what_an_administrator_changes_meanwhile_stays(tmp_path: Path) -> None:
    site = Site(tmp_path, "2(a[devices=/dev/nvidia0:rw,mem=4G] b[x=y])")
    site.out(0)
    site.round()
    site.set("2(b[x=z] c)")
    site.out()
    site.round()
    assert site.value() == "3(a[devices=/dev/nvidia0:rw,mem=4G] b[x=z] c)"


def test_what_others_took_out_stays_out(site: Site) -> None:
    site.out(1)
    site.round()
    site.set("1(GPU1)")
    site.out()
    site.round()
    assert (site.value(), site.notes()) == ("2(GPU1 GPU2)", {})


@pytest.mark.parametrize(
    ("fault", "told"),
    [
        ("down", "ids at qmaster are not updated: qconf -se node1 ended with"),
        ("deaf", "card of node1: qconf -mattr exechost complex_values"),
        ("vain", "not 3(GPU1 GPU3 GPU4) as was set"),  # another has changed the host meanwhile
    ],
)
def test_where_qmaster_does_not_take_it_that_is_told_once_and_no_id_is_forgotten(
    site: Site, fault: str, told: str
) -> None:
    (site.root / fault).touch()
    site.out(1)
    site.round()
    site.round()
    (line,) = site.journal.said()
    assert told in line
    assert site.value() == NAMED
    (site.root / fault).unlink()
    site.round()
    assert site.value() == "3(GPU1 GPU3 GPU4)"
    (site.root / fault).touch()
    site.out()
    site.round()
    (site.root / fault).unlink()
    site.chore = RsmapSync(site.journal)
    site.round()
    assert (site.value(), site.notes()) == (NAMED, {})


def test_a_kill_after_the_note_or_after_the_change_is_made_good(site: Site) -> None:
    noted = {"card": {"GPU2": "GPU2"}}
    rsmap.save_withdrawn_ids(str(site.box.state), noted)
    site.round()  # noted, never taken out, and good again
    assert (site.value(), site.notes()) == (NAMED, {})
    site.set("3(GPU1 GPU3 GPU4)")
    rsmap.save_withdrawn_ids(str(site.box.state), noted)
    site.round()  # put back as noted
    assert (site.value(), site.notes()) == (NAMED, {})


def test_a_reserved_and_a_missing_card_leave_as_well(site: Site) -> None:
    (site.box.state / quarantine.FOLDER).mkdir()
    quarantine.write_device_note(
        str(site.box.state), quarantine.RESERVE, bus(0), "me", "driver test"
    )
    text = (site.box.state / card_map.MAP_NAME).read_text()
    (site.box.state / card_map.MAP_NAME).write_text(text.replace(bus(3), "0000:ff:00.0"))
    site.round()
    assert site.value() == "2(GPU2 GPU3)"


def test_without_a_map_nobody_is_asked(site: Site) -> None:
    (site.box.state / card_map.MAP_NAME).unlink()
    site.out(1)
    site.round()
    assert not (site.root / "asked").exists()
