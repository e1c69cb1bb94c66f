# SPDX-License-Identifier: Apache-2.0
"""`prolog/clean` becomes a program without the job's environment, whatever that holds."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import pytest

from gpulock.install.clean_program import CODE, SCRIPT, build_clean_program

MACHINE = os.uname().machine
ENV = "/usr/bin/env"
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


@pytest.mark.parametrize(
    "env",
    [
        {},
        {"GLIBC_TUNABLES": "glibc.rtld.optional_static_tls=1000000000000"},
        {"LD_PRELOAD": "/no/such", "LD_AUDIT": "/no/such"},
        {"SGE": "1", "SGEX_": "1", "XSGE_A": "1", "A": ""},
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
    own = {"SGE_JOBEXIT_STAT": "137", "SGE_CWD_PATH": "/a b", "SGE_": ""}
    first, second, third = own.items()
    env = dict([first, *MANY.items(), second, ("LD_X", "1"), third])

    assert run(clean, ENV, **env).stdout == "".join(f"{k}={v}\n" for k, v in own.items())


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
