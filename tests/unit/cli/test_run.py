# SPDX-License-Identifier: Apache-2.0
"""`gpulock run`: the command's environment and its end."""

from __future__ import annotations

import os
import shlex
import signal
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from gpulock.alloc.environs import CLAIM
from gpulock.cli.session import uid_to_user_name
from gpulock.deadline import Deadline
from gpulock.job import environment
from gpulock.node.settings_file import read_settings
from gpulock.store.gate import Gate
from gpulock.workstation.waiter import ENVIRONMENT
from tests.support.cli_site import Site
from tests.support.wait import wait_until

WAITS = ("--", "/bin/sh", "-c", "echo; read -r _")  # until its input ends
# what a reap says of a look that was not whole
OUTRUN = ("came and went faster than", "no time for process", "be looked at in time")

pytestmark = pytest.mark.slow


def test_the_command_gets_the_variables_of_a_job(site: Site) -> None:
    users = {"CUDA_VISIBLE_DEVICES": "7", "SINGULARITYENV_CUDA_VISIBLE_DEVICES": "6"}
    users[CLAIM] = "stale"
    done = site.run("run", "-n", "2", "--", "/usr/bin/env", env={**os.environ, **users})
    pairs = (line.partition("=") for line in done.stdout.splitlines())
    found = {name: value for name, _, value in pairs}
    # of an environment no more than its beginning is read
    assert next(iter(found)) == CLAIM and found[CLAIM] != "stale"
    machine = site.files.machine
    uuids = f"{machine.uuid(machine.gpus[0])},{machine.uuid(machine.gpus[3])}"
    assert found["CUDA_VISIBLE_DEVICES"] == "0,3"
    assert found["SINGULARITYENV_CUDA_VISIBLE_DEVICES"] == "0,3"
    assert found["NVIDIA_VISIBLE_DEVICES"] == found["GPULOCK_DEVICES"] == uuids
    assert environment.grant_variable_names() - found.keys() == {
        *environment.OPTIONAL_VARIABLES
    }  # no CDI_DIR, no share
    assert found["HOME"] == os.environ["HOME"]


def test_the_command_loses_the_mps_of_a_share_and_keeps_the_users_own(site: Site) -> None:
    mps_dir = read_settings(site.config).mps_dir
    name, limit = "CUDA_MPS_PIPE_DIRECTORY", "CUDA_MPS_ACTIVE_THREAD_PERCENTAGE"
    for pipes, left in ((f"{mps_dir}/x/pipe", ["", ""]), ("/tmp/mine", ["/tmp/mine", "25"])):
        env = {**os.environ, name: pipes, limit: "25"}
        script = f'echo "${name}"; echo "${limit}"'
        said = site.run("run", "-n", "1", "--", "/bin/sh", "-c", script, env=env)
        assert said.stdout.splitlines() == left


def test_the_commands_exit_code_is_ours_and_its_arguments_are_its_own(site: Site) -> None:
    done = site.run(
        "run", "-n", "1", "/bin/sh", "-c", 'echo "$*"; exit 7', "x", "a", "-n", "--wait"
    )
    assert (done.returncode, done.stdout) == (7, "a -n --wait\n")


def test_the_command_is_the_owner_while_it_runs(site: Site) -> None:
    with site.running("run", "-n", "2", *WAITS) as process:
        held = [gpu["held"] for gpu in site.json()["gpus"] if gpu["held"]]
        assert os.getsid(process.pid) == process.pid  # without a terminal it leads a session
        own = {"pid": process.pid, "sid": process.pid, "scheduler": "process"}
        assert [{key: owner[key] for key in own} for owner in held] == [own] * 2
        assert Path(f"/proc/{process.pid}/comm").read_text() == "sh\n"
    assert reaped(site) == ["free"] * 8


def reaped(site: Site) -> list[str]:
    """Reap, again where the machine outran the look, which frees nothing; return the states."""
    for _ in range(50):
        done = site.call("reap")
        assert done.exit_code == 0, done.output
        if not any(words in done.output for words in OUTRUN):
            break
    return site.states()


