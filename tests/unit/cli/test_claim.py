# SPDX-License-Identifier: Apache-2.0
"""`gpulock claim` and `release`: devices for a process that runs already."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from gpulock.cli.claims import socket_client
from gpulock.cli.session import uid_to_user_name
from gpulock.deadline import clock_boottime
from gpulock.job.environment import BIND_LISTS, loaded_driver_version
from gpulock.node.context import Node
from gpulock.node.settings import Settings
from gpulock.node.settings_file import read_settings
from gpulock.workstation.wire import SocketReply, SocketRequest
from tests.support.cli_site import NOBODY, ROOT, Site, dead_process
from tests.support.driver_reads import is_gate_held
from tests.support.locks import place_lock
from tests.support.wait import wait_until

pytestmark = pytest.mark.slow

Process = subprocess.Popen[bytes]


def records(site: Site) -> list[str]:
    """Return the text of each claim's record."""
    claims = Path(f"{site.files.lock_dir}.claims/claims")
    return [path.read_text() for path in claims.glob("*/record")]


def test_a_claim_is_held_for_the_process_that_is_named(site: Site, process: Process) -> None:
    result = site.call("claim", "-n", "2", "--for", "2h", "--pid", str(process.pid))
    end = time.strftime("%m-%d", time.localtime(time.time() + 7200))
    assert (result.exit_code, f"process ends; the claim's end: {end}" in result.stderr) == (
        0,
        True,
    )
    assert [line.split()[:3] for line in result.stdout.splitlines()] == [
        ["GPU", "0", "0000:06:00.0"],
        ["GPU", "3", "0000:0b:00.0"],
    ]
    said = f"gpulock: GPUs 0, 3 held by pid {process.pid} until its claim's last process ends;"
    assert result.stderr.startswith(said)
    assert f"{site.gpulock} release --pid {process.pid}" in result.stderr
    assert [gpu["held"]["pid"] for gpu in site.json()["gpus"] if gpu["held"]] == [process.pid] * 2
    assert len(records(site)) == 1
    freed = site.call("release", "--pid", str(process.pid))
    assert (freed.exit_code, freed.stdout.count("freed")) == (0, 2)
    assert (site.states(), records(site)) == (["free"] * 8, [])


def test_what_a_script_starts_after_an_export_keeps_its_claim_when_the_script_has_ended(
    site: Site,
) -> None:
    script = (
        'eval "$("$@" claim -n 1 --export 2>/dev/null)"; sleep 99 >&- 2>&- & echo $!;'
        ' eval "$("$@" release --export 2>/dev/null)"; env | grep -c ^GPULOCK_CLAIM;'
        ' eval "$("$@" claim -n 1 --export 2>/dev/null)"; sleep 99 >&- 2>&- & echo $!'
    )
    first, unset, second = map(int, site.shell(script, "bash").split())
    site.call("reap")
    assert (unset, site.states().count("held")) == (0, 1)
    for pid in (first, second):
        os.kill(pid, signal.SIGKILL)
    wait_until(lambda: not os.path.exists(f"/proc/{second}"), why="it to end")
    site.call("reap")
    assert site.states() == ["free"] * 8


def test_a_release_names_what_was_started_in_the_claim_and_runs_on(site: Site) -> None:
    script = (
        'sleep 99 >&- 2>&- & eval "$("$@" claim -n 1 --export 2>/dev/null)";'
        ' sleep 98 >&- 2>&- & echo $!; sleep 97 >&- 2>&- & "$@" release 2>&1; kill $! %1 %2'
    )
    started, *said = site.shell(script, "bash").splitlines()
    left = f"gpulock: process {started} (sleep) was started in this claim, and runs on without"
    assert [line for line in said if "process" in line] == [
        f"{left} what is freed; 1 more likewise"
    ]


