# SPDX-License-Identifier: Apache-2.0
"""What Slurm learns of devices that are out: a drain of ours, taken back, and no other touched."""

from __future__ import annotations

from pathlib import Path

import pytest

from gpulock.daemon.reconcile.reconcile import ReconcileReport
from gpulock.daemon.slots import slurm
from gpulock.daemon.slots.slurm import (
    PREFIX,
    DrainAction,
    SlurmDrainSync,
    decide_drain_action,
    format_drain_reason,
    parse_slurm_node_state,
)
from gpulock.slurm.scontrol import SlurmctldClient
from gpulock.store import quarantine
from tests.support.journal import HeardJournal
from tests.support.trees import NAME, Box, bus

SCONTROL = """\
#!/bin/sh
cd {root}
test -e down && exit 1
read host < host; read names < aliases; read state < state; read reason < reason
case "$1 $2" in
"show aliases") test "$3" = "$host" && echo "$names"; true ;;
"show node") echo "NodeName=$4 State=$state Reason=$reason [root@2026-11-21T19:00:00] Comment=x" ;;
"update NodeName=n1")
    shift 2
    for word; do case "$word" in
    State=DRAIN) echo IDLE+DRAIN > state ;;
    State=UNDRAIN) echo IDLE > state; echo > reason ;;
    Reason=*) echo "${{word#Reason=}}" > reason ;;
    esac; done ;;
*) exit 1 ;;
esac
"""
BAD = {bus(1): "xid: XID 79"}
OURS = f"{PREFIX}{bus(1)}: xid: XID 79"


class Site:
    """A slurmctld of files, and the chore of a node."""

    def __init__(self, root: Path, **keys: str) -> None:
        self.root = root
        (root / "scontrol").write_text(SCONTROL.format(root=root))
        (root / "scontrol").chmod(0o755)
        known = {
            "SLURM_BINARIES": str(root),
            "SLURM_ON_UNHEALTHY": "drain",
            "SLURM_CONF": "/x",
            **keys,
        }
        self.box = Box(root / "box", 4, **known)
        (self.box.state / quarantine.FOLDER).mkdir()
        self.journal = HeardJournal()
        self.now = 0.0
        self.start()
        self.put("aliases", "n1")
        self.put("host", NAME)
        self.node("IDLE")

    def start(self) -> None:
        """Restart gpulockd."""
        self.chore = SlurmDrainSync(self.journal)

    def put(self, name: str, text: str) -> None:
        (self.root / name).write_text(f"{text}\n")

    def node(self, state: str, reason: str = "") -> None:
        """Let slurmctld have the node so."""
        self.put("state", state)
        self.put("reason", reason)

    def shown(self) -> tuple[str, str]:
        """Return what slurmctld has of the node."""
        state, reason = ((self.root / name).read_text().strip() for name in ("state", "reason"))
        return state, reason

    def out(self, number: int) -> None:
        args = (str(self.box.state), quarantine.QUARANTINE, bus(number))
        quarantine.write_device_note(*args, "gpulock", "xid: XID 79")

    def back(self, number: int) -> None:
        quarantine.remove_device_note(str(self.box.state), quarantine.QUARANTINE, bus(number))

    def round(self) -> None:
        """Let one round be asked for and answered."""
        for _ in range(2):
            self.now += slurm.EVERY
            node = self.box.node()
            report = ReconcileReport([], [])
            report.devices = node.devices()
            self.chore.run(node, report, self.now)
            asking = self.chore.asking
            assert asking is None or asking.wait(20.0)

    def said(self) -> list[str]:
        return self.journal.said()


@pytest.fixture
def site(tmp_path: Path) -> Site:
    return Site(tmp_path)


def test_a_node_is_drained_with_the_reason_and_resumed_when_all_is_well(site: Site) -> None:
    site.out(1)
    site.round()
    assert site.shown() == ("IDLE+DRAIN", OURS)
    site.round()
    site.back(1)
    site.round()
    assert site.shown() == ("IDLE", "")
    assert [line for line in site.said() if "updated Slurm" in line] == [
        f"<5>updated Slurm: State=DRAIN Reason={OURS}",
        "<5>updated Slurm: State=UNDRAIN",
    ]


def test_a_node_drained_before_a_restart_is_resumed_once_slurmctld_answers(site: Site) -> None:
    site.out(1)
    site.round()
    site.back(1)
    site.start()
    (site.root / "scontrol").rename(site.root / "away")
    site.round()
    assert site.shown() == ("IDLE+DRAIN", OURS)
    (site.root / "away").rename(site.root / "scontrol")
    site.round()
    assert site.shown() == ("IDLE", "")


