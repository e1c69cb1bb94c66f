# SPDX-License-Identifier: Apache-2.0
"""`prolog/chain` runs our hook and the site's, each as Grid Engine would have."""

from __future__ import annotations

import os
import pwd
import shutil
import subprocess
import tempfile
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
        path.write_text(text.format(log=self.log, code=code))
        path.chmod(0o755)
        return path

    def run(self, hook: str, user: str = "root@", ours: int = 0, site: int = 0) -> int:
        self.script(self.folder / hook / "sge", OURS, ours)
        command = self.script(self.folder / "site", SITE, site)
        words = ["12", "3", "gpu.q", "nobody", f"{user}{command}", "a", "b c"]
        done = subprocess.run(
            [self.folder / "prolog/clean", self.folder / "prolog/chain", hook, *words],
            env={"PATH": "/usr/bin:/bin", "SECRET": "of nobody", "SGE_JOBEXIT_STAT": "137"},
            cwd=self.folder,
            check=False,
            timeout=20,
        )
        return done.returncode

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
    return Chain(folder, tmp_path / "log")


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
    assert site.startswith("site a b c SECRET=x ")


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
    nobody = pwd.getpwnam("nobody")
    folder = chain.folder
    while folder not in (Path(tempfile.gettempdir()), Path("/")):
        folder.chmod(0o755)
        folder = folder.parent
    chain.log.touch()
    chain.log.chmod(0o666)
    (env := Path(f"{chain.log}.env")).touch()
    env.chmod(0o666)

    assert chain.run("prolog", user) == 0

    site = chain.said()[1]
    assert f"SECRET=of the file uid={nobody.pw_uid}" in site
    text = env.read_text()
    assert "TMPDIR=/job\n" in text
    assert "LD_X=a\\b\nc \n\n" in text
    assert "-odd=1\n" in text


def test_backslashes_are_as_in_the_job_of_open_cluster_scheduler(chain: Chain) -> None:
    """Its execd writes a newline as \\n and leaves backslashes; its shepherd reads that back."""
    (chain.folder / "config").write_text("inherit_env=1\nenable_addgrp_kill=1\n")
    (chain.folder / "environment").write_text(
        "A=c:\\temp\\\\x\\\nyes=a\\b\nC=*\\n\\\nB=\\n1\\n\\n2\\\\n\\n\nSECRET=x\n"
    )

    assert chain.run("epilog") == 0

    text = Path(f"{chain.log}.env").read_text()
    assert "A=c:\\temp\\\\x\\\n" in text
    assert "yes=a\\b\nC=*\n\\\n" in text
    assert "B=\n1\n\n2\\\n\n\n" in text


def test_every_byte_of_a_variable_reaches_the_sites_hook(chain: Chain) -> None:
    wild = bytes(byte for byte in range(1, 256) if byte not in b"\n\\")
    told = [b"A=" + wild, b"B=''", b"C='\\\\'\\n'\\\\n'", b"D=$(id)`id`\\\\", b"SECRET=x"]
    (chain.folder / "environment").write_bytes(b"\n".join(told) + b"\n")

    assert chain.run("epilog") == 0

    seen = Path(f"{chain.log}.env").read_bytes()
    for line in (b"A=" + wild, b"B=''", b"C='\\'\n'\\n'", b"D=$(id)`id`\\"):
        assert b"\n" + line + b"\n" in b"\n" + seen, line


@pytest.mark.slow
def test_a_job_with_very_many_variables_does_not_keep_the_sites_hook(chain: Chain) -> None:
    """A list that grew with each of them took minutes; Linux takes 130,000 as small as these."""
    told = [f"V{number}=\\\\'" for number in range(40_000)]
    (chain.folder / "environment").write_text("\n".join([*told, "SECRET=x"]) + "\n")

    assert chain.run("epilog") == 0

    seen = set(Path(f"{chain.log}.env").read_text().splitlines())
    assert {f"V{number}=\\'" for number in range(40_000)} <= seen


@pytest.mark.root
def test_a_site_hook_of_roots_gets_nothing_that_a_loader_or_a_shell_obeys(chain: Chain) -> None:
    kept = ["PATH=/usr/bin:/bin", "RESTARTED=1", "TERM=x", "JOB_ID=12", "OMP_NUM_THREADS=4"]
    gone = ["GLIBC_TUNABLES=a", "LD_X=a", "LC_ALL=../x", "PYTHONPATH=/x", "BASH_ENV=/x", "ENV=x"]
    (chain.folder / "environment").write_text("\n".join([*kept, *gone]) + "\n")

    assert chain.run("epilog") == 0

    seen = Path(f"{chain.log}.env").read_text().splitlines()
    assert sorted(seen) == sorted([*kept, "SGE_JOBEXIT_STAT=137"])


@pytest.mark.root
def test_a_site_hook_of_an_unknown_user_fails(chain: Chain) -> None:
    assert chain.run("prolog", "no-such-user@") == 1
