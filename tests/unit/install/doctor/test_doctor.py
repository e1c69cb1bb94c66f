# SPDX-License-Identifier: Apache-2.0
"""Doctor finds each fault that is planted, says what to do, and never takes silence for health."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from gpulock.daemon.core import sample
from gpulock.deadline import clock_boottime
from gpulock.install.doctor import daemon, doctor
from gpulock.install.doctor.check import (
    FAULT,
    OK,
    WARNING,
    Check,
    Finding,
    Report,
    fact,
    fault,
    report_json,
    report_lines,
    run_checks,
    warning,
)
from gpulock.install.doctor.doctor import run_doctor
from gpulock.install.files import InstallError
from gpulock.install.systemd import install as systemd_install
from gpulock.node.procfs import Proc
from gpulock.node.settings_file import read_settings
from gpulock.store import boot
from gpulock.store.locks import LockStore
from tests.support.faults import disk_full, raising
from tests.support.install_site import (
    Site,
    be_real,
    ignore,
    keep_copy,
    make_site,
    put_back,
    worst_of,
)
from tests.support.locks import place_lock
from tests.support.trees import BOOT, Box, record

pytestmark = pytest.mark.slow
DAMAGE = "echo '#!/bin/sh' >node/state/hooks/current/epilog/sge"


@pytest.fixture(scope="module")
def installed(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Site]:
    """Install a node once, with the sensor's values in qmaster."""
    with pytest.MonkeyPatch.context() as patch:
        site = make_site(tmp_path_factory.mktemp("site") / "root", patch)
        site.install_all()
        site.edit("se", "load_values           ", "load_values           gpu=8,gpu.free=8,")
        be_real(site.config)
        patch.setattr("gpulock.install.doctor.sge.try_sge_hooks", ignore)
        patch.setattr("gpulock.sge.shepherds.why_execd_hidden", ignore)
        keep_copy(site.root)
        yield site


@pytest.fixture
def site(installed: Site) -> Iterator[Site]:
    """Return the installed node, and put it right again after the test."""
    yield installed
    put_back(installed.root)


def run(site: Site) -> Report:
    return run_doctor(site.config)


def found(site: Site) -> dict[str, Finding]:
    """Return the worst check of each name."""
    return worst_of(run(site))


def test_an_installed_node_has_no_faults_of_its_own(site: Site) -> None:
    report = run(site)

    assert [one.name for one in report.findings if one.state == FAULT] == []
    assert [one.name for one in report.findings if one.state == WARNING] == ["gpulockd"]
    assert "Grid Engine 8.1.9" in report.facts


