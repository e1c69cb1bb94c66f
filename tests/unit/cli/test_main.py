# SPDX-License-Identifier: Apache-2.0
"""The frame of the command line: lazy commands, exit codes, refusals; the small commands."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import click
import pytest

from gpulock import __version__
from gpulock.cli import command_group
from gpulock.cli.admin.config import format_config_lines
from gpulock.cli.commands import NAMES
from gpulock.daemon.health.findings import POLICY_WORDS
from gpulock.errors import BROKEN, UNKNOWN, Refusal
from gpulock.node.setting_keys import KEYS
from gpulock.node.settings_file import read_settings
from gpulock.simulate.presets import PRESETS
from tests.support.cli_site import ROOT, Site
from tests.support.faults import raising
from tests.support.runner import command_runner


def call(*args: str) -> tuple[int, str, str]:
    result = command_runner().invoke(command_group, args)
    return result.exit_code, result.stdout, result.stderr


def test_help_lists_every_command_and_what_is_none_is_a_usage_error() -> None:
    text = call("--help")[1]
    assert all(f"\n  {name} " in text for name in NAMES)
    assert call("--version") == (0, f"gpulock {__version__}\n", "")
    assert (call("nonsense")[0], call("status", "--nonsense")[0]) == (2, 2)
    for name in NAMES:
        code, text, _ = call(name, "--help")
        assert (code, text.startswith("Usage: ")) == (0, True), name


@pytest.mark.parametrize(("option", "time"), [("--for", "2"), ("--for", "0s"), ("--wait", "2")])
def test_a_time_without_a_unit_or_an_end_at_once_is_refused(option: str, time: str) -> None:
    code, _, said = call("run", option, time, "--", "true")
    assert (code, f"'{option}'" in said) == (2, True)


@pytest.mark.parametrize(
    ("fault", "code", "said"),
    [
        *(
            (Refusal(kind, "it is\nso", "do that"), code, f"{kind}: it is?so; do that")
            for kind, code in ((UNKNOWN, 1), (BROKEN, 3))
        ),
        (
            OSError(5, "Input/output error", "/run"),
            3,
            "broken: [Errno 5] Input/output error: '/run'",
        ),
    ],
)
def test_a_refusal_and_an_unexpected_error_are_one_line_and_an_exit_code(
    fault: Exception, code: int, said: str, site: Site, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("gpulock.cli.status.status.view_node", raising(fault))
    result = site.call("status")
    assert (result.exit_code, result.stdout) == (code, "")
    assert (result.stderr.count("\n"), said in result.stderr) == (1, True)


@pytest.mark.slow
@pytest.mark.parametrize("unbuffered", ["", "1"])
@pytest.mark.parametrize("args", [["status"], ["--help"], ["status", "--help"], ["--version"]])
def test_output_that_cannot_be_written_is_one_line_and_no_broken_node(
    site: Site, args: list[str], unbuffered: str
) -> None:
    environ = {**os.environ, "PYTHONUNBUFFERED": unbuffered}
    with open("/dev/full", "w") as full:
        done = subprocess.run(
            site.command(*args),
            stdout=full,
            stderr=subprocess.PIPE,
            text=True,
            cwd=ROOT,
            check=False,
            env=environ,
        )
    said = "gpulock: cannot write the output: No space left on device\n"
    assert (done.returncode, done.stderr) == (1, said)


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("none", "unknown: no settings file"),
        ("", "unknown: settings: {}: not a regular file; name a file\n"),
    ],
)
def test_settings_that_are_not_there_are_no_broken_node(
    tmp_path: Path, name: str, said: str
) -> None:
    code, _, error = call("--config", str(tmp_path / name), "status")
    assert (code, said.format(tmp_path / name) in error) == (1, True)
    assert "doctor" not in error, "it is refused as well"


def test_config_shows_every_key_and_where_it_comes_from(
    site: Site, monkeypatch: pytest.MonkeyPatch
) -> None:
    text = site.call("config").stdout
    lines = {line.split()[0]: line for line in text.splitlines() if line[:1].isupper()}
    simulated = ["LOCK_DIR", "STATE_DIR", "DRIVER_ROOT", "SYS_ROOT", "DEV_ROOT", "SIMULATION"]
    assert list(lines) == [*(key[0] for key in KEYS), *simulated]
    assert lines["EXPECTED_GPUS"].split() == ["EXPECTED_GPUS", "8", "(file,", "default", "0)"]
    assert lines["SLURM_WAIT"].split() == ["SLURM_WAIT", "15", "(default)"]
    assert all(meaning in text for *_, meaning in KEYS)
    assert f"puts a device out: {' '.join(POLICY_WORDS)} (words)" in text
    site.set("ISOLATION=cgroup\n")
    assert "  uuid  (by other keys, default index)" in site.call("config").stdout
    monkeypatch.setenv("COLUMNS", "80")
    narrow = [*format_config_lines(site.node().settings, 80), site.call("inventory").stdout]
    shown = click.unstyle("\n".join(narrow)).replace(str(site.files.config.parent), "/run")
    assert [line for line in shown.splitlines() if len(line) > 80] == []


def test_config_shows_the_value_in_force_where_the_files_is_not(site: Site) -> None:
    site.set("ISOLATION=cgroup\nSHARES=0:2\nSHARE_MPS=yes\nVISIBLE_DEVICES=index\n")
    told = site.call("config").stdout
    assert "\nVISIBLE_DEVICES         uuid  (by other keys, default index)\n" in told
    assert "\nSHARE_MPS               no  (default)\n" in told
    assert "SHARE_MPS=yes needs ISOLATION=off" in told


@pytest.mark.parametrize(
    ("text", "fault"),
    [
        ("EXPECTED_GPUS=8\nFOO=1\n", ":2: unknown key 'FOO'"),
        ("EXPECTED_GPUS=x\n", ":1: EXPECTED_GPUS must be a whole number"),
        ("\nDRIVER_DIR=/opt/nvidia # kept\n", ":2: DRIVER_DIR must have no comment behind it"),
        ("DRIVER_DIR=/opt\0\n", ":1: DRIVER_DIR must have printable characters only"),
        ("SIMULATION=/none\n", ": simulation marker: "),
        ("IDLE_COMMAND=mail\n", ":1: IDLE_COMMAND must be an absolute path"),
        ("SGE_BINARIES=bin\n", ":1: SGE_BINARIES must be an absolute path"),
        ("QUARANTINE_ON=xid hot\n", ": QUARANTINE_ON=hot: not one of xid ecc missing health"),
        ("EXPORTER_LISTEN=:9465 foo\n", ": EXPORTER_LISTEN=foo: neither HOST:PORT"),
        ("EXPORTER_LISTEN=::1:9465\n", ": EXPORTER_LISTEN=::1:9465: neither HOST:PORT"),
        ("EXPORTER_LISTEN=:70000\n", ": EXPORTER_LISTEN=:70000: neither HOST:PORT"),
        ("PROMETHEUS_URL=ftp://p:9090\n", ": PROMETHEUS_URL=ftp://p:9090: no valid http://"),
        ("PROMETHEUS_URL=http://u:pw@:90\n", ": PROMETHEUS_URL=http://:90: no valid http://"),
        ("PROMETHEUS_URL=u:p/w@p:9090\n", ": PROMETHEUS_URL=p:9090: no valid http://"),
        ("WEB_CONFIG=/none/web.yml\n", ": WEB_CONFIG=/none/web.yml: no such file"),
        (
            "IDLE_COMMAND=/none/mail\n",
            ": IDLE_COMMAND=/none/mail: not run, /none/mail: No such file",
        ),
        ("HEALTH_COMMAND=/none/dcgmi\n", ": HEALTH_COMMAND=/none/dcgmi: not run, /none/dcgmi: No"),
        ("IDLE_KILL=60\n", ": IDLE_KILL=60: ends no job without IDLE_COMMAND"),
        ("EXPORTER_LISTEN=:9465 127.0.0.1:1 [::1]:9465 node1:9465\n", ""),
        ("QUARANTINE_ON=xid ecc missing health\n", ""),
        ("PROMETHEUS_URL=https://user:password@prometheus:9090/prefix\n", ""),
    ],
)
def test_config_check_says_file_and_line_of_the_first_fault_if_any(
    tmp_path: Path, text: str, fault: str
) -> None:
    path = tmp_path / "gpulock.conf"
    path.write_text(text)
    code, _, error = call("config", "--check", str(path))
    assert code == (1 if fault else 0)
    assert not fault or f"{path}{fault}" in error
    assert not fault or error.endswith("; correct that line, or what it names\n")


@pytest.mark.parametrize("path", ["/dev/null", "/tmp"])
def test_config_check_has_the_mode_changed_of_nothing_but_a_file(path: str) -> None:
    code, _, error = call("config", "--check", path)
    assert (code, error) == (
        1,
        f"gpulock: config: {path}: not a regular file; name a settings file\n",
    )
    code, _, error = call("--config", path, "config")
    assert (code, "chmod" in error) == (1, False)


def test_config_check_takes_the_two_folders_in_a_file_that_is_named_alone(site: Site) -> None:
    code, _, error = call("config", "--check", site.config)
    assert (code, "LOCK_DIR cannot be set here: it is /run/gpulock" in error) == (1, True)
    site.hold(0)
    site.spoil(0)  # which is doctor's to tell
    code, text, _ = call("--config", site.config, "config", "--check", site.config)
    assert (code, "right, 8 keys set" in text, "users cannot read" in text) == (0, True, False)
    Path(site.config).chmod(0o640)
    code, text, _ = call("--config", site.config, "config", "--check", site.config)
    assert (code, "users cannot read" in text) == (0, True)


@pytest.mark.parametrize("mode", [0o664, 0o646])
def test_config_check_refuses_a_file_that_others_may_write_as_a_hook_does(
    tmp_path: Path, mode: int
) -> None:
    path = tmp_path / "gpulock.conf"
    path.write_text("EXPECTED_GPUS=8\n")
    path.chmod(mode)
    code, _, error = call("config", "--check", str(path))
    assert (code, f"mode {mode:o}, and must be root's" in error) == (1, True)
    assert f"chown root {path}; chmod 644 {path}" in error


@pytest.mark.parametrize("folder", ["lock_dir", "state_dir"])
def test_config_check_refuses_folders_that_others_may_write(site: Site, folder: str) -> None:
    path = Path(getattr(read_settings(site.config), folder))
    path.mkdir(exist_ok=True)
    path.chmod(0o777)
    code, _, error = call("--config", site.config, "config", "--check", site.config)
    assert (code, str(path) in error, "777" in error) == (1, True, True)


def test_inventory_shows_instances_and_what_is_not_known(tmp_path: Path) -> None:
    site = Site(tmp_path / "a", "a100-mig")
    text = site.call("inventory").stdout
    assert "12 devices, driver 535.129.03" in text and "0:gi10.ci0" in text
    assert site.files.machine.uuid(site.files.machine.gpus[5]) in text
    other = Site(tmp_path / "b", "workstation")
    for path in other.files.driver_root.glob("gpus/*/information"):
        path.write_text(path.read_text().replace("UUID: \t GPU-", "UUID: \t GPU-????????-"))
    (other.files.lock_dir / "inventory").unlink()
    (other.files.driver_root / "version").unlink()
    text = other.call("inventory").stdout
    assert "devices, driver unknown (" in text and "not known yet" in text
    assert "no inventory was published" in text


@pytest.mark.slow
@pytest.mark.parametrize("preset", list(PRESETS))
def test_every_command_to_look_with_works_on_every_preset(preset: str, tmp_path: Path) -> None:
    folder = str(tmp_path / "node")
    assert call("simulate", folder, "--preset", preset)[0] == 0
    config = f"{folder}/gpulock.conf"
    for line in ("status", "status --json", "status --free", "inventory", "config", "reap"):
        code, text, error = call("--config", config, *line.split())
        assert (code, error, text != "") == (0, "", True), line
    assert call("--config", config, "why", "pid 1")[0] == 1


def test_a_simulation_that_cannot_be_is_refused(tmp_path: Path) -> None:
    code, _, error = call("simulate", str(tmp_path / "node"), "--gpus", "9")
    assert (code, error.count("\n")) == (1, 1)
    assert call("simulate", str(tmp_path / "node"), "--preset", "none")[0] == 2


def test_the_next_command_names_the_settings_that_were_given(
    site: Site, monkeypatch: pytest.MonkeyPatch
) -> None:
    refused = site.call("why", "nonsense")
    assert refused.stderr.endswith(f"; see {site.gpulock} status\n")
    monkeypatch.setattr("gpulock.cli.session.DEFAULT_PATH", site.config)
    assert site.call("why", "nonsense").stderr.endswith("; see gpulock status\n")
