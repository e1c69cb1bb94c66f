# SPDX-License-Identifier: Apache-2.0
"""What doctor looks at where systemd runs the services: their files, and what runs of them."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final

from gpulock.install.doctor.check import INSTALLED, Check, Finding, warning
from gpulock.install.items import Wanted
from gpulock.install.systemd import manager
from gpulock.install.systemd.install import SystemdInstaller, SystemdOptions
from gpulock.install.systemd.manager import ON, UNUSED
from gpulock.install.systemd.units import says_more

_AGAIN: Final = "gpulock install systemd"


def systemd_checks(options: SystemdOptions) -> list[Check]:
    """Return the checks of the services; none where nobody installed, enabled or started any."""
    if not manager.RUNNING.is_dir():
        return []
    return [Check("services", lambda: check_services(SystemdInstaller(options)), (INSTALLED,))]


def check_services(installer: SystemdInstaller) -> Iterator[Finding]:
    """Compare files and services with what would be installed; raise InstallError."""
    files = installer.unit_files()
    here = any(item.read() is not None for own in files.values() for item in own)
    services = [one for one in installer.services(files) if here or one.read() not in UNUSED]
    own = [item for one in services for unit in one.units for item in files[unit]]
    differ = [
        str(item.path)
        for item in (*(installer.etc_files() if services else ()), *own)
        if item.show(Wanted.PRESENT) and (item.read() is not None or says_more(item.text))
    ]
    if differ:
        yield warning(f"not as package and settings want them: {', '.join(differ)}", _AGAIN)
    for service in services:
        running = service.read() == ON  # else the checks of both programs say so
        if running and not differ and (why := service.restart_reason()):
            yield warning(why, _AGAIN, service.name)
