# SPDX-License-Identifier: Apache-2.0
"""`gpulock status`: what it shows of a node in every state, and to whom."""

from __future__ import annotations

import os
import re
import shlex
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from gpulock.alloc import states
from gpulock.alloc.device_users import mig_access_nodes
from gpulock.cli.claims import queue
from gpulock.cli.status import attention
from gpulock.deadline import clock_boottime
from gpulock.store.owner import TYPES
from gpulock.store.reservations import Reservation, write_reservations
from gpulock.store.verdicts import Verdict, write_verdicts
from gpulock.workstation.waiting import KEPT, WaitingCaller, encode_waiting, write_waiting
from tests.support.cli_site import NOBODY, ROOT, Site, dead_process
from tests.support.fake_mps import leave_mps
from tests.support.locks import spoil_record
from tests.support.trees import public_place


def line_of(text: str, index: int) -> list[str]:
    return text.splitlines()[index + 1].split()


def test_a_node_without_lock_directory_is_all_free(site: Site) -> None:
    shutil.rmtree(site.files.lock_dir)
    result = site.call("status")
    assert result.exit_code == 0
    assert result.stdout.splitlines()[-1] == "8 GPUs: 8 free"


def test_the_table_is_cut_for_no_program(site: Site, monkeypatch: pytest.MonkeyPatch) -> None:
    site.hold(0, user="a-very-long-user-name", queue="a-queue-of-many-words.q", job_id="1234567")
    monkeypatch.delenv("COLUMNS", raising=False)  # a test runner may have set it
    whole = site.call("status").stdout
    assert "a-very-long-user-name  a-queue-of-many-words.q" in whole
    monkeypatch.setenv("COLUMNS", "0")  # of a terminal that does not know
    assert "BUS ID" in site.call("status").stdout


def test_a_dead_owner_is_stale_with_proof_and_next_command_and_looking_changes_nothing(
    site: Site,
) -> None:
    pid, start = dead_process()
    site.hold(2, scheduler="process", job_id=str(pid), pid=pid, start=start)
    site.publish(t=Verdict("alive", f"process {pid} runs"))  # before it ended
    before = sorted(str(path) for path in site.files.directory.rglob("*"))
    text = site.call("status").stdout
    assert line_of(text, 2)[3] == "stale"
    assert f"process {pid} is gone" in text
    assert f"{site.gpulock} reap" in " ".join(text.split())
    assert site.call("why", "2").stdout.splitlines()[0].endswith("stale")
    assert sorted(str(path) for path in site.files.directory.rglob("*")) == before


def test_slurmctld_is_not_asked_again_while_a_verdict_is_fresh(site: Site) -> None:
    pid, start = dead_process()
    site.hold(2, scheduler="slurm", pid=pid, start=start)
    assert site.states()[2] == "unknown"
    site.publish(t=Verdict("dead", "slurmctld says that it is over"))
    assert site.states()[2] == "stale"


def test_a_card_in_mig_mode_without_an_instance_is_no_administrators_quarantine(site: Site) -> None:
    assert site.call("reap").exit_code == 0
    path = site.files.lock_dir / "inventory"
    boot = site.node().boot_id
    path.write_text(f"gpulock-inventory 1\nboot_id={boot}\ngpu.{site.id(0)}.mig=1\n")
    said = site.words("status")
    assert "it is in MIG mode, and no instance of it is known; back by a MIG instance" in said
    assert "8 GPUs: 7 free, 1 quarantined" in said
    why = site.call("why", "0").stdout
    assert "restore" not in why
    assert "nvidia-smi mig -lgi" in why


def test_records_at_which_every_claim_stops_are_said_before_all_else(site: Site) -> None:
    spoil_record(site.node().store, "garbage")
    text = site.words("status")
    assert "records the record of claim garbage cannot be read: " in text
    assert "nothing is granted until it can be read" in text
    shutil.rmtree(f"{site.files.lock_dir}.claims")
    text = site.words("status")
    assert "records lost nothing is granted; " in text
    assert f"{site.gpulock} forget-locks" in text


def test_a_boot_id_that_cannot_be_read_hides_no_device(site: Site) -> None:
    site.hold(3)
    path = Path(f"{site.files.lock_dir}.claims/boot_id")
    path.unlink()
    path.mkdir()
    result = site.call("status")
    assert (result.exit_code, result.stderr) == (0, "")
    assert line_of(result.stdout, 3)[3] == "held"
    assert "8 GPUs: 7 free, 1 held" in result.stdout
    said = " ".join(result.stdout.split())
    why = f"boot_id: [Errno 22] not a regular file: '{path}'; nothing is granted until it can be"
    assert said.count(f"records {why} read; run {site.gpulock} doctor as root") == 1
    assert "job 12 of alice" in site.call("why", "3").stdout