@pytest.mark.parametrize(
    ("command", "words"),
    [
        *(("claim", words) for words in (("-n", "9"), ("-n", "x"))),
        ("release", ("0",)),  # the work behind it would go on with cards that are still held
    ],
)
def test_a_claim_or_release_that_fails_lets_its_eval_fail(
    site: Site, command: str, words: tuple[str, ...]
) -> None:
    refused = site.call(command, "--export", *words)
    assert (refused.exit_code > 0, refused.stdout) == (True, "false\n")
    assert "false" not in site.call(command, *words).stdout
    assert "false\n" not in site.call(command, "--export", "--help").stdout


@pytest.mark.parametrize("shell", ["sh", "bash"])
def test_a_claim_in_a_pipe_or_substitution_is_the_shells_and_a_second_one_is_told_of_it(
    site: Site, shell: str
) -> None:
    program = shutil.which(shell)
    assert program, f"there is no {shell} here: install it"
    script = (
        'x=$("$@" claim -n 1 --for 2h 2>&1 | cat); echo $$; "$@" claim -n 1 --for 3h 2>&1;'
        ' "$@" status --json; "$@" release; true'
    )
    pid, said, *_, freed = site.shell(script, program).splitlines()
    assert said.startswith(f"gpulock: pid {pid} holds GPU 0 already, until ")
    assert freed == f"freed GPU 0 (was pid {pid} of {uid_to_user_name(os.getuid())})"


@pytest.mark.parametrize("words", ["-n 2", "-n 1 --devices 5", "-n 2 --model 'v100*'"])
def test_a_claim_without_a_mask_says_what_sets_it(site: Site, words: str) -> None:
    """The line gives the mask of the claim that the shell has, and says nothing once it is set."""
    told, claim = f'eval "$({site.gpulock} claim {words} --export)"', f'"$@" claim {words}'
    again = f'eval "$({claim} --export 2>/dev/null)"; echo "<$CUDA_VISIBLE_DEVICES>"; {claim} 2>&1'
    environ = {name: value for name, value in os.environ.items() if "CUDA" not in name}
    said = site.shell(f"{claim} 2>&1; {again}", env=environ)
    mask = ",".join(line.split()[1] for line in said.splitlines() if line.startswith("GPU "))
    assert f"<{mask[: len(mask) // 2]}>" in said
    assert [line.partition(": ")[2] for line in said.splitlines() if "eval" in line] == [
        f"this shell sees all GPUs until you run: {told}"
    ]


def test_a_claim_for_a_process_says_what_sets_its_mask(site: Site, process: Process) -> None:
    """With the token, which makes what that process starts later the claim's own."""
    said = site.call("claim", "--devices", "5", "--pid", str(process.pid)).stderr
    line = said.splitlines()[-1].rpartition("CUDA: ")[2]
    check = f"{line}; print(os.environ['CUDA_VISIBLE_DEVICES'], os.environ['GPULOCK_CLAIM'])"
    token = site.json()["gpus"][5]["held"]["token"]
    assert subprocess.check_output([sys.executable, "-c", check], text=True) == f"5 {token}\n"


def test_a_claim_that_a_notebook_makes_says_what_sets_the_mask_of_its_kernel(site: Site) -> None:
    """`bash -c` becomes the command, so the kernel is its parent, and holds the claim."""
    line = [*site.command(), "claim", "--devices", "5"]
    said = subprocess.run(line, capture_output=True, text=True, cwd=ROOT, check=True).stderr
    assert "'CUDA_VISIBLE_DEVICES': '5'" in said.partition("os.environ.update(")[2]