def test_by_default_slurm_is_asked_and_told_nothing(tmp_path: Path) -> None:
    quiet = Site(tmp_path, SLURM_ON_UNHEALTHY="log")
    (tmp_path / "scontrol").unlink()
    quiet.out(1)
    quiet.round()
    assert (quiet.chore.asking, quiet.said()) == (None, [])


def test_a_node_that_was_resumed_by_hand_is_left_alone_until_one_more_is_out(site: Site) -> None:
    site.out(1)
    site.round()
    site.node("IDLE")
    site.round()
    assert site.shown() == ("IDLE", "")
    site.out(0)
    site.round()
    assert site.shown()[0] == "IDLE+DRAIN"
    assert site.shown()[1].endswith("and 1 more")


@pytest.mark.parametrize("restarted", [False, True])
def test_when_the_key_is_changed_our_drain_is_taken_back(site: Site, restarted: bool) -> None:
    site.out(1)
    site.round()
    site.box.settings["SLURM_ON_UNHEALTHY"] = "log"
    if restarted:
        (site.box.state / "slurm-map").write_text("")  # gpulock is installed for Slurm here
        site.start()
    site.round()
    assert site.shown() == ("IDLE", "")


def test_a_slurmctld_that_is_down_is_told_once_and_asked_again(site: Site) -> None:
    site.put("down", "")
    site.out(1)
    site.round()
    site.round()
    assert len(site.said()) == 1
    (site.root / "down").unlink()
    site.round()
    assert site.shown()[0] == "IDLE+DRAIN"


def test_slurm_may_know_the_machine_by_its_short_name(site: Site) -> None:
    control = SlurmctldClient(site.box.node().settings)
    assert slurm.find_slurm_node_name(control, f"{NAME}.cluster.example") == "n1"


@pytest.mark.parametrize("names", ["", "n1 n2"])
def test_a_machine_that_is_not_one_node_of_slurms_is_not_drained(site: Site, names: str) -> None:
    site.put("aliases", names)
    site.out(1)
    site.round()
    assert site.shown() == ("IDLE", "")
    (line,) = site.said()
    assert f"{NAME} is {names or 'no node'} to Slurm" in line


def test_a_card_that_is_not_there_counts(site: Site) -> None:
    site.box.settings["EXPECTED_GPUS"] = "5"
    site.round()
    assert site.shown() == ("IDLE+DRAIN", f"{PREFIX}missing: 1 of 5 GPUs are not there")


def test_a_card_that_is_out_and_fell_off_the_bus_counts_once(site: Site) -> None:
    site.box.settings["EXPECTED_GPUS"] = "5"
    site.out(4)
    site.round()
    assert site.shown() == ("IDLE+DRAIN", f"{PREFIX}{bus(4)}: xid: XID 79")


def test_while_the_driver_is_away_nothing_is_taken_back(site: Site) -> None:
    site.out(1)
    site.round()
    site.back(1)
    before = site.chore.asking
    for _ in range(3):
        site.now += slurm.EVERY
        site.chore.run(site.box.node(), ReconcileReport([], []), site.now)
    assert site.chore.asking is before
    assert site.shown()[0] == "IDLE+DRAIN"


@pytest.mark.parametrize(
    ("state", "reason", "bad", "noted", "due"),
    [
        ("IDLE", "", {}, "", DrainAction((), "")),
        ("DOWN*+DRAIN", OURS, {}, bus(1), DrainAction(("State=UNDRAIN",), "")),
        ("DOWN", OURS, {}, bus(1), DrainAction((), "")),
        ("MIXED+DRAIN", OURS, BAD, "", DrainAction((), bus(1))),
        ("IDLE", "", BAD, "", DrainAction(("State=DRAIN", f"Reason={OURS}"), bus(1))),
        ("DRAIN", "x", BAD, bus(1), DrainAction((), bus(1))),
        ("MIXED+DRAIN", "new cooling", {}, "", DrainAction((), "")),
    ],
)
def test_each_state_of_a_node_has_its_act(
    state: str, reason: str, bad: dict[str, str], noted: str, due: DrainAction
) -> None:
    assert decide_drain_action(state, reason, bad, noted) == due


def test_a_reason_is_one_short_line_without_quotes() -> None:
    reason = format_drain_reason({bus(1): 'a "b"\n' + "c" * 500, bus(2): "d"})
    assert reason.startswith(f"{PREFIX}{bus(1)}: a 'b'?ccc") and reason.endswith(", and 1 more")
    assert len(reason) == slurm.LENGTH


def test_state_and_reason_are_read_from_what_scontrol_shows() -> None:
    line = "NodeName=n1 State=MIXED+DRAIN ThreadsPerCore=1 Reason=a b [c] d [root@2026] Comment=x\n"
    assert parse_slurm_node_state(line) == ("MIXED+DRAIN", "a b [c] d")
    assert parse_slurm_node_state("NodeName=n1 State=IDLE X=1\n") == ("IDLE", "")
