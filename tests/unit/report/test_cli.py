# SPDX-License-Identifier: Apache-2.0
"""`gpulock report` and `gpulock history` on a node whose claims begin and end."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import time
from pathlib import Path
from typing import Any

import pytest
from click.testing import Result

from gpulock.cli import command_group
from gpulock.cli.session import parse_time
from gpulock.daemon.history.files import name_month
from gpulock.report import scan
from tests.support.cli_site import PROGRAM, ROOT
from tests.support.history_site import Ended
from tests.support.runner import command_runner
from tests.support.trees import OTHER_BOOT, bus, public_place

NOBODY = 65534


class Desk(Ended):
    """A node on which commands are called."""

    def call(self, *words: str) -> Result:
        """Run a command."""
        return command_runner().invoke(command_group, ["--config", self.config(), *words])

    def text(self, *words: str) -> str:
        """Return what a command that succeeds says."""
        done = self.call(*words)
        assert done.exit_code == 0, done.output
        return done.output

    def past(self, number: int, *, ago: float = 0.0, **about: Any) -> None:
        """Let a claim of a job have ended some seconds ago, seen to work for half of its time."""
        about.setdefault("claimed_at", time.time() - ago - 100)
        own = self.hold(number, token=f"t{number}{int(ago)}", **about)
        self.finish(own, self.account(own, number))
        self.end(number)
        at, boottime = time.time() - ago, own.claimed_boottime + 100
        note = self.finished(own.token) / "released"
        note.write_text(f"{bus(number)} {at:.3f} {boottime} {number} GPU-{number} epilog\n")
        self.write()


@pytest.fixture
def desk(tmp_path: Path) -> Desk:
    made = Desk(tmp_path)
    made.sample()
    return made


def test_a_running_job_is_told_from_its_lock_and_the_sample(desk: Desk) -> None:
    own = desk.hold(0, 1)
    desk.sample(desk.account(own, 0), desk.account(own, 1, busy=0))
    said = desk.text("report", "12")
    assert "for 1m so far" in said and "2 GPUs" in said
    assert [line.split()[2:4] for line in said.splitlines()[4:6]] == [["40", "%"], ["0", "%"]]


def test_a_finished_job_is_told_before_and_after_it_is_in_the_history(desk: Desk) -> None:
    own = desk.hold(0)
    desk.finish(own, desk.account(own, 0))
    desk.end(0)
    before = desk.text("report", "12")
    assert "so far" not in before and "40 %" in before
    desk.write()
    (desk.exporter / "finished" / own.token).unlink()
    assert desk.text("report", "12") == before


def test_a_task_is_told_alone_and_an_array_whole(desk: Desk) -> None:
    for task in range(1, 4):
        desk.past(0, ago=100 - task, task_id=str(task))
    desk.past(1, job_id="123")
    found = json.loads(desk.text("report", "12", "--json"))
    assert [one["task_id"] for one in found["claims"]] == ["1", "2", "3"]
    assert [c["task_id"] for c in json.loads(desk.text("report", "12.3", "--json"))["claims"]] == [
        "3"
    ]
    assert desk.text("report", "job 12.2").startswith("Job 12.2 of alice")


def test_an_id_that_came_again_is_the_later_job(desk: Desk) -> None:
    desk.past(0, ago=100 * 86400, user="bob", uid=1001)
    desk.past(0, ago=90 * 86400)
    desk.past(1, ago=500, user="bob", uid=1001)
    desk.past(2, ago=300, cluster="another")
    desk.past(0)
    found = json.loads(desk.text("report", "12", "--json"))["claims"]
    assert len(found) == 1 and found[0]["user"] == "alice"


def test_of_a_claim_that_stands_what_it_gave_back_is_told_as_well(desk: Desk) -> None:
    desk.hold(0, 1)
    desk.end(0)
    assert "2 GPUs" in desk.text("report", "12")


@pytest.mark.parametrize("about", [{"boot_id": OTHER_BOOT}, {"ago": -50.0}])
def test_how_long_a_claim_stands_may_not_be_known(desk: Desk, about: dict[str, Any]) -> None:
    desk.hold(0, **about)
    assert ", for how long is not known" in desk.text("report", "12")


def test_where_locks_cannot_be_read_the_history_is_told(desk: Desk) -> None:
    desk.past(0)
    (desk.lock / "locks").rmdir()
    (desk.lock / "locks").write_text("x")
    assert "40 %" in desk.text("report", "12")


def test_a_run_of_weeks_and_the_next_one_are_of_the_same_job(desk: Desk) -> None:
    desk.past(0, ago=500, claimed_at=time.time() - 40 * 86400)
    desk.past(1)
    assert len(json.loads(desk.text("report", "12", "--json"))["claims"]) == 2


def test_of_a_claim_that_a_power_cut_brought_back_the_history_has_the_last_word(desk: Desk) -> None:
    own = desk.hold(0)
    desk.finish(own, desk.account(own, 0))
    desk.end(0)
    shutil.copytree(desk.finished(), desk.root / "kept")
    desk.write()
    shutil.copytree(desk.root / "kept", desk.finished())
    (desk.exporter / "finished" / own.token).unlink()
    assert "40 %" in desk.text("report", "12")


def test_of_claims_without_a_line_yet_the_last_is_the_one_that_ended_last(desk: Desk) -> None:
    for job, ago in ((1, 30), (2, 10), (3, 20)):
        own = desk.claim(0, token=f"t{job}", job_id=str(job))
        at, boottime = time.time() - ago, own.claimed_boottime + 100
        note = desk.finished(own.token) / "released"
        note.write_text(f"{bus(0)} {at:.3f} {boottime} 0 GPU-0 epilog\n")
    assert "last  job 2 of alice until" in desk.text("why", "0")


@pytest.mark.parametrize("runs", [True, False])
def test_a_process_is_no_job_of_its_number(desk: Desk, *, runs: bool) -> None:
    (desk.hold if runs else desk.past)(0, scheduler="process", job_id="12", pid=12)
    assert desk.call("report", "job", "12").exit_code == 1
    for words in (["12"], ["pid", "12"]):
        assert desk.text("report", *words).startswith("pid 12 of alice")


@pytest.mark.parametrize("words", [["12"], ["gpu", "0"], ["x y"], ["12", "--json"]])
def test_a_job_that_nobody_knows_is_refused_in_a_line(desk: Desk, words: list[str]) -> None:
    done = desk.call("report", *words)
    assert (done.exit_code, len(done.stderr.splitlines())) == (1, 1)
    assert done.stderr.startswith("gpulock: report:")
    assert desk.call("report").exit_code == 2


def test_a_node_on_which_nothing_was_ever_claimed_has_no_reports(tmp_path: Path) -> None:
    made = Desk(tmp_path)
    for path in (made.lock / "locks", made.records / "claims", made.records / "finished"):
        path.rmdir()
    assert made.call("report", "12").exit_code == 1
    assert made.text("history") == "no finished claim\n"


# --- history ----------------------------------------------------------------------------------


@pytest.fixture
def busy(desk: Desk) -> Desk:
    """A node with a week of claims, in two files: of alice and bob, in two queues."""
    for day in range(8, 0, -1):
        user, uid = ("alice", 1000) if day % 2 else ("bob", 1001)
        about: dict[str, Any] = {"user": user, "uid": uid, "queue": f"q{day % 3}"}
        desk.past(day % 4, ago=day * 86400.0, job_id=str(day), **about)
        if day == 5:
            desk.path.rename(desk.root / "earlier")
    desk.path.rename(next_month(desk))
    (desk.root / "earlier").rename(desk.path)
    return desk


def next_month(desk: Desk) -> Path:
    """Return the file of the month to come."""
    return desk.path.with_name(name_month(time.time() + 31 * 86400))


def jobs(desk: Desk, *words: str) -> list[str]:
    """Return the jobs that the history lists."""
    return [one["job_id"] for one in json.loads(desk.text("history", "--json", *words))["claims"]]


@pytest.mark.parametrize(
    ("words", "found"),
    [
        ((), "87654321"),
        (("--user", "bob"), "8642"),
        (("--since", "84h"), "321"),
        (("--until", "84h"), "87654"),
        (("--since", "6d", "--until", "60h", "--user", "alice"), "53"),
        (("--job", "7"), "7"),
        (("--device", "1"), "51"),
        (("--device", "0000:02:00.0"), "51"),
        (("--device", "GPU-00000001-aaaa"), "51"),
        (("--user", "carol"), ""),
        (("--job", "pid 7"), ""),
        (("--device", "0000:99:00.0"), ""),
    ],
)
def test_claims_are_found_by_user_job_device_and_time(
    busy: Desk, words: tuple[str, ...], found: str
) -> None:
    assert "".join(jobs(busy, *words)) == found


@pytest.mark.parametrize("words", [(), ("--json",), ("--by", "user")])
def test_claims_that_are_over_and_not_yet_written_are_counted(
    desk: Desk, words: tuple[str, ...]
) -> None:
    own = desk.hold(0)
    assert "not yet" not in desk.call("history", *words).stderr
    desk.finish(own, desk.account(own, 0))
    desk.end(0)
    done = desk.call("history", *words)
    assert (done.exit_code, "1 claim is over and not yet written" in done.stderr) == (0, True)
    for other in (("--user", "carol"), ("--until", "1h"), ("--device", "3")):
        assert "not yet" not in desk.call("history", *words, *other).stderr
    desk.write()
    assert desk.call("history", *words).stderr == ""


def test_a_claim_that_a_reboot_ended_is_told_before_it_is_in_the_history(desk: Desk) -> None:
    desk.run_job(0, ago=3600)
    assert "so far" in desk.text("report", "12")
    desk.proc.boot(OTHER_BOOT)
    desk.lose_run()
    assert "so far" not in desk.text("report", "12")
    assert "before this boot" in " ".join(desk.text("why", "job", "12").split())
    assert "1 claim is over and not yet written" in desk.call("history").stderr


@pytest.mark.parametrize("folder", ["finished", "claims", "owed", "history"])
def test_of_a_job_nothing_is_denied_where_a_folder_cannot_be_read(desk: Desk, folder: str) -> None:
    path = (desk.records if folder in ("finished", "claims") else desk.state) / folder
    shutil.rmtree(path, ignore_errors=True)
    path.write_text("x")
    done = desk.call("report", "12")
    assert (done.exit_code, "held no GPU" in done.stderr) == (1, False)
    assert f"{path}: Not a directory" in done.stderr
    if folder != "claims":  # then `why` refuses as a whole
        assert "no trace" not in desk.call("why", "job", "12").stdout


@pytest.mark.parametrize("words", [(), ("--json",), ("--by", "user")])
def test_a_history_that_cannot_be_read_is_not_an_empty_one(
    desk: Desk, words: tuple[str, ...]
) -> None:
    desk.past(0, ago=9)
    desk.path.rename(desk.root / "away")
    desk.path.mkdir()
    done = desk.call("history", *words)
    assert done.exit_code == 1
    assert f"{desk.path}: Is a directory" in done.stderr
    assert "no finished claim" not in done.stdout


def test_a_process_of_its_number_is_in_no_sum_of_a_job(desk: Desk) -> None:
    for number, scheduler in enumerate(("slurm", "process", "admin")):
        desk.past(number, ago=9, scheduler=scheduler, job_id="12")
    assert desk.text("history", "--job", "12").splitlines()[-1].startswith("1 claim: ")
    assert desk.text("history", "--job", "pid 12").splitlines()[-1].startswith("1 claim: ")
    for words in (("--by", "user"), ("--by", "device")):
        sums = json.loads(desk.text("history", "--job", "12", "--json", *words))["sums"]
        assert [one["claims"] for one in sums] == [1]


def test_one_task_of_an_array_is_neither_summed_with_the_others_nor_hidden_by_them(
    desk: Desk,
) -> None:
    for task in range(1, 4):
        desk.past(0, ago=100 - task, task_id=str(task))
    for job in ("12.1", "12.2"):
        said = desk.text("history", "--job", job, "--last", "1").splitlines()
        assert (len(said), said[1].split()[2]) == (3, job)
        assert said[2].startswith("1 claim: ")
        sums = desk.text("history", "--job", job, "--by", "user", "--json")
        assert [one["claims"] for one in json.loads(sums)["sums"]] == [1]
    desk.past(1, ago=9, job_id="13")  # the first task of what may be no array is the job
    assert desk.text("history", "--job", "13.1").splitlines()[-1].startswith("1 claim: ")


def test_the_table_has_the_last_ones_and_their_sum(busy: Desk) -> None:
    said = busy.text("history", "--last", "5").splitlines()
    assert [line.split()[2:6] for line in said[4:6]] == [
        ["2", "bob", "2", "1m"],
        ["1", "alice", "1", "1m"],
    ]
    every = jobs(busy)
    assert [jobs(busy, "--last", last) for last in ("0", "2")] == [every, every[-2:]]
    assert said[6] == "earlier claims are not shown: --last 0 shows all, --by user sums all"
    assert said[7] == "5 claims: 0.14 GPU hours held, 0.06 busy, 0.06 idle, 0.03 not observed"
    for last in ("0", "8", "9"):
        said = busy.text("history", "--last", last).splitlines()
        assert len(said) == 10
        assert said[-1] == "8 claims: 0.22 GPU hours held, 0.09 busy, 0.09 idle, 0.04 not observed"
    assert all(len(line) <= 100 for line in said)


def test_sums_by_user_device_and_queue(busy: Desk) -> None:
    found = json.loads(busy.text("history", "--by", "user", "--json"))
    assert [(one["user"], one["claims"], one["gpu_seconds"]) for one in found["sums"]] == [
        ("alice", 4, 400.0),
        ("bob", 4, 400.0),
    ]
    assert (found["sums"][0]["busy_seconds"], found["sums"][0]["idle_seconds"]) == (160.0, 160.0)
    assert found["sums"][0]["unobserved_seconds"] == 80.0
    by_device = json.loads(busy.text("history", "--by", "device", "--json"))
    assert [one["device"] for one in by_device["sums"]] == [bus(n) for n in range(4)]
    by_queue = busy.text("history", "--by", "queue").splitlines()
    assert [line.split()[0] for line in by_queue] == ["QUEUE", "q1", "q2", "q0"], "largest first"
    one = json.loads(busy.text("history", "--by", "user", "--device", "1", "--json"))
    assert [(each["user"], each["claims"]) for each in one["sums"]] == [("alice", 2)]


@pytest.mark.parametrize("tail", [1, 700, 5000])
def test_the_last_ones_are_found_behind_others_and_over_the_end_of_a_month(
    busy: Desk, monkeypatch: pytest.MonkeyPatch, tail: int
) -> None:
    monkeypatch.setattr(scan, "TAIL", tail)
    whole = busy.text("history", "--last", "3", "--user", "alice")
    assert [line.split()[2] for line in whole.splitlines()[1:4]] == ["5", "3", "1"]
    lines = busy.path.read_bytes().splitlines(keepends=True)
    busy.path.with_name("2001-02.jsonl").write_bytes(b"".join(lines[:-2]))
    busy.path.with_name("2001-01.jsonl").write_bytes(b"is not read\n")
    busy.path.write_bytes(b"".join(lines[-2:]))
    assert busy.call("history", "--last", "3", "--user", "alice").output == whole


def test_a_line_that_a_power_cut_tore_is_in_no_sum(desk: Desk) -> None:
    desk.past(0, ago=9)
    whole = desk.path.read_bytes()
    torn = whole[:400] + bytes(100) + whole[500:]
    desk.path.write_bytes(torn + whole)
    done = desk.call("history", "--by", "user", "--json")
    assert [one["claims"] for one in json.loads(done.stdout)["sums"]] == [1]
    assert "1 line of the history cannot be read" in done.stderr


def test_of_a_claim_of_several_devices_only_the_one_asked_for_counts(desk: Desk) -> None:
    both = desk.hold(0, 1)
    desk.finish(both, desk.account(both, 0, busy=10), desk.account(both, 1, busy=70))
    desk.end(0, 1)
    desk.write()
    assert "1 claim: 0.03 GPU hours held, 0.02 busy" in desk.text("history", "--device", "1")


def test_lines_that_are_garbage_are_counted_and_the_rest_is_told(busy: Desk) -> None:
    with busy.path.open("ab") as file:
        file.write(b"garbage\n{}\n" + b"[" * 50_000 + b"\n" + b"x" * 3_000_000 + b"\n\0\0\n")
        file.write(
            b'{"version":1,"released_at":1.2.3,"claimed_at":1,"user":"a","gpus":1,'
            b'"gpu_seconds":1,"busy_seconds":1,"observed_seconds":1,\n'
        )
    busy.past(0, job_id="99")
    done = busy.call("history", "--since", "10d")
    assert "9 claims" in done.output
    assert "5 lines of the history cannot be read" in done.stderr


def test_a_user_with_any_name_is_found_by_it(desk: Desk) -> None:
    desk.past(0, user='Ünï"\\', ago=5)
    desk.past(1, user="alice")
    assert "Ünï" in desk.text("history", "--user", 'Ünï"\\')
    found = json.loads(desk.text("history", "--by", "user", "--json"))["sums"]
    assert {one["user"] for one in found} == {'Ünï"\\', "alice"}


@pytest.mark.parametrize(
    "words",
    [
        *(("--since", "soon"), ("--job", "gpu"), ("--device", "9"), ("--by", "moon")),
        *((f"--{name}", "") for name in ("user", "job", "device", "since", "until")),
    ],
)
def test_a_question_that_makes_no_sense_is_a_wrong_call_and_not_everything(
    busy: Desk, words: tuple[str, str]
) -> None:
    done = busy.call("history", *words)
    assert (done.exit_code, done.stdout) == (2, "")


def test_a_time_is_a_date_or_so_long_ago() -> None:
    now = time.mktime((2026, 11, 21, 12, 0, 0, 0, 0, -1))
    assert parse_time("7d", now) == now - 7 * 86400
    assert parse_time("2026-11-21T12:00", now) == now
    assert parse_time("2026-11-21 11:59:50", now) == now - 10
    assert [now - parse_time(clock, now) for clock in ("11:00", "12:30")] == [3600, 23.5 * 3600]
    for text, hours in (("8:30", 20.5), ("14:00", 2), ("2h", 2), ("2026-11-21T14:00", 2)):
        assert parse_time(text, now, now) == now + hours * 3600
    assert parse_time("14:00", now, now + 6 * 3600) == now + 26 * 3600
    with pytest.raises(ValueError, match="'9:30' is past; for the next day write 2026-11-22T09:30"):
        parse_time("9:30", now, now)
    for none in ("2026-13-01", "25:00", "0001-01-01"):
        with pytest.raises(ValueError, match="is no time: 7d"):
            parse_time(none, now)


def test_why_still_knows_a_job_that_is_in_the_history(desk: Desk) -> None:
    desk.past(0)
    assert desk.waiting() == []
    said = desk.text("why", "job", "12")
    assert "holds nothing" in said and "GPU 0 from" in said
    assert f"gpulock --config {desk.config()} report 12" in " ".join(said.split())
    assert desk.call("why", "job", "13").exit_code == 1


def test_why_still_knows_who_had_a_free_device_last(desk: Desk) -> None:
    desk.past(0, user="bob", job_id="11", ago=50)
    desk.past(0)
    desk.past(1, job_id="13")
    assert "12 of alice until" in desk.text("why", "gpu", "0")
    assert "until" not in desk.text("why", "gpu", "2")


@pytest.mark.slow
@pytest.mark.another_user
def test_an_ordinary_user_sees_reports_as_far_as_the_folders_mode_allows() -> None:
    os.umask(0o022)
    with public_place() as place:
        desk = Desk(place)
        desk.past(0)
        desk.hold(1, token="beef", job_id="13")
        config = desk.root / "real.conf"
        config.write_text("".join(f"{key}={value}\n" for key, value in desk.settings.items()))

        def asked(*words: str) -> subprocess.CompletedProcess[str]:
            line, pipe = [*PROGRAM, "--config", str(config), *words], subprocess.PIPE
            ids: dict[str, Any] = {"user": NOBODY, "group": NOBODY}
            return subprocess.run(
                line, **ids, cwd=ROOT, stdout=pipe, stderr=pipe, text=True, check=False
            )

        assert "Job 12 of alice" in asked("report", "12").stdout
        assert "1 claim" in asked("history").stdout
        desk.path.parent.chmod(0o750)
        closed = asked("report", "12")
        assert closed.returncode == 1 and "Permission denied" in closed.stderr
        assert "Job 13 of alice" in asked("report", "13").stdout
        assert "Permission denied" in asked("history").stderr