@pytest.mark.parametrize(
    ("words", "process"),
    [(("--pid", "4711"), (4711, 99)), (("--job", "pid 4711"), (4711, 99)), (("2",), (0, 0))],
)
def test_a_user_gives_back_what_a_process_that_ended_has_left_or_a_gpu_where_no_shell_calls(
    site: Site, monkeypatch: pytest.MonkeyPatch, words: tuple[str, ...], process: tuple[int, int]
) -> None:
    """gpulockd is asked for the claim of that number, as status shows it."""
    asked: list[SocketRequest] = []

    def answer(_: Node, request: SocketRequest) -> SocketReply:
        asked.append(request)
        return SocketReply(devices=(site.id(2),))

    site.hold(2, scheduler="process", job_id="4711", pid=4711, start=99)
    monkeypatch.setattr(socket_client, "is_daemon_needed", lambda _: True)
    monkeypatch.setattr(socket_client, "request_daemon_act", answer)
    monkeypatch.setattr("gpulock.cli.claims.release.find_calling_shell", lambda _: 0)
    assert site.call("release", *words).stdout == "freed GPU 2 (was pid 4711 of alice)\n"
    assert [(one.pid, one.start) for one in asked] == [process]


@pytest.mark.parametrize(
    ("words", "why"),
    [
        ((), "GPU 2 of the claim of pid {}, which this command is in; end that program, or: "),
        (("--job", "12"), "--job is for root here; use --pid PID, or DEVICE"),
        (
            ("--force", "--reason", "x"),
            "--force is for root here; leave it out to release your own",
        ),
    ],
)
def test_a_user_is_told_which_release_would_do(
    site: Site, monkeypatch: pytest.MonkeyPatch, words: tuple[str, ...], why: str
) -> None:
    me = os.getpid()
    site.hold(2, scheduler="process", job_id=str(me), uid=os.getuid())
    monkeypatch.setattr(socket_client, "is_daemon_needed", lambda _: True)
    monkeypatch.setattr("gpulock.cli.claims.release.find_calling_shell", lambda _: 1)
    assert why.format(me) in site.call("release", *words).stderr


@pytest.mark.parametrize(
    "script", ['"$@" claim -n 1', '"$@" claim -n 1 2>&1', 'eval "$("$@" claim -n 1)"']
)
def test_a_claim_for_a_shell_that_ends_with_it_is_refused(site: Site, script: str) -> None:
    """So it is with `!gpulock claim` in a notebook: the GPUs would be free a moment later."""
    line = ["/bin/sh", "-c", script, "sh", *site.command()]
    done = subprocess.run(line, capture_output=True, text=True, cwd=ROOT, check=False)
    said = done.stdout + done.stderr
    assert "ends with this command, and its GPUs would be free again" in said
    assert f"{site.gpulock} claim -n 1 --pid {os.getpid()}" in said
    assert site.states() == ["free"] * 8


def test_a_release_says_what_the_shell_is_to_unset_and_lets_it_unset_what_is_gone_already(
    site: Site,
) -> None:
    script = (
        'eval "$("$@" claim -n 1 --export 2>/dev/null)"; "$@" release 2>&1;'
        ' eval "$("$@" release --export 2>/dev/null)"; echo "<$CUDA_VISIBLE_DEVICES$GPULOCK_CLAIM>"'
    )
    environ = {name: value for name, value in os.environ.items() if "CUDA" not in name}
    *_, said, left = site.shell(script, env=environ).splitlines()
    assert said.startswith("gpulock: this shell still uses what is freed: unset APPTAINERENV_")
    assert {"CUDA_VISIBLE_DEVICES", "GPULOCK_DEVICES"} <= {*said.partition(": unset ")[2].split()}
    assert left == "<>"


def test_a_release_of_another_claim_says_nothing_of_the_mask_and_that_of_a_part_does(
    site: Site,
) -> None:
    lost = site.files.driver_root / "gpus" / site.id(7)  # a card off the bus is still its claim's
    script = (
        'sleep 99 >&- 2>&- & eval "$("$@" claim --devices 4,7 --export 2>/dev/null)";'
        f' "$@" claim --devices 3 --pid $! >/dev/null 2>&1; rm -r {lost};'
        ' "$@" release --pid $! 2>&1; "$@" release 4 2>&1; kill $!;'
        ' eval "$("$@" release --export 2>/dev/null)"; echo "<$CUDA_VISIBLE_DEVICES$GPULOCK_CLAIM>"'
    )
    other, part, mask, *_, left = site.shell(script, "bash").splitlines()
    assert (other[:11], part[:11]) == ("freed GPU 3", "freed GPU 4")
    line = f'eval "$({site.gpulock} claim -n 1 --export)"'
    assert mask == f"gpulock: this shell still uses what is freed: {line}"
    assert left == "<>"


