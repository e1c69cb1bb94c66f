# SPDX-License-Identifier: Apache-2.0
"""Quarantine by policy: what is bad goes out once, with the reason, and comes back when clean."""

from __future__ import annotations

import errno
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from gpulock.daemon.health import policy
from gpulock.daemon.health.findings import MIB
from gpulock.errors import LockTimeout, Refusal
from gpulock.store import quarantine
from gpulock.store.gate import Gate
from tests.support.claims import ask, ids
from tests.support.faults import raising
from tests.support.health_site import GIB, ROUND, SHEPHERD, Ward
from tests.support.trees import bus


@pytest.fixture
def ward(tmp_path: Path) -> Iterator[Ward]:
    made = Ward(tmp_path)
    for number in range(4):
        made.tell(number)
    made.round()
    yield made


# --- out of service -------------------------------------------------------------------------------


def test_an_xid_of_the_card_puts_it_out_and_is_told_once_with_the_reason(ward: Ward) -> None:
    ward.log_xid(1)
    ward.round(3, sampled=False)  # also where no exporter runs
    assert ward.out() == [bus(1)]
    (line,) = ward.said()
    assert f"{bus(1)} is out of service: xid: XID 79 (GPU has fallen off the bus)" in line
    with pytest.raises(Refusal):
        ask(ward, 4)
    assert bus(1) not in ids(ask(ward, 3))


@pytest.mark.parametrize("number", [13, 31, 43, 45, 63, 92, 94, 9999])
def test_what_an_application_did_or_what_is_information_puts_nothing_out(
    ward: Ward, number: int
) -> None:
    ward.log_xid(1, number)
    ward.round()
    assert (ward.out(), ward.said()) == ([], [])


@pytest.mark.parametrize(
    ("fact", "reason"),
    [
        ("uncorrected=2", "ecc: 2 uncorrected ECC errors"),
        ("remap_failure=1", "ecc: a row of its memory could not be remapped"),
        ("recovery_action=2", "xid: the driver asks for node_reboot"),
        ("c.ecc.corrected.dram=900,900,90.0,0.0", ""),
        ("uncorrected=0", ""),
        ("remap_failure=0 recovery_action=0", ""),
    ],
)
def test_memory_that_fails_puts_a_card_out_and_what_was_corrected_does_not(
    ward: Ward, fact: str, reason: str
) -> None:
    ward.tell(2, fact)
    ward.round()
    assert ward.out() == ([bus(2)] if reason else [])
    assert not reason or ward.reason(2) == reason


def test_a_card_that_is_gone_is_out_until_it_was_here_for_long_enough(ward: Ward) -> None:
    place = ward.driver / "gpus" / bus(3)
    place.rename(ward.root / "fell-out")
    del ward.facts[3]
    ward.round(2)
    assert ward.out() == []
    ward.round()
    assert ward.reason(3) == "missing: the driver does not show it any more"
    (ward.root / "fell-out").rename(place)
    ward.tell(3)
    ward.round(2)
    assert ward.out() == [bus(3)]
    ward.round()
    assert ward.out() == []


def test_a_card_that_the_driver_excludes_is_not_gone(ward: Ward) -> None:
    ward.gpu(bus(3), 3, **{"GPU Excluded": "Yes"})
    ward.round(9)
    assert ward.out() == []


def test_of_cards_that_only_the_exporter_names_nothing_is_kept(ward: Ward) -> None:
    ward.tell(9, "pcie_width=4 pcie_width_max=16")
    ward.round()
    assert ward.cards().states.keys() == {bus(number) for number in range(4)}


# --- memory ---------------------------------------------------------------------------------------


def test_memory_in_use_with_nobody_there_puts_a_free_device_out_until_it_is_clean(
    ward: Ward,
) -> None:
    ward.tell(0, f"memory_used={300 * MIB}")
    ward.round()
    assert ward.out() == [], "a process may not be listed yet"
    ward.round()
    assert ward.reason(0) == "health: 300 MiB are in use without a process"
    ward.round(5)
    ward.tell(0)
    ward.round(2)
    ward.tell(0, f"memory_used={300 * MIB}")
    ward.round(2)
    ward.tell(0)
    ward.round(2)
    assert ward.out() == [bus(0)]  # clean checks in a row
    ward.round()
    assert ward.out() == []


@pytest.mark.parametrize("meanwhile", ["processes=1", "processes=unknown", "held"])
def test_memory_that_was_left_in_use_counts_until_it_can_be_looked_at_again(
    ward: Ward, meanwhile: str
) -> None:
    """A HEALTH_COMMAND of a minute or two holds the device, and passes: that cleans no memory."""
    ward.tell(0, f"memory_used={300 * MIB}")
    ward.round(2)
    if meanwhile == "held":
        ward.hold(0)
    ward.tell(0, f"memory_used={300 * MIB}", meanwhile.replace("held", ""))
    ward.round(4)
    assert ward.out() == [bus(0)]
    if meanwhile == "held":
        ward.proc.remove(SHEPHERD)
    ward.tell(0, f"memory_used={300 * MIB}")
    ward.round()
    assert ward.out() == [bus(0)]
    ward.tell(0)
    ward.round(4)
    assert ward.out() == []


