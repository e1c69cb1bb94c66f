# SPDX-License-Identifier: Apache-2.0
"""The site's own hook behind ours: its user, the job's environment and limits, its exit code."""

from __future__ import annotations

import os
import pwd
import random
import re
import shutil
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace

import pytest

from gpulock.sge import site_hook
from gpulock.sge.hook import DONE, REQUEUE, SgeHookCall
from tests.support.drop_env import write_drop_env
from tests.support.faults import raising, returning

ROOT = Path(__file__).parents[3]
CALLS = {"prolog": "become_site_prolog", "epilog": "run_site_epilog"}
# A hook of ours, once its own work is done.
OURS = f"""#!{os.path.realpath(sys.executable)} -IS
import os, sys
sys.path.insert(0, {str(ROOT)!r})
from gpulock.sge import hook, prolog, site_hook
told = site_hook.{{call}}(hook.SgeHookCall(sys.argv, os.environ), os.environ)
sys.exit(told if isinstance(told, int) else prolog.sge_hook_exit_code(told, None))
"""
SITE = """#!/bin/sh
echo "site $* SECRET=$SECRET uid=$(id -u) groups=$(id -G) $(grep SigIgn /proc/$$/status)" >>{log}
echo "$(ulimit -v) $(ulimit -d) $(ulimit -f) $(ulimit -t) $(ulimit -s)" >>{log}.limits
tr '\\0' '\\n' </proc/$$/environ >{log}.env
{end}
"""
CONFIG = "job_id=12\nja_task_id=3\npe={pe}\n"


@dataclass(frozen=True)
class Chain:
    """A shepherd's folder, with a hook of ours that starts one of the site's."""

    folder: Path
    log: Path

    def script(self, path: Path, text: str, **values: object) -> Path:
        path.parent.mkdir(exist_ok=True)
        path.write_text(text.format(log=self.log.name, **values) if values else text)
        path.chmod(0o755)
        return path

    def configure(self, pe: str = "none", escaped: bool = True) -> None:
        """Write the shepherd's config as 8.1.9 does, or as Open Cluster Scheduler does."""
        last = "enable_windomacc=0" if escaped else "enable_addgrp_kill=1"
        (self.folder / "config").write_text(CONFIG.format(pe=pe) + f"{last}\n")

    def run(self, hook: str, user: str = "root@", end: str = "exit 0", limits: str = "") -> int:
        ours = self.script(self.folder / hook / "sge", OURS, call=CALLS[hook])
        self.script(self.folder / "site", SITE, end=end)  # named as the shepherd's folder has it
        words = ["12", "3", "gpu.q", "nobody", f"{user}./site", "a", "b c"]
        limited = ["/usr/bin/prlimit", *limits.split(), "--"] if limits else []
        line: list[str | Path] = [*limited, self.folder / "prolog/drop-env", ours, *words]
        done = subprocess.run(
            [self.folder / "sge_shepherd", "-c", '"$@"; exit $?', "shepherd", *line],
            env={"PATH": "/usr/bin:/bin", "SECRET": "of nobody", "SGE_JOBEXIT_STAT": "137"},
            cwd=self.folder,
            check=False,
            extra_groups=[0, 7] if os.geteuid() == 0 else None,
        )
        return done.returncode

    def open_to_all(self) -> Path:
        """Let any user run the site's hook and write what it saw; return the file of the latter."""
        for folder in (self.folder, self.folder.parent, self.folder.parent.parent):
            folder.chmod(0o755)
        seen = Path(f"{self.log}.env")
        for path in (self.log, seen, Path(f"{self.log}.limits")):
            path.touch()
            path.chmod(0o666)
        return seen

    def said(self) -> str:
        return self.log.read_text()


@pytest.fixture
def chain(tmp_path: Path) -> Chain:
    """Return the folder of a shepherd that starts hooks: it holds the job's environment file."""
    folder = tmp_path / "chain"
    write_drop_env(folder)
    shutil.copy("/bin/dash", folder / "sge_shepherd")
    (folder / "environment").write_text("PATH=/usr/bin:/bin\nSECRET=x\n")
    chain = Chain(folder, folder / "log")
    chain.configure()
    return chain


@pytest.mark.parametrize("hook", CALLS)
@pytest.mark.parametrize(
    ("end", "code"), [("exit 0", 0), ("exit 1", 1), ("exit 99", 99), ("exit 100", 100),
                      ("kill -9 $$", 137)],
)  # fmt: skip
def test_the_exit_code_of_the_sites_hook_counts(
    chain: Chain, hook: str, end: str, code: int
) -> None:
    me = f"{pwd.getpwuid(os.geteuid()).pw_name}@"

    assert chain.run(hook, me, end) == code
    assert chain.said().startswith("site a b c SECRET=")


