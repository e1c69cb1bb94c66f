# SPDX-License-Identifier: Apache-2.0
"""`reserve`, `quarantine` and back; `reap`; `forget-locks`."""

from __future__ import annotations

import os
import shutil
import subprocess
import time
from pathlib import Path

import pytest

from gpulock.alloc.environs import CLAIM
from gpulock.cli.admin import forget
from gpulock.cli.claims import socket_client
from gpulock.cli.session import uid_to_user_name
from gpulock.daemon.health.cards import COMMAND, NodeCards, read_cards, save_cards
from gpulock.daemon.health.checker import is_test_due
from gpulock.deadline import clock_boottime
from gpulock.node.context import Node
from gpulock.node.settings_file import read_settings
from gpulock.store import quarantine
from gpulock.store.reservations import Reservation, write_reservations
from gpulock.workstation.wire import RELEASED, RESERVE, UNRESERVE, SocketReply, SocketRequest
from tests.support.cli_site import Site, dead_process
from tests.support.clock import VirtualClock
from tests.support.fake_mps import leave_mps
from tests.support.faults import disk_full
from tests.support.trees import Box
from tests.support.wait import wait_until


def noted(site: Site, kind: str) -> list[str]:
    return quarantine.list_noted_devices(str(site.files.state_dir), kind)


def test_a_reserve_locks_the_device_and_is_noted_for_the_next_boot(site: Site) -> None:
    result = site.call("reserve", "3", "--reason", "burn-in")
    assert (result.exit_code, result.stdout) == (0, "GPU 3 is reserved: burn-in\n")
    held = site.json()["gpus"][3]["held"]
    assert (held["scheduler"], held["comment"]) == ("admin", "burn-in")
    assert noted(site, quarantine.RESERVE) == [site.id(3)]
    assert site.run("run", "-n", "8", "--", "/bin/true").returncode == 1


def test_status_and_why_show_the_reason_of_a_reserve(site: Site) -> None:
    for device in ("3", "5"):
        site.call("reserve", device, "--reason", "burn-in until Friday")
    said = [" ".join(line.split()) for line in site.call("status").stdout.splitlines()]
    (line,) = [line for line in said if "burn-in" in line]
    assert line.startswith("GPUs 3, 5 reserved by ")
    assert line.endswith(": burn-in until Friday")
    why = site.words("why", "3")
    assert f"holder a reserve of {uid_to_user_name(os.getuid())} " in why
    assert "reason burn-in until Friday" in why
    assert why.endswith(f"next {site.gpulock} unreserve 3")
    assert "burn-in" not in site.call("status", "--free").stdout


@pytest.mark.parametrize("removed", [False, True])
def test_a_held_device_is_not_reserved_whether_its_lock_was_removed_or_not(
    site: Site, removed: bool
) -> None:
    site.hold(3)
    if removed:
        shutil.rmtree(site.files.lock_dir / "locks" / site.id(3))
    result = site.call("reserve", "3", "--reason", "x")
    assert result.exit_code == 1
    assert "GPU 3 is held by job 12 of alice" in result.stderr
    assert noted(site, quarantine.RESERVE) == []


def test_a_device_whose_mps_still_ends_is_not_reserved(site: Site) -> None:
    leave_mps(Node(read_settings(site.config)), site.id(3), 1001)
    result = site.call("reserve", "3", "--reason", "x")
    assert (result.exit_code, "MPS of uid 1001 ends on it" in result.stderr) == (1, True)
    assert (noted(site, quarantine.RESERVE), site.json()["gpus"][3]["held"]) == ([], None)
    assert site.call("reserve", "4", "--reason", "x").exit_code == 0


def test_what_a_dead_owner_left_does_not_stop_a_reserve(site: Site) -> None:
    pid, start = dead_process()
    site.hold(3, scheduler="process", job_id=str(pid), pid=pid, start=start)
    assert site.call("reserve", "3", "--reason", "x").exit_code == 0
    assert site.json()["gpus"][3]["held"]["scheduler"] == "admin"