@pytest.mark.parametrize("facts", ["processes=1", "processes=unknown", "memory_used=1000"])
def test_memory_of_somebody_or_of_the_driver_is_left_alone(ward: Ward, facts: str) -> None:
    ward.tell(0, f"memory_used={300 * MIB}", facts)
    ward.round(3)
    assert ward.out() == []


def test_memory_that_a_job_held_counts_from_its_end(ward: Ward) -> None:
    ward.hold(0)
    ward.tell(0, f"memory_used={300 * MIB}")
    ward.round(3)
    assert (ward.out(), ward.cards().of(bus(0)).failed()) == ([], {})
    ward.proc.remove(SHEPHERD)
    ward.round()
    assert ward.out() == []
    ward.round()
    assert ward.out() == [bus(0)]


# --- back -----------------------------------------------------------------------------------------


def test_it_does_not_come_back_before_the_command_passed_on_it(tmp_path: Path) -> None:
    ward = Ward(tmp_path, HEALTH_COMMAND="/bin/true")
    ward.log_xid(1)
    ward.round()
    ward.reload()
    ward.round(9, tests=False)
    assert ward.out() == [bus(1)], "never tested"
    for said, tested, out in (
        ("", ward.now - 3600, [bus(1)]),  # before it was put out
        ("it failed", ward.now + 3600, [bus(1)]),
        ("", ward.now + 3600, []),
    ):
        ward.note_command(1, said, tested)
        ward.round(3, tests=False)
        assert ward.out() == out


def test_a_card_that_fails_the_command_again_goes_out_again_without_an_exporter(
    tmp_path: Path,
) -> None:
    ward = Ward(tmp_path, HEALTH_COMMAND="/bin/true")
    for said, out in (("it failed", [bus(1)]), ("", []), ("it failed", [bus(1)])):
        ward.note_command(1, said)
        ward.round(3, sampled=False, tests=False)
        assert ward.out() == out


def test_checks_in_quick_succession_count_as_one(
    ward: Ward, monkeypatch: pytest.MonkeyPatch
) -> None:
    ward.log_xid(1)
    ward.round()
    ward.reboot()
    monkeypatch.setattr("tests.support.health_site.ROUND", 1.0)
    ward.round(10)
    assert ward.out() == [bus(1)]


def test_what_an_administrator_brought_back_is_not_put_out_for_the_same(ward: Ward) -> None:
    ward.tell(1, "recovery_action=1")
    ward.log_xid(1)
    ward.round()
    ward.restored(1)
    ward.round(3)
    assert ward.out() == []
    ward.tell(1, "recovery_action=1")
    ward.log_xid(1)
    ward.round()
    assert ward.reason(1) == "xid: XID 79 (GPU has fallen off the bus)"


def test_another_recovery_action_is_news_whether_its_number_is_higher_or_lower(ward: Ward) -> None:
    for action, news in ((7, True), (7, False), (4, True), (4, False), (7, True), (0, False)):
        ward.tell(1, f"recovery_action={action}")
        ward.round()
        assert ward.out() == ([bus(1)] if news else []), action
        if news:
            ward.restored(1)


def test_one_more_cause_is_noted_beside_the_first_and_both_must_be_over(ward: Ward) -> None:
    ward.tell(0, f"memory_used={300 * MIB}")
    ward.round(2)
    ward.tell(0)
    ward.log_xid(0, 48)
    ward.round(9)
    assert ward.reason(0).split("; ") == [
        "health: 300 MiB are in use without a process",
        "xid: XID 48 (uncorrectable ECC error)",
    ]
    ward.reload()
    ward.round(3)
    assert ward.out() == []


def test_an_event_after_the_driver_was_loaded_wants_it_loaded_once_more(ward: Ward) -> None:
    ward.log_xid(0, 48)
    ward.round()
    ward.reload()
    ward.round(2)
    ward.log_xid(0, 48)
    ward.round(9)
    assert ward.out() == [bus(0)]
    ward.reload()
    ward.round(2)
    assert ward.out() == [bus(0)]  # its checks began anew
    ward.round()
    assert ward.out() == []


