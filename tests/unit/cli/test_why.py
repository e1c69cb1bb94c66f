# SPDX-License-Identifier: Apache-2.0
"""`gpulock why`: holder, evidence and the next command, for devices, jobs and processes."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from gpulock.alloc.device_users import OpenFiles
from gpulock.alloc.environs import CLAIM
from gpulock.cli.status import attention, evidence, why
from gpulock.cli.status.evidence import describe_process, printable_process_name
from gpulock.cli.status.status_view import ProcessView, view_node
from gpulock.node.procfs import TICKS, Proc
from gpulock.store.event_kinds import REFUSED
from gpulock.store.events import note_event
from gpulock.store.quarantine import QUARANTINE, write_device_note
from gpulock.store.verdicts import ALIVE, Verdict
from tests.support.cli_site import Site, dead_process
from tests.support.locks import place_lock, retire_lock
from tests.support.runner import read_facts as facts
from tests.support.samples import Sampled
from tests.support.trees import Box, FakeProc, bus

Process = subprocess.Popen[bytes]
SEEN = "" if os.geteuid() == 0 else " (of your own processes; root sees all)"


def test_of_each_holder_of_a_shared_gpu_it_is_said_what_frees_it(site: Site) -> None:
    for number in (1, 2):
        site.hold_places(2, f"1{number}", number, scheduler="slurm")
    site.publish(t11=Verdict("dead", "its steps are gone"), t12=Verdict("alive", "it runs"))
    told = site.call("why", "2").stdout.splitlines()
    assert told.count("") == 1
    said = [" ".join(line.split()) for line in told]
    assert [line for line in said if not line or line.startswith(("holder", "freed"))] == [
        "holder job 11 of alice in gpu.q",
        "freed by the next claim that needs it, or a reap",
        "",
        "holder job 12 of alice in gpu.q",
        "freed by its epilog, when the job ends",
    ]
    assert said[-1] == "next scontrol show job 12"


def test_a_claim_of_several_places_is_one_holder_with_its_part(site: Site) -> None:
    site.hold_places(2, "12", 1, 2)
    site.hold_places(2, "13", 3)
    said = [" ".join(line.split()) for line in site.call("why", "2").stdout.splitlines()]
    assert [line for line in said if line.startswith(("holder", "share", "grant"))] == [
        "holder job 12 of alice in gpu.q",
        "share 2 of 4 places of GPU 2",
        "holder job 13 of alice in gpu.q",
        "share 1 of 4 places of GPU 2",
    ]
    asked = facts(site.call("why", "12").stdout)
    assert asked["share"] == "2 of 4 places of GPU 2"
    assert asked["open"].count("GPU 2:") == 1


def test_a_held_device_names_holder_verdict_processes_and_next_command(
    site: Site, process: Process
) -> None:
    start = site.node().proc.start(process.pid)
    site.hold(1, 3, job_id="12", task_id="3", pid=process.pid, start=start, sid=process.pid)
    result = site.call("why", "3")
    assert result.exit_code == 0
    assert result.stdout.startswith("GPU 3  0000:0b:00.0  V100-SXM2-32GB  held\n")
    found = facts(result.stdout)
    assert found["holder"] == "job 12.3 of alice in gpu.q"
    assert found["verdict"] == f"alive: its shepherd {process.pid} runs"
    assert found["shepherd"] == f"{process.pid} (sleep) runs"
    assert found["grant"] == "GPUs 1, 3 in one claim"
    assert found["open"] == f"GPU 3: nobody{SEEN}"
    assert found["freed by"] == "its epilog, when the job ends"
    assert found["next"] == "qstat -j 12"


def test_a_claim_of_run_is_told_by_the_command_and_not_by_a_code(
    site: Site, monkeypatch: pytest.MonkeyPatch
) -> None:
    site.hold(2, scheduler="process", queue="", comment="run")
    site.publish(t=Verdict(ALIVE, "process 7 runs"))
    monkeypatch.setattr(evidence, "owns_lock_dir", lambda _: False)
    monkeypatch.setattr(why, "owns_lock_dir", lambda _: False)
    found = facts(site.call("why", "2").stdout)
    assert found["verdict"] == "alive: process 7 runs, 0s ago"  # it may be gone by now
    assert found["freed by"] == "the end of the claim's last process"
    assert found["made by"] == "a `run` command"
    assert "reason" not in found


def test_a_free_device_is_asked_for_as_the_node_gives_it(site: Site) -> None:
    assert (
        facts(site.call("why", "3").stdout)["next"] == f"{site.gpulock} run -n 1 --wait -- COMMAND"
    )
    (Path(site.node().settings.state_dir) / "slurm-map").write_text("")
    assert facts(site.call("why", "3").stdout)["next"] == "sbatch --gres=gpu:1 JOB_SCRIPT"
    with open(site.config, "a") as file:
        file.write("SGE_ROOT=/opt/sge\nSGE_COMPLEXES=cards gpu_a100=model:a100*\n")
    assert facts(site.call("why", "3").stdout)["next"] == "qsub -l cards=1 JOB_SCRIPT"


def test_a_job_without_shepherd_is_alive_while_its_session_is(site: Site, process: Process) -> None:
    pid, start = dead_process()
    site.hold(5, pid=pid, start=start, sid=process.pid, uid=os.getuid())
    found = facts(site.call("why", "12").stdout)
    told = f"alive: its process {process.pid} runs without a shepherd: it is of its session"
    assert found["verdict"] == f"{told} {process.pid}"
    assert found["shepherd"] == f"{pid} is gone"
    assert found["session"] == f"{process.pid}: {process.pid} (sleep)"
    after = "the next claim or reap after its last process has ended"
    assert (found["freed by"], found["next"]) == (after, f"{site.gpulock} reap")


def test_a_claim_that_is_being_made_ends_by_a_reap(site: Site) -> None:
    path = Path(site.node().store.locks_dir, site.id(1))
    path.mkdir()
    found = facts(site.call("why", "1").stdout)
    assert found["record"] == "none: a claim is being made"
    assert found["freed by"] == "a reap, where no claim is at work"
    assert found["next"] == f"{site.gpulock} reap"


@pytest.mark.root
def test_who_has_a_device_open_and_is_another_users_is_marked(site: Site) -> None:
    site.hold(5)
    with site.opened(5) as stranger:
        found = facts(site.call("why", "5").stdout)
    assert found["open"] == f"GPU 5: {stranger.pid} (sh, of root)"


def test_who_has_a_device_open_and_is_of_another_claim_is_marked(
    site: Site, process: Process
) -> None:
    with site.opened(5) as stranger:
        session, uid = os.getsid(stranger.pid), os.getuid()
        site.hold(1, job_id="13", token="t13", uid=uid, sid=session)
        site.hold(5, pid=process.pid, start=site.node().proc.start(process.pid), uid=uid)
        found = facts(site.call("why", "5").stdout)
    assert found["open"] == f"GPU 5: {stranger.pid} (sh, job 13 of alice){SEEN}"


@pytest.mark.parametrize(("of_owner", "to_root"), [(False, True), (True, True), (True, False)])
def test_what_was_not_seen_is_said_to_root_of_the_owner_alone(
    site: Site, monkeypatch: pytest.MonkeyPatch, of_owner: bool, to_root: bool
) -> None:
    look = OpenFiles._opened_by  # pyright: ignore[reportPrivateUsage]

    def slow(files: OpenFiles, pid: int, uid: int | None) -> Iterator[str]:
        if (uid is not None) is of_owner and pid == os.getpid():
            raise TimeoutError
        return look(files, pid, uid)

    monkeypatch.setattr(OpenFiles, "_opened_by", slow)
    site.hold(5, uid=os.getuid() if of_owner else 4321)
    monkeypatch.setattr("gpulock.cli.status.evidence.owns_lock_dir", lambda _: to_root)
    said = facts(site.call("why", "5").stdout).get("not seen", "")
    assert (
        said.endswith("open files than can be looked at in time")
        is (of_owner and to_root)
        is bool(said)
    )


def test_a_process_that_proc_hides_is_not_said_to_be_gone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Under hidepid=2 no process of another user shows, init neither (proc(5))."""
    proc = Proc(str(tmp_path))
    monkeypatch.setattr(os, "geteuid", lambda: 1000)
    hidden = "5019 is not to be seen (other users' processes are hidden from you)"
    assert describe_process(proc, 5019, 1) == hidden
    (tmp_path / "1").mkdir()
    assert describe_process(proc, 5019, 1) == "5019 is gone"


