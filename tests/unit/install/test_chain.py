# SPDX-License-Identifier: Apache-2.0
"""`prolog/chain` runs our hook and the site's, each as Grid Engine would have."""

from __future__ import annotations

import os
import pwd
import random
import re
import shutil
import subprocess
from dataclasses import dataclass
from pathlib import Path

import pytest

from gpulock.install.clean_program import build_clean_program

ROOT = Path(__file__).parents[3]
OURS = """#!/bin/sh
echo "ours $*" "$(/usr/bin/env | /usr/bin/sort | /usr/bin/tr '\\n' ' ')" >>{log}
exit {code}
"""
SITE = """#!/bin/sh
echo "site $* SECRET=$SECRET uid=$(id -u)" >>{log}
tr '\\0' '\\n' </proc/$$/environ >{log}.env
exit {code}
"""


@dataclass(frozen=True)
class Chain:
    """An installed chain between two hooks that write down how they were started."""

    folder: Path
    log: Path

    def script(self, path: Path, text: str, code: int) -> Path:
        path.parent.mkdir(exist_ok=True)
        path.write_text(text.format(log=self.log.name, code=code))
        path.chmod(0o755)
        return path

    def run(self, hook: str, user: str = "root@", ours: int = 0, site: int = 0) -> int:
        self.script(self.folder / hook / "sge", OURS, ours)
        self.script(
            self.folder / "site", SITE, site
        )  # its names are those of the shepherd's folder
        words = ["12", "3", "gpu.q", "nobody", f"{user}./site", "a", "b c"]
        done = subprocess.run(
            [self.folder / "prolog/clean", self.folder / "prolog/chain", hook, *words],
            env={"PATH": "/usr/bin:/bin", "SECRET": "of nobody", "SGE_JOBEXIT_STAT": "137"},
            cwd=self.folder,
            check=False,
        )
        return done.returncode

    def open_to_all(self) -> Path:
        """Let any user run the site's hook and write what it saw; return the file of the latter."""
        self.folder.chmod(0o755)
        seen = Path(f"{self.log}.env")
        for path in (self.log, seen):
            path.touch()
            path.chmod(0o666)
        return seen

    def said(self) -> list[str]:
        return self.log.read_text().splitlines()


