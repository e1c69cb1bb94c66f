# SPDX-License-Identifier: Apache-2.0
"""What an administrator sees of doctor in five cases, each output whole."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from gpulock import __version__
from gpulock.deadline import clock_boottime
from gpulock.install.doctor import daemon, doctor
from gpulock.install.doctor.check import Check, report_lines, run_checks
from gpulock.install.systemd import manager
from gpulock.node import sample
from gpulock.node.procfs import Proc
from gpulock.node.settings_file import read_settings
from gpulock.slurm.steps import SlurmSteps
from tests.support.install_site import be_real, ignore, make_site
from tests.support.slurm_node import SlurmNode, make_slurm_node
from tests.support.trees import BOOT, Box

pytestmark = pytest.mark.slow

RUNS = 77


@pytest.fixture
def node(monkeypatch: pytest.MonkeyPatch) -> Iterator[SlurmNode]:
    """Return a node of Slurm on which all is installed, gpulockd and the exporter run."""
    with tempfile.TemporaryDirectory() as top:
        Path(top).chmod(0o755)
        made = make_slurm_node(Path(top, "root"), monkeypatch)
        made.install()
        made.put_hooks()
        made.put_recommended()
        run_daemon(made.config, monkeypatch)
        monkeypatch.setattr(doctor, "find_execds", list)
        monkeypatch.setattr(SlurmSteps, "is_slurmd_seen", lambda *_: True)
        tell(made.config, 5)
        yield made


def run_daemon(config: Path, patch: pytest.MonkeyPatch) -> None:
    """Let a simulated node have a scheduler and gpulockd; nobody knows its name."""
    be_real(config)
    patch.setattr(daemon, "find_running_daemon", lambda *_: RUNS)
    patch.setattr(daemon, "is_stopped", lambda *_: False)
    patch.setattr(manager, "RUNNING", config.parent / "no-systemd")
    name = os.uname_result(("Linux", "n17", "6.1", "#1", "x86_64"))
    patch.setattr(os, "uname", lambda: name)


def tell(config: Path, ago: float) -> None:
    """Let the exporter have written a sample, so many seconds ago."""
    folder = Path(read_settings(str(config)).exporter_dir)
    folder.mkdir(exist_ok=True)
    head = f"boot_id={Proc().boot_id()}\nboottime={clock_boottime() - ago}\n"
    (folder / "sample").write_text(f"{sample.SAMPLE_LINE}\n{head}")


def seen(config: Path) -> str:
    report = doctor.run_doctor(config)
    return "\n".join(report_lines(report, with_all=False))


def test_on_a_node_with_the_package_alone_one_command_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    site = make_site(tmp_path / "root", monkeypatch)
    run_daemon(site.config, monkeypatch)
    before = seen(site.config)
    site.install_all()
    assert site.uninstall().remainders == []

    assert seen(site.config) == before, "after an uninstallation it is so again"
    assert before == (
        "x gpulock: it is installed into no scheduler here (sge_execd runs).\n"
        "    gpulock install sge"
    )


def test_a_node_that_is_well_is_one_line(node: SlurmNode) -> None:
    assert seen(node.config) == (
        f"ok: n17, 8 GPUs, hooks {__version__}, Slurm 22.05.8, no ConstrainDevices: a job can open"
        " any GPU, ISOLATION=off, gpulockd, exporter (31 checks; --all)"
    )


def test_a_queue_in_error_names_its_job_and_both_commands(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    site = make_site(tmp_path / "root", monkeypatch)
    site.install_all()
    site.edit("se", "load_values           ", "load_values           gpu=8,gpu.free=8,")
    (site.root / "root/default/common/bootstrap").write_text("admin_user none\n")
    (site.state / "states").write_text("E\n")
    run_daemon(site.config, monkeypatch)
    monkeypatch.setattr("gpulock.install.doctor.sge.try_sge_hooks", ignore)
    monkeypatch.setattr("gpulock.install.doctor.sge.SgeChecks.execd", lambda _: ())

    assert seen(site.config) == (
        "x queue gpu.q@node1: in error by job 4711.\n"
        "    gpulock why 4711; then qmod -cq gpu.q@node1"
    )


def test_an_exporter_that_failed_is_said_with_its_end_and_jobs_go_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def systemd(*words: str) -> str:
        if words[0] == "journalctl":
            return "/run is full\n"
        return "LoadState=loaded\nUnitFileState=enabled\nActiveState=failed\nExecMainStatus=3\n"

    box = Box(tmp_path)
    monkeypatch.setattr(manager, "RUNNING", tmp_path)
    monkeypatch.setattr(manager, "run_systemd_program", systemd)
    folder = Path(box.node().settings.exporter_dir)
    folder.mkdir(exist_ok=True)
    head = f"{sample.SAMPLE_LINE}\nboot_id={BOOT}\nboottime={clock_boottime() - 190}\n"
    (folder / "sample").write_text(head)
    look = Check("exporter", lambda: daemon.check_exporter_runs(box.node().settings))

    assert "\n".join(report_lines(run_checks([look]), with_all=False)) == (
        "! exporter: down for 3m: exit 3, /run is full. Jobs are not affected.\n"
        "    journalctl -u gpulock-exporter.service"
    )