def test_without_execd_that_alone_is_told(site: Site, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("gpulock.install.sge.site.find_execds", list)
    assert [one.name for one in run(site).findings] == ["execd", "gpulockd"]


NO_QUEUE = "sed -i 's/^epilog .*@gpulock=/epilog NONE,[nodex=/' sge/state/sq"


@pytest.mark.parametrize(
    ("harm", "name", "says", "do"),
    [
        ("cat /proc/sys/kernel/random/boot_id >node/state/boot_id", "boot", "were lost", "forget"),
        ("echo x >node/state/boot_id", "boot", "state/boot_id is garbage", "forget"),
        ("sed -i 's,DRIVER_ROOT=,&/nowhere,' etc/gpulock.conf", "driver", "no NVIDIA", "load the"),
        ("sed -i s/GPUS=8/GPUS=9/ etc/gpulock.conf", "EXPECTED_GPUS", "8 of 9 GPUs", "dmesg"),
        ("rm node/dev/nvidia3", "device nodes", "nvidia3: missing", "nvidia-modprobe"),
        (DAMAGE, "hooks", "damaged: epilog/sge", "gpulock install hooks"),
        ("ln -sfn gone node/state/hooks/current", "hooks", "(its folder is gone): jobs", "hooks"),
        (NO_QUEUE, "Grid Engine", "no queue of node1 has the hooks", "--cluster --queue"),
        ("sed -i s/gpu=8/gpu=9/ sge/state/se", "complex_values", "gpu=9, but there are 8", "gpu=8"),
        ("sed -i s/sge-sensor/no/ sge/state/sconf-node1", "Grid Engine", "configuration", "sge"),
        ("rm sge/sge_shepherd", "Grid Engine", "no job would start", "install sge"),
        ("sed -i s/8.1.9/6.2u5/ sge/state/release", "qmaster", "SGE 6.2u5", "taken out"),
    ],
)
def test_a_planted_fault_is_found(site: Site, harm: str, name: str, says: str, do: str) -> None:
    """Once: what the hooks' check says the comparison with an installation does not say again."""
    site.harm(harm)

    (check,) = [one for one in run(site).findings if one.state == FAULT]

    assert (check.name, says in check.what, do in check.do) == (name, True, True), check


def hold_one(site: Site) -> None:
    """Let a claim of this boot have a device."""
    store = LockStore(str(site.root / "node/run/gpulock"))
    os.makedirs(store.path, exist_ok=True)
    store.check(make=True)
    (site.root / "node/state").mkdir(exist_ok=True)
    boot.begin_boot(store, str(site.root / "node/state"), Proc().boot_id(), "node1")
    place_lock(store, "0000:06:00.0", record(boot_id=Proc().boot_id()))


RECORD_IS_A_FOLDER = "cd run/gpulock.claims/claims/*; rm record; mkdir record"
UNREADABLE_LOCK = "rm -r run/gpulock.claims/claims/*; echo x | tee run/gpulock/locks/*/owner"
OPEN_GATE = "touch run/gpulock.claims/gate; chmod 644 run/gpulock.claims/gate"
SPOILED = "echo garbage | tee run/gpulock.claims/claims/*/record; rm -r run/gpulock/locks/*"


@pytest.mark.parametrize(
    ("harm", "name", "says", "do"),
    [
        ("mv state ../elsewhere", "quarantine", "quarantine was lost", "quarantine again what"),
        ("rm -r run/gpulock state", "quarantine", "quarantine was lost", "quarantine again"),
        (SPOILED, "locks", "): nothing is granted", "once no job is left: rm -r"),
        (RECORD_IS_A_FOLDER, "locks", "): nothing is granted", "once no job is left: rm -r"),
        (UNREADABLE_LOCK, "locks", "0000:06:00.0: its owner record", "gpulock why 0000:06:00.0"),
        (OPEN_GATE, "gate", "has mode 0644: any user can block it", "chmod 600"),
    ],
)
def test_what_no_claim_can_put_back_is_a_fault(
    site: Site, harm: str, name: str, says: str, do: str
) -> None:
    hold_one(site)
    site.harm(f"cd node; {harm}")

    check = found(site)[name]

    assert (check.state, says in check.what, do in check.do) == (FAULT, True, True), check


@pytest.mark.parametrize(
    "lost", ["run/gpulock/locks/*", "run/gpulock.claims/claims/*", "run/gpulock"]
)
def test_what_the_next_claim_puts_back_asks_for_no_reboot(site: Site, lost: str) -> None:
    hold_one(site)
    site.harm(f"rm -r node/{lost}")

    assert not {"boot", "locks"} & {one.name for one in run(site).findings}


NO_KILL = "sed -i 's/^execd_params /& ENABLE_ADDGRP_KILL=false /' sge/state/sconf"
DEAF = "touch sge/state/deaf; sed -i s/gpu.free=8/slots=8/g sge/state/se"


@pytest.mark.parametrize(
    ("harm", "name", "says"),
    [
        (NO_KILL, "execd_params", "stray processes"),
        (DEAF, "load sensor", "no values have arrived"),
        ("sed -i s/gpu=8/gpu=6/ sge/state/se", "complex_values", "gpu=6 of 8"),
    ],
)
def test_what_is_only_doubtful_is_a_warning(site: Site, harm: str, name: str, says: str) -> None:
    site.harm(harm)

    check = found(site)[name]

    assert (check.state, says in check.what) == (WARNING, True), check


@pytest.mark.parametrize(
    ("params", "isolation", "is_told"),
    [
        ("none", "off", True),
        ("ENABLE_ADDGRP_KILL=1", "off", False),
        ("ENABLE_ADDGRP_KILL=true", "cgroup", True),
        ("ENABLE_SYSTEMD=false", "cgroup", False),
        ("USE_CGROUPS=systemd", "off", True),
    ],
)
def test_an_execd_that_gives_its_gpu_jobs_to_systemd_is_a_fault(
    site: Site, monkeypatch: pytest.MonkeyPatch, params: str, isolation: str, is_told: bool
) -> None:
    """Open Cluster Scheduler does as it is installed, Some Grid Engine where it is told to."""
    monkeypatch.setattr("gpulock.install.doctor.sge.BOOTED", site.root)
    site.harm(f"echo ISOLATION={isolation} >>etc/gpulock.conf")
    site.harm(f"sed -i 's/^execd_params .*/execd_params {params}/' sge/state/sconf")
    if "CGROUPS" not in params:
        site.harm("echo ocs.slice >root/default/common/slice_name")

    check = found(site)["execd_params"]

    assert (check.state == FAULT, "GPU jobs are refused" in check.what) == (is_told, is_told)


def test_without_qmaster_the_node_itself_is_still_looked_at(site: Site) -> None:
    (site.state / "down").touch()

    checks = found(site)

    assert checks["qmaster"].state == WARNING
    assert "Connection refused" in checks["qmaster"].what
    assert checks["trial of hooks"].state == OK
    assert "Grid Engine" not in checks


def test_settings_with_a_fault_are_one_with_what_to_do(site: Site) -> None:
    good = site.config.read_text()
    site.config.write_text(f"{good}GUPS=8\n")
    report = run(site)
    check = worst_of(report)["settings"]
    assert report.silent["Grid Engine"] == "settings"
    assert (check.state, "unknown key 'GUPS'" in check.what) == (FAULT, True)
    assert check.do.startswith("correct the file, or upgrade gpulock here")
    site.config.write_text("EXPECTED_GPUS=many\n")
    assert [*found(site)] == ["settings"], "none are obeyed, so that all else is unknown"
    site.config.write_text(good)
    read_settings(str(site.config), keep=True)
    site.config.write_text(f"{good}GUPS\n")

    checks = found(site)

    what = "not KEY=VALUE: 'GUPS': the settings obeyed last stay in force"
    assert what in checks["settings"].what
    assert len(checks) > 1


def test_a_check_that_fails_is_a_warning_with_its_reason_and_others_wait_for_it() -> None:
    failing = Check("thing", raising(InstallError("qconf: no such object; look")))
    waiting = [Check("second", lambda: [], ("thing",)), Check("third", lambda: [], ("second",))]

    report = run_checks([failing, *waiting, Check("fourth", lambda: [], ("nobody",))])

    what = "could not be checked: qconf: no such object; look"
    assert report.findings == [Finding("thing", WARNING, what)]
    assert report.silent == {"second": "thing", "third": "second"}
    assert report.passed == ["fourth"]


def lines_of(*findings: Finding, width: int = 80) -> list[str]:
    report = run_checks([Check("a", lambda: findings)])
    return [*report_lines(report, with_all=False, width=width)]


@pytest.mark.parametrize(
    ("do", "width", "lines"),
    [
        ("look", 80, ["    look"]),
        (f"mend /{'x' * 30} by hand", 12, ["    mend", f"    /{'x' * 30}", "    by hand"]),
        ("chmod 600 '/run/a b/gate'", 24, ["    chmod 600", "    '/run/a b/gate'"]),
    ],
)
def test_a_cause_is_one_line_and_what_to_do_stands_below_with_whole_paths(
    do: str, width: int, lines: list[str]
) -> None:
    said = lines_of(fault("it is", do), warning("odd?", "", "b"), width=width)
    assert said == ["x a: it is.", *lines, "! b: odd?"]


def test_all_names_the_checks_that_are_well_and_those_that_said_nothing() -> None:
    well = [Check("a", lambda: [fact("n17"), fact("8 GPUs")]), Check("b", lambda: [])]
    shown = [*report_lines(run_checks(well), with_all=True)]
    assert shown == ["ok a", "ok b", "ok: n17, 8 GPUs (2 checks)"]
    bad = [Check("a", lambda: [fault("bad", "mend it")]), Check("b", lambda: [], ("a",))]
    shown = [*report_lines(run_checks(bad), with_all=True)]
    assert shown[2:] == ["- b: not looked at without a"]


def test_json_has_the_same() -> None:
    report = run_checks([Check("a", lambda: [fact("n17"), warning("odd", "look")])])
    assert json.loads(report_json(report)) == {
        "version": 1,
        "broken": False,
        "facts": ["n17"],
        "findings": [{"check": "a", "state": "warning", "what": "odd", "do": "look"}],
        "passed": [],
        "silent": {},
    }


def test_a_cluster_without_a_queue_is_told_once_and_nothing_fails(site: Site) -> None:
    """qselect and qstat fail there, without a word."""
    (site.state / "sq").unlink()
    checks = found(site)
    assert (checks["Grid Engine"].state, "--queue" in checks["Grid Engine"].do) == (FAULT, True)
    assert checks["queue"].state == OK


def test_a_directory_that_cannot_be_written_is_a_fault(
    site: Site, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("gpulock.store.atomic.replace_file", disk_full)
    checks = found(site)
    for name in ("LOCK_DIR", "STATE_DIR"):
        assert checks[name].state == FAULT and "No space left" in checks[name].what


# --- what an administrator sees in some cases, each output whole ----------------------------------

RUNS = 77


def run_daemon(config: Path, patch: pytest.MonkeyPatch) -> None:
    """Let a simulated node have a scheduler and gpulockd; nobody knows its name."""
    be_real(config)
    patch.setattr(daemon, "find_running_daemon", lambda *_: RUNS)
    patch.setattr(daemon, "is_stopped", lambda *_: False)
    patch.setattr(systemd_install, "BOOTED", config.parent / "no-systemd")
    name = os.uname_result(("Linux", "n17", "6.1", "#1", "x86_64"))
    patch.setattr(os, "uname", lambda: name)


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


def test_a_queue_in_error_names_its_job_and_both_commands(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    site = make_site(tmp_path / "root", monkeypatch)
    site.install_all()
    site.edit("se", "load_values           ", "load_values           gpu=8,gpu.free=8,")
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
        unit = {"LoadState": "loaded", "ActiveState": "failed", "ExecMainStatus": "3"}
        asked = words[-1].rpartition("=")[2].split(",")
        return "".join(f"{name}={unit.get(name, '')}\n" for name in asked)

    box = Box(tmp_path)
    monkeypatch.setattr(systemd_install, "BOOTED", tmp_path)
    monkeypatch.setattr(systemd_install, "run_systemd_program", systemd)
    folder = Path(box.node().settings.exporter_dir)
    folder.mkdir(exist_ok=True)
    head = f"{sample.SAMPLE_LINE}\nboot_id={BOOT}\nboottime={clock_boottime() - 190}\n"
    (folder / "sample").write_text(head)
    look = Check("exporter", lambda: daemon.check_exporter_runs(box.node().settings))

    assert "\n".join(report_lines(run_checks([look]), with_all=False)) == (
        "! exporter: down for 3m: exit 3, /run is full. Jobs are not affected.\n"
        "    journalctl -u gpulock-exporter.service"
    )