def test_who_waits_first_for_gpus_is_named(site: Site, monkeypatch: pytest.MonkeyPatch) -> None:
    node, me = site.node(), os.getpid()
    process, since = (me, node.proc.start(me), 1000), clock_boottime() - 60
    callers = [
        WaitingCaller(7, *process, since, "alice", "4 GPUs", "2 of 8 free"),
        WaitingCaller(9, *process, since, "bob", "1 GPU", "stopped"),
    ]
    for words in (("why", str(me)), ("why", "pid", str(me)), ("why", "9")):
        write_waiting(node.store.path, encode_waiting(callers, node.boot_id))
        assert "waits as number 9 of bob for 1 GPU: stopped; " in site.words(*words)
    for many, more in ((1, ""), (2, f"; 1 other caller: {site.gpulock} queue")):
        write_waiting(node.store.path, encode_waiting(callers[:many], node.boot_id))
        shown = site.words("status")
        assert f"queue alice waits 1m for 4 GPUs: 2 of 8 free{more}" in shown
        assert f"queue alice waits 1m for 4 GPUs: 2 of 8 free{more}" in site.words("why", "2")
    callers[1] = callers[1]._replace(why=KEPT)
    write_waiting(node.store.path, encode_waiting(callers, node.boot_id))
    assert f"bob waits 1m for 1 GPU: {KEPT}; 1 other" in site.words("status")
    told = site.json()["waiting"]
    assert [(one["number"], one["user"], one["what"]) for one in told] == [
        (7, "alice", "4 GPUs"),
        (9, "bob", "1 GPU"),
    ]
    assert told[1].keys() == {"number", "user", "uid", "pid", "since", "what", "why"}
    assert round(time.time() - told[1]["since"], -1) == 60.0
    monkeypatch.setattr(queue, "request_daemon_act", lambda *_: None)
    ended = site.call("queue", "--cancel", "9").stdout
    assert ended == f"cancelled 9: bob, pid {me}, for 1 GPU\n"
    rows = [line.split() for line in site.call("queue").stdout.splitlines()]
    assert [row[:4] for row in rows[1:]] == [
        ["7", "alice", str(me), "1m"],
        ["9", "bob", str(me), "1m"],
    ]


@pytest.mark.parametrize("state", ["", "T", "late", "S"])
def test_a_user_is_told_where_no_gpulockd_would_grant_anything(
    site: Site, monkeypatch: pytest.MonkeyPatch, state: str
) -> None:
    node, pid = site.node(), os.getpid()
    site.set("USER_CLAIMS=yes\n")
    monkeypatch.setattr(attention, "owns_lock_dir", lambda _: False)
    monkeypatch.setattr(attention, "find_running_daemon", lambda *_: pid if state else None)
    monkeypatch.setattr(attention, "is_stopped", lambda *_: state == "T")
    if state == "late":
        monkeypatch.setattr(attention, "FRESH", -1.0)
        write_verdicts(node.store.path, {}, node.boot_id)
    what = f"pid {pid} does not answer" if state else "does not run"
    told = f"gpulockd {what}: nothing is granted; ask root to start it again"
    for words in (("status",), ("why", "0"), ("queue",)):
        said = site.words(*words)
        assert (told in said) == (state != "S"), words