def test_a_shell_that_releases_a_part_has_the_number_of_the_rest(site: Site) -> None:
    script = (
        'eval "$("$@" claim --devices 4,5 --export 2>/dev/null)";'
        ' eval "$("$@" release 4 --export 2>/dev/null)"; echo "$CUDA_VISIBLE_DEVICES"'
    )
    assert site.shell(script, "bash") == "5\n"


def test_a_shell_loses_the_mps_of_the_share_that_it_was_submitted_from(site: Site) -> None:
    pipes = f"{read_settings(site.config).mps_dir}/x/pipe"
    stale = {"CUDA_MPS_PIPE_DIRECTORY": pipes, "CUDA_MPS_ACTIVE_THREAD_PERCENTAGE": "25"}
    stale["GPULOCK_SHARE"] = "1/4"
    script = 'eval "$("$@" claim -n 1 --export 2>/dev/null)"; env | grep "CUDA_\\|GPULOCK_S"'
    said = site.shell(script, env={**os.environ, **stale})
    assert "CUDA_MPS" not in said and "GPULOCK_SHARE" not in said
    assert "CUDA_VISIBLE_DEVICES=0\n" in said


def test_a_shells_containers_get_this_nodes_driver_besides_its_own_binds(site: Site) -> None:
    config = Path(site.config)
    sets = config.parent / "sets"
    config.write_text(config.read_text() + f"DRIVER_DIR={sets}\n")
    refused = site.run("claim", "-n", "1", "--export")
    assert (refused.returncode, refused.stdout) == (1, "false\n")
    assert "no driver set for this node's driver" in refused.stderr
    assert site.states() == ["free"] * 8

    folder = sets / loaded_driver_version(str(config.parent / "proc/driver/nvidia"))
    for part in ("bin", "lib"):
        (folder / part).mkdir(parents=True)
    environ = {**os.environ, "SINGULARITY_BINDPATH": "/my own"}
    done = site.run("claim", "-n", "1", "--export", env=environ)
    binds = f"/my own,{folder}/bin:/nvbin,{folder}/lib:/nvlib"
    for name in BIND_LISTS:
        assert f"export {name}='{binds}'\n" in done.stdout


def test_a_process_that_is_gone_cannot_claim(site: Site) -> None:
    pid, _ = dead_process()
    result = site.call("claim", "-n", "1", "--pid", str(pid))
    assert result.exit_code == 1
    assert f"no such process: {pid};" in result.stderr
    assert "Errno" not in result.stderr


@pytest.mark.parametrize("words", [(), ("--force", "--reason", "x")])
def test_an_empty_job_is_no_job_and_not_the_calling_shell(
    site: Site, words: tuple[str, ...]
) -> None:
    refused = f'"$@" release --job "" {" ".join(words)} 2>&1'
    output = site.shell(
        f'"$@" claim -n 1; {refused}; echo "code $?"; "$@" release', start_new_session=True
    )
    assert "'' is no job" in output and "\ncode 1\n" in output
    assert output.count("freed") == 1, "it was still held"


def test_one_device_of_a_claim_is_released_and_the_record_keeps_the_other(
    site: Site, process: Process
) -> None:
    site.call("claim", "--devices", "4,5", "--pid", str(process.pid))
    assert site.call("release", "4").exit_code == 0
    assert [state for state in site.states() if state != "free"] == ["held"]
    (text,) = records(site)
    assert f"devices={site.id(5)}\n" in text