def test_a_reserve_that_cannot_be_noted_is_undone(
    site: Site, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("gpulock.store.quarantine.write_device_note", disk_full)
    result = site.call("reserve", "3", "--reason", "x")
    assert (result.exit_code, "No space left" in result.stderr) == (3, True)
    assert site.states()[3] == "free"


def test_a_reserve_with_an_end_is_gpulockds(site: Site, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[SocketRequest] = []

    def ask(_: Node, one: SocketRequest) -> SocketReply:
        asked.append(one)
        return SocketReply(RELEASED, number=2, why="reserved for alice; reserved for bob")

    monkeypatch.setattr(socket_client, "request_daemon_act", ask)
    site.hold(3)
    now = time.time()
    minute = now // 60 * 60

    def day(hours: int) -> str:
        return time.strftime("%m-%d %H:%M", time.localtime(now + hours * 3600))

    result = site.call("reserve", "3", "--from", "1h", "--to", "3h", "--reason", "thesis")
    me = uid_to_user_name(os.getuid())
    said = f'GPU 3 is reserved for {me} from {day(1)} until {day(3)}: "thesis"\n'
    kept = "job 12 of alice holds GPU 3 and keeps it until it is freed\n"
    assert (result.exit_code, result.stdout) == (0, said + kept)
    site.call("release", "3", "--force", "--reason", "x")
    assert asked[0][0:2] + asked[0].devices == (RESERVE, 0, site.id(3))
    assert (asked[0].seconds, asked[0].begin) == (7200, minute + 3600)  # as its times are shown
    site.call("reserve", "3", "--to", "2m", "--reason", "now")
    assert (asked[1].seconds, asked[1].begin) == (120, minute)
    assert site.call("unreserve", "3").exit_code == 1  # nobody has reserved it
    every = [Reservation(site.id(3), 1001, (now, now + 60), "alice", "thesis")]
    write_reservations(site.node().settings.state_dir, every)
    assert site.call("unreserve", "3").exit_code == 1  # without USER_CLAIMS it counts for nobody
    site.set("USER_CLAIMS=yes\n")
    ended = "GPU 3: 2 reservations ended: reserved for alice; reserved for bob\n"
    assert site.call("unreserve", "3").stdout == ended
    assert [one.act for one in asked] == [RESERVE, RESERVE, UNRESERVE]
    assert site.call("reserve", "2", "--reason", "test").exit_code == 0
    write_reservations(
        site.node().settings.state_dir, [Reservation(site.id(2), 1001, (now, now + 60), "a", "b")]
    )
    over = site.call("unreserve", "2").stdout  # root's own, and no user's
    assert over == "the administrator's reserve of GPU 2 is over\n"
    assert len(asked) == 3
    site.call("quarantine", "3", "--reason", "Xid 79")
    for words in (("--to", "1h"), ()):
        told = site.call("reserve", "3", "--reason", "x", *words).stdout
        assert "GPU 3 is quarantined: Xid 79 (" in told, words


@pytest.mark.parametrize("turned", [False, True])
def test_the_end_of_a_reserve_is_the_first_such_time_after_its_begin(
    site: Site, monkeypatch: pytest.MonkeyPatch, *, turned: bool
) -> None:
    asked: list[SocketRequest] = []
    monkeypatch.setattr(socket_client, "request_daemon_act", lambda _, one: asked.append(one))
    now = time.mktime((2026, 11, 30, 13, 12, 0, 0, 0, -1))
    monkeypatch.setattr(time, "time", lambda: now)
    times = [("--from", "10:00"), ("--to", "15:00")]
    words = [word for pair in (times[::-1] if turned else times) for word in pair]
    said = site.call("reserve", "3", "--reason", "x", *words).stdout
    assert 'from 12-01 10:00 until 12-01 15:00: "x"' in said
    assert asked[0].seconds == 5 * 3600


@pytest.mark.parametrize(
    ("times", "said"),
    [
        (("--from", "1h"), "say until when with --to TIME"),
        (("--from", "2h", "--to", "1h"), "--to is before --from"),
        (("--to", "noon"), "'noon' is no time: 14:00, 2h (from now) or 2026-12-01T14:00"),
        (("--to", "25:00"), "'25:00' is no time"),
        (
            ("--from", "19:40", "--to", "19:39"),
            "'19:39' is before the start; for the next day write 2",
        ),
    ],
)
def test_a_time_that_means_nothing_reserves_nothing(
    site: Site, times: tuple[str, ...], said: str
) -> None:
    result = site.call("reserve", "3", "--reason", "x", *times)
    assert (result.exit_code, said in result.stderr) == (2, True)
    assert site.states()[3] == "free"


def test_unreserve_frees_it_once(site: Site) -> None:
    site.call("reserve", "3", "--reason", "x")
    assert site.call("unreserve", "3").exit_code == 0
    assert site.states()[3] == "free"
    assert noted(site, quarantine.RESERVE) == []
    assert site.call("unreserve", "3").exit_code == 1
    site.hold(3)
    assert site.call("unreserve", "3").exit_code == 1
    assert site.states()[3] == "held"


@pytest.mark.parametrize(
    "words", [("quarantine", "3"), ("reserve", "3"), ("release", "3", "--force")]
)
def test_a_reason_is_needed_kept_on_one_line_and_has_an_end(
    site: Site, words: tuple[str, ...]
) -> None:
    for reason in ((), ("--reason", "  "), ("--reason", "x" * 1001)):
        assert site.call(*words, *reason).exit_code == 2
    assert site.states()[3] == "free"
    if words[0] != "release":
        assert site.call(*words, "--reason", "one\ntwo").exit_code == 0
        kind = quarantine.RESERVE if words[0] == "reserve" else quarantine.QUARANTINE
        note = quarantine.read_device_note(str(site.files.state_dir), kind, site.id(3))
        assert note["reason"] == "one?two"


def test_a_job_keeps_a_device_that_is_quarantined_and_nobody_gets_it_after(site: Site) -> None:
    site.hold(7)
    result = site.call("quarantine", "7", "--reason", "Xid 79")
    assert "job 12 of alice holds GPU 7 and keeps it until it is freed" in result.stdout
    assert site.json()["gpus"][7]["held"]["job_id"] == "12"
    site.call("release", "7", "--force", "--reason", "over")
    assert site.run("run", "--devices", "7", "--", "/bin/true").returncode == 1
    assert site.call("restore", "7").exit_code == 0
    assert site.run("run", "--devices", "7", "--", "/bin/true").returncode == 0


def test_reap_frees_the_dead_keeps_the_living_and_says_why(site: Site) -> None:
    pid, start = dead_process()
    site.hold(1, 2, scheduler="process", job_id=str(pid), pid=pid, start=start, token="a")
    site.hold(5, job_id="12", token="b")
    dry = site.call("reap", "--dry-run").stdout
    assert dry.startswith("would free  GPUs 1, 2: ") and dry.endswith("3 locks: 2 would be freed\n")
    assert site.states()[1] == "stale"
    result = site.call("reap")
    assert result.exit_code == 0
    freed, held, total = result.stdout.splitlines()
    assert freed.startswith(f"freed       GPUs 1, 2: pid {pid} of alice: process {pid} is gone")
    assert held == f"held        GPU 5: job 12 of alice: its shepherd {os.getpid()} runs"
    assert total == "3 locks: 2 freed"
    assert [n for n, state in enumerate(site.states()) if state != "free"] == [5]


def whole(site: Site, command: str) -> str:
    """Return what a command prints once it could see each process of root's.

    One that starts a program cannot be seen, and while it does every lock of its user stays.
    """
    printed = [""]

    def sees_all() -> bool:
        printed.append(site.call(*command.split()).stdout)
        return "starts a program" not in printed[-1]

    wait_until(sees_all, why=lambda: f"a look at every process:\n{printed[-1]}")
    return printed[-1]


def test_reap_names_who_keeps_a_dead_owners_device(site: Site) -> None:
    site.hold(4, 5, draining=1, uid=os.getuid(), sid=dead_process()[0])
    with site.opened(4) as user:
        assert "GPUs 4, 5  quarantined: orphans: process" in whole(site, "status")
        text = whole(site, "reap")
        assert f"orphans     GPU 4: job 12 of alice: process {user.pid} has" in text
        assert f"{site.id(4)} open; {site.gpulock} why 4" in " ".join(whole(site, "status").split())
        refused = site.call("restore", "4")
        assert (refused.exit_code, f"{site.gpulock} reap" in refused.stderr) == (1, True)
        why = " ".join(whole(site, "why 4").split())
        assert "freed by a reap, once no process has it open" in why and "back by" not in why
        assert f"next end process {user.pid} " in why and f", then {site.gpulock} reap" in why
    assert whole(site, "reap").startswith("freed ")


def test_reap_puts_back_what_living_runs_hold_when_the_locks_were_lost(site: Site) -> None:
    with site.running("run", "-n", "2", "--", "/bin/sh", "-c", "echo; read -r _") as process:
        subprocess.run(["rm", "-r", str(site.files.lock_dir)], check=True)
        site.files.lock_dir.mkdir(mode=0o755)
        text = site.call("reap").stdout
        whose = f"pid {process.pid} of {uid_to_user_name(os.getuid())}"
        restored = f"restored    GPUs 0, 3: {whose}, whose lock or record was lost"
        assert text.splitlines()[0] == restored
        assert site.states()[:4] == ["held", "free", "free", "held"]


def test_a_split_card_goes_out_of_service_as_a_whole_and_comes_back(tmp_path: Path) -> None:
    site = Site(tmp_path, "a100-mig")
    assert site.call("quarantine", "0", "--reason", "XID 79").exit_code == 0
    states = [row["state"] for row in site.json()["gpus"]]
    assert states == ["quarantined"] * 4 + ["free"] * 8
    refused = site.call("restore", "0:gi2.ci0")
    assert (refused.exit_code, f"{site.gpulock} restore 0000:07:00.0" in refused.stderr) == (
        1,
        True,
    )
    me, restore = uid_to_user_name(os.getuid()), f"{site.gpulock} restore 0"
    assert f"XID 79 ({me}); back by an administrator; {restore}" in site.words("status")
    why = site.words("why", "0:gi2.ci0")
    assert why.endswith(f"next {site.gpulock} restore 0")
    assert site.call("restore", "0").exit_code == 0
    assert noted(site, quarantine.QUARANTINE) == []


@pytest.mark.parametrize("name", ["0A:00.0", "00000000:0a:00.0"])
def test_a_card_that_fell_off_the_bus_stays_out_of_service_once_it_is_back(
    site: Site, name: str
) -> None:
    """The note had the name as it was typed, which is no card's."""
    site.lose_card(2)
    assert site.call("quarantine", name, "--reason", "Xid 79").exit_code == 0
    assert noted(site, quarantine.QUARANTINE) == [site.id(2)]


def test_restore_ends_a_quarantine_and_no_reserve(site: Site) -> None:
    site.call("reserve", "3", "--reason", "driver test")
    site.call("quarantine", "3", "--reason", "XID 79")
    assert site.call("restore", "3").stdout == "GPU 3 is not quarantined any more\n"
    assert site.json()["gpus"][3]["held"]["comment"] == "driver test"
    assert site.call("restore", "3").exit_code == 1


def test_a_test_is_asked_for_and_gpulockd_runs_it_once_the_gpu_is_free(
    site: Site, clock: VirtualClock
) -> None:
    clock.now += 90  # the machine may have been booted just now
    assert "HEALTH_COMMAND is not set" in site.call("test", "3").stderr
    site.set("HEALTH_COMMAND=/bin/true\n")
    node = site.node()
    cards = read_cards(node.settings.state_dir, node.boot_id)
    cards.of(site.id(3)).tested = clock_boottime() - 90
    cards.of(site.id(3)).checks[COMMAND] = ""
    assert save_cards(node.settings.state_dir, cards)
    assert "passed HEALTH_COMMAND, begun 1m ago" in site.call("why", "3").stdout
    asked = site.call("test", "9", "3")
    assert (asked.exit_code, "no device '9' here" in asked.stderr) == (1, True)
    assert "GPU 3 is tested once it is free" in asked.stdout, "one that is missing stops no other"
    assert "HEALTH_COMMAND" not in site.call("why", "3").stdout, "it is not known any more"
    state = read_cards(node.settings.state_dir, node.boot_id).of(site.id(3))
    assert is_test_due(state, {}, NodeCards(""), 6.0)


def test_a_release_says_where_nothing_is_held_and_changes_no_folder_that_others_may_write(
    site: Site,
) -> None:
    none = site.call("release", "1")
    assert (none.exit_code, "nothing is held on this node" in none.stderr) == (1, True)
    assert "--force" not in none.stderr
    site.hold(1)
    site.files.lock_dir.chmod(0o777)
    refused = site.call("release", "1", "--force", "--reason", "x")
    assert (refused.exit_code, "writable by no other user" in refused.stderr) == (3, True)
    assert list((site.files.lock_dir / "locks").iterdir())


# --- `forget-locks`: the way out where the records of a boot's claims were lost -------------------

TRUE = ("run", "-n", "1", "--", "/bin/true")
OF_JOB = "SLURMD_NODENAME=n1\0SLURM_JOB_ID"


@pytest.fixture
def lost(site: Site, monkeypatch: pytest.MonkeyPatch) -> Site:
    """Give a node that has granted in this boot, and whose records are gone."""
    # other tests start some of their own
    monkeypatch.setattr(forget, "list_job_processes", lambda *_: iter(()))
    assert site.run(*TRUE).returncode == 0
    lose_records(site)
    return site


def lose_records(site: Site) -> None:
    """Remove the records, as an accident does."""
    shutil.rmtree(f"{site.files.lock_dir}.claims")


def test_a_node_whose_records_were_lost_grants_again_once_told(lost: Site) -> None:
    refused = lost.run(*TRUE)
    assert refused.returncode != 0
    assert "run gpulock" in refused.stderr and "forget-locks" in refused.stderr
    said = lost.words("why", "2")  # a free device is offered to nobody meanwhile
    assert "granted to nobody: the records of this boot's claims were lost" in said
    assert "forget-locks when no job is left" in said and "COMMAND" not in said

    result = lost.call("forget-locks")

    assert (result.exit_code, result.stderr) == (0, "")
    assert "may be granted again" in result.stdout
    assert lost.run(*TRUE).returncode == 0
    again = lost.call("forget-locks")
    assert again.exit_code != 0 and "no records were lost" in again.stderr


def test_while_a_process_has_a_gpu_open_nothing_is_forgotten_but_by_force(lost: Site) -> None:
    with lost.opened(3) as user:
        result = lost.call("forget-locks")
        assert result.exit_code != 0 and f"has {lost.id(3)} open" in result.stderr
        assert lost.run(*TRUE).returncode != 0

        assert lost.call("forget-locks", "--force").exit_code == 0
        user.kill()
    assert lost.run(*TRUE).returncode == 0


@pytest.mark.parametrize(
    ("name", "cmdline", "environ", "told"),
    [
        ("sge_shepherd", "sge_shepherd-12 -bg", "", "runs a job"),
        ("slurmstepd", "slurmstepd: [12.batch]", "", "runs a job"),
        ("slurmstepd", "/usr/sbin/slurmstepd", "", ""),
        ("bash", "bash", "HOME=/root", ""),
        # it has no GPU open, and was started by one
        ("python3", "", f"{CLAIM}=0123456789abcdef", "was started with a user's claim"),
        ("python3", "", f"{OF_JOB}=12", "was started by job 12"),
        ("python3", "", f"{OF_JOB}=\x1b[1m", "was started by a job"),
        ("python3", "", f"{OF_JOB}=12\0SLURM_SCRIPT_CONTEXT=epilog_slurmd", ""),
    ],
)
def test_a_shepherd_a_step_daemon_and_what_a_job_started_are_a_job(
    tmp_path: Path, name: str, cmdline: str, environ: str, told: str
) -> None:
    box = Box(tmp_path)
    box.proc.add(700, name)
    (box.proc.root / "700" / "cmdline").write_text(f"{cmdline}\0")
    (box.proc.root / "700" / "environ").write_text(f"{environ}\0")
    said = [f"process 700 ({name}) {told}"] if told else []
    assert list(forget.list_remaining_users(box.node())) == said


def test_what_a_job_of_grid_engine_left_is_known_by_a_group_that_has_no_name(
    tmp_path: Path,
) -> None:
    """It may open a GPU later; no shepherd of it runs, and no lock tells the group."""
    box = Box(tmp_path)
    box.proc.add(700, "python3", groups=(0, 65400))
    assert list(forget.list_remaining_users(box.node())) == []
    box.settings["SGE_ROOT"] = "/opt/sge"
    told = "process 700 (python3) carries group 65400, which has no name, as one of a job"
    assert list(forget.list_remaining_users(box.node())) == [told]


def test_a_driver_that_cannot_be_read_is_a_doubt_and_one_that_is_not_loaded_is_none(
    tmp_path: Path,
) -> None:
    box = Box(tmp_path)
    shutil.rmtree(box.driver / "gpus")
    assert list(forget.list_remaining_users(box.node())) == []
    (box.driver / "gpus").touch()
    (told,) = forget.list_remaining_users(box.node())
    assert "driver/gpus" in told


def test_a_lock_whose_copy_is_left_and_whose_owner_lives_is_not_forgotten(
    site: Site, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(forget, "list_job_processes", lambda *_: iter(()))
    site.hold(2)
    lose_records(site)

    result = site.call("forget-locks")

    assert result.exit_code != 0
    assert f"{site.id(2)} is held by job 12 of alice" in result.stderr
    assert (site.files.lock_dir / "locks" / site.id(2)).is_dir()


@pytest.mark.root
def test_where_lock_dir_is_gone_the_owner_of_the_records_may_change_them(site: Site) -> None:
    site.hold(2)
    shutil.rmtree(site.files.lock_dir)
    assert "freed by" in site.call("why", "2").stdout
    os.chown(f"{site.files.lock_dir}.claims", 654321, 654321)
    result = site.call("release", "2", "--force", "--reason", "x")
    assert result.exit_code != 0 and "only uid 654321 may change locks" in result.stderr
