# SPDX-License-Identifier: Apache-2.0
"""What doctor says of gpulockd and the exporter: who runs, what waits, what systemd has of them."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

from gpulock.daemon.core import sample
from gpulock.daemon.core.instance_lock import find_running_daemon
from gpulock.daemon.health.findings import MISSING, POLICY_WORDS, XID
from gpulock.deadline import clock_boottime
from gpulock.install.doctor.check import INSTALLED, Check, Finding, fact, fault, warning
from gpulock.install.files import InstallError
from gpulock.install.items import FileItem, Wanted
from gpulock.install.systemd import install, units
from gpulock.install.systemd.install import UNUSED, SystemdInstaller
from gpulock.node.context import Node
from gpulock.node.settings import Settings
from gpulock.store.verdicts import FRESH, read_dated_verdicts
from gpulock.text.words import format_duration
from gpulock.workstation.waiting import is_stopped

_AGAIN = "gpulock install systemd"
_RESTART = "see its log, then: systemctl restart gpulockd"
_LOG = f"journalctl -u {units.EXPORTER}"


def daemon_checks(settings: Settings) -> list[Check]:
    """Return the checks of both as processes."""
    return [
        Check("gpulockd", lambda: check_daemon_runs(settings), (INSTALLED,)),
        Check("exporter", lambda: check_exporter_runs(settings), (INSTALLED,)),
    ]


def check_daemon_runs(settings: Settings) -> Iterator[Finding]:
    """Tell whether gpulockd runs; where it does not, what of this node's settings needs it."""
    node, now = Node(settings), clock_boottime()
    _, reaped = read_dated_verdicts(settings.lock_dir, now, node.boot_id)
    late = reaped is not None and now - reaped > FRESH
    if pid := find_running_daemon(settings.lock_dir, settings.proc_root):
        if late or is_stopped(node, pid):
            last = f"; it last looked {now - reaped:.0f} s ago" if reaped is not None else ""
            yield fault(f"pid {pid} does not answer{last}", _RESTART)
        else:
            yield fact("gpulockd")
        return
    start = how_to_start(units.DAEMON)
    needs = {"USER_CLAIMS": settings.user_claims, "SHARE_MPS": settings.share_mps}
    if needed := [name for name, is_set in needs.items() if is_set]:
        yield fault(f"it does not run, which {' and '.join(needed)} need", start)
    elif late or reaped is None:
        do = f"{start}; or run gpulock reap from cron every minute"
        yield warning("it does not run: what a hook could not free stays locked", do)
    else:
        yield fact("gpulock reap instead of gpulockd")


def how_to_start(unit: str) -> str:
    """Return the command that starts one of the services."""
    if not install.BOOTED.is_dir():
        return f"start {unit.partition('.')[0]}"
    known = install.unit_state(read_unit(unit))
    return f"systemctl enable --now {unit}" if known else _AGAIN


def read_unit(unit: str) -> dict[str, str]:
    """Return how systemd sees a unit, as one that is not there where systemd does not run."""
    with suppress(InstallError):
        if install.BOOTED.is_dir():
            return install.unit_properties(unit)
    return {"LoadState": "not-found"}


def check_exporter_runs(settings: Settings) -> Iterator[Finding]:
    """Tell that an exporter is down: one that was started in this boot, is enabled, or needed."""
    folder, boot_id = settings.exporter_dir, Node(settings).boot_id
    if sample.read_sample(folder, clock_boottime(), boot_id, settings.max_sample_age):
        yield fact("exporter")
        return
    policy = settings.quarantine_on if "QUARANTINE_ON" in settings.given else ()
    unseen = [word for word in policy if word in POLICY_WORDS and word not in (MISSING, XID)]
    seen = read_unit(units.EXPORTER)
    state = install.unit_state(seen)
    last = sample.load_sample_file(f"{folder}/{sample.SAMPLE}", sample.SAMPLE_LINE)
    here = last is not None and last.boot_id == boot_id
    if not here and not unseen and state in UNUSED:
        return
    then = last.boottime if here and last else None
    since = f" for {format_duration(clock_boottime() - then)}" if then is not None else ""
    failed = state is not None and state.endswith("failed")
    why = f": exit {seen.get('ExecMainStatus')}{read_last_words()}" if failed else ""
    do = _LOG if failed else how_to_start(units.EXPORTER)
    lost = f"{' '.join(unseen)} is not detected" if unseen else "Jobs are not affected"
    yield warning(f"down{since}{why}. {lost}", do)


def read_last_words() -> str:
    """Return the last line that the exporter wrote to the journal, as far as it is known."""
    words = ("-n1", "-ocat", f"_SYSTEMD_UNIT={units.EXPORTER}")
    with suppress(InstallError):
        return f", {install.run_systemd_program('journalctl', *words).strip()}"
    return ""


def systemd_checks(config: Path) -> list[Check]:
    """Return the checks of the services; none where nobody installed, enabled or started any."""
    if not install.BOOTED.is_dir():
        return []
    return [Check("services", lambda: check_services(SystemdInstaller(config)), (INSTALLED,))]


def check_services(installer: SystemdInstaller) -> Iterator[Finding]:
    """Compare files and services with what would be installed; raise InstallError."""
    items = installer.items(installer.drop_ins())
    files = [one for one in items if isinstance(one, FileItem)]
    if {*install.unit_states().values()} <= {*UNUSED} and not any(item.read() for item in files):
        return
    if differ := [str(item.path) for item in files if item.show(Wanted.PRESENT)]:
        yield warning(f"not as package and settings want them: {', '.join(differ)}", _AGAIN)