@pytest.mark.parametrize(
    ("after", "older"),
    [(-1.0, ""), (0.009, ""), (1.0, ", older than the claim")],  # a start is known to 0.01 s
)
def test_who_keeps_the_device_of_a_dead_job_open_is_named_and_whether_it_was_there_before(
    site: Site, after: float, older: str
) -> None:
    pid, start = dead_process()
    with site.opened(5) as user:
        claimed = site.node().proc.start(user.pid) / TICKS + after
        site.hold(5, pid=pid, start=start, sid=pid, uid=os.getuid(), claimed_boottime=claimed)
        text = site.call("why", "5").stdout
        assert "quarantined" in text.splitlines()[0]
        found = facts(text)
        assert found["open"] == f"GPU 5: {user.pid} (sh{older}){SEEN}"
        end = f"end process {user.pid} (ps -fp {user.pid} shows it)"
        assert found["next"] == f"{end}, then {site.gpulock} reap"


@pytest.mark.parametrize(
    ("runs", "first", "second"),
    [
        (0, "then {} reap", "ask root: {} reap"),
        (7, "then gpulockd frees it", "nothing: gpulockd does it"),
    ],
    ids=["no gpulockd", "gpulockd runs"],
)
def test_a_user_is_told_what_only_root_may_do_as_roots(
    site: Site, monkeypatch: pytest.MonkeyPatch, runs: int, first: str, second: str
) -> None:
    write_device_note(site.node().settings.state_dir, QUARANTINE, site.id(1), "bob", "fan")
    site.hold(0)
    verdict = Verdict("dead", "its shepherd is gone")
    site.publish(t=verdict)
    monkeypatch.setattr(attention, "owns_lock_dir", lambda _: False)
    monkeypatch.setattr(attention, "find_running_daemon", lambda *_: runs)
    monkeypatch.setattr("gpulock.cli.status.why.owns_lock_dir", lambda _: False)
    assert facts(site.call("why", "1").stdout)["next"] == f"ask root: {site.gpulock} restore 1"
    assert facts(site.call("why", "0").stdout)["next"] == second.format(site.gpulock)
    verdict.orphans = "process 7 has the device open"
    site.publish(t=verdict)
    assert facts(site.call("why", "0").stdout)["next"].endswith(first.format(site.gpulock))


