# SPDX-License-Identifier: Apache-2.0
"""`gpulock install sge` and `doctor` on a real Grid Engine, beside what is the site's own."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.labs.sge.bare_node import GPULOCK, NODE, ON_NODE, PREFIX, Node, bare_node, unwrapped
from tests.labs.sge.gpulock import name_shepherd
from tests.labs.sge.install import INSTALLATION, PROGRAMS
from tests.labs.sge.lab import GridEngine, without
from tests.support.pairs import zip_equal
from tests.support.wait import wait_until

pytestmark = pytest.mark.lab
SITE_HOOK = """#!/bin/sh
echo "$0 $* user=$(id -un) groups=$(id -Gn) cwd=$PWD vmem=$(ulimit -v)" >>{log}
tr '\\0' '\\n' </proc/$$/environ | sort >{log}.$1.env
exit ${{SITE_CODE:-0}}
"""


@pytest.fixture
def node(sge: GridEngine) -> Iterator[Node]:
    """Give a node without gpulock."""
    yield from bare_node(sge)


@pytest.fixture
def site_hook(sge: GridEngine) -> Iterator[Path]:
    """Write a hook of the site's that tells how it was started, for every user."""
    folder = sge.lab / "site"
    folder.mkdir(mode=0o777)
    folder.chmod(0o1777)
    hook = folder / "hook"
    hook.write_text(SITE_HOOK.format(log=folder / "log"))
    hook.chmod(0o755)
    (folder / "log").touch()
    (folder / "log").chmod(0o666)
    yield hook
    shutil.rmtree(folder)


def test_what_the_site_sets_later_stays_through_another_installation_and_its_end(
    node: Node, site_hook: Path
) -> None:
    """A line of the host's own is nobody's but the site's: it is to be the queue's."""
    sge, log = node.sge, site_hook.with_name("log")
    node.install()
    prolog = f"{site_hook} pro $job_name"
    sge.qconf("-rattr", "queue", "prolog", prolog, f"gpu.q@{NODE}")
    sge.qconf("-mattr", "exechost", "complex_values", "slots=17", NODE)
    sge.set_complex("later later INT <= YES NO 0 0")
    sge.set_conf("xterm", "/usr/bin/later", host=NODE)
    sge.set_conf("mailer", "/bin/later")
    said = node.install()
    assert f"{NODE} alone has the prolog {prolog}: take it out" in unwrapped(said)
    assert f"[{NODE}={prolog}]" in node.objects()["-sq gpu.q"]
    sge.qconf("-purge", "queue", "prolog", f"gpu.q@{NODE}")
    sge.qconf("-rattr", "queue", "prolog", prolog, "gpu.q")
    node.install_cluster()
    assert "installed, NOT" not in node.install()
    _, text = node.run("-l", "gpu=2", script='echo "[$CUDA_VISIBLE_DEVICES]"\n')
    assert (text, " pro " in log.read_text()) == ("[0,1]\n", True)

    assert "uninstalled: sge" in node.uninstall()

    objects = node.objects()
    assert prolog in objects[f"-sq gpu.q@{NODE}"]
    assert "later later INT <= YES NO 0 0" in objects["-sc"]
    assert "slots=17" in objects["-se"]
    assert "mailer /bin/later" in objects["-sconf"]
    assert "xterm /usr/bin/later" in objects["own"]
    assert PREFIX not in objects[f"-sq gpu.q@{NODE}"] + objects["own"]
    assert node.run(script="echo ran\n")[1] == "ran\n"

    sge.set_conf("mailer", "/bin/mail")
    sge.forget_conf(NODE, "xterm")
    sge.load("-Mc", "complexes", without(sge.qconf("-sc"), ["later"]))


