# SPDX-License-Identifier: Apache-2.0
"""Doctor says whether settings can do on this node what they are set to."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from gpulock.daemon.mps.unit import MpsPrograms
from gpulock.deadline import clock_boottime
from gpulock.install.doctor.check import FAULT, WARNING, Finding, run_checks
from gpulock.install.doctor.daemon import daemon_checks
from gpulock.install.doctor.node import check_mps, check_settings, node_checks
from gpulock.install.doctor.policies import policy_checks
from gpulock.install.systemd import manager
from gpulock.node import sample
from gpulock.node.settings_file import read_settings
from gpulock.store.checks import MOST_SILENT, CardChecks, write_card_checks
from gpulock.store.owner import encode_owner
from tests.support.faults import raising
from tests.support.trees import BOOT, Box, bus, record


@pytest.fixture
def box(tmp_path: Path) -> Box:
    (tmp_path / "run-exporter").mkdir()
    return Box(tmp_path)


def states(box: Box, clean: str) -> list[str]:
    box.settings["LEFTOVER_PROCESSES"] = clean
    return [one.state for one in findings(box) if one.name == "hand-over"]


def findings(box: Box) -> list[Finding]:
    return run_checks(policy_checks(box.node().settings)).findings


def tell(box: Box, text: str) -> None:
    head = f"{sample.SAMPLE_LINE}\nboot_id={BOOT}\nboottime={clock_boottime()}\n"
    (box.root / "run-exporter" / "sample").write_text(f"{head}device {bus(0)} {text}\n")


@pytest.mark.parametrize(("boot", "ago", "warned"), [(BOOT, 5, 0), (BOOT, 60, 1), ("x", 60, 0)])
def test_an_exporter_that_wrote_in_this_boot_and_writes_no_more_is_a_warning(
    box: Box, boot: str, ago: float, warned: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(manager, "RUNNING", box.root / "none")
    head = f"{sample.SAMPLE_LINE}\nboot_id={boot}\nboottime={clock_boottime() - ago}\n"
    (box.root / "run-exporter" / "sample").write_text(head)
    report = run_checks(daemon_checks(box.node().settings))
    found = [one for one in report.findings if one.name == "exporter"]
    assert [one.state for one in found] == [WARNING] * warned
    assert not warned or found[0].what == "down for 1m. Jobs are not affected"


@pytest.mark.parametrize("leftovers", ["off", "report", "kill"])
def test_leftovers_are_well_on_a_kernel_with_pidfds(box: Box, leftovers: str) -> None:
    assert states(box, leftovers) == []


@pytest.mark.parametrize("command", ["/bin/true", ""])
@pytest.mark.parametrize("count", [MOST_SILENT, MOST_SILENT + 1])
def test_a_health_command_that_tells_nothing_time_and_again_is_a_warning(
    box: Box, command: str, count: int
) -> None:
    card = CardChecks()
    card.unproven = (count, 1.0, "signal 9 ended it")
    box.lock.mkdir(exist_ok=True)
    write_card_checks(str(box.lock), {bus(0): card}, BOOT, 1.0)
    box.settings["HEALTH_COMMAND"] = command
    found = [one for one in findings(box) if "told nothing" in one.what]
    told = bool(command) and count > MOST_SILENT
    assert [one.state for one in found] == [WARNING] * told
    assert not told or found[0].what.startswith(f"{bus(0)}: HEALTH_COMMAND told nothing 3 times")


def test_where_the_kernel_has_no_pidfd_kill_is_a_fault(
    box: Box, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(os, "pidfd_open", raising(OSError(38, "Function not implemented")))
    assert states(box, "kill") == [FAULT]
    assert states(box, "report") == []


def test_a_value_that_no_hook_reads_is_a_fault_all_the_same(tmp_path: Path) -> None:
    path = tmp_path / "gpulock.conf"
    path.write_text("QUARANTINE_ON=hot\nWEB_CONFIG=/none/web.yml\n")
    assert [one.state for one in check_settings(read_settings(str(path)), path)] == [FAULT, FAULT]
    path.write_text("QUARANTINE_ON=xid\n")
    assert [*check_settings(read_settings(str(path)), path)] == []


def told_of(box: Box, name: str) -> list[tuple[str, str]]:
    found = run_checks(node_checks(box.node().settings)).findings
    return [(check.state, check.what) for check in found if check.name == name]


def shares_of(box: Box) -> list[tuple[str, str]]:
    return told_of(box, "SHARES")


def test_a_node_without_shares_is_not_told_of_any(box: Box) -> None:
    assert shares_of(box) == []


def test_places_of_no_card_are_told(box: Box) -> None:
    box.settings["SHARES"] = "0:4 9:2"
    (wrong,) = shares_of(box)
    assert wrong[0] == WARNING
    assert wrong[1].startswith("9:2 names no card here")


def test_a_place_that_an_earlier_setting_gave_waits(box: Box) -> None:
    (box.lock / "locks" / f"{bus(0)}.share1").mkdir(parents=True)
    held = record(devices=(f"{bus(0)}.share1",), places=4)
    (box.lock / "locks" / f"{bus(0)}.share1" / "owner").write_text(encode_owner(held))
    for words, waits in (("0:4", 0), ("0:2", 1), ("", 1)):
        box.settings["SHARES"] = words
        told = [what for state, what in shares_of(box) if state == WARNING]
        assert len(told) == waits
    assert told == [
        f"12 holds one of 4 places of {bus(0)}, SHARES says 0: that counts when it ends"
    ]


def test_places_of_one_claim_wait_in_one_line(box: Box) -> None:
    names = tuple(f"{bus(0)}.share{number}" for number in (1, 2, 3))
    for name in names:
        (box.lock / "locks" / name).mkdir(parents=True)
        held = encode_owner(record(devices=names, places=4))
        (box.lock / "locks" / name / "owner").write_text(held)
    box.settings["SHARES"] = "0:2"
    told = [what for state, what in shares_of(box) if state == WARNING]
    assert told == [f"12 holds 3 of 4 places of {bus(0)}, SHARES says 2: that counts when it ends"]


def test_users_who_share_a_card_that_is_one_users_now_wait(box: Box) -> None:
    for number, user in enumerate(("alice", "bob"), 1):
        name = f"{bus(0)}.share{number}"
        (box.lock / "locks" / name).mkdir(parents=True)
        held = record(devices=(name,), places=4, user=user, uid=1000 + number)
        (box.lock / "locks" / name / "owner").write_text(encode_owner(held))
    box.settings |= {"SHARES": "0:4", "SHARE_USERS": "many"}
    assert shares_of(box) == []
    box.settings["SHARE_USERS"] = "one"
    assert shares_of(box) == [
        (
            WARNING,
            f"alice and bob share {bus(0)}, SHARE_USERS says one: that counts when one is left",
        )
    ]


def test_a_share_of_a_card_that_is_in_mig_mode_now_waits(box: Box) -> None:
    name = f"{bus(0)}.share1"
    (box.lock / "locks" / name).mkdir(parents=True)
    held = record(devices=(name,), places=4)
    (box.lock / "locks" / name / "owner").write_text(encode_owner(held))
    box.settings["SHARES"] = "0:4"
    box.inventory(f"gpu.{bus(0)}.mig=1", f"mig.{bus(0)}.gi1.ci0.uuid=MIG-a")
    assert told_of(box, "MIG") == [
        (WARNING, f"12 holds {name}, which is in MIG mode now: that counts when it ends")
    ]
    assert "0:4 names no card here, or one in MIG mode" in shares_of(box)[0][1]


def test_claims_from_before_a_change_of_mig_mode_wait(box: Box) -> None:
    instance = f"{bus(0)}.gi1.ci0"
    for name in (instance, bus(1)):
        (box.lock / "locks" / name).mkdir(parents=True)
        (box.lock / "locks" / name / "owner").write_text(encode_owner(record(devices=(name,))))
    split = (f"gpu.{bus(0)}.mig=1", f"mig.{instance}.uuid=MIG-a")
    box.inventory(*split)
    assert told_of(box, "MIG") == []
    box.inventory(f"gpu.{bus(1)}.mig=1", f"mig.{bus(1)}.gi1.ci0.uuid=MIG-b")
    assert told_of(box, "MIG") == [
        (WARNING, f"12 holds {instance}, which is not shown now: that counts when it ends"),
        (WARNING, f"12 holds {bus(1)}, which is in MIG mode now: that counts when it ends"),
    ]


def test_what_keeps_mps_from_starting_is_told(box: Box) -> None:
    assert told_of(box, "SHARE_MPS") == []
    own = {"SHARES": "0:4", "SHARE_MPS": "yes"}
    box.settings |= own
    (box.driver / "version").write_text(
        "NVRM version: NVIDIA UNIX x86_64 Kernel Module  470.1  x\n"
    )
    told = list(check_mps(box.node().settings, MpsPrograms("/bin/none", "/bin/true", "/bin/none")))
    assert [(one.state, one.what.partition(":")[0]) for one in told] == [
        (FAULT, "/bin/none is no program"),
        (FAULT, "/bin/none is no program"),
        (WARNING, "MPS of driver 470.1 does not limit the memory of a place"),
    ]
    (box.driver / "version").write_text(
        "NVRM version: NVIDIA UNIX x86_64 Kernel Module  580.1  x\n"
    )
    found = check_mps(box.node().settings, MpsPrograms("/bin/true", "/bin/true", "/bin/true"))
    assert [*found] == []


def test_a_card_whose_mps_does_not_end_is_told(box: Box) -> None:
    own = {"SHARES": "0:4", "SHARE_MPS": "yes"}
    box.settings |= own
    card = Path(f"{box.state}-mps") / bus(0).replace(":", "-")
    card.mkdir(parents=True)
    closed = [what for _, what in told_of(box, "SHARE_MPS") if "has not ended" in what]
    assert closed == [f"the MPS of {bus(0)} has not ended: the card is closed until then"]