def test_of_a_claim_whose_users_processes_cannot_all_be_seen_it_is_said_who_can_end_them(
    site: Site,
) -> None:
    site.hold(0, scheduler="process", job_id="7", uid=os.getuid())
    site.publish(t=Verdict("unknown", "uid 2004 has more processes"))
    view = view_node(site.node(), judging=False)
    freed = "a reap that sees all processes of alice; root may end them"
    found = attention.list_next_steps(view, view.rows()[0])
    assert found == [("freed by", freed), ("next", "ps -fu alice")]


def test_a_device_with_the_number_of_a_job_points_to_the_job_and_its_tasks(site: Site) -> None:
    site.hold(0, job_id="3", task_id="2")
    site.hold(1, job_id="3", task_id="5", token="u")
    text = site.call("why", "3").stdout
    assert text.startswith("GPU 3 ")
    assert f"{site.gpulock} why job 3" in text
    of_job = site.call("why", "job", "3").stdout
    assert of_job.startswith("job 3.2 of alice in gpu.q holds GPU 0\n")
    assert "\njob 3.5 of alice in gpu.q holds GPU 1\n" in of_job


def test_a_process_leads_to_the_job_whose_session_it_is_in(site: Site, process: Process) -> None:
    pid, start = dead_process()
    site.hold(2, pid=pid, start=start, sid=process.pid, uid=os.getuid())
    assert "job 12 of alice" in site.call("why", f"pid {process.pid}").stdout


def test_of_a_process_without_a_claim_it_is_told_whether_it_runs(site: Site) -> None:
    for pid, word in ((os.getpid(), "runs"), (dead_process()[0], "is gone")):
        assert f"process {pid} {word}" in site.words("why", "pid", str(pid))


def test_of_a_process_without_a_claim_it_is_told_what_it_has_open_and_who_holds_that(
    site: Site,
) -> None:
    pid, start = dead_process()
    site.hold(3, pid=pid, start=start)
    with site.opened(2, 3) as process:
        result = site.call("why", "pid", str(process.pid))
        said = "GPU 2 without a claim; GPU 3 without a claim: it is held by job 12 of alice"
        assert (result.exit_code, facts(result.stdout)["open"]) == (0, said)
        assert f"pid {process.pid} holds nothing" in result.stdout