def test_a_jobs_devices_are_not_released_without_force(site: Site) -> None:
    site.hold(1, 2)
    result = site.call("release", "--job", "12")
    assert result.exit_code == 1
    assert "held by job 12 of alice" in result.stderr
    me = str(os.getpid())
    site.hold(3, token="p", scheduler="process", job_id=me, uid=NOBODY, user="nobody")
    refused = site.call("release", "3")
    assert (refused.exit_code, "--force" in refused.stderr) == (1, True)
    assert site.states().count("held") == 3


def test_a_lock_without_an_owner_is_refused_with_the_reason(site: Site) -> None:
    Path(site.files.lock_dir, "locks", site.id(1)).mkdir(parents=True)
    assert "GPU 1: a claim is being made; ask root" in site.call("release", "1").stderr


def test_force_frees_exactly_that_job(site: Site) -> None:
    site.hold(1, job_id="12", token="a")
    site.hold(2, job_id="123", token="b")
    site.hold(3, job_id="12", task_id="11", token="c")
    site.hold(4, job_id="12", task_id="2", token="d")
    assert site.call("release", "--job", "12.1", "--force", "--reason", "x").exit_code == 0
    assert [n for n, state in enumerate(site.states()) if state == "held"] == [2, 3, 4]
    assert site.call("release", "--job", "12", "--force", "--reason", "x").exit_code == 0
    assert [n for n, state in enumerate(site.states()) if state == "held"] == [2]


def test_force_is_noted_with_who_and_why(site: Site, monkeypatch: pytest.MonkeyPatch) -> None:
    said: list[str] = []

    def note(settings: Settings, line: str) -> None:
        said.append(line)

    monkeypatch.setattr("gpulock.cli.claims.release.log_to_syslog", note)
    site.hold(1)
    site.call("release", "1", "--force", "--reason", "job is\na ghost")
    (folder,) = Path(f"{site.files.lock_dir}.claims/finished").iterdir()
    for text in (said[0], (folder / "released").read_text()):
        assert "release --force by " in text
        assert "job is?a ghost" in text
    assert "job 12 of alice" in said[0]


def test_a_device_in_use_is_kept_without_force_and_named_with_it(
    site: Site, process: Process
) -> None:
    site.call("claim", "--devices", "6", "--pid", str(process.pid))
    with site.opened(6) as user:
        refused = site.call("release", "6")
        assert refused.exit_code == 1
        assert f"process {user.pid} has GPU 6 open" in refused.stderr
        assert site.json()["gpus"][6]["held"] is not None
        forced = site.call("release", "6", "--force", "--reason", "x")
        assert forced.exit_code == 0
        assert f"STILL IN USE: process {user.pid} has" in forced.stderr
        assert site.json()["gpus"][6]["held"] is None


def test_nothing_is_said_of_a_forced_release_while_the_gate_is_held(
    site: Site, process: Process, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A terminal that takes no text would keep every claim of the node waiting."""
    held: list[bool] = []

    def observed(text: str, **_: object) -> None:
        held.append(is_gate_held(Path(f"{site.files.lock_dir}.claims")))

    site.call("claim", "--devices", "6", "--pid", str(process.pid))
    monkeypatch.setattr("gpulock.cli.claims.release.click.echo", observed)
    with site.opened(6):
        site.call("release", "6", "--force", "--reason", "x")
    assert held == [False, False]


def test_a_reserve_is_ended_by_unreserve_not_by_release(site: Site) -> None:
    site.call("reserve", "2", "--reason", "x")
    result = site.call("release", "2")
    assert (result.exit_code, f"{site.gpulock} unreserve" in result.stderr) == (1, True)


def test_a_lock_on_a_card_that_is_gone_is_released_by_its_id(site: Site) -> None:
    node = site.node()
    record = site.hold(1, claimed_boottime=clock_boottime())
    place_lock(node.store, "0000:ff:00.0", record)
    assert site.call("release", "0000:ff:00.0", "--force", "--reason", "x").exit_code == 0
    assert sorted(node.store.read_all_locks()) == [site.id(1)]
