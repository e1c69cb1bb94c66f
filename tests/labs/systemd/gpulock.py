# SPDX-License-Identifier: Apache-2.0
"""gpulock on a machine with systemd: a package of its own in /opt, simulated cards, an NVML double.

Services run as users who may not see this repository, so what they need is copied: the package as
a wheel would install it, the third-party modules beside it.
"""

from __future__ import annotations

import contextlib
import importlib.util
import shutil
import venv
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import tomli

from gpulock.install.systemd.units import DAEMON, EXPORTER, SOCKET
from gpulock.simulate.node import write_simulated_node
from gpulock.store.owner import Owner
from tests.labs.common.lock_folder import owners
from tests.labs.systemd.machine import Machine
from tests.nvml.double import Double
from tests.support.wait import LabError, wait_until

REPOSITORY: Final = Path(__file__).resolve().parents[3]
OPT: Final = "/opt/gpulock"
NODE: Final = "/srv/node"
NVML: Final = "/srv/nvml"
CONFIG: Final = "/etc/gpulock/gpulock.conf"
GPUS: Final = 8
UNITS: Final = (DAEMON, SOCKET, EXPORTER)
NVIDIA: Final = 195  # major number of /dev/nvidiaN
MODULES: Final = ("click", "filelock", "prometheus_client", "psutil", "pynvml")
_HTTP_ERROR: Final = 22  # of curl(1) with -f
_SCRIPT: Final = """#!{python}
import sys
from {module} import {function}
sys.exit({function}())
"""


@dataclass(frozen=True)
class Package:
    """An installed package and what it is to see: the host's folders by their path inside."""

    folder: Path
    double: Double

    @property
    def binds(self) -> dict[Path, str]:
        """What a machine must be given."""
        return {
            self.folder / "opt": OPT,
            self.folder / "node": NODE,
            self.folder / "nvml": NVML,
        }

    @property
    def modules(self) -> Path:
        """Where the package's modules are."""
        return next((self.folder / "opt").glob("lib/python*/site-packages"))


def make_package(folder: Path) -> Package:
    """Install what is in the checkout below `folder`, as a wheel would be in /opt/gpulock."""
    opt = folder / "opt"
    venv.create(opt, symlinks=True, with_pip=False)
    target = next(opt.glob("lib/python*/site-packages"))
    project = tomli.loads((REPOSITORY / "pyproject.toml").read_text())
    wheel = project["tool"]["hatch"]["build"]["targets"]["wheel"]
    for source in wheel["packages"]:
        copy(REPOSITORY / source, target / Path(source).name)
    for source, inside in wheel["force-include"].items():
        copy(REPOSITORY / source, target / inside)
    for name, entry in project["project"]["scripts"].items():
        module, _, function = entry.partition(":")
        script = opt / "bin" / name
        python = f"{OPT}/bin/python3"
        script.write_text(_SCRIPT.format(python=python, module=module, function=function))
        script.chmod(0o755)
    for name in MODULES:
        spec = importlib.util.find_spec(name)
        if spec is None or spec.origin is None:
            raise LabError(f"{name} is not installed here")
        origin = Path(spec.origin)
        source = origin.parent if origin.name == "__init__.py" else origin
        copy(source, target / source.name)
    node = write_simulated_node(folder / "node", "dgx1").directory
    double = Double(folder / "nvml", node=node)
    shutil.copy(double.library, folder / "nvml" / double.library.name)
    return Package(folder, double)


def copy(source: Path, target: Path) -> None:
    """Copy a module or a folder, readable by everybody, without byte code."""
    target.parent.mkdir(parents=True, exist_ok=True)
    if source.is_dir():
        shutil.copytree(source, target, ignore=shutil.ignore_patterns("__pycache__"))
    else:
        shutil.copy(source, target)