def test_what_a_job_held_and_how_it_ended_is_told(site: Site) -> None:
    site.hold(1, 2, job_id="12")
    site.hold(3, job_id="123", token="u")
    site.call("release", "--job", "12", "--force", "--reason", "the epilog was lost")
    result = site.call("why", "job 12")
    assert result.exit_code == 0
    found = facts(result.stdout)
    assert found["held"].startswith("GPUs 1, 2 from ")
    assert "the epilog was lost" in " ".join(result.stdout.split())
    assert "job 123" not in result.stdout


def test_a_number_that_is_no_device_here_is_said_to_be_taken_for_a_job(site: Site) -> None:
    said = "no GPU 99 is here: 99 is taken for a job"
    unknown = site.call("why", "99")
    assert (unknown.exit_code, said in unknown.stdout) == (1, True)
    assert said not in site.call("why", "job", "99").stdout
    site.hold(1, job_id="99")
    assert said in site.call("why", "99").stdout
    assert "taken for a job" not in site.call("why", "99.1").stdout


def test_a_number_of_no_known_job_is_a_process_as_status_names_it(site: Site) -> None:
    pid, start = dead_process()
    held = site.hold(1, scheduler="process", job_id=str(pid), pid=pid, start=start, queue="")
    told = site.call("why", str(pid)).stdout
    assert told.startswith(f"pid {pid} of alice holds GPU 1\n")
    assert f"no GPU {pid} is here: {pid} is taken for a process" in told
    assert site.call("why", "job", str(pid)).stdout == told[: told.rindex("(no GPU")]
    assert site.call("report", str(pid)).stdout.startswith(f"pid {pid} of alice on ")
    site.hold(2, job_id=str(pid), token="u", uid=held.uid)
    assert site.call("why", str(pid)).stdout.startswith(f"job {pid} of alice in gpu.q holds GPU 2")
    assert site.call("report", str(pid)).stdout.startswith(f"Job {pid} of alice")


def test_a_job_that_the_prolog_refused_is_told_the_last_reason(site: Site) -> None:
    lock_dir = site.node().store.path
    sentence = "gpulock: job 4711: broken: no NVIDIA driver; load it"
    note_event(lock_dir, REFUSED, "4711", "gpulock: job 4711: busy: no GPU; wait")
    note_event(lock_dir, REFUSED, "4711", sentence)
    result = site.call("why", "4711")
    assert result.exit_code == 0
    assert facts(result.stdout)["refused"].startswith(f"{sentence}, at ")
    assert "busy" not in result.stdout
    assert "no trace" not in result.stdout
    assert "no trace" in site.call("why", "471").stdout


@pytest.mark.parametrize(
    ("name", "shown"),
    [
        ("a-program-with-a-long-name", "a-program-with-a-long-name"),
        ("train), 55 (x;", "train?? 55 ?x?"),
        ("x" * 60, "x" * 40),
    ],
)
def test_a_long_name_is_told_but_nothing_that_ends_its_brackets(
    tmp_path: Path, name: str, shown: str
) -> None:
    proc = FakeProc(tmp_path)
    proc.add(700, name[:15])  # as long as the kernel keeps it
    (tmp_path / "700/cmdline").write_text(f"/opt/{name}\0--epochs\0")
    told = [printable_process_name(Proc(str(tmp_path)), pid) for pid in (700, 701)]
    assert told == [shown, "?"]


def test_an_owners_process_that_opened_the_card_by_another_path_is_named(
    site: Site, tmp_path: Path
) -> None:
    site.hold(3, uid=os.getuid())
    alias = tmp_path / "alias"
    os.link(site.files.dev_root / "nvidia3", alias)
    with alias.open() as kept, subprocess.Popen(["/bin/sleep", "300"], stdin=kept) as sleeper:
        opened = facts(site.call("why", "3").stdout)["open"]
        sleeper.kill()
    assert f"{sleeper.pid} (sleep" in opened