def test_the_command_has_the_callers_umask_and_default_signals(site: Site) -> None:
    script = "umask; grep SigIgn /proc/self/status"
    done = site.run("run", "-n", "1", "--", "/bin/sh", "-c", script, umask=0o077)
    mask, ignored = done.stdout.split("\n")[:2]
    assert mask == "0077"
    modes = {path: path.stat().st_mode & 0o777 for path in site.files.lock_dir.rglob("locks/*")}
    assert set(modes.values()) == {0o755}  # everybody may read them
    broken_pipe = 1 << (signal.SIGPIPE - 1)
    assert int(ignored.split()[1], 16) & broken_pipe == 0


NONE = "No such file or directory"


@pytest.mark.parametrize(
    ("command", "code", "why"),
    [
        ("/no/such", 127, NONE),
        ("nosuchthing", 127, NONE),
        ("/etc/passwd", 126, "Permission denied"),
    ],
)
def test_a_command_that_is_not_there_claims_nothing(
    site: Site, command: str, code: int, why: str
) -> None:
    done = site.run("run", "-n", "8", "--", command)
    assert done.returncode == code
    assert done.stderr == f"gpulock: run: {command}: {why}\n"
    assert site.states() == ["free"] * 8


def test_an_exec_that_fails_gives_everything_back(site: Site, tmp_path: Path) -> None:
    broken = tmp_path / "broken"
    broken.write_bytes(b"\x7fELF garbage")
    broken.chmod(0o755)
    done = site.run("run", "-n", "3", "--", str(broken))
    assert done.returncode == 126
    assert "Exec format error" in done.stderr
    assert site.states() == ["free"] * 8
    assert list(Path(f"{site.files.lock_dir}.claims/claims").iterdir()) == []


def test_what_the_command_leaves_behind_keeps_the_claim_until_it_ends(site: Site) -> None:
    """As a tmux that was detached does: in a session of its own, its parent gone."""
    server = "setsid sleep 1000 >/dev/null 2>&1 & echo $!"
    done = site.run("run", "-n", "1", "--", "sh", "-c", server)
    pid = int(done.stdout)
    site.run("reap")
    assert site.states() == ["held", *["free"] * 7]
    os.kill(pid, signal.SIGKILL)
    wait_until(lambda: not Path(f"/proc/{pid}").exists(), why="it to be gone")
    site.run("reap")
    assert site.states() == ["free"] * 8


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (("tmux",), True),
        (("tmux", "-L", "default", "new", "-d"), True),
        (("tmux", "-L", "other", "new", "-d"), False),
        (("tmux", "-2S/nowhere"), False),
        (("train", "-L", "default"), False),
        (("screen", "-dmS", "work", "train", "-r"), False),
        (("screen", "-S", "work", "-x"), True),
    ],
)
def test_where_the_command_leaves_its_work_to_a_server_that_is_said(
    site: Site, tmp_path: Path, words: tuple[str, ...], says: bool
) -> None:
    program = tmp_path / words[0]
    program.write_text("#!/bin/sh\n")
    program.chmod(0o755)
    (folder := tmp_path / f"tmux-{os.getuid()}").mkdir()
    outside = {name: value for name, value in os.environ.items() if name != "TMUX"}
    env = {**outside, "TMUX_TMPDIR": str(tmp_path)}
    name_self = "open('/proc/self/comm', 'w').write('screen'); print(flush=True); input()"
    argv, pipe = [sys.executable, "-c", name_self], subprocess.PIPE
    with (
        subprocess.Popen(argv, stdin=pipe, stdout=pipe) as server,
        socket.socket(socket.AF_UNIX) as listening,
    ):
        assert server.stdout is not None
        server.stdout.readline()
        listening.bind(str(folder / "default"))
        listening.listen()
        done = site.run("run", "-n", "1", "--", str(program), *words[1:], env=env)
        pid = server.pid if words[0] == "screen" else os.getpid()
        told = f"{words[0]} server runs already (pid {pid})" in done.stderr
        assert (done.returncode, told, bool(done.stderr)) == (0, says, says)
        waited = {**env, ENVIRONMENT: "-1 0"}  # it was said before the waiting
        done = site.run("run", "-n", "1", "--", str(program), *words[1:], env=waited)
        assert done.stderr == ""
        server.kill()


