# SPDX-License-Identifier: Apache-2.0
"""`prolog/clean` becomes a program without the job's environment, whatever that holds."""

from __future__ import annotations

import contextlib
import ctypes
import os
import resource
import subprocess
from pathlib import Path

import pytest

from gpulock.install.clean_program import CODE, SCRIPT, build_clean_program

MACHINE = os.uname().machine
ENV = "/usr/bin/env"
LONGEST = 131_071  # bytes, MAX_ARG_STRLEN of the kernel without the NUL
MANY = {f"V{n}": "x" * 10_000 for n in range(150)}


@pytest.fixture
def clean(tmp_path: Path) -> Path:
    path = tmp_path / "clean"
    path.write_bytes(build_clean_program())
    path.chmod(0o755)
    return path


def run(*words: Path | str, **env: str) -> subprocess.CompletedProcess[str]:
    """Run a command with an environment."""
    return subprocess.run(words, env=env, capture_output=True, text=True, check=False, timeout=60)


def started_with(
    clean: Path, lines: list[str], *words: str, room: int = resource.RLIM_INFINITY
) -> subprocess.CompletedProcess[str]:
    """Start `clean` with lines of an environment, of one name too, and room for so many bytes."""
    strings = [line.encode() for line in lines]
    source, told = os.pipe()
    if not (child := os.fork()):
        with contextlib.suppress(OSError):
            os.dup2(told, 1)
            unlimited = resource.RLIM_INFINITY, resource.RLIM_INFINITY
            resource.setrlimit(resource.RLIMIT_STACK, unlimited)
            execve = ctypes.CDLL(None, use_errno=True).execve
            argv = [bytes(clean), *[word.encode() for word in words or (ENV,)]]
            vectors = [(ctypes.c_char_p * (len(each) + 1))(*each, None) for each in (argv, strings)]
            resource.setrlimit(resource.RLIMIT_AS, (room, room))
            execve(argv[0], *vectors)
        os._exit(77)
    os.close(told)
    with open(source) as pipe:
        said = pipe.read()
    return subprocess.CompletedProcess(words, os.waitpid(child, 0)[1], said, "")


@pytest.mark.parametrize(
    "env",
    [
        {},
        {"GLIBC_TUNABLES": "glibc.rtld.optional_static_tls=1000000000000"},
        {"LD_PRELOAD": "/no/such", "LD_AUDIT": "/no/such"},
        {"SGE": "1", "SGEX_": "1", "XSGE_A": "1", "A": "", "SGE_QMASTER_PORT": "1", "SGE_": ""},
        {"SGE_CWD_PATH_": "1", "SGE_CWD_PAT": "1", "XSGE_CWD_PATH": "1", "sge_cwd_path": "1"},
        MANY,
    ],
)
def test_nothing_of_the_environment_passes(clean: Path, env: dict[str, str]) -> None:
    done = run(clean, ENV, **env)

    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")


def test_a_variable_of_the_c_library_ends_an_ordinary_program() -> None:
    """What `clean` is for: this is `env -i`, as the queue's line had it."""
    bad = {"GLIBC_TUNABLES": "glibc.rtld.optional_static_tls=1000000000000"}

    assert run(ENV, "-i", "/bin/true", **bad).returncode != 0


def test_what_the_shepherd_says_to_a_hook_passes(clean: Path) -> None:
    own = {"SGE_STDERR_PATH": "", "SGE_CWD_PATH": "/a b", "SGE_JOBEXIT_STAT": "137"}
    own |= {"SGE_STDIN_PATH": "SGE_CWD_PATH=1", "SGE_STDOUT_PATH": "x" * 100_000}
    first, second, *others = own.items()
    env = dict([first, *MANY.items(), second, ("LD_X", "1"), *others])

    assert run(clean, ENV, **env).stdout == "".join(f"{k}={v}\n" for k, v in own.items())


def test_of_two_lines_of_one_name_the_last_passes(clean: Path) -> None:
    """Without INHERIT_ENV both reach execve(2), and a dash takes the last."""
    lines = ["A=1", *[f"SGE_CWD_PATH={n}" for n in range(20_000)], "SGE_CWD_PATHS=1", "B=1"]

    assert started_with(clean, lines).stdout == "SGE_CWD_PATH=19999\n"


@pytest.mark.parametrize("name", ["SGE_M{:x}=", "X{:x}=", "SGE_CWD_PATH="])
@pytest.mark.parametrize("room", [10 << 20, 20 << 20])  # Grid Engine gives no job less
def test_no_number_of_variables_leaves_a_launcher_without_room(
    clean: Path, name: str, room: int
) -> None:
    """150,000 empty ones killed the shell behind it, and a signal puts a queue in error."""
    for count in (50_000, 100_000, 150_000, 200_000):
        lines = [name.format(number) for number in range(count)]
        done = started_with(clean, lines, "/bin/sh", "-c", "echo ran", room=room)
        assert (done.returncode, done.stdout) == (0, "ran\n"), (count, done.stderr)


def test_values_as_long_as_any_leave_a_launcher_room(clean: Path) -> None:
    names = ("JOBEXIT_STAT", "CWD_PATH", "STDIN_PATH", "STDOUT_PATH", "STDERR_PATH")
    lines = [f"SGE_{name}=".ljust(LONGEST, "x") for name in names] * 4

    done = started_with(clean, lines, "/bin/sh", "-c", "echo ran", room=10 << 20)

    assert (done.returncode, done.stdout) == (0, "ran\n")


def test_arguments_and_exit_code_are_the_programs(clean: Path) -> None:
    done = run(clean, "/bin/sh", "-c", 'echo "$#" "$0" "$1"; exit 99', "a b", "", JOB="1")

    assert (done.returncode, done.stdout) == (99, "1 a b \n")


@pytest.mark.parametrize("words", [(), ("/no/such/program",), ("/etc/passwd",)])
def test_what_cannot_be_started_puts_the_job_in_error(clean: Path, words: tuple[str, ...]) -> None:
    assert run(clean, *words).returncode == 100


def test_a_machine_without_code_gets_a_script(tmp_path: Path) -> None:
    (path := tmp_path / "clean").write_bytes(build_clean_program("s390x"))
    path.chmod(0o755)

    assert path.read_bytes() == SCRIPT
    assert run(path, ENV, SGE_JOBEXIT_STAT="1", OTHER="2").stdout == "SGE_JOBEXIT_STAT=1\n"


def test_the_bytes_are_what_the_assembler_makes_of_the_lines(tmp_path: Path) -> None:
    lines = [".intel_syntax noprefix"] if MACHINE == "x86_64" else []
    source, made = tmp_path / "clean.s", tmp_path / "clean.o"
    source.write_text("\n".join([*lines, *(line for _, line in CODE[MACHINE])]) + "\n")
    subprocess.run(["as", source, "-o", made], check=True, timeout=60)

    bare = tmp_path / "clean.bin"
    subprocess.run(["objcopy", "-O", "binary", "-j", ".text", made, bare], check=True, timeout=60)

    expected = bytes.fromhex("".join(instruction for instruction, _ in CODE[MACHINE]))
    assert bare.read_bytes()[: len(expected)] == expected