def test_a_note_does_not_grow_for_ever(ward: Ward) -> None:
    reason = "health: 300 MiB stay in use after job 12"
    quarantine.write_device_note(str(ward.state), quarantine.QUARANTINE, bus(0), "gpulock", reason)
    ward.tell(0, f"memory_used={300 * MIB}")
    ward.round()
    assert ward.reason(0) == reason
    for number in (46, 48, 62, 64, 74, 79, 95):
        ward.log_xid(0, number)
        ward.round()
    assert len(ward.reason(0).split("; ")) == 4


@pytest.mark.parametrize("back", [False, True])
def test_an_administrator_who_is_quicker_than_a_note_or_its_end_keeps_the_device(
    ward: Ward, monkeypatch: pytest.MonkeyPatch, *, back: bool
) -> None:
    """The administrator's quarantine comes between our look and the gate."""

    class Late(Gate):
        def __enter__(self) -> Gate:
            ward.by_hand(1)
            return super().__enter__()

    ward.log_xid(1)
    if back:
        ward.round()
        ward.reload()
        ward.round(2)
    monkeypatch.setattr("gpulock.daemon.health.policy.Gate", Late)
    ward.round()
    monkeypatch.undo()
    ward.reload()
    ward.round(9)
    assert (ward.out(), ward.reason(1)) == ([bus(1)], "its fan died")


def test_a_card_that_is_not_there_does_not_come_back(tmp_path: Path) -> None:
    quiet = Ward(tmp_path, QUARANTINE_ON="")
    quiet.round()
    quarantine.write_device_note(
        str(quiet.state), quarantine.QUARANTINE, "0000:99:00.0", "gpulock", "missing: gone"
    )
    quiet.round(9)
    assert quiet.out() == ["0000:99:00.0"]


def test_a_card_that_flaps_stays_out_until_an_administrator_brings_it_back(ward: Ward) -> None:
    for _ in range(3):
        ward.tell(0, f"memory_used={300 * MIB}")
        ward.round(2)
        assert ward.out() == [bus(0)]
        ward.tell(0)
        ward.round(3)
        assert ward.out() == []
    ward.tell(0, f"memory_used={300 * MIB}")
    ward.round(2)
    ward.tell(0)
    ward.round(9)
    ward.reboot()
    ward.round(9)
    assert ward.out() == [bus(0)]
    assert "only an administrator brings it back" in ward.reason(0)


# --- an exporter gone mad -------------------------------------------------------------------------


def test_one_that_says_everything_is_bad_puts_out_half_and_the_rest_is_told_once(
    ward: Ward,
) -> None:
    for number in range(4):
        ward.tell(number, "recovery_action=2", "remap_failure=1")
        ward.log_xid(number)
    ward.round(5)
    assert ward.out() == [bus(0), bus(1)]
    told = [line for line in ward.said() if "more than half of this node" in line]
    assert [line.split()[0] for line in told] == [f"<3>{bus(2)}", f"<3>{bus(3)}"]


def test_what_an_administrator_took_out_leaves_the_policy_its_half(ward: Ward) -> None:
    ward.by_hand(0)
    ward.by_hand(1, "health: its fan died")
    for number in range(4):
        ward.log_xid(number)
    ward.round()
    assert ward.out() == [bus(number) for number in range(4)]
    assert ward.reason(0) == "its fan died"
    assert not [line for line in ward.said() if "is not put out" in line]


# --- faults ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("fault", [LockTimeout("the gate"), OSError(errno.ENOSPC, "full")])
def test_a_note_that_is_not_written_or_taken_back_for_one_card_is_told_and_tried_again(
    ward: Ward, monkeypatch: pytest.MonkeyPatch, fault: Exception
) -> None:
    faults = list[Exception]()

    def fail_once(act: Callable[..., Any]) -> Callable[..., Any]:
        def acts(*words: Any) -> Any:
            if faults:
                raise faults.pop()
            return act(*words)

        return acts

    class ShutOnce(Gate):
        if isinstance(fault, LockTimeout):
            __enter__ = fail_once(Gate.__enter__)

    monkeypatch.setattr(policy, "Gate", ShutOnce)
    if isinstance(fault, OSError):
        for name in ("write_device_note", "remove_device_note"):
            monkeypatch.setattr(quarantine, name, fail_once(getattr(quarantine, name)))
    ward.log_xid(0)
    ward.log_xid(1)
    faults.append(fault)
    ward.round()
    assert ward.out() == [bus(1)]
    assert f"{bus(0)} cannot be put out of service: " in "\n".join(ward.said())
    ward.round()
    assert ward.out() == [bus(0), bus(1)]
    ward.reload()
    ward.round(2)
    faults.append(fault)
    ward.round()
    assert (ward.out(), len(ward.cards().backs)) == ([bus(0)], 1)
    assert f"{bus(0)} could be back in service: " in "\n".join(ward.said())
    ward.round()
    assert (ward.out(), len(ward.cards().backs)) == ([], 2)