@pytest.mark.parametrize("hook", CALLS)
def test_the_sites_hook_runs_under_the_jobs_own_limits_and_ignores_no_signal(
    chain: Chain, hook: str
) -> None:
    """As it did before gpulock came: drop-env lifts them for ours alone."""
    me = f"{pwd.getpwuid(os.geteuid()).pw_name}@"
    limits = {"as": 90 << 20, "data": 80 << 20, "fsize": 2 << 20, "cpu": 90, "stack": 1 << 20}
    words = " ".join(f"--{name}={value}:" for name, value in limits.items())

    assert chain.run(hook, me, limits=words) == 0

    seen = Path(f"{chain.log}.limits").read_text().split()
    assert seen == [*(str(limits[n] >> 10) for n in ("as", "data")), "4096", "90", "1024"]
    assert int(chain.said().split()[-1], 16) & (1 << 12 | 1 << 24) == 0  # SIGPIPE, SIGXFSZ


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

    own = f"uid={nobody.pw_uid} groups={nobody.pw_gid} "
    assert f"SECRET=of the file {own}" in chain.said(), "none of root's groups"
    text = env.read_text()
    assert "TMPDIR=/job\n" in text
    assert "LD_X=a\\b\nc \n\n" in text
    assert "-odd=1\n" in text


@pytest.mark.root
def test_backslashes_are_as_in_the_job_of_open_cluster_scheduler(chain: Chain) -> None:
    """Its execd writes a newline as \\n and leaves backslashes; its shepherd reads that back."""
    chain.configure(escaped=False)
    (chain.folder / "environment").write_text(
        "A=c:\\temp\\\\x\\\nyes=a\\b\nC=*\\n\\\nB=\\n1\\n\\n2\\\\n\\n\nSECRET=x\n"
    )
    seen = chain.open_to_all()

    assert chain.run("epilog", "nobody@") == 0

    text = seen.read_text()
    assert "A=c:\\temp\\\\x\\\n" in text
    assert "yes=a\\b\nC=*\n\\\n" in text
    assert "B=\n1\n\n2\\\n\n\n" in text


ODD = (b"\\", b"\\n", b"=", b"'", b'"', b"$(id)", b"`id`", b"A", b"-")
PIECES = (*ODD * 20, *(bytes([byte]) for byte in range(1, 256) if byte != ord("\n")))


def as_the_shepherd_reads(line: bytes, escaped: bool) -> bytes:
    """Return a line of `environment` as builtin_starter.c of 8.1.9, or of its successor, does."""
    known = {b"\\n": b"\n", **({b"\\\\": b"\\"} if escaped else {})}
    return re.sub(rb"\\[\\n]" if escaped else rb"\\n", lambda found: known[found[0]], line)


@pytest.mark.root
@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("escaped", [True, False])
def test_any_bytes_reach_the_sites_hook_as_the_shepherd_reads_them(
    chain: Chain, escaped: bool, seed: int
) -> None:
    rng, seen = random.Random(seed), chain.open_to_all()
    lines = [b"".join(rng.choices(PIECES, k=rng.randrange(30))) for _ in range(200)]
    lines += [b"LONG=" + b"".join(rng.choices(PIECES, k=30_000))]
    (chain.folder / "environment").write_bytes(b"\n".join([*lines, b""]))
    chain.configure(escaped=escaped)

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
        chain.script(evil / name, f"#!/bin/sh\necho evil >>{chain.log}\n")
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
    chain.configure(pe="smp")
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
    assert not chain.log.exists()


@pytest.mark.root
def test_a_name_of_odd_bytes_is_none_of_those_that_root_gets(chain: Chain) -> None:
    odd = ["USER JOB_ID=1", "*=1", "[!x]=1", "JOB_ID\\=1", "JOB_ID", "=JOB_ID=1", "JOB_=1", " =1"]
    (chain.folder / "environment").write_text("\n".join([*odd, *KEPT]) + "\n")

    assert chain.run("prolog") == 0

    seen = Path(f"{chain.log}.env").read_text().splitlines()
    assert sorted(seen) == sorted([PATH, *KEPT, STATUS])


@pytest.mark.root
@pytest.mark.parametrize(("hook", "code"), [("prolog", REQUEUE), ("epilog", DONE)])
def test_a_site_hook_of_an_unknown_user_stops_no_queue(chain: Chain, hook: str, code: int) -> None:
    """A name service that is away for a moment put each queue in error, and ran jobs again."""
    assert chain.run(hook, "no-such-user@") == code


@pytest.mark.root
@pytest.mark.parametrize(("hook", "code"), [("prolog", REQUEUE), ("epilog", DONE)])
def test_a_job_whose_environment_cannot_be_read_has_no_hook_of_the_sites(
    chain: Chain, hook: str, code: int
) -> None:
    (chain.folder / "environment").unlink()

    assert chain.run(hook) == code
    assert not chain.log.exists()


def test_an_epilog_of_the_sites_that_cannot_be_started_says_so(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    made = SimpleNamespace(become=raising(OSError("no prlimit")))
    monkeypatch.setattr(site_hook, "SiteHook", returning(made))
    assert site_hook.run_site_epilog(SgeHookCall(["sge"], {}), {}) == site_hook.NOT_STARTED


@pytest.mark.parametrize("answers", ["999", "none", ""])
def test_a_drop_env_that_is_gone_keeps_no_epilog_from_releasing(answers: str) -> None:
    site_hook.answer_drop_env({"GPULOCK_ANSWERS": answers}, DONE)