def test_the_sites_hooks_go_on_as_their_users_in_their_environment(
    node: Node, site_hook: Path
) -> None:
    node.sge.qconf("-rattr", "queue", "prolog", f"{site_hook} pro $job_name $host", "gpu.q")
    node.sge.set_conf("epilog", f"sgeadmin@{site_hook} epi $queue")
    log = site_hook.with_name("log")
    args = ("-l", "gpu=2", "-N", "named", "-v", "LD_LIBRARY_PATH=/x,TEXT=a\\b  c,SITE_CODE=0")
    wait_until(
        lambda: bool(node.run(*args, script="exit 3\n")) and " epi " in log.read_text(),
        why="execd to know the global epilog",
    )
    alone = Path(f"{log}.pro.env").read_text(), Path(f"{log}.epi.env").read_text()
    first = log.read_text().splitlines()[-2:]
    log.write_text("")

    said = node.install_cluster()
    assert "the prolog in force keeps running, with gpulock's" in unwrapped(said)
    node.install()
    _, text = node.run(*args, script="echo $CUDA_VISIBLE_DEVICES; exit 3\n")

    assert text == "0,1\n"
    assert log.read_text().splitlines() == first
    for before, name in zip_equal(alone, ("pro", "epi")):
        after = Path(f"{log}.{name}.env").read_text()
        assert _lasting(after) == _lasting(before)
        assert "TEXT=a\\b  c\n" in after
    told = "SGE_JOBEXIT_STAT=3\n" in Path(f"{log}.epi.env").read_text()
    assert told is not INSTALLATION.is_ocs  # Open Cluster Scheduler has no such variable
    assert node.sge.path_in(NODE, "/run/gpulock/locks").is_dir()
    assert not list(node.sge.path_in(NODE, "/run/gpulock/locks").iterdir())


@pytest.mark.parametrize(("code", "failed"), [("100", "30"), ("99", "25")])
def test_a_sites_prolog_that_fails_keeps_its_meaning_and_no_lock_stays(
    node: Node, site_hook: Path, code: str, failed: str
) -> None:
    node.sge.qconf("-rattr", "queue", "prolog", f"{site_hook} pro", "gpu.q")
    node.install()

    args = ("-l", "gpu=2", "-v", f"SITE_CODE={code}", "-o", "/dev/null")
    job = node.sge.submit("glalice", *ON_NODE, *args, stdin="true\n")
    node.sge.wait_state(job, "Eqw", "Rq")

    assert node.sge.records(job)[-1]["failed"].split()[0] == failed
    locks = node.sge.path_in(NODE, "/run/gpulock/locks")
    wait_until(lambda: not list(locks.iterdir()), why="the locks to be gone")


def test_jobs_wait_while_their_shepherd_cannot_be_started(node: Node) -> None:
    """They vanished: 127 was taken for the shepherd's own exit."""
    node.install()
    launcher = node.sge.path_in(NODE, f"{PREFIX}/current/prolog/sge_shepherd")
    real = name_shepherd(launcher, "/nowhere/sge_shepherd")
    assert real == str(PROGRAMS / "sge_shepherd")
    node.sge.stop_execd(NODE)
    node.sge.start_execd(NODE)  # it knows shepherd_cmd from the beginning
    where = (*ON_NODE, "-l", "gpu=1", "-o", "waits.out")
    jobs = [node.sge.submit(user, *where, stdin="echo ran\n") for user in ("glalice", "glbob")]
    for job in jobs:
        node.sge.wait_state(job, "Rq")
    said = unwrapped(node.python(GPULOCK, "doctor"))
    assert "x hooks" in said and "damaged: prolog/sge_shepherd" in said
    assert "gpulock install hooks" in said
    assert set(node.sge.queue_states().values()) == {""}

    name_shepherd(launcher, real)
    for job, user in zip_equal(jobs, ("glalice", "glbob")):
        node.sge.wait_settled(job)
        assert (node.sge.users[user].home / "waits.out").read_text() == "ran\n"


def _lasting(environ: str) -> list[str]:
    """Return the variables that do not differ from job to job, without ours."""
    differ = ("JOB_ID=", "JOB_SCRIPT=", "PATH=", "TMP", "SGE_JOB_SPOOL_DIR=", "PWD=", "OLDPWD=")
    ours = ("CUDA_", "NVIDIA_", "GPU", "SGE_GPU=", "APPTAINERENV_", "SINGULARITYENV_")
    return [line for line in environ.splitlines() if not line.startswith((*differ, *ours))]