@pytest.mark.attack
def test_what_a_user_wrote_beside_a_claim_is_no_word_of_gpulocks(
    site: Site, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Tried: a comment `free, until 12-31 23:59`, which looked like the state and an end.

    Stopped by: it stands in quotes, behind gpulock's own words, and not whole where it is long.
    """
    monkeypatch.setenv("COLUMNS", "200")
    ends = clock_boottime() + 3600.0
    site.hold(1, note='free", until 12-31 23:59' + 70 * "x", until=ends, scheduler="process")
    shown = site.call("status").stdout
    said = f'"free\', until 12-31 23:59{15 * "x"}…"'
    assert re.search(rf"  until \d\d-\d\d \d\d:\d\d, {said}  ", shown)


def test_what_a_user_reserved_is_shown_with_its_times(site: Site) -> None:
    site.set("USER_CLAIMS=yes\n")
    node, now = site.node(), time.time()
    every = [
        Reservation(site.id(2), 1001, (now - 60, now + 3600), "alice", "thesis"),
        Reservation(site.id(3), 1002, (now + 3600, now + 7200), "bob", "talk"),
        Reservation(site.id(1), 1002, (now - 120, now + 3600), "bob", "now"),
        Reservation(site.id(4), 1002, (now - 7200, now - 3600), "bob", "over"),
    ]
    write_reservations(node.settings.state_dir, every)
    shown = site.words("status")
    assert [site.states()[number] for number in (2, 3, 4)] == ["held", "free", "free"]
    assert f"GPU 2 {every[0].describe()} GPU 3 {every[1].describe()}" in shown
    assert line_of(site.call("status").stdout, 2)[3:] == ["held", "reserved"]
    assert "over" not in shown
    keys = ("device", "uid", "user", "begin", "end", "comment")
    bob = (site.id(3), 1002, "bob", now + 3600, now + 7200, "talk")
    assert site.json()["reservations"][2] == dict(zip(keys, bob))
    said = site.words("why", "2")
    assert every[0].describe() in said
    assert f"later {every[1].describe()}" in site.words("why", "3")
    site.hold(1)
    assert f" {every[2].describe()}" in site.words("why", "1")
    assert "reserved reserved" not in site.words("why", "1")
    assert f"{site.gpulock} run -n 1 --wait -- COMMAND" in said


def test_nobody_waits_whose_process_has_ended(site: Site) -> None:
    node = site.node()
    gone = WaitingCaller(7, *dead_process(), 1000, 0.0, "alice", "4 GPUs", "")
    write_waiting(node.store.path, encode_waiting([gone], node.boot_id))
    assert "queue" not in site.call("status").stdout
    assert site.call("queue").stdout.startswith("nobody waits: no gpulockd runs")


def test_a_device_open_in_a_process_of_no_claim_is_foreign(site: Site) -> None:
    site.node()
    with site.opened(5) as process:
        assert site.states()[5] == "foreign"
        pid, start = process.pid, site.node().proc.start(process.pid)
        site.hold(1, scheduler="process", job_id=str(pid), pid=pid, start=start)
        assert site.states()[5] == "free"


def test_of_a_card_in_mig_mode_only_the_instance_that_is_used_is_foreign(tmp_path: Path) -> None:
    site = Site(tmp_path, "a100-mig")
    node = site.node()
    used = next(device for device in node.devices() if device.id.endswith(".gi3.ci0"))
    caps = mig_access_nodes(used, node.settings.driver_root)
    assert len(caps) == 2
    with site.opened(used.minor, "nvidiactl", *caps) as process:
        found = {gpu["id"]: gpu["state"] for gpu in site.json()["gpus"]}
        assert [name for name, state in found.items() if state == "foreign"] == [used.id]
        assert f"end process {process.pid} " in site.call("why", used.id).stdout
        beside = used.id.replace(".gi3.", ".gi2.")
        assert site.call("why", beside).stdout.splitlines()[0].endswith("free")
    text = site.call("status").stdout
    assert "1:gi1.ci0  0000:0f:00.0  A100-SXM4-80GB 3g.40gb  free" in text
    assert text.splitlines()[-1] == "12 devices: 12 free"


def test_free_lists_free_devices_only(site: Site) -> None:
    site.hold(0, 1, 2)
    result = site.call("status", "--free")
    assert result.exit_code == 0
    assert [line.split()[0] for line in result.stdout.splitlines()] == ["GPU", *"34567", "8"]
    site.hold(*range(3, 8), token="u")
    none = site.call("status", "--free")
    assert (none.exit_code, none.stdout) == (1, "8 GPUs: 0 free, 8 held\n")


def test_json_has_every_key_of_version_1_and_no_dots(site: Site) -> None:
    site.hold(3, task_id="7", until=clock_boottime() + 3600.0, comment="run", note="thesis")
    found = site.json()
    keys = {"version", "node", "boot_id", "settings_faults", "sample", "gpus", "totals"}
    assert found.keys() == keys | {"reservations", "waiting"}
    assert (found["version"], found["settings_faults"]) == (1, [])
    assert found["totals"] == {name: 0 for name in states.STATES} | {
        "free": 7,
        "held": 1,
        "expected": 8,
    }
    held = found["gpus"][3]
    assert held.keys() == {
        *("index", "id", "uuid", "minor", "model", "numa_node", "memory_mib"),
        *("state", "reason", "held", "holders", "held_seconds", "shares", "use"),
    }
    assert held["held"].keys() == TYPES.keys() - {"note"}
    assert (held["held"]["job_id"], held["held"]["task_id"]) == ("12", "7")
    assert held["held"]["comment"] == "thesis", "its user's, not gpulock's own word"
    assert round(held["held"]["until"] - time.time(), -2) == 3600.0, "by the wall clock"
    assert 0 <= held["held_seconds"] < 60
    assert (found["gpus"][4]["held"], found["gpus"][4]["held_seconds"]) == (None, None)
    assert not any("." in key for key in (*found, *held, *held["held"], *found["totals"]))
    text = (ROOT / "docs/status-json.md").read_text()
    shown = (*found, *held, *held["held"], *found["totals"])
    assert [key for key in shown if f"`{key}`" not in text] == []
    listed = re.findall("`([a-z_]+)`", text.partition("## `held`")[2].partition("## States")[0])
    assert {*listed} == TYPES.keys() - {"note"}, "what is not there is not listed"


def test_settings_that_are_not_obeyed_are_told(site: Site) -> None:
    site.set("GUPS=8\n")
    said = site.words("status")
    assert f"unknown key 'GUPS'; {site.gpulock} doctor" in said
    assert "unknown key 'GUPS'" in site.json()["settings_faults"][0]
    assert site.call("config").stdout.splitlines()[1].endswith("unknown key 'GUPS'")
    assert "unknown key 'GUPS'" in site.call("reap").stderr


def test_json_says_null_for_what_is_not_known(site: Site) -> None:
    site.lose_card(1)
    (site.files.lock_dir / "inventory").unlink()
    gpus = site.json()["gpus"]
    assert [gpu["memory_mib"] for gpu in gpus] == [None] * 8
    assert (gpus[7]["index"], gpus[7]["state"], gpus[7]["uuid"]) == (None, "missing", None)
    text = site.call("status").stdout
    assert "8 GPUs: 7 free, 1 missing" in text and "expected, but not there" in text
    assert text.splitlines()[8].split() == ["-", "missing"]
    site.call("quarantine", "0000:ff:00.0", "--reason", "x")  # then it is known which one it is
    assert site.call("status").stdout.splitlines()[8].split() == ["-", "0000:ff:00.0", "missing"]


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ("--idle soon", "is no duration"),
        ("--idle 1h --free", "a free device is not held"),
        ("--idle 1h --cluster", "each node lists its own idle devices"),
        ("--json --cluster", "ask Prometheus itself"),
        ("--watch 0", "is not in the range"),
        ("--watch x", "is not a valid float"),
        ("--watch --json", "call it again for each document"),
    ],
)
def test_what_makes_no_sense_is_a_usage_error(site: Site, words: str, said: str) -> None:
    result = site.call("status", *words.split())
    assert (result.exit_code, said in result.stderr) == (2, True)
    assert "before the command" not in result.stderr


@pytest.mark.slow
def test_colour_is_for_terminals_and_can_be_refused(site: Site) -> None:
    callers = {name: value for name, value in os.environ.items() if name != "NO_COLOR"}
    terminal = {**callers, "TERM": "xterm"}  # the caller's may be dumb
    assert "\x1b" not in site.run("status", env=terminal).stdout
    script = shutil.which("script")
    assert script, "script(1) makes the terminal: install util-linux"
    for extra, coloured in ({}, True), ({"NO_COLOR": "1"}, False):
        line = [script, "-qec", shlex.join(site.command("status")), "/dev/null"]
        env, none = {**terminal, **extra}, subprocess.DEVNULL
        shown = subprocess.check_output(line, env=env, stdin=none, text=True, cwd=ROOT, timeout=40)
        assert ("\x1b[32mfree" in shown) is coloured


def test_status_imports_nothing_it_does_not_need(site: Site) -> None:
    program = (
        "import sys\nfrom gpulock.cli import command_group\n"
        f"command_group.main(['--config', {site.config!r}, 'status'], standalone_mode=False)\n"
        "print(*sorted(sys.modules))"
    )
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, cwd=ROOT, check=True
    )
    loaded = set(done.stdout.splitlines()[-1].split())
    assert "gpulock.cli.status.status" in loaded
    assert not loaded & {
        *("json", "subprocess", "psutil", "dataclasses", "shutil", "tempfile"),
        *(
            "gpulock.cli.status.why",
            "gpulock.cli.claims.run",
            "gpulock.alloc.claim",
            "gpulock.install",
        ),
        *("gpulock.simulate", "gpulock.workstation.process_claims", "gpulock.alloc.release"),
    }


@pytest.fixture
def public() -> Iterator[Site]:
    """Give a node of root's that looks real (no marker) and that everybody can reach."""
    with public_place() as folder:
        made = Site(folder)
        text = made.files.config.read_text()
        kept = [line for line in text.splitlines() if not line.startswith("SIMULATION=")]
        made.files.config.write_text("\n".join(kept) + "\n")
        yield made


@pytest.mark.another_user
def test_an_ordinary_user_sees_holders_and_published_verdicts_and_no_other_judgement(
    public: Site,
) -> None:
    pid, start = dead_process()
    public.hold(1, scheduler="process", job_id=str(pid), pid=pid, start=start)
    nobody: dict[str, Any] = {"user": NOBODY, "group": NOBODY, "extra_groups": []}
    done = public.run("status", **nobody)
    assert line_of(done.stdout, 1)[3] == "held"
    assert "who uses a GPU without a claim is not known" in done.stdout
    assert "without a claim" not in public.run("status").stdout
    public.publish(t=Verdict("dead", "its shepherd is gone"))
    done = public.run("status", **nobody)
    assert (done.returncode, done.stderr) == (0, "")
    assert line_of(done.stdout, 1)[3:6] == ["stale", "pid", str(pid)]
    public.files.lock_dir.chmod(0o700)
    done = public.run("status", **nobody)
    assert (done.returncode, done.stdout) == (3, ""), "it is not called free"
    assert "Permission denied" in done.stderr


@pytest.mark.slow
@pytest.mark.parametrize(
    "command",
    [
        *("reap", "run -n 1 -- /bin/true", "claim -n 1", "release 1", "reserve 1 --reason x"),
        *("unreserve 1", "quarantine 1 --reason x", "restore 1"),
    ],
)
@pytest.mark.another_user
def test_an_ordinary_user_changes_nothing_of_roots(public: Site, command: str) -> None:
    public.hold(1)
    done = public.run(*command.split(), user=NOBODY, group=NOBODY, extra_groups=[])
    assert done.returncode == 1
    words = ("belongs to root", "only root ", "is root's; claim for one of your own")
    assert any(text in done.stderr for text in words)
    assert done.stderr.count("\n") == 1
    assert public.states()[1] != "free"


def test_the_shares_of_a_card_and_how_many_are_free_are_shown(site: Site) -> None:
    assert "shares" not in site.call("status").stdout
    site.set("SHARES=6:4 7:2\n")
    site.hold(7, job_id="13")
    site.hold_places(6, "12", 1)
    assert site.words("status").endswith(
        "8 GPUs: 6 free, 2 held shares GPU 6: 3 of 4 free, GPU 7: 0 of 2 free"
    )
    gpus = site.json()["gpus"]
    assert [gpu["shares"] for gpu in gpus[5:]] == [
        None,
        {"places": 4, "free": 3},
        {"places": 2, "free": 0},
    ]


def test_a_card_whose_mps_ends_is_held_and_says_so(site: Site) -> None:
    site.set("SHARES=6:4\n")
    leave_mps(site.node(), site.id(6), 1001)
    text = site.call("status").stdout
    assert line_of(text, 6)[3] == "held"
    said = f"GPU 6 held: MPS of uid 1001 ends on it; {site.gpulock} why 6"
    assert said in " ".join(text.split())
    assert "GPU 6: 0 of 4 free" in text
    gpu = site.json()["gpus"][6]
    assert (gpu["state"], gpu["reason"]) == ("held", "MPS of uid 1001 ends on it")
    assert (gpu["held"], gpu["holders"]) == (None, [])
    why = site.words("why", "6")
    assert "reason MPS of uid 1001 ends on it" in why
    assert why.endswith(f"freed by the end of that MPS, by gpulockd next {site.gpulock} doctor")


def test_a_full_lock_dir_is_said(site: Site, monkeypatch: pytest.MonkeyPatch) -> None:
    """It said that all GPUs are free, while no job was granted one."""
    full = os.statvfs_result((4096, 4096, 1000, 0, 0, 1000, 500, 500, 0, 255))

    def statvfs(_: object) -> os.statvfs_result:
        return full

    monkeypatch.setattr(os, "statvfs", statvfs)
    text = site.words("status")
    assert "LOCK_DIR it is full, no GPU is granted until there is room; df /" in text