@pytest.mark.parametrize(
    ("words", "why"),
    [
        (("--for", "3"), "say the unit, as in 2h or 90m"),
        (("--wait", "3"), "say the unit, as in 2h or 90m"),
        (("--for", "0"), "the time must be longer than 0"),
    ],
)
def test_a_time_without_its_unit_is_asked_back(
    site: Site, words: tuple[str, str], why: str
) -> None:
    done = site.run("run", "-n", "1", *words, "--", "/bin/true")
    assert (done.returncode, why in done.stderr) == (2, True)


@pytest.mark.parametrize("wait", [(), ("--wait", "0")])
def test_more_than_is_free_is_refused_at_once(site: Site, wait: tuple[str, ...]) -> None:
    site.hold(0, 1, 2)
    done = site.run("run", "-n", "6", *wait, "--", "/bin/true")
    assert done.returncode == 1
    assert done.stderr.startswith("gpulock: run: busy: 6 GPUs asked for, 5 of 8 free")
    assert "; use --wait; " in done.stderr
    assert done.stderr.count("\n") == 1
    never = site.run("run", "-n", "9", "--wait", "--", "/bin/true")
    assert (never.returncode, "invalid request" in never.stderr) == (1, True)


def test_exactly_the_devices_that_are_named_are_claimed(site: Site) -> None:
    script = 'echo "$CUDA_VISIBLE_DEVICES"'
    done = site.run("run", "--devices", "6,1", "--", "/bin/sh", "-c", script)
    assert done.stdout == "1,6\n"
    assert reaped(site) == ["free"] * 8
    site.hold(1)
    assert site.run("run", "--devices", "6,1", "--", "/bin/true").returncode == 1


@pytest.mark.parametrize(
    "words",
    ["-- true", "-n 0 -- true", "-n 1 --devices 0,1 -- true", "-n 1 --wait /bin/true", "-n 1"],
)
def test_what_makes_no_sense_to_the_parser_is_a_usage_error(site: Site, words: str) -> None:
    assert site.call("run", *words.split()).exit_code == 2


def test_waiting_ends_at_its_time_with_the_reason(site: Site) -> None:
    site.hold(*range(8))
    done = site.run("run", "-n", "1", "--wait", "2s", "--", "/bin/true")
    assert done.returncode == 1
    first, last = done.stderr.splitlines()
    why = "1 GPU asked for, 0 of 8 free; no gpulockd serves here, so there is no queue"
    assert first == f"gpulock: waiting: {why}: tried every 1 s"
    assert last.startswith("gpulock: run: busy: 1 GPU asked for, 0 of 8 free")


def test_ctrl_c_ends_it_without_a_word_and_a_script_around_it(site: Site) -> None:
    site.hold(*range(8))
    with site.start("run", "-n", "1", "--wait", "--", "/bin/true") as process:
        assert process.stderr is not None
        process.stderr.readline()
        process.send_signal(signal.SIGINT)
        assert process.communicate(timeout=60) == ("", "")
    assert process.returncode == -signal.SIGINT  # bash ends no script for less


def test_who_does_not_wait_in_line_still_waits_at_the_gate(site: Site) -> None:
    node = site.node()
    with Gate(node.store, Deadline(5)):
        process = site.start("run", "-n", "1", "--", "/bin/true")
        gate = os.path.realpath(f"{node.store.root}/gate")
        wait_until(lambda: opens(process.pid, gate), why="it to be at the gate")
    process.communicate(timeout=60)
    assert process.returncode == 0


def opens(pid: int, path: str) -> bool:
    folder = f"/proc/{pid}/fd"
    try:
        return path in [os.readlink(f"{folder}/{fd}") for fd in os.listdir(folder)]
    except OSError:
        return False


def test_the_gpus_of_a_command_that_runs_are_not_released_from_outside(site: Site) -> None:
    with site.running("run", "-n", "1", *WAITS) as process:
        for words in (("release", "--pid", str(process.pid)), ("release", "0", "1", "2", "3")):
            refused = site.call(*words)
            assert refused.exit_code == 1
        held = [gpu for gpu in site.json()["gpus"] if gpu["held"]]
        assert len(held) == 1
        forced = site.call("release", "--pid", str(process.pid), "--force", "--reason", "test")
        assert forced.exit_code == 0


