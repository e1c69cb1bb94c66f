# SPDX-License-Identifier: Apache-2.0
"""`prolog/drop-env` starts a hook without the job's environment and limits, whatever they are."""

from __future__ import annotations

import contextlib
import ctypes
import os
import resource
import socket
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from gpulock.install import drop_env
from gpulock.install.files import InstallError
from tests.support.drop_env import SHARE, write_drop_env
from tests.support.trees import public_place

ENV = "/usr/bin/env"
JOB = ("12", "3", "gpu.q")
LONGEST = 131_071  # bytes, MAX_ARG_STRLEN of the kernel without the NUL
MANY = {f"V{n}": "x" * 10_000 for n in range(150)}
OWN = ("PATH", "JOB_ID", "SGE_TASK_ID", "QUEUE", "GPULOCK_LIMITS", "GPULOCK_ANSWERS")
UNLIMITED = (resource.RLIM_INFINITY, resource.RLIM_INFINITY)
NOBODY = 65534


class Started:
    """A folder with drop-env and hooks, as the queue's line starts them."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.program = write_drop_env(folder)
        self.prolog = self.hook("prolog", f"exec {ENV}")
        self.epilog = self.hook("epilog", f"exec {ENV}")

    def hook(self, kind: str, text: str, interpreter: str = "/bin/sh") -> Path:
        path = self.folder / kind / "sge"
        path.parent.mkdir(exist_ok=True)
        path.write_text(f"#!{interpreter}\n{text}\n")
        path.chmod(0o755)
        return path

    def run(
        self, *words: Path | str, env: dict[str, str] | None = None, limited: bool = False
    ) -> subprocess.CompletedProcess[str]:
        """Start drop-env; `limited` as somebody who may not lift the limit on file sizes."""

        def limit() -> None:
            resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 20, 1 << 20))

        return subprocess.run(
            [self.program, *words],
            env=env or {},
            cwd="/",
            capture_output=True,
            text=True,
            check=False,
            timeout=60,
            user=NOBODY if limited and os.geteuid() == 0 else None,
            preexec_fn=limit if limited else None,
        )

    def seen(self, env: dict[str, str]) -> dict[str, str]:
        """Return the environment that a prolog sees."""
        done = self.run(self.prolog, *JOB, env=env)
        assert done.returncode == 0, done.stderr
        lines = (line.partition("=") for line in done.stdout.splitlines())
        return {name: value for name, _, value in lines if name != "PWD"}


@pytest.fixture
def started() -> Iterator[Started]:
    """Return hooks that every user reaches."""
    with public_place() as folder:
        yield Started(folder)


def started_with(
    started: Started, lines: list[str], room: int = resource.RLIM_INFINITY
) -> subprocess.CompletedProcess[str]:
    """Start a prolog with lines of an environment, of one name too, and room for so many bytes."""
    strings = [line.encode() for line in lines]
    source, told = os.pipe()
    if not (child := os.fork()):
        with contextlib.suppress(OSError):
            os.dup2(told, 1)
            resource.setrlimit(resource.RLIMIT_STACK, UNLIMITED)
            execve = ctypes.CDLL(None, use_errno=True).execve
            argv = [bytes(started.program), bytes(started.prolog), *(w.encode() for w in JOB)]
            vectors = [(ctypes.c_char_p * (len(each) + 1))(*each, None) for each in (argv, strings)]
            resource.setrlimit(resource.RLIMIT_AS, (room, room))
            execve(argv[0], *vectors)
        os._exit(77)
    os.close(told)
    with open(source) as pipe:
        said = pipe.read()
    return subprocess.CompletedProcess(argv_of(started), os.waitpid(child, 0)[1], said, "")


def argv_of(started: Started) -> list[str]:
    return [str(started.program), str(started.prolog), *JOB]


@pytest.mark.parametrize(
    "env",
    [
        {},
        {"GLIBC_TUNABLES": "glibc.rtld.optional_static_tls=1000000000000"},
        {"LD_PRELOAD": "/no/such", "LD_AUDIT": "/no/such", "PATH": "/evil", "JOB_ID": "7"},
        {"SGE": "1", "SGEX_": "1", "XSGE_A": "1", "A": "", "SGE_QMASTER_PORT": "1", "SGE_": ""},
        {"SGE_CWD_PATH_": "1", "SGE_CWD_PAT": "1", "XSGE_CWD_PATH": "1", "sge_cwd_path": "1"},
        {"GPULOCK_LIMITED": "1", "GPULOCK_ANSWERS": "1"},
        MANY,
    ],
)
def test_nothing_of_the_environment_passes(started: Started, env: dict[str, str]) -> None:
    seen = started.seen(env)

    assert {*seen} == {*OWN}
    told = [seen[name] for name in OWN[:4]]
    assert told == ["/usr/bin:/bin", *JOB]


def test_what_the_shepherd_says_to_a_hook_passes(started: Started) -> None:
    own = {"SGE_STDERR_PATH": "", "SGE_CWD_PATH": "/a b", "SGE_JOBEXIT_STAT": "137"}
    own |= {"SGE_STDIN_PATH": "SGE_CWD_PATH=1", "SGE_STDOUT_PATH": "x" * 100_000}
    first, second, *others = own.items()
    env = dict([first, *MANY.items(), second, ("LD_X", "1"), *others])

    seen = started.seen(env)

    assert {name: value for name, value in seen.items() if name not in OWN} == own


def test_of_two_lines_of_one_name_the_last_passes(started: Started) -> None:
    """Without INHERIT_ENV both reach execve(2), and a dash takes the last."""
    lines = ["A=1", *[f"SGE_CWD_PATH={n}" for n in range(20_000)], "SGE_CWD_PATHS=1", "B=1"]

    said = started_with(started, lines).stdout

    assert [line for line in said.splitlines() if "CWD" in line] == ["SGE_CWD_PATH=19999"]


@pytest.mark.parametrize("name", ["SGE_M{:x}=", "X{:x}=", "SGE_CWD_PATH="])
@pytest.mark.parametrize("room", [10 << 20, 20 << 20])  # Grid Engine gives no job less
def test_no_number_of_variables_leaves_a_hook_without_room(
    started: Started, name: str, room: int
) -> None:
    """150,000 empty ones killed the launcher, and a signal puts a queue in error."""
    for count in (50_000, 100_000, 150_000, 200_000):
        lines = [name.format(number) for number in range(count)]
        done = started_with(started, lines, room)
        assert done.returncode == 0 and "JOB_ID=12\n" in done.stdout, count


def test_values_as_long_as_any_leave_a_hook_room(started: Started) -> None:
    names = ("JOBEXIT_STAT", "CWD_PATH", "STDIN_PATH", "STDOUT_PATH", "STDERR_PATH")
    lines = [f"SGE_{name}=".ljust(LONGEST, "x") for name in names] * 4

    done = started_with(started, lines, 10 << 20)

    assert done.returncode == 0 and "JOB_ID=12\n" in done.stdout


def test_a_hook_is_told_who_its_shepherd_is_and_what_the_sites_hook_is(started: Started) -> None:
    started.hook("prolog", 'echo "$#" "$0" "$@"; exit 99')

    done = started.run(started.prolog, *JOB, "root", "root@/site/pro", "a b", "")

    assert done.returncode == 99
    assert done.stdout == f"5 {started.prolog} {os.getpid()} root root@/site/pro a b \n"


def test_a_hook_runs_without_the_jobs_limits_and_learns_what_they_were(started: Started) -> None:
    """Soft ones, which anybody may lift: not every root may lift a hard one."""
    script = "ulimit -v; ulimit -d; ulimit -f; ulimit -t; ulimit -s; echo $GPULOCK_LIMITS"
    script += "; grep SigIgn /proc/self/status"
    started.hook("prolog", script)
    soft = {"as": 10 << 20, "data": 9 << 20, "fsize": 0, "cpu": 9, "stack": 1 << 16}
    limits = " ".join(f"--{name}={value}:{2**64 - 1}" for name, value in soft.items())

    done = subprocess.run(
        ["/usr/bin/prlimit", *limits.split(), *argv_of(started)],
        env={}, capture_output=True, text=True, check=False,
    )  # fmt: skip

    *told, signals = done.stdout.splitlines()
    assert told == [*["unlimited"] * 4, "8192", limits]
    ignored = int(signals.split()[1], 16)  # a message that nobody reads, or without room, is lost
    assert ignored & (1 << 12) and ignored & (1 << 24)  # SIGPIPE, SIGXFSZ


@pytest.mark.parametrize("words", [(), ("/bin/true",), ("/bin/true", "12", "3")])
def test_a_line_that_is_cut_short_puts_the_job_in_error(
    started: Started, words: tuple[str, ...]
) -> None:
    assert started.run(*words).returncode == 100


KILLED, ROOM = "kill -9 $$", "its own limits leave its prolog no room"
SITE = 'printf x >&"$GPULOCK_ANSWERS"; '  # the site's hook has the answer in hand
WITH_SITE = ("root", "root@/bin/false")


@pytest.mark.parametrize(
    ("kind", "script", "site", "code", "says"),
    [
        *(("prolog", f"exit {code}", (), code, "") for code in (0, 1, 99, 100)),
        ("prolog", KILLED, (), 99, "job 12: its prolog was ended by signal 9, so the job goes"),
        ("prolog", SITE + KILLED, (), 137, ""),  # what killed it is the site's
        *(("epilog", f"exit {code}", (), 0, "") for code in (1, 99, 100, 127)),
        ("epilog", KILLED, (), 0, ""),
        ("epilog", "exit 1", ("root",), 0, ""),  # an owner without a command: no site's hook
        *(
            ("epilog", f'printf {told} >&"$GPULOCK_ANSWERS"; {KILLED}', WITH_SITE, code, "")
            for told, code in ((r"\\0", 0), (r"\\0\\143", 99), (r"\\0\\0", 0), (r"\\0\\211", 137))
        ),
    ],
)
def test_the_exit_code_is_the_hooks_own_or_one_that_stops_no_queue(
    started: Started, kind: str, script: str, site: tuple[str, ...], code: int, says: str
) -> None:
    hook = started.hook(kind, script)

    done = started.run(hook, *JOB, *site)

    assert (done.returncode, says in done.stderr) == (code, True)


@pytest.mark.parametrize(
    ("end", "code", "says"),
    [
        *(("exit 0", 0, False), ("exit 99", 99, False), ("exit 100", 100, False)),
        *((end, 100, True) for end in ("exit 1", KILLED, "exit 127")),
        (f"{SITE}exit 7", 7, False),  # what the site's prolog ends with is believed
    ],
)
def test_a_prolog_that_dies_under_limits_is_blamed_on_the_job(
    started: Started, end: str, code: int, says: bool
) -> None:
    """It knows that they hold."""
    started.hook("prolog", f"echo limited=$GPULOCK_LIMITED; {end}")

    done = started.run(started.prolog, *JOB, limited=True)

    assert (done.returncode, ROOM in done.stderr) == (code, says)
    assert done.stdout == "limited=1\n"


@pytest.mark.root
@pytest.mark.parametrize("broken", ["/nowhere/python3.11 -IS", "/bin/false", "/bin/sh -c kill"])
@pytest.mark.parametrize(
    ("owner", "user"), [("nobody", ""), ("root", "nobody@"), ("nobody", "root@")]
)
def test_the_sites_epilog_runs_where_ours_cannot(
    started: Started, broken: str, owner: str, user: str
) -> None:
    """A Python that is gone, or ends before it has the site's epilog in hand."""
    started.hook("epilog", "", broken)
    site = ["/bin/sh", "-c", 'id -un; echo "$0 $JOB_ID $SGE_CWD_PATH $LD_X"; exit 3', "a b"]

    env = {"SGE_CWD_PATH": "/x", "LD_X": "1"}
    done = started.run(started.epilog, *JOB, owner, f"{user}{site[0]}", *site[1:], env=env)

    assert done.returncode == 3, done.stderr
    expected = (user or owner).rstrip("@")
    assert done.stdout == f"{expected}\na b 12 /x \n"