@pytest.mark.parametrize(
    "parts", [("findings.check_links",), ("KernelLog.read", "HealthPolicy._name_suspects")]
)
def test_a_part_that_fails_is_told_and_stops_no_other(
    ward: Ward, monkeypatch: pytest.MonkeyPatch, parts: tuple[str, ...]
) -> None:
    for part in parts:
        failing = raising(RuntimeError(part))
        monkeypatch.setattr(f"gpulock.daemon.health.policy.{part}", failing)
    ward.tell(1, "recovery_action=1")
    ward.round()
    said = "\n".join(ward.said())
    assert [part for part in parts if f"RuntimeError: {part}" not in said] == []
    assert ward.out() == [bus(1)]
    assert ward.cards().marks == {(bus(1), "recovery"): 1}


# --- without QUARANTINE_ON ------------------------------------------------------------------------


@pytest.mark.parametrize("plain", ["card", "any"])
@pytest.mark.parametrize(("shares", "count"), [("", 3), ("3:2", 2), ("3:2", 3)])
def test_without_any_policy_a_job_gets_no_lost_card_while_a_good_one_is_free(
    tmp_path: Path, plain: str, shares: str, count: int
) -> None:
    ward = Ward(tmp_path, 4, PLAIN_REQUEST=plain, SHARES=shares, QUARANTINE_ON="")
    ward.lose(0)
    ward.lose(1)
    ward.round()
    granted = ids(ask(ward, count))
    assert {bus(2), bus(3)} <= {*granted}
    assert (len(granted), ward.out()) == (count, [])
    ward.now += 3600
    ward.round(sampled=False)
    assert ward.suspects() == dict.fromkeys([bus(0), bus(1)], "GPU is lost"), "nothing else is told"
    ward.lost.clear()
    ward.round()
    assert ward.suspects() == {}


def test_without_an_exporter_claims_take_a_card_last_that_fails_the_command(
    tmp_path: Path,
) -> None:
    ward = Ward(tmp_path, 2, HEALTH_COMMAND="/bin/true", QUARANTINE_ON="")
    for said in ("it failed", ""):
        ward.note_command(0, said)
        ward.round(sampled=False, tests=False)
        assert ward.suspects() == ({bus(0): said} if said else {})


def test_what_is_no_card_of_this_node_or_no_reason_is_no_loss(ward: Ward) -> None:
    del ward.settings["QUARANTINE_ON"]
    ward.lose(2)
    ward.sample("lost ../x 1 GPU is lost", f"lost {bus(1)}", f"lost {bus(1)} x y")
    ward.now -= ROUND
    ward.round(sampled=False)
    assert ward.suspects() == {bus(2): "GPU is lost"}


def test_two_looks_before_and_after_a_long_pause_are_no_lasting_loss(ward: Ward) -> None:
    del ward.settings["QUARANTINE_ON"]
    ward.lose(1)
    ward.tell(2, f"memory_used={GIB}")
    ward.round()
    for _ in range(4):
        ward.now += 8 * 3600  # the machine was suspended
        ward.round()
    assert (ward.out(), ward.cards().of(bus(2)).failed()) == ([], {})
    ward.now += 5  # a round that took its time
    ward.round()
    assert "memory" in ward.cards().of(bus(2)).failed()
    ward.round()
    assert ward.out() == [bus(1)]


def test_a_loss_that_comes_and_goes_is_no_lasting_one(ward: Ward) -> None:
    """As cards do while a driver is loaded anew for each job: a minute is one in a row."""
    for _ in range(9):
        for act in (ward.lose, ward.lost.pop):
            act(1)
            ward.now -= ROUND / 2
            ward.round()
    assert ward.out() == []


def test_a_split_card_is_neither_missing_nor_lost(ward: Ward) -> None:
    del ward.settings["QUARANTINE_ON"]
    ward.inventory(f"gpu.{bus(0)}.mig=1", f"mig.{bus(0)}.gi1.ci0.uuid=MIG-1", f"gpu.{bus(1)}.mig=1")
    ward.round(9)
    assert ward.out() == []


def test_a_card_that_fell_off_the_bus_still_counts_for_half_of_the_node(ward: Ward) -> None:
    del ward.settings["QUARANTINE_ON"]
    (ward.driver / "gpus" / bus(3)).rename(ward.root / "fell-off")
    for number in (0, 1):
        ward.log_xid(number)
    ward.round()
    assert ward.out() == [bus(0), bus(1)]


def test_what_an_administrator_put_out_stays(ward: Ward) -> None:
    ward.by_hand(0, "health: I do not trust it")
    ward.by_hand(1)
    ward.log_xid(1)
    ward.round(2)
    ward.reboot()
    ward.round(9)
    assert (ward.out(), ward.reason(1)) == ([bus(0), bus(1)], "its fan died")
