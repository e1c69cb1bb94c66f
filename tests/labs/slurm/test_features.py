# SPDX-License-Identifier: Apache-2.0
"""Lines of a site's slurm.conf that change what hooks, tasks and doctor meet.

A release that has not one yet runs the same jobs without it.
"""

from __future__ import annotations

import contextlib
import os
import re
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest

from gpulock.install.hooks import HookPaths
from gpulock.install.versions import FOLDER
from tests.labs.common.installed import STATE_DIR, reap
from tests.labs.slurm.gpulock import Gpulock, hook_programs
from tests.labs.slurm.jobs import SHOW_MASK
from tests.labs.slurm.lab import ENDED, JobId
from tests.labs.slurm.modes import NODE, SLURM_CONF, by_gpulock, by_slurm
from tests.labs.slurm.releases import (
    FINDS_CARDS,
    HAS_STEPMGR,
    MASKS_BY_UUID,
    NAMES_NAMESPACES,
    NAMES_PRIVATE_FOLDERS,
)
from tests.nvml.double import Double
from tests.support.wait import wait_until

pytestmark = pytest.mark.lab
PLUGINS = "usr/lib/x86_64-linux-gnu/slurm-wlm"
NVML_PLUGIN = f"/srv/slurm-nvml/{PLUGINS}"  # tests/root/packages.py
NO_CONF = ("env", "-u", "SLURM_CONF")
OWN_MOUNTS = ("unshare", "-m", "--propagation", "private")
# For sh, with a folder and the driver's one of /proc: slurmd where /dev, /proc, /sys show cards.
SHOW_CARDS = """
set -eu
mkdir -p "$0" && mount -t tmpfs -o mode=755 tmpfs "$0" && mkdir "$0/pts" "$0/shm"
for name in null zero full random urandom tty pts shm; do
    [ -d "$0/$name" ] || : >"$0/$name"
    mount --bind "/dev/$name" "$0/$name"
done
ln -s pts/ptmx "$0/ptmx"
ln -s /proc/self/fd "$0/fd"
for minor in 0 1 2 3 4 5 6 7; do mknod -m 666 "$0/nvidia$minor" c 195 "$minor"; done
for card in "$1"/nvidia/gpus/*; do
    place="$0/drivers/nvidia/${card##*/}"
    mkdir -p "$place" && echo 0-1 >"$place/local_cpulist"
done
mount --bind "$0/drivers" /sys/bus/pci/drivers
mount --rbind "$0" /dev
mount --bind "$1" /proc/driver
exec slurmd
"""
INSTALLED = hook_programs(HookPaths(FOLDER / "current"))
TWO_GPUS = ("slalice", "-w", NODE, "--gres=gpu:2")
SHOW_STEP = f"{SHOW_MASK}srun --gres=gpu:1 bash -c 'echo step=$CUDA_VISIBLE_DEVICES'\n"


@pytest.fixture
def site(slurm_gpus: Gpulock) -> Iterator[Gpulock]:
    """Give a test nodes whose hooks `gpulock install slurm` made, of which doctor judges."""
    yield slurm_gpus
    gone = ["rm", "-r", str(FOLDER / "current"), f"{STATE_DIR}/slurm-map"]
    assert slurm_gpus.cluster.run_in(NODE, gone).returncode == 0  # Slurm still leads to the hooks


def install(gpus: Gpulock, around: Sequence[str] = ()) -> None:
    """Install gpulock on the node, whose slurm.conf names its hooks already."""
    done = gpus.command_below(NODE, around, "install", "slurm")
    assert done.returncode == 0, done.stdout + done.stderr


def check_one_job(
    gpus: Gpulock, *words: str, script: str = SHOW_STEP, masks: Sequence[str] = ("0", "1")
) -> None:
    """Run a job of 2 GPUs with a step of 1, which have these in their masks, and are free then."""
    check_job(gpus, gpus.slurm.submit(*TWO_GPUS, *words, script=script), masks)


def check_job(gpus: Gpulock, job: JobId, masks: Sequence[str] = ("0", "1")) -> None:
    """Wait for such a job, and check what it printed."""
    slurm = gpus.slurm
    assert slurm.wait_done(job) == "COMPLETED", slurm.said(job)
    gpus.wait_free()
    assert (gpus.locks(NODE), slurm.node_words(NODE)) == ({}, {"IDLE"})
    assert slurm.said(job) == f"mask={','.join(masks)}.\nstep={masks[0]}\n"


@pytest.mark.short
def test_a_job_whose_own_node_manages_its_steps_gets_its_gpus(slurm_gpus: Gpulock) -> None:
    """The extern step daemon of such a job has another title (stepmgr, 24.05)."""
    newer = slurm_gpus.slurm.release >= HAS_STEPMGR
    extra = {"SlurmctldParameters": "enable_stepmgr"} if newer else {}
    by_gpulock(slurm_gpus, extra={**SLURM_CONF, **extra})

    check_one_job(slurm_gpus, *(["--stepmgr"] if newer else []))