@pytest.mark.parametrize("kind", ["prolog", "epilog"])
def test_a_hook_whose_interpreter_is_gone_says_so_and_what_to_do(
    started: Started, kind: str
) -> None:
    """It said "not found" to the job alone, and the administrator saw GPUs that stay locked."""
    hook = started.hook(kind, "", "/nowhere/python3.11 -IS")

    done = started.run(hook, *JOB)

    assert done.returncode == (1 if kind == "prolog" else 0)
    told = f"gpulock: {hook} cannot be started (is its interpreter there?), so no job can: "
    assert f"{told}run gpulock install sge again\n" in done.stderr


def with_log(started: Started, log: Path) -> None:
    """Compile drop-env with another place for the system's log."""
    text = (SHARE / drop_env.SOURCE).read_text()
    assert text.count('"/dev/log"') == 1 and text.count("path[9]") == 1
    text = text.replace('"/dev/log"', f'"{log}"').replace("path[9]", "path[108]")
    (started.folder / "log.c").write_text(text)
    compiler = drop_env.find_compiler()
    started.program.unlink()
    started.program.write_bytes(drop_env.compile_drop_env(started.folder / "log.c", compiler))
    started.program.chmod(0o755)


def test_a_log_that_nobody_reads_holds_up_no_hook_whose_interpreter_is_gone(
    started: Started,
) -> None:
    log = started.folder / "log"
    with_log(started, log)
    hook = started.hook("prolog", "", "/nowhere/python3.11 -IS")

    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as reader:
        reader.bind(str(log))
        started.run(hook, *JOB)
        line = reader.recv(4096).decode()
        assert line.startswith(f"<27>gpulock: {hook} cannot be started (is its interpreter there?)")
        assert line.endswith(": run gpulock install sge again"), "the administrator reads it"
        with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as writer:
            writer.setblocking(False)
            with contextlib.suppress(BlockingIOError):
                while True:
                    writer.sendto(b"x" * 1000, str(log))

            assert started.run(hook, *JOB).returncode == 1


def test_a_pipe_that_nobody_reads_holds_up_no_hook(started: Started) -> None:
    hook = started.hook("epilog", "", "/nowhere/python3.11 -IS")
    reader, writer = os.pipe2(os.O_NONBLOCK)
    with contextlib.suppress(BlockingIOError):
        while True:
            os.write(writer, b"x" * 4096)
    os.set_blocking(writer, True)

    done = subprocess.run([started.program, hook, *JOB], stderr=writer, check=False, timeout=60)

    os.close(reader)
    os.close(writer)
    assert done.returncode == 0


def test_it_is_the_packages_or_compiled_and_else_refused_with_what_to_install(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    (tmp_path / drop_env.SOURCE).write_text("nonsense\n")
    with pytest.raises(InstallError, match=r"cannot be compiled: .*error"):
        drop_env.drop_env_program(tmp_path)
    monkeypatch.setattr(drop_env, "find_compiler", list)

    with pytest.raises(InstallError, match="no C compiler here: install gcc, or zig"):
        drop_env.drop_env_program(tmp_path)
    (tmp_path / drop_env.DROP_ENV).write_bytes(b"program")
    assert drop_env.drop_env_program(tmp_path) == b"program"