@pytest.mark.parametrize(
    "name", ["0000:ff:00.0", "ff:00.0", "00000000:FF:00.0", "gpu ff:00.0", "ff:00.0.gi3.ci0"]
)
def test_a_locked_card_that_is_gone_is_found_by_its_bus_id(site: Site, name: str) -> None:
    node, gone = site.node(), f"0000:ff:00.0{name.partition('0.0')[2]}"
    place_lock(node.store, gone, site.hold(1))
    result = site.call("why", name)
    assert (result.exit_code, result.stdout.split("\n")[0]) == (0, f"{gone}  missing")
    assert facts(result.stdout)["holder"] == "job 12 of alice in gpu.q"
    assert "open" not in facts(result.stdout)
    assert facts(result.stdout)["freed by"] == "the end of its job"
    assert os.path.isdir(f"{node.store.locks_dir}/{gone}")


def test_a_claim_of_before_this_boot_is_told_as_such_and_its_end_is_not(site: Site) -> None:
    site.hold(1, boot_id="another", until=1e6)
    found = facts(site.call("why", "1").stdout)
    assert found["since"].endswith(", before this boot") and "end" not in found


def test_before_the_first_claim_of_a_boot_that_is_said(site: Site) -> None:
    assert "nothing was claimed here in this boot" in site.call("why", "job", "12").stdout


def test_cards_that_are_gone_are_told_claim_by_claim_and_one_that_never_was_is_refused(
    site: Site,
) -> None:
    for number, name in ((1, "0000:fe:00.0"), (2, "0000:ff:00.0")):
        place_lock(site.node().store, name, site.hold(number, token=f"t{number}"))
        assert name in facts(site.call("status").stdout)
    result = site.call("why", "fd:00.0")
    assert (result.exit_code, result.stdout) == (1, "")
    assert "no device 'fd:00.0' here" in result.stderr
    store = site.node().store
    place_lock(store, "0000:fd:00.0", site.hold(devices=("0000:fd:00.0",)))
    retire_lock(store, store.read("0000:fd:00.0"), "epilog")
    assert site.call("why", "fd:00.0").stdout.startswith("0000:fd:00.0  missing\n")  # it was


def test_a_card_that_fell_off_the_bus_is_missing_with_its_last_holder(site: Site) -> None:
    site.lose_card(1)
    result = site.call("why", "01:00.0")
    assert (result.exit_code, result.stdout.split("\n")[0]) == (0, "0000:01:00.0  missing")
    assert facts(result.stdout) == {
        "reason": "the driver does not show it",
        "next": "look at dmesg for NVRM and Xid",
    }
    store = site.node().store
    place_lock(store, "0000:01:00.0", site.hold(devices=("0000:01:00.0",)))
    retire_lock(store, store.read("0000:01:00.0"), "epilog")
    assert facts(site.call("why", "01:00.0").stdout)["last"].startswith("job 12 of alice")


def test_a_quarantined_card_that_is_gone_is_missing(site: Site) -> None:
    state_dir = site.node().settings.state_dir
    write_device_note(state_dir, QUARANTINE, "0000:ff:00.0", "root", "Xid 79")
    result = site.call("why", "ff:00.0")
    assert (result.exit_code, result.stdout.split("\n")[0]) == (0, "0000:ff:00.0  missing")
    reason = "the driver does not show it; quarantined: Xid 79 (root)"
    assert facts(result.stdout)["reason"] == reason
    write_device_note(state_dir, QUARANTINE, site.id(1), "root", "Xid 79")
    site.lose_card(1)
    reason = "expected, but not there; quarantined: Xid 79 (root)"
    assert facts(site.call("why", "07:00.0").stdout)["reason"] == reason


def test_a_record_that_no_reap_can_read_is_freed_by_force_alone(site: Site) -> None:
    site.hold(0)
    site.spoil(0)
    force = f'{site.gpulock} release 0 --force --reason "TEXT"'
    found = facts(site.call("why", "0").stdout)
    assert found["freed by"] == "an administrator: no reap frees what it cannot read"
    assert found["next"] == force
    assert force in " ".join(site.call("status").stdout.split())
    assert force in site.call("reap").stdout
    refused = site.call("release", "0")
    assert (refused.exit_code, "use --force" in refused.stderr) == (1, True)
    assert site.call("release", "0", "--force", "--reason", "x").stdout == "freed GPU 0\n"
    assert "restored" not in site.call("reap").stdout
    assert site.states()[0] == "free"


