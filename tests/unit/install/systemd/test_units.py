# SPDX-License-Identifier: Apache-2.0
"""The rendered units: what stands in them, and what systemd's own tools say of them."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

from gpulock.install.files import InstallError
from gpulock.install.systemd.units import (
    DAEMON,
    EXPORTER,
    SOCKET,
    SYSUSERS,
    TMPFILES,
    UNITS,
    drop_in_texts,
    read_static_files,
    writable_folders,
)
from gpulock.node.settings import Settings
from tests.support.pairs import zip_equal
from tests.support.scripts import write_script
from tests.support.systemd_site import driver

CONFIG = Path("/etc/gpulock/gpulock.conf")
SYSTEMD = pytest.mark.root  # the private root has systemd's programs, not every machine
EXPOSURE = 25  # tenths: what `systemd-analyze security` may say of the exporter at most


def settings(**keys: str) -> Settings:
    return Settings(keys)


def units(**keys: str) -> dict[str, str]:
    """Return each unit as systemd reads it: its file, then its drop-in."""
    drop_ins = drop_in_texts(False, CONFIG, settings(**keys))
    static = read_static_files()
    return {unit: f"{static[unit]}{text}" for unit, text in drop_ins.items()}


def drop_ins(**keys: str) -> dict[str, list[str]]:
    """Return what stands in each drop-in where a package brings the programs."""
    texts = drop_in_texts(True, CONFIG, settings(**keys))
    return {unit: text.splitlines()[3:] for unit, text in texts.items()}


def values(text: str, name: str) -> list[str]:
    lines = text.splitlines()
    return [line.partition("=")[2] for line in lines if line.startswith(f"{name}=")]


def write(folder: Path, **keys: str) -> list[str]:
    """Write the units with their drop-ins, as an installation in /opt has them."""
    drop_ins = drop_in_texts(False, CONFIG, settings(**keys))
    for name in UNITS:
        (folder / name).write_text(read_static_files()[name])
        (folder / f"{name}.d").mkdir()
        (folder / f"{name}.d/10-gpulock.conf").write_text(drop_ins[name])
    return [str(folder / name) for name in UNITS]


@pytest.mark.parametrize(
    ("unit", "name", "wanted"),
    [
        # what dies of anything but its settings is started again
        *((unit, "Restart", ["on-failure"]) for unit in (DAEMON, EXPORTER)),
        *((unit, "RestartPreventExitStatus", ["2"]) for unit in (DAEMON, EXPORTER)),
        # no unit owns the folder of the locks, and what the exporter writes outlives it
        *((unit, "RuntimeDirectory", []) for unit in (DAEMON, SOCKET)),
        (EXPORTER, "OOMPolicy", ["continue"]),
        (EXPORTER, "RuntimeDirectory", ["gpulock-exporter"]),
        (EXPORTER, "RuntimeDirectoryPreserve", ["yes"]),
        (EXPORTER, "DevicePolicy", ["closed"]),
        (DAEMON, "ReadWritePaths", ["/run /var/lib/gpulock"]),
    ],
)
def test_a_unit_says_of_itself(unit: str, name: str, wanted: list[str]) -> None:
    assert values(units()[unit], name) == wanted
    cards = {f"/dev/nvidia{number} rw" for number in range(16)}
    assert {"char-195 rwm", "/dev/nvidiactl rw"} | cards <= {
        *values(units()[EXPORTER], "DeviceAllow")
    }


# --- systemd's own word -------------------------------------------------------------------------

EVERY_SETTING = {
    "IDLE_COMMAND": "/usr/local/sbin/idle",
    "ISOLATION": "cgroup",
    "CDI_DIR": "/srv/cdi",
    "EXPORTER_LISTEN": ":9465 127.0.0.1:9466 [::1]:9467",
}


@SYSTEMD
@pytest.mark.parametrize("keys", [{}, EVERY_SETTING, {"SHARES": "0:4", "SHARE_MPS": "yes"}])
def test_systemd_finds_nothing_to_say_against_the_units(
    tmp_path: Path, keys: dict[str, str]
) -> None:
    paths = write(tmp_path, **keys)

    done = subprocess.run(
        ["systemd-analyze", "verify", *paths], capture_output=True, text=True, check=False
    )

    # an unknown key or a bad value is told on stderr alone
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")


def exposure(path: str, threshold: int) -> tuple[int, float]:
    command = ["systemd-analyze", "security", "--offline=yes", f"--threshold={threshold}"]
    done = subprocess.run(
        [*command, "--no-pager", path], capture_output=True, text=True, check=False
    )
    return done.returncode, float(done.stdout.rpartition("service: ")[2].split()[0])


@SYSTEMD
def test_the_exporter_is_exposed_as_little_as_it_must_be(tmp_path: Path) -> None:
    paths = dict(zip_equal(UNITS, write(tmp_path)))

    code, found = exposure(paths[EXPORTER], EXPOSURE)
    daemon_code, daemon = exposure(paths[DAEMON], EXPOSURE)

    assert (code, found <= EXPOSURE / 10) == (0, True)
    assert (daemon_code, daemon > EXPOSURE / 10) == (1, True)  # it sees what root sees


# --- what stands in them ------------------------------------------------------------------------


def test_a_package_with_default_settings_needs_nothing_beside_its_units() -> None:
    assert drop_in_texts(True, CONFIG, settings()) == dict.fromkeys(UNITS, "")
    assert drop_ins(EXPORTER_LISTEN=":1")[SOCKET] == ["ListenStream=", "ListenStream=1"]


def test_a_program_is_started_by_this_interpreter_with_these_settings(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(sys, "executable", "/opt/g/bin/python3")
    texts = drop_in_texts(False, Path("/srv/g.conf"), settings())

    start = "/opt/g/bin/python3 -I -m"
    for unit, module in (
        (DAEMON, "gpulock.daemon.app"),
        (EXPORTER, "gpulock_exporter.app.program"),
    ):
        lines = ["", f"{start} {module} --config /srv/g.conf"]
        assert values(texts[unit], "ExecStart") == lines


FOLDERS = ("/run/gpulock", "/run/gpulock.claims", "/var/lib/gpulock")


@pytest.mark.parametrize(
    ("name", "lines"),
    [
        (TMPFILES, [f"d {folder} 0755 root root -" for folder in FOLDERS]),  # never aged
        (SYSUSERS, ['u gpulock-exporter - "Metrics of GPUs" /']),  # who may not log in
    ],
)
def test_tmpfiles_and_sysusers_make_this_and_no_more(name: str, lines: list[str]) -> None:
    found = read_static_files()[name].splitlines()

    assert [line for line in found if not line.startswith("#")] == lines


def test_the_daemon_writes_where_its_settings_send_it() -> None:
    assert writable_folders(settings()) == []
    assert writable_folders(settings(CDI_DIR="/var/run/cdi")) == []
    assert writable_folders(settings(CDI_DIR="/nfs/cdi")) == ["-/nfs/cdi"]
    assert writable_folders(settings(CDI_DIR="/running/cdi")) == ["-/running/cdi"]
    text = units(SHARES="0:4", SHARE_MPS="yes")[DAEMON]
    assert "-/var/lib/gpulock-mps" in text, "nothing beside it is written"
    assert "ExecStartPre=+/usr/bin/install -d -m 0755 /var/lib/gpulock-mps\n" in text, "as root"


def test_nvidia_modprobe_makes_the_nodes_of_the_cards_that_there_are(tmp_path: Path) -> None:
    """`-c` makes a node of any number, also of a card that is not there."""
    proc = driver(tmp_path) / "proc/driver/nvidia/gpus"
    found = re.search(r"ExecStartPre=\+-/bin/sh -c '((?:.|\n)*?)'\n", units()[EXPORTER])
    assert found
    script = found[1].replace("\\\n", " ").replace("$$", "$")
    script = script.replace("/proc/driver/nvidia/gpus", str(proc))
    fake = tmp_path / "bin/nvidia-modprobe"
    fake.parent.mkdir()
    write_script(fake, 'echo "$@"')

    env = {"PATH": f"{fake.parent}:/usr/bin:/bin"}
    done = subprocess.run(
        ["/bin/sh", "-c", script], env=env, capture_output=True, text=True, check=True
    )

    first, second = done.stdout.splitlines()
    assert first == ""
    assert sorted(second.split(" -c ")) == ["-c 255", *map(str, range(8))]


def capabilities(text: str) -> set[str]:
    return {*" ".join(values(text, "CapabilityBoundingSet")).split()}


SIGHT = {"CAP_SYS_PTRACE", "CAP_DAC_OVERRIDE", "CAP_DAC_READ_SEARCH", "CAP_KILL", "CAP_SYSLOG"}
ALWAYS = {*SIGHT, "CAP_SETGID"}  # slurmd -G drops its supplementary groups first
MAY_MAIL = {"NoNewPrivileges": "no", "ProtectSystem": "full", "MemoryDenyWriteExecute": "no"}


@pytest.mark.parametrize(
    ("keys", "more", "last"),
    [
        ({}, set(), {"NoNewPrivileges": "yes", "ProtectControlGroups": "yes"}),
        ({}, set(), {"OOMPolicy": "continue", "ProtectSystem": "strict"}),
        ({"ISOLATION": "cgroup"}, {"CAP_SYS_ADMIN"}, {"ProtectControlGroups": "no"}),
        ({"IDLE_COMMAND": "/bin/mail"}, {"CAP_SETUID"}, {**MAY_MAIL, "DevicePolicy": "closed"}),
        (
            {"HEALTH_COMMAND": "/bin/dcgmi diag"},
            {"CAP_SETUID"},
            {**MAY_MAIL, "DevicePolicy": "auto"},
        ),
        ({"SHARES": "0:4", "SHARE_MPS": "yes"}, {"CAP_CHOWN"}, {"DevicePolicy": "closed"}),
    ],
)
def test_the_daemon_has_the_rights_that_its_settings_need_and_no_more(
    keys: dict[str, str], more: set[str], last: dict[str, str]
) -> None:
    text = units(**keys)[DAEMON]

    assert capabilities(text) == ALWAYS | more
    assert {name: values(text, name)[-1] for name in last} == last


def test_an_address_to_listen_on_is_given_as_systemd_wants_it_or_refused() -> None:
    words = ":9465 0.0.0.0:9465 127.0.0.1:1 [::1]:65535"
    streams = values(units(EXPORTER_LISTEN=words)[SOCKET], "ListenStream")
    assert streams == ["9465", "", "9465", "0.0.0.0:9465", "127.0.0.1:1", "[::1]:65535"]
    for word in ("node1:9465", "9465", ":0", ":65536", "::1:9465", ":9465x"):
        with pytest.raises(InstallError, match="EXPORTER_LISTEN="):
            units(EXPORTER_LISTEN=word)


@pytest.mark.parametrize("path", ["/srv/my cdi", "/srv/100%", '/srv/"x', "srv/x", "/srv/a\nb"])
def test_a_path_that_systemd_would_read_differently_is_refused(path: str) -> None:
    what = settings()
    what.cdi_dir = path

    with pytest.raises(InstallError, match="cannot stand in a unit"):
        drop_in_texts(False, CONFIG, what)