@pytest.mark.parametrize("closed", ["0<&-", "1>&-", "2>&-"])
def test_closed_streams_keep_no_command_from_its_work(site: Site, closed: str) -> None:
    made = site.files.directory / "made"
    script = f"ls /proc/$$/fd/{closed[0]} && touch {shlex.quote(str(made))}"  # open for it as well
    words = ["run", "-n", "1", "--", "/bin/sh", "-c", script]
    done = subprocess.run(
        ["/bin/sh", "-c", f'exec "$@" {closed}', "sh", *site.command(*words)], check=False
    )
    assert (done.returncode, made.exists()) == (0, True)


SHOW = ("/bin/sh", "-c", "echo $CUDA_VISIBLE_DEVICES")


def test_a_run_within_a_claim_uses_its_cards(site: Site) -> None:
    inner = [shlex.join(site.command("run", "-n", count, "--", *SHOW)) for count in ("1", "3")]
    script = "; ".join(
        [*inner, shlex.join(site.command("run", "-n", "1", "--", "sh", "-c", "umask"))]
    )
    done = site.run("run", "--devices", "3,5", "--", "/bin/sh", "-c", script, umask=0o077)
    within, beside, mask = done.stdout.splitlines()
    assert (within, len({*beside.split(",")} - {"3", "5"}), mask) == ("3", 3, "0077")
    assert "GPU 3 of the claim of pid" in done.stderr


def test_a_run_within_a_claim_says_which_options_change_nothing_of_it(site: Site) -> None:
    script = '"$@" claim --devices 5 >/dev/null 2>&1; "$@" run -n 1 --for 5m --wait -- env 2>&1'
    said = site.shell(script)
    assert "which this command is in: nothing of it is changed by --for\n" in said
    assert "CUDA_VISIBLE_DEVICES=5\n" in said


def test_a_run_that_waits_says_what_its_own_shell_holds(site: Site) -> None:
    script = (
        '"$@" claim --devices 5 >/dev/null 2>&1; echo $$; "$@" run -n 8 --wait 1s -- true 2>&1; :'
    )
    pid, first, *_, last = site.shell(script).splitlines()
    who = f"the claim of pid {pid}, which this command is in"
    assert first == f"gpulock: {who}, keeps GPU 5; this takes others"
    assert "--wait" not in last


def test_the_end_and_the_comment_of_a_claim_stand_beside_its_card(site: Site) -> None:
    with site.running("run", "-n", "1", "--for", "2h", "--comment", "Diss\n✓", *WAITS):
        for coding, said in (("utf-8", ', "Diss?✓"'), ("latin-1", ', "Diss?\\u2713"')):
            env = {**os.environ, "COLUMNS": "200", "PYTHONIOENCODING": coding}
            assert said in site.run("status", env=env).stdout.splitlines()[1]


@pytest.mark.parametrize(("longest", "asked", "code"), [("3600", "2h", 1), ("3600", "1h", 0)])
def test_no_claim_is_longer_than_a_site_allows(
    site: Site, longest: str, asked: str, code: int
) -> None:
    with Path(site.config).open("a") as file:
        file.write(f"CLAIM_MAX={longest}\n")
    done = site.run("run", "-n", "1", "--for", asked, "--", "/bin/true")
    assert (done.returncode, "CLAIM_MAX is 3600 s" in done.stderr) == (code, bool(code))


def test_the_cards_of_the_last_claim_are_preferred_where_they_are_free(site: Site) -> None:
    site.run("run", "--devices", "5", "--", "/bin/true")
    site.run("reap")  # which writes the history
    own = uid_to_user_name(os.getuid())
    site.hold(6, token="b", scheduler="process", user=f"not-{own}")
    site.hold(7, token="j", user=own)  # a job of ours
    for card in "67":
        site.call("release", card, "--force", "--reason", "x")
    words = ("run", "-n", "1", "--prefer", "last", "--", *SHOW)
    assert site.run(*words).stdout == "5\n"
    with site.running("run", "--devices", "5", *WAITS):
        assert site.run(*words).stdout not in ("", "5\n")