@pytest.mark.short
def test_a_node_that_fetches_slurm_conf_is_fit_for_use(site: Gpulock) -> None:
    """Nothing on the node names slurm.conf: slurmd was told where slurmctld is (configless)."""
    slurm = site.slurm
    extra = {**SLURM_CONF, "SlurmctldParameters": "enable_configless"}
    by_gpulock(site, hooks=INSTALLED, extra=extra)
    socket = slurm.lab / "munge/socket"  # slurm.conf is not there yet to name it
    shell = f"mkdir -p /run/munge && ln -sfn {socket} /run/munge/munge.socket.2"
    assert slurm.run_in(NODE, ["sh", "-c", shell]).returncode == 0
    start_anew(site, *NO_CONF, "slurmd", "--conf-server", f"{slurm.master}:6817")
    site.configure(NODE, SLURM_DEVICE_SELECTION="gpulock")
    install(site, NO_CONF)

    check_one_job(site)
    assert "ok slurmctld\nok installation\nok slurm.conf\n" in check_doctor(site, NO_CONF)
    older = slurm.lab / "etc/older.conf"
    lines = (slurm.lab / "etc/slurm.conf").read_text().splitlines(keepends=True)
    older.write_text("".join(line for line in lines if not line.startswith("Prolog=")))
    site.configure(NODE, SLURM_DEVICE_SELECTION="gpulock", SLURM_CONF=str(older))
    shown = site.command_below(NODE, NO_CONF, "doctor").stdout
    assert f"x slurm.conf: {older} is not what slurmctld has read: it lacks Prolog, so" in shown


@pytest.mark.short
def test_tasks_with_folders_of_their_own_see_their_grant(site: Gpulock) -> None:
    """job_container/tmpfs; an older release has it for /tmp alone, where this lab is."""
    slurm, mine = site.slurm, Path("/var/tmp/gpulock-lab-own")
    flags: dict[str, str] = {}
    if newer := slurm.release >= NAMES_PRIVATE_FOLDERS:
        lines = ("AutoBasePath=true", "BasePath=/run/private", "Dirs=/var/tmp,/dev/shm")
        (slurm.lab / "etc/job_container.conf").write_text("\n".join(lines) + "\n")
        named = slurm.release >= NAMES_NAMESPACES
        key, kind = ("Namespace", "namespace") if named else ("JobContainer", "job_container")
        flags = {f"{key}Type": f"{kind}/tmpfs"}
    by_gpulock(site, hooks=INSTALLED, extra={**SLURM_CONF, **flags})
    # Linux 6.18 numbers namespaces by processor, and binds none into one of a higher number: the
    # slurmd of a machine that is no namespace never meets that.
    line = ("taskset", "-c", str(min(os.sched_getaffinity(0))), *OWN_MOUNTS, "slurmd")
    start_anew(site, *line)
    install(site, beside_slurmd(site))

    try:
        check_job(site, submit_in_own_folders(site, line, f"touch {mine}\n{SHOW_STEP}"))
        assert mine.exists() is not newer, "whose folder it is"
    finally:
        mine.unlink(missing_ok=True)
    check_doctor(site, beside_slurmd(site))


def submit_in_own_folders(gpus: Gpulock, line: Sequence[str], script: str) -> JobId:
    """Submit a job until Slurm has made its folders; where it could not, slurmd starts anew.

    Slurm's own step daemon failed to, once in 200 jobs of 24.11, before it started the job.
    """
    for _ in range(3):
        job = gpus.slurm.submit(*TWO_GPUS, script=script)
        if has_own_folders(gpus, job):
            return job
        gpus.slurm.recover()
        start_anew(gpus, *line)
    raise AssertionError("Slurm made no folders for three jobs")


def has_own_folders(gpus: Gpulock, job: JobId) -> bool:
    """Wait for a job, and say whether Slurm could make its folders."""
    slurm = gpus.slurm
    log = slurm.lab / f"log/{NODE}.log"
    failed = re.compile(rf"_g_(?:stepd_)?create\((?:JobId=)?{job}\b")

    def is_told() -> bool:
        return failed.search(log.read_text(errors="replace")) is not None

    over = (*ENDED, "")
    wait_until(lambda: slurm.state(job) in over or is_told(), why=f"job {job}")
    return not is_told()


