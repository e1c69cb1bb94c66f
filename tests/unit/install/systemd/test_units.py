# SPDX-License-Identifier: Apache-2.0
"""The rendered units: what stands in them, and what systemd's own tools say of them."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from gpulock.install.hooks import InstallError
from gpulock.install.systemd.units import (
    DAEMON,
    EXPORTER,
    LOGROTATE,
    SOCKET,
    SYSUSERS,
    TMPFILES,
    UNITS,
    UnitInputs,
    card_minors,
    fill_placeholders,
    listen_stream,
    read_unit_templates,
    render_units,
    writable_folders,
)
from gpulock.node.settings import Settings
from tests.support.pairs import zip_equal

EXPOSURE = 25  # tenths: what `systemd-analyze security` may say of the exporter at most


def settings(**keys: str) -> Settings:
    return Settings(keys)


def units(**keys: str) -> dict[str, str]:
    what = UnitInputs(sys.executable, Path("/etc/gpulock/gpulock.conf"), settings(**keys), (0, 1))
    return render_units(what)


def values(text: str, name: str) -> list[str]:
    lines = text.splitlines()
    return [line.partition("=")[2] for line in lines if line.startswith(f"{name}=")]


def write(folder: Path, texts: dict[str, str]) -> list[str]:
    for name in UNITS:
        (folder / name).write_text(texts[name])
    return [str(folder / name) for name in UNITS]


# --- systemd's own word -------------------------------------------------------------------------

EVERY_SETTING = {
    "IDLE_COMMAND": "/usr/local/sbin/idle",
    "ISOLATION": "cgroup",
    "EXPORTER_DIR": "/srv/exporter",
    "REPORT_DIR": "/srv/reports",
    "JOB_MAP_DIR": "/run/maps",
    "EXPORTER_LISTEN": ":9465 127.0.0.1:9466 [::1]:9467",
}


@pytest.mark.parametrize(
    "keys",
    [
        {},
        EVERY_SETTING,
        {"SHARES": "0:4", "SHARE_MPS": "yes"},
        {"QUARANTINE_RESET": "yes"},
    ],
)
def test_systemd_finds_nothing_to_say_against_the_units(
    tmp_path: Path, keys: dict[str, str]
) -> None:
    paths = write(tmp_path, units(**keys))

    done = subprocess.run(
        ["systemd-analyze", "verify", *paths], capture_output=True, text=True, check=False
    )

    # an unknown key or a bad value is told on stderr alone
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")


def test_verify_would_find_a_key_that_systemd_does_not_know(tmp_path: Path) -> None:
    texts = units()
    texts[DAEMON] = texts[DAEMON].replace("ProtectClock=", "ProtectClocks=")
    paths = write(tmp_path, texts)

    done = subprocess.run(
        ["systemd-analyze", "verify", *paths], capture_output=True, text=True, check=False
    )

    assert "ProtectClocks" in done.stderr


def exposure(path: str, threshold: int) -> tuple[int, float]:
    command = ["systemd-analyze", "security", "--offline=yes", f"--threshold={threshold}"]
    done = subprocess.run(
        [*command, "--no-pager", path], capture_output=True, text=True, check=False
    )
    return done.returncode, float(done.stdout.rpartition("service: ")[2].split()[0])


def test_the_exporter_is_exposed_as_little_as_it_must_be(tmp_path: Path) -> None:
    paths = dict(zip_equal(UNITS, write(tmp_path, units())))

    code, found = exposure(paths[EXPORTER], EXPOSURE)
    daemon_code, daemon = exposure(paths[DAEMON], EXPOSURE)

    assert (code, found <= EXPOSURE / 10) == (0, True)
    assert (daemon_code, daemon > EXPOSURE / 10) == (1, True)  # it sees what root sees


# --- what stands in them ------------------------------------------------------------------------


def test_every_placeholder_is_filled_and_systemds_own_at_signs_stay() -> None:
    for name, text in units(**EVERY_SETTING).items():
        assert "@" not in text.replace("@system-service", "").replace(
            "@privileged @resources", ""
        ), name


def test_a_placeholder_without_a_value_is_an_error() -> None:
    with pytest.raises(KeyError):
        fill_placeholders("ExecStart=@PYTHON@ @NOBODY@", {"PYTHON": "/usr/bin/python3"})


def test_the_daemon_is_started_by_this_interpreter_with_these_settings() -> None:
    assert values(units()[DAEMON], "ExecStart") == [
        f"{sys.executable} -I -X faulthandler -m gpulock.daemon.app"
        " --config /etc/gpulock/gpulock.conf"
    ]


def test_no_unit_owns_the_folder_of_the_locks() -> None:
    for text in units().values():
        assert values(text, "RuntimeDirectory") in ([], ["gpulock-exporter"])


def test_tmpfiles_makes_the_folders_and_never_ages_them() -> None:
    lines = [line for line in units()[TMPFILES].splitlines() if not line.startswith("#")]

    folders = ("/run/gpulock", "/run/gpulock.claims", "/var/lib/gpulock")
    assert lines == [f"d {folder} 0755 root root -" for folder in folders]


def test_logrotate_is_told_where_this_nodes_history_is() -> None:
    assert "\n/var/lib/gpulock/history/history.jsonl {" in units()[LOGROTATE]
    assert "\n/srv/state/history/history.jsonl {" in units(STATE_DIR="/srv/state")[LOGROTATE]


def test_the_exporters_user_may_not_log_in() -> None:
    lines = [line for line in units()[SYSUSERS].splitlines() if not line.startswith("#")]

    assert lines == ['u gpulock-exporter - "Metrics of GPUs" /']


def test_the_daemon_writes_above_the_lock_dir_and_where_its_settings_send_it() -> None:
    assert writable_folders(settings()) == ["/run", "/var/lib/gpulock"]
    assert writable_folders(settings(LOCK_DIR="/gpulock")) == [
        "/gpulock",
        "/gpulock.claims",
        "/var/lib/gpulock",
        "-/run/gpulock-exporter",
    ]
    assert writable_folders(settings(REPORT_DIR="/nfs/reports", JOB_MAP_DIR="/run/maps")) == [
        "/run",
        "/var/lib/gpulock",
        "-/nfs/reports",
    ]


def test_a_folder_that_only_begins_like_another_is_not_taken_for_part_of_it() -> None:
    assert "-/running/maps" in writable_folders(settings(JOB_MAP_DIR="/running/maps"))


def test_the_exporter_may_open_the_cards_by_number_and_by_path() -> None:
    allowed = values(units()[EXPORTER], "DeviceAllow")

    assert {"char-195 rwm", "/dev/nvidiactl rw", "/dev/nvidia0 rw", "/dev/nvidia1 rw"} <= {*allowed}
    assert "/dev/nvidia2 rw" not in allowed
    assert values(units()[EXPORTER], "DevicePolicy") == ["closed"]


def test_nvidia_modprobe_may_fail_and_is_roots() -> None:
    assert values(units()[EXPORTER], "ExecStartPre") == [
        "+-/usr/bin/nvidia-modprobe -c 255 -c 0 -c 1"
    ]


def test_what_the_exporter_writes_outlives_it() -> None:
    text = units()[EXPORTER]

    assert values(text, "RuntimeDirectoryPreserve") == ["yes"]
    elsewhere = units(EXPORTER_DIR="/srv/exporter")
    assert values(elsewhere[EXPORTER], "RuntimeDirectory") == []
    assert values(elsewhere[EXPORTER], "ReadWritePaths") == ["/srv/exporter"]
    assert "d /srv/exporter 0755 gpulock-exporter gpulock-exporter -" in elsewhere[TMPFILES]


def test_private_tmp_hides_nothing_that_the_exporter_reads() -> None:
    def private(python: str, **keys: str) -> list[str]:
        config = Path("/etc/gpulock/gpulock.conf")
        what = UnitInputs(python, config, settings(**keys), (0, 1))
        return values(render_units(what)[EXPORTER], "PrivateTmp")

    assert private("/usr/bin/python3") == ["yes"]
    assert private("/tmp/venv/bin/python3") == ["no"]
    assert private("/usr/bin/python3", STATE_DIR="/var/tmp/state") == ["no"]
    assert private("/usr/bin/python3", MPS_DIR="/tmp/mps") == ["no"]


def test_both_see_all_processes() -> None:
    for unit in (DAEMON, EXPORTER):
        assert values(units()[unit], "ProtectProc") == ["default"]
        assert values(units()[unit], "ProcSubset") == ["all"]
        assert values(units()[unit], "PrivateUsers") == []


def capabilities(**keys: str) -> set[str]:
    return {*" ".join(values(units(**keys)[DAEMON], "CapabilityBoundingSet")).split()}


def test_the_daemon_keeps_the_capabilities_that_its_settings_need_and_no_more() -> None:
    sight = {"CAP_SYS_PTRACE", "CAP_DAC_OVERRIDE", "CAP_DAC_READ_SEARCH", "CAP_KILL"}

    assert capabilities() == sight
    assert capabilities(ISOLATION="cgroup") - sight == {"CAP_SYS_ADMIN"}
    assert capabilities(IDLE_COMMAND="/bin/mail") - sight == {"CAP_SETUID", "CAP_SETGID"}


def test_a_node_of_slurm_lets_gpulockd_ask_slurmd(tmp_path: Path) -> None:
    """slurmd -G drops its supplementary groups first, and fails where it may not."""
    assert "CAP_SETGID" not in capabilities(STATE_DIR=str(tmp_path))
    (tmp_path / "slurm-map").touch()
    assert "CAP_SETGID" in capabilities(STATE_DIR=str(tmp_path))


def test_isolation_that_was_on_in_this_boot_can_still_be_cleared_away() -> None:
    before = UnitInputs(sys.executable, Path("/etc/gpulock.conf"), settings(), was_isolated=True)

    text = render_units(before)[DAEMON]

    assert values(text, "ProtectControlGroups") == ["no"]
    assert values(units()[DAEMON], "ProtectControlGroups") == ["yes"]


def test_a_command_of_the_site_may_send_mail() -> None:
    text = units(IDLE_COMMAND="/bin/mail")[DAEMON]

    assert values(text, "NoNewPrivileges") == ["no"]
    assert values(text, "ProtectSystem") == ["full"]
    assert values(units()[DAEMON], "NoNewPrivileges") == ["yes"]


@pytest.mark.parametrize(
    ("word", "stream"),
    [
        (":9465", "9465"),
        ("0.0.0.0:9465", "0.0.0.0:9465"),
        ("127.0.0.1:1", "127.0.0.1:1"),
        ("[::1]:65535", "[::1]:65535"),
    ],
)
def test_an_address_to_listen_on_is_given_as_systemd_wants_it(word: str, stream: str) -> None:
    assert listen_stream(word) == stream


@pytest.mark.parametrize("word", ["node1:9465", "9465", ":0", ":65536", "::1:9465", ":9465x", ""])
def test_what_systemd_cannot_listen_on_is_refused(word: str) -> None:
    with pytest.raises(InstallError, match="EXPORTER_LISTEN="):
        listen_stream(word)


def test_the_socket_listens_on_every_address() -> None:
    text = units(EXPORTER_LISTEN=":9465 127.0.0.1:9466")[SOCKET]

    assert values(text, "ListenStream") == ["9465", "127.0.0.1:9466"]


@pytest.mark.parametrize("path", ["/srv/my locks", "/srv/100%", '/srv/"x', "srv/x", "/srv/a\nb"])
def test_a_path_that_systemd_would_read_differently_is_refused(path: str) -> None:
    what = settings()
    what.state_dir = path

    with pytest.raises(InstallError, match="cannot stand in a unit"):
        render_units(UnitInputs(sys.executable, Path("/etc/gpulock.conf"), what))


def test_the_cards_are_those_seen_else_as_many_as_the_settings_say() -> None:
    assert card_minors([3, 0, -1], 8) == (0, 3)
    assert card_minors([], 2) == (0, 1)
    assert card_minors([], 0) == (0,)


def test_every_line_of_the_templates_fits_a_terminal() -> None:
    for name, text in read_unit_templates().items():
        assert [line for line in text.splitlines() if len(line) > 100] == [], name


def test_security_knows_every_property_it_is_asked_about(tmp_path: Path) -> None:
    path = dict(zip_equal(UNITS, write(tmp_path, units())))[EXPORTER]
    done = subprocess.run(
        ["systemd-analyze", "security", "--offline=yes", "--json=short", "--no-pager", path],
        capture_output=True,
        text=True,
        check=False,
    )

    open_ = {row["json_field"] for row in json.loads(done.stdout) if row["set"] is False}

    # whose the processes on a card are, can only be seen by who sees processes and users
    assert {"ProtectProc", "ProcSubset", "PrivateUsers", "PrivateDevices"} <= open_
    assert not {"NoNewPrivileges", "ProtectSystem", "PrivateNetwork", "ProtectHome"} & open_


def test_a_health_command_may_open_devices_and_become_another_user() -> None:
    text = units(HEALTH_COMMAND="/usr/bin/dcgmi diag -r 1")[DAEMON]
    assert text.index("DevicePolicy=auto") > text.index("DevicePolicy=closed")
    assert "CAP_SETUID CAP_SETGID" in text
    assert "MemoryDenyWriteExecute=no" in text


def test_a_reset_may_open_devices_and_is_roots_to_the_driver_and_no_more() -> None:
    plain, text = units()[DAEMON].splitlines(), units(QUARANTINE_RESET="yes")[DAEMON].splitlines()
    added = [line for line in text if line not in plain and not line.startswith("#")]
    assert added == ["DevicePolicy=auto", "CapabilityBoundingSet=CAP_SYS_ADMIN"]
    assert [line for line in plain if line not in text] == []
    assert text.index("DevicePolicy=auto") > text.index("DevicePolicy=closed")


def test_settings_that_need_the_same_say_it_once() -> None:
    keys = {"HEALTH_COMMAND": "/bin/test", "IDLE_COMMAND": "/bin/mail", "QUARANTINE_RESET": "yes"}
    assert values(units(**keys)[DAEMON], "DevicePolicy") == ["closed", "auto"]
    assert values(units(**keys)[DAEMON], "ProtectSystem") == ["full"]


def test_what_the_oom_killer_ends_takes_gpulockd_with_it_only_where_it_is_gpulockd() -> None:
    assert values(units()[DAEMON], "OOMPolicy") == ["continue"]


def test_mps_may_open_devices_and_outlives_gpulockd() -> None:
    files = units(SHARES="0:4", SHARE_MPS="yes", MPS_DIR="/srv/mps/gpulock")
    text = files[DAEMON]
    assert "KillMode=process" in text
    assert text.index("DevicePolicy=auto") > text.index("DevicePolicy=closed")
    assert "CAP_SETUID CAP_SETGID CAP_CHOWN" in text
    assert "-/srv/mps/gpulock" in text, "nothing beside it is written"
    assert "d /srv/mps/gpulock 0755 root root -\n" in files[TMPFILES], "before gpulockd starts"
    assert "KillMode" not in units(SHARES="0:4")[DAEMON]