@pytest.fixture
def chain(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Chain:
    """Be the shepherd of a chain: our directory holds the job's environment file."""
    folder = tmp_path / "chain"
    (folder / "prolog").mkdir(parents=True)
    (folder / "prolog/clean").write_bytes(build_clean_program())
    (folder / "prolog/clean").chmod(0o755)
    (folder / "environment").write_text("PATH=/usr/bin:/bin\nSECRET=x\n")
    (folder / "config").write_text("inherit_env=1\nenable_windomacc=0\n")
    monkeypatch.chdir(folder)
    for name in ("chain", "limits"):
        shutil.copy(ROOT / "prolog" / name, folder / "prolog" / name)
    return Chain(folder, folder / "log")


def test_our_prolog_comes_first_and_gets_nothing_of_the_jobs_environment(chain: Chain) -> None:
    assert chain.run("prolog") == 0

    ours, site = chain.said()
    assert ours.startswith(f"ours {os.getpid()}")
    assert ours.partition("JOB_ID=")[2].split() == [
        "12",
        "PATH=/usr/bin:/bin",
        *[word for word in ours.split() if word.startswith("PWD=")],
        "QUEUE=gpu.q",
        "SGE_TASK_ID=3",
    ]
    assert site.startswith("site a b c SECRET= ")


@pytest.mark.parametrize("code", [99, 100])
def test_a_prolog_of_ours_that_refuses_is_the_last_word(chain: Chain, code: int) -> None:
    assert chain.run("prolog", ours=code) == code
    assert len(chain.said()) == 1


def test_what_kills_our_prolog_under_limits_is_blamed_on_the_job(chain: Chain) -> None:
    assert chain.run("prolog", ours=7) in (7, 100)  # 100 where limits cannot be lifted
    assert len(chain.said()) == 1


@pytest.mark.parametrize("code", [0, 1, 99, 100])
def test_the_sites_prolog_decides_after_ours(chain: Chain, code: int) -> None:
    assert chain.run("prolog", site=code) == code


@pytest.mark.parametrize(("ours", "site"), [(0, 0), (1, 0), (0, 99), (3, 1)])
def test_the_sites_epilog_comes_first_and_its_code_counts(
    chain: Chain, ours: int, site: int
) -> None:
    assert chain.run("epilog", ours=ours, site=site) == site

    assert [line.split()[0] for line in chain.said()] == ["site", "ours"]


@pytest.mark.root
@pytest.mark.parametrize("user", ["", "nobody@"])
def test_a_site_hook_of_another_user_gets_that_user_and_the_shepherds_environment(
    chain: Chain, user: str
) -> None:
    (chain.folder / "environment").write_text(
        "SECRET=of the file\nTMPDIR=/job\nLD_X=a\\\\b\\nc \\n\n-odd=1\n=none\nBAD\n"
    )
    nobody, env = pwd.getpwnam("nobody"), chain.open_to_all()

    assert chain.run("prolog", user) == 0

    site = chain.said()[1]
    assert f"SECRET=of the file uid={nobody.pw_uid}" in site
    text = env.read_text()
    assert "TMPDIR=/job\n" in text
    assert "LD_X=a\\b\nc \n\n" in text
    assert "-odd=1\n" in text


@pytest.mark.root
def test_backslashes_are_as_in_the_job_of_open_cluster_scheduler(chain: Chain) -> None:
    """Its execd writes a newline as \\n and leaves backslashes; its shepherd reads that back."""
    (chain.folder / "config").write_text("inherit_env=1\nenable_addgrp_kill=1\n")
    (chain.folder / "environment").write_text(
        "A=c:\\temp\\\\x\\\nyes=a\\b\nC=*\\n\\\nB=\\n1\\n\\n2\\\\n\\n\nSECRET=x\n"
    )
    seen = chain.open_to_all()

    assert chain.run("epilog", "nobody@") == 0

    text = seen.read_text()
    assert "A=c:\\temp\\\\x\\\n" in text
    assert "yes=a\\b\nC=*\n\\\n" in text
    assert "B=\n1\n\n2\\\n\n\n" in text


@pytest.mark.root
def test_every_byte_of_a_variable_reaches_the_sites_hook(chain: Chain) -> None:
    wild = bytes(byte for byte in range(1, 256) if byte not in b"\n\\")
    told = [b"A=" + wild, b"B=''", b"C='\\\\'\\n'\\\\n'", b"D=$(id)`id`\\\\", b"SECRET=x"]
    (chain.folder / "environment").write_bytes(b"\n".join(told) + b"\n")
    seen = chain.open_to_all()

    assert chain.run("epilog", "nobody@") == 0

    found = seen.read_bytes()
    for line in (b"A=" + wild, b"B=''", b"C='\\'\n'\\n'", b"D=$(id)`id`\\"):
        assert b"\n" + line + b"\n" in b"\n" + found, line


@pytest.mark.root
@pytest.mark.slow
@pytest.mark.giant
def test_a_job_with_very_many_variables_does_not_keep_the_sites_hook(chain: Chain) -> None:
    """A list that grew with each of them took minutes; Linux takes 130,000 as small as these."""
    told = [f"V{number}=\\\\'" for number in range(40_000)] + ["PATH=/usr/bin:/bin"]
    (chain.folder / "environment").write_text("\n".join(told) + "\n")
    seen = chain.open_to_all()

    assert chain.run("epilog", "nobody@") == 0

    found = set(seen.read_text().splitlines())
    assert {f"V{number}=\\'" for number in range(40_000)} <= found


PIECES = (
    b"\\",
    b"\\n",
    b"'",
    b'"',
    b"=",
    b" ",
    b"$(id)",
    b"`id`",
    b"*",
    b"\xff",
    b"\r",
    b";",
    b"A",
    b"-",
)


def as_the_shepherd_reads(line: bytes, escaped: bool) -> bytes:
    """Return a line of `environment` as builtin_starter.c of 8.1.9, or of its successor, does."""
    known = {b"\\n": b"\n", **({b"\\\\": b"\\"} if escaped else {})}
    return re.sub(rb"\\[\\n]" if escaped else rb"\\n", lambda found: known[found[0]], line)


@pytest.mark.root
@pytest.mark.slow
@pytest.mark.parametrize("seed", range(10))
@pytest.mark.parametrize("escaped", [True, False])
def test_any_bytes_reach_the_sites_hook_as_the_shepherd_reads_them(
    chain: Chain, escaped: bool, seed: int
) -> None:
    """An eval reads them: nothing of it may run, and nothing may be lost."""
    rng, seen = random.Random(seed), chain.open_to_all()
    lines = [b"".join(rng.choices(PIECES, k=rng.randrange(30))) for _ in range(200)]
    lines += [b"LONG=" + b"".join(rng.choices(PIECES, k=30_000))]
    (chain.folder / "environment").write_bytes(b"\n".join([*lines, b""]))
    (chain.folder / "config").write_text("enable_windomacc=0\n" if escaped else "inherit_env=1\n")

    assert chain.run("epilog", "nobody@") == 0

    told = {b"SGE_JOBEXIT_STAT": b"SGE_JOBEXIT_STAT=137"}
    for line in lines:
        if b"=" in line[1:] and line[:1] != b"=":
            read = as_the_shepherd_reads(line, escaped)
            told[read.partition(b"=")[0]] = read
    expected = b"\n".join([*told.values(), b""])
    assert sorted(seen.read_bytes().split(b"\n")) == sorted(expected.split(b"\n"))


KEPT = ["RESTARTED=1", "JOB_ID=12", "JOB_NAME=it's mine", "USER=nobody", "SGE_ROOT=/sge"]
PARALLEL = ["PE=smp", "PE_HOSTFILE=/spool/12.3/pe_hostfile"]
MASKS = ["CUDA_VISIBLE_DEVICES=0", "GPULOCK_DEVICES=GPU-a", "SGE_GPU=0"]
PATH = "PATH=/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"
STATUS = "SGE_JOBEXIT_STAT=137"


@pytest.mark.root
def test_a_site_hook_of_roots_runs_no_program_that_the_jobs_owner_chose(chain: Chain) -> None:
    """Tried: each way to name a program, a module, a start file or another qmaster."""
    evil = chain.folder / "evil"
    for name in ("nvidia-smi", "id", "tr", "env"):
        chain.script(evil / name, "#!/bin/sh\necho evil >>{log}\n", 0)
    (evil / "Evil.pm").write_text(f"package Evil; system('echo evil >>{chain.log}'); 1;\n")
    user = [
        f"{n}={evil}" for n in ("HOME", "PATH", "PERL5LIB", "TMP", "TMPDIR", "SGE_ROOT_", "CDPATH")
    ]
    user += ["PERL5OPT=-MEvil", "EXECIGNORE=*", "BASHOPTS=failglob:extdebug", "SHELL=/x", "TZ=x"]
    user += ["SGE_QMASTER_PORT=1", "SGE_EXECD_PORT=1", "SGE_STDOUT_PATH=/x", "SGE_JOBEXIT_STAT=0"]
    user += ["GLIBC_TUNABLES=a", "LD_X=a", "LC_ALL=../x", "PYTHONPATH=/x", "BASH_ENV=/x", "ENV=x"]
    (chain.folder / "environment").write_text("\n".join([*user, *KEPT, *PARALLEL, *MASKS]) + "\n")

    assert chain.run("epilog") == 0

    assert "evil" not in chain.said()
    seen = Path(f"{chain.log}.env").read_text().splitlines()
    assert sorted(seen) == sorted([PATH, *KEPT, STATUS])


@pytest.mark.root
def test_a_site_hook_of_roots_is_told_of_the_hosts_and_gpus_that_were_granted(chain: Chain) -> None:
    with (chain.folder / "config").open("a") as config:
        config.write("pe=smp\n")
    (chain.folder / "gpulock").touch()  # the record of a grant
    (chain.folder / "environment").write_text("\n".join([*KEPT, *PARALLEL, *MASKS]) + "\n")

    assert chain.run("prolog") == 0

    seen = Path(f"{chain.log}.env").read_text().splitlines()
    assert sorted(seen) == sorted([PATH, *KEPT, *PARALLEL, *MASKS, STATUS])


@pytest.mark.root
@pytest.mark.parametrize(("hook", "code"), [("prolog", 100), ("epilog", 0)])
def test_a_variable_whose_name_forges_a_line_starts_no_hook_of_roots(
    chain: Chain, hook: str, code: int
) -> None:
    """execd writes a newline in a name as it is, and nobody can tell which line is execd's."""
    lines = ["X", "SGE_ROOT=/evil", *KEPT]
    (chain.folder / "environment").write_text("\n".join(lines) + "\n")

    assert chain.run(hook) == code
    assert [line.split()[0] for line in chain.said()] == ["ours"]


@pytest.mark.root
def test_a_name_of_odd_bytes_is_none_of_those_that_root_gets(chain: Chain) -> None:
    odd = ["USER JOB_ID=1", "*=1", "[!x]=1", "JOB_ID\\=1", "JOB_ID", "=JOB_ID=1", "JOB_=1", " =1"]
    (chain.folder / "environment").write_text("\n".join([*odd, *KEPT]) + "\n")

    assert chain.run("prolog") == 0

    seen = Path(f"{chain.log}.env").read_text().splitlines()
    assert sorted(seen) == sorted([PATH, *KEPT, STATUS])


@pytest.mark.root
def test_a_site_hook_of_an_unknown_user_fails(chain: Chain) -> None:
    assert chain.run("prolog", "no-such-user@") == 1