@pytest.mark.short
def test_a_node_whose_cards_slurm_finds_itself_gives_each_job_its_own(site: Gpulock) -> None:
    """AutoDetect=nvidia reads /proc and /dev; an older release is given the same by File= lines.

    From 26.05 on Slurm's own masks may have UUIDs (env_uuid): they are the ones that it found.
    """
    slurm = site.slurm
    by_slurm(site, hooks=INSTALLED)
    around: list[str] = []
    by_uuid = slurm.release >= MASKS_BY_UUID
    if slurm.release >= FINDS_CARDS:
        files = f"Name=gpu File=/dev/nvidia[0-{slurm.setup.gpus - 1}] Flags=env_uuid"
        line = f"AutoDetect=nvidia {files if by_uuid else ''}".rstrip()
        conf = slurm.lab / "etc/gres.conf"
        conf.write_text("".join(f"NodeName={node} {line}\n" for node in slurm.nodes))
        places = (slurm.lab / "found", site.drivers / NODE / "proc/driver")
        start_anew(site, *OWN_MOUNTS, "sh", "-c", SHOW_CARDS, *map(str, places))
        around = beside_slurmd(site)
    state = slurm.path_in(NODE, "/var/lib/gpulock")  # its map is of File= lines
    (state / "slurm-map").unlink()
    install(site, around)

    found = [card["uuid"] for card in site.status(NODE)["gpus"]] if by_uuid else ["0", "1"]
    check_one_job(site, masks=found[:2])
    assert "ok order of gres.conf\n" in check_doctor(site, around)


@pytest.mark.short
def test_a_node_whose_cards_nvml_tells_slurm_gives_each_job_its_own(site: Gpulock) -> None:
    """AutoDetect=nvml, by Slurm's own plugin, on the double of NVIDIA's library."""
    slurm = site.slurm
    plugins = f"/{PLUGINS}:{NVML_PLUGIN}"
    by_slurm(site, hooks=INSTALLED, extra={**SLURM_CONF, "PluginDir": plugins})
    conf = slurm.lab / "etc/gres.conf"
    conf.write_text("".join(f"NodeName={node} AutoDetect=nvml\n" for node in slurm.nodes))
    with Double(slurm.lab / "nvml", node=site.drivers / NODE) as nvml:
        nvml.set(
            "gpu*.cpus", "0-1"
        )  # as `local_cpulist` above: a slurmd knows those of its machine
        link = nvml.library.parent / "libnvidia-ml.so"  # the name by which 22.05 looks for it
        with contextlib.suppress(FileExistsError):
            link.symlink_to(nvml.library.name)
        control = slurm.path_in(NODE, "/etc/nvml-double")
        control.unlink(missing_ok=True)  # of a test that failed
        control.symlink_to(nvml.control)
        library = ("env", f"LD_LIBRARY_PATH={nvml.library.parent}")  # as of slurmd's unit
        places = (slurm.lab / "found", site.drivers / NODE / "proc/driver")
        start_anew(site, *OWN_MOUNTS, *library, "sh", "-c", SHOW_CARDS, *map(str, places))
        around = beside_slurmd(site)
        state = slurm.path_in(NODE, "/var/lib/gpulock")  # its map is of File= lines
        (state / "slurm-map").unlink()
        install(site, around)

        check_one_job(site)
        assert nvml.calls()["nvmlDeviceGetMinorNumber"] > 0
        check_doctor(site, around)
        control.unlink()


def test_the_pages_health_check_drains_the_node_and_resumes_what_it_drained(
    slurm_gpus: Gpulock,
) -> None:
    by_gpulock(slurm_gpus)
    reap(slurm_gpus, NODE)
    slurm = slurm_gpus.slurm
    page = (Path(__file__).parents[3] / "docs/quarantine.md").read_text()
    program = re.search(r"```\n(#!/bin/sh\n.*?)```", page, re.DOTALL)
    assert program

    def check() -> tuple[bool, str]:
        done = slurm.run_in(NODE, ["sh", "-c", program[1]])
        assert done.returncode == 0, done.stderr
        return "DRAIN" in slurm.node_words(NODE), slurm.node_state(NODE)[1]

    assert check()[0] is False
    slurm_gpus.command(NODE, "quarantine", "1", "--reason", "its fan died")
    ours = "gpulock: a GPU is out of service"
    assert [check(), check()] == [(True, ours)] * 2
    slurm_gpus.command(NODE, "restore", "1")
    assert check()[0] is False
    slurm.scontrol("update", f"nodename={NODE}", "state=drain", "reason=new cooling")
    assert check() == (True, "new cooling")
    slurm.resume_node(NODE)


def start_anew(gpus: Gpulock, *command: str) -> None:
    """Start a node's slurmd anew, by this command."""
    gpus.slurm.stop_slurmd(NODE)
    gpus.slurm.start_slurmd(NODE, command=command)


def beside_slurmd(gpus: Gpulock) -> list[str]:
    """Return words before a command that is to see what the node's slurmd sees mounted."""
    return ["nsenter", "-m", "-t", str(gpus.slurm.slurmd_pid(NODE))]


def check_doctor(gpus: Gpulock, around: Sequence[str] = ()) -> str:
    """Return what doctor says on a node on which gpulock is installed: of no fault."""
    shown = gpus.command_below(NODE, around, "doctor", "--all").stdout
    assert not [line for line in shown.splitlines() if line.startswith("x ")], shown
    assert "it is not installed for that" not in shown
    return shown