def test_anchors_that_cannot_be_read_do_not_keep_a_device_from_a_forced_release(site: Site) -> None:
    site.hold(0)
    Path(f"{site.files.lock_dir}.claims/claims/t/anchors").write_text("")
    result = site.call("release", "0", "--force", "--reason", "x")
    assert result.stdout == "freed GPU 0 (was job 12 of alice)\n"
    assert site.states()[0] == "free"


@pytest.mark.parametrize("linked", [False, True])
def test_what_stands_in_the_place_of_a_lock_is_freed_by_force_alone(
    site: Site, tmp_path: Path, *, linked: bool
) -> None:
    site.node()
    path = site.files.lock_dir / "locks" / site.id(1)
    path.symlink_to(tmp_path) if linked else path.write_text("x")
    (tmp_path / "owner").write_text("kept")
    force = f'{site.gpulock} release 1 --force --reason "TEXT"'
    assert force in site.words("why", "1")
    assert force in site.call("reap").stdout
    assert f"{path} is no directory" in site.call("doctor").stdout
    assert site.call("release", "1", "--force", "--reason", "x").stdout == "freed GPU 1\n"
    assert (site.states()[1], (tmp_path / "owner").exists()) == ("free", True)


def test_of_a_card_that_is_gone_a_lock_that_no_reap_can_free_is_told_as_such(site: Site) -> None:
    site.node()
    path = site.files.lock_dir / "locks" / "0000:ff:00.0"
    path.mkdir()
    (path / "owner").write_text("garbage")
    said = facts(site.call("why", "0000:ff:00.0").stdout)
    assert said["freed by"] == "an administrator: no reap frees what it cannot read"
    assert said["next"] == f'{site.gpulock} release 0000:ff:00.0 --force --reason "TEXT"'
    assert "end of its job" not in site.call("status").stdout


def test_what_keeps_a_claim_past_its_end_is_named_beside_the_shell(site: Site) -> None:
    shell = str(os.getpid())
    site.hold(0, scheduler="process", job_id=shell, uid=os.getuid(), until=1.0)
    with subprocess.Popen(["/bin/sleep", "300"], env={CLAIM: "t"}) as job:
        found = facts(site.call("why", "0").stdout)
        job.kill()
    assert "it is over" in found["end"]
    assert (found["process"].split()[0], found["beside it"]) == (shell, f"{job.pid} (sleep)")


def test_the_process_that_lives_is_named_where_the_one_that_claimed_is_gone(
    site: Site, process: Process
) -> None:
    pid, start = dead_process()
    uid, sid = os.getuid(), process.pid
    site.hold(0, scheduler="process", job_id=str(pid), pid=pid, start=start, sid=sid, uid=uid)
    found = facts(site.call("why", "0").stdout)
    assert found["verdict"] == f"alive: process {process.pid} is of its session {process.pid}"
    assert found["next"] == f"look at it: ps -fp {process.pid}"


def test_what_only_the_exporter_saw_is_told_as_its_word(site: Site) -> None:
    sampled = Sampled(site.files.exporter_dir)
    sampled.device(site.id(4), foreign=1, foreign_pids="4711")
    site.hold(5)
    sampled.device(site.id(5))
    sampled.claim("t", site.id(5), idle=7200.0)
    sampled.write()
    found = facts(site.call("why", "4").stdout)
    assert found["foreign"] == "process 4711, as gpulock-exporter saw it"
    ends = f"end process 4711 (ps -fp 4711 shows it), or {site.gpulock} quarantine"
    assert found["next"].startswith(ends)
    text = site.call("why", "5").stdout
    assert text.splitlines()[0].endswith("held (idle)")
    assert facts(text)["idle"] == "did nothing for 2h00m, as gpulock-exporter saw it"


def test_a_process_that_was_forked_between_two_looks_is_a_stranger_and_no_crash(
    tmp_path: Path,
) -> None:
    box = Box(tmp_path)
    sight = ProcessView(view_node(box.node(), False))
    sight.scan.statuses()
    box.proc.add(900, "child", fds={3: box.dev / "nvidia0"})
    assert sight.find_foreign_pids(bus(0)) == [900]
    sight = ProcessView(view_node(box.node(), False))
    assert sight.holders.pids_with_open(bus(0)) == [900]
    box.proc.remove(900)
    assert sight.find_foreign_pids(bus(0)) == [900]  # it had it open when it was looked at