class Node:
    """The machine as gpulock's node: settings, devices, services, locks."""

    def __init__(self, machine: Machine, package: Package) -> None:
        self.machine = machine
        self.package = package

    def prepare(self) -> None:
        """Make device nodes, settings, and the way to the NVML double."""
        self.configure()
        for name, minor in [("nvidiactl", 255), *((f"nvidia{n}", n) for n in range(GPUS))]:
            self.machine.run("mknod", "-m", "666", f"/dev/{name}", "c", str(NVIDIA), str(minor))
        self.drop_in(
            "gpulock-exporter.service",
            f"Environment=LD_LIBRARY_PATH={NVML} NVML_DOUBLE={NVML}/control",
            f"ReadWritePaths={NVML}",
        )

    def configure(self, **changes: str) -> None:
        """Write the settings."""
        keys = {
            "DRIVER_ROOT": f"{NODE}/proc/driver/nvidia",
            "SYS_ROOT": f"{NODE}/sys",
            "EXPECTED_GPUS": str(GPUS),
            **changes,
        }
        self.machine.write(CONFIG, "".join(f"{key}={value}\n" for key, value in keys.items()))

    def drop_in(self, unit: str, *lines: str, name: str = "lab") -> None:
        """Change a unit as `systemctl edit` does; it counts from the next daemon-reload."""
        text = "\n".join(["[Service]", *lines, ""])
        self.machine.write(f"/etc/systemd/system/{unit}.d/{name}.conf", text)

    def gpulock(self, *words: str, check: bool = True) -> str:
        """Run gpulock as root; return what it says."""
        done = self.machine.run(f"{OPT}/bin/gpulock", *words, check=check)
        return done.stdout + done.stderr

    def claim(self, count: int, name: str = "job", uid: int = 0) -> dict[str, Owner]:
        """Let a job hold devices until its unit `name` is stopped; return its locks."""
        line = [f"{OPT}/bin/gpulock", "run", "-n", str(count), "--", "sleep", "infinity"]
        start = ("systemd-run", "--quiet", f"--unit={name}", f"--uid={uid}", *line)
        wait_until(  # an earlier unit of that name may still be on its way out
            lambda: self.machine.run(*start, check=False).returncode == 0,
            why=f"the unit {name} to start",
        )
        return wait_until(
            lambda: found if len(found := self.held_by(name)) == count else None,
            why="the job's locks",
        )

    def held_by(self, name: str) -> dict[str, Owner]:
        """Return the locks of the job of a unit."""
        pid = self.main_pid(name)
        return {device: record for device, record in self.locks().items() if record.pid == pid}

    def locks(self) -> dict[str, Owner]:
        """Return the owner of every lock."""
        return owners(self.machine.path("/run/gpulock/locks"))

    def main_pid(self, unit: str) -> int:
        """Return a service's main process, in the machine's own numbers; 0 where none runs."""
        return int(self.machine.show(unit, "MainPID"))

    def reload(self, unit: str, *lines: str) -> None:
        """Start a service with more settings in its unit, until `prepare_again`."""
        self.drop_in(unit, *lines, name="test")
        self.machine.run("systemctl", "daemon-reload")
        self.machine.run("systemctl", "restart", unit)

    def prepare_again(self) -> None:
        """Take away what a test changed; both services run afterwards, and no job."""
        run = self.machine.run
        run("systemctl", "stop", "job*", check=False)
        run("bash", "-c", "rm -f /etc/systemd/system/*.d/test.conf")
        self.package.double.reset()
        self.configure()
        run("systemctl", "daemon-reload")
        run("systemctl", "reset-failed")
        run("systemctl", "restart", *UNITS)
        wait_until(lambda: not self.locks(), why="all devices to be free")

    def scrape(self, path: str = "/metrics", port: int = 9465) -> str:
        """Ask the exporter, as Prometheus would; nothing while its first second is not over."""
        line = ["curl", "-sS", "-f", "--max-time", "50", f"http://127.0.0.1:{port}{path}"]
        done = self.machine.run(*line, check=False)
        if done.returncode not in (0, _HTTP_ERROR):
            raise LabError(f"scrape: {done.stderr}")
        return done.stdout

    def metric(self, series: str) -> float | None:
        """Return the value of a series, None where there is none."""
        for line in self.scrape().splitlines():
            name, _, value = line.rpartition(" ")
            if name == series:
                return float(value)
        return None

    def wait_metric(self, series: str, value: float | None) -> None:
        """Wait until a series has a value, or is gone."""
        wait_until(
            lambda: self.metric(series) == value,
            why=lambda: f"{series} to be {value}\n{self.scrape()}",
        )


@contextlib.contextmanager
def booted_node(package: Package, mode: str) -> Iterator[Node]:
    """Boot a machine that has the package, and shut it down afterwards."""
    machine = Machine(mode, binds=package.binds)
    machine.up()
    try:
        node = Node(machine, package)
        node.prepare()
        yield node
    finally:
        machine.down()
