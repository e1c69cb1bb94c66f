# SPDX-License-Identifier: Apache-2.0
"""The packages, as the package managers of distributions install, upgrade and remove them."""

from __future__ import annotations

import hashlib
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Final

import pytest

from gpulock import __version__
from gpulock.install.trial import NO_PROCESS
from gpulock.sge.hook import TRIAL_JOB
from tests.install.roots import Machine, copy_demo

pytestmark = [pytest.mark.install, pytest.mark.root, pytest.mark.timeout(900)]
ROOT: Final = Path(__file__).resolve().parents[2]
CURRENT: Final = "/usr/lib/gpulock/hooks/current"
# What `gpulock install sge` does to the node itself.
INSTALL_HOOKS: Final = """
cat >/tmp/hooks.py <<'END'
from pathlib import Path
from gpulock.install.items import FileItem, Wanted, run_items
from gpulock.install.versions import SGE, Hooks
from gpulock.node.settings_file import DEFAULT_PATH, read_settings
from gpulock.sge.card_map import format_card_map
settings = read_settings(DEFAULT_PATH)
mark = FileItem(Path(settings.state_dir, "sge-map"), format_card_map("node1", {}))
run_items([mark, Hooks(settings, SGE)], Wanted.PRESENT, Path(settings.state_dir), print)
END
/usr/lib/gpulock/bin/python3 -I /tmp/hooks.py
"""
# A package with another module, and one whose hooks do not run.
REPACKED: Final = """
for name in later broken; do
    dpkg-deb -R /mnt/gpulock_*-2_*.deb /tmp/$name
done
library=usr/lib/gpulock/lib/python/site-packages/gpulock
echo '# later' >>/tmp/later/$library/errors.py
echo 'raise RuntimeError' >>/tmp/broken/$library/sge/sensor.py
for name in later broken; do
    dpkg-deb -b /tmp/$name /tmp/$name.deb
done
"""
# Each look starts a hook, as a shepherd does that is none: it must refuse, by its own words.
LOOKS: Final = f"""
while [ ! -e /tmp/stop ]; do
    JOB_ID={TRIAL_JOB} {CURRENT}/prolog/sge {NO_PROCESS} 2>&1 || true
    [ -x {CURRENT}/epilog/sge ] || echo missing
done >/tmp/looks &
"""
# rpm's own database knows nothing of Debian's Python.
PYTHON_RPM: Final = """
cat >/tmp/python.spec <<'END'
Name: python3
Version: 3.11
Release: 1
Summary: stands for the Python of this machine
License: none
BuildArch: noarch
Provides: python(abi) = 3.11
Provides: /usr/bin/python3
%description
%files
END
rpmbuild -bb --define '_rpmdir /tmp' /tmp/python.spec
rpm -i /tmp/noarch/python3-*.rpm
"""


def build(folder: Path, *releases: str) -> Path:
    """Build the packages for this machine."""
    words = [word for release in releases for word in ("--release", release)]
    machine = {"x86_64": "amd64", "aarch64": "arm64"}[os.uname().machine]
    command = [sys.executable, str(ROOT / "packaging/build.py"), str(folder), "--machine", machine]
    done = subprocess.run(
        [*command, *words],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        check=False,
        timeout=600,
    )
    assert done.returncode == 0, done.stdout
    return folder


@pytest.fixture(scope="module")
def packages(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two releases of the packages."""
    return build(tmp_path_factory.mktemp("packages") / "built", "1", "2")


@pytest.fixture
def machine(packages: Path, tmp_path: Path) -> Iterator[Machine]:
    """A machine of this Debian, which has the package managers of Fedora too."""
    top = tmp_path / "machine"
    top.mkdir()
    made = Machine(top, packages)
    copy_demo(top / "upper/opt")
    yield made


def check_programs(machine: Machine) -> None:
    """Run each program, as an administrator does first, and look at what is not to be there."""
    programs = ("gpulock", "gpulockd", "gpulock-exporter")
    said = machine.run("; ".join(f"{name} --version" for name in programs))
    assert said.split("\n") == [*(f"{name} {__version__}" for name in programs), ""]
    shown = machine.run("cd /opt && /usr/lib/gpulock/bin/python3 -m tests.demo")
    assert "8 GPUs: 8 free" in shown, "hooks of the package run jobs"
    machine.run("! gpulock demo")
    machine.run("gpulock config --check /etc/gpulock/gpulock.conf")
    machine.run("/usr/lib/gpulock/bin/python3 -I -c 'import bcrypt, pynvml, yaml'")
    share = "/usr/lib/gpulock/lib/python/site-packages/gpulock/share/prolog"
    start = f"{share}/drop-env"
    machine.run(f"code=0; {start} || code=$?; test $code = 100; {start} /bin/true 1 0 gpu.q")
    spank = (ROOT / "prolog/spank/spank_gpulock.c").read_text()
    assert machine.run(f"cat {share}/spank/spank_gpulock.c") == spank
    machine.run(
        "ls /usr/share/man/man1/gpulock-run.1.gz /usr/lib/systemd/system/gpulockd.service"
        " /usr/share/zsh/site-functions/_gpulock"
    )
    started = machine.run("find /etc /usr/local -path '*systemd*gpulock*'")
    assert started == "", "nothing is started"
    machine.run("test ! -e /usr/lib/gpulock/hooks")
    machine.run("test -d /run/gpulock.claims; test -d /var/lib/gpulock; id gpulock-exporter")


def check_refused_removal(machine: Machine, remove: str) -> None:
    """Try to remove the package while a node needs it; then remove it all the same."""
    state, lock = "/var/lib/gpulock", "/run/gpulock/locks/0000:06:00.0"
    unit = "/etc/systemd/system/multi-user.target.wants/gpulockd.service"
    for needed, says in (
        (f"{state}/sge-map", "gpulock uninstall sge"),
        (f"{state}/slurm-map", "gpulock uninstall slurm"),
        (unit, "gpulock uninstall systemd"),
        (lock, "GPUs are held"),
    ):
        machine.run(f"mkdir -p {os.path.dirname(needed)}; echo >{needed}")
        assert says in machine.run(f"! {remove}")
        assert f"gpulock {__version__}" in machine.run("gpulock --version")
        machine.run(f"rm {needed}")
    machine.run(f"echo >{lock}; GPULOCK_REMOVE=anyway {remove}")
    machine.run(f"test ! -e /usr/lib/gpulock; test -e {lock}")


def test_a_deb_is_installed_upgraded_downgraded_and_removed(machine: Machine) -> None:
    install = "apt-get install -qq -y --no-install-recommends --allow-downgrades"
    machine.run(f"{install} /mnt/gpulock_*-1_*.deb")
    check_programs(machine)
    machine.run("echo EXPECTED_GPUS=8 >>/etc/gpulock/gpulock.conf")
    for release in ("2", "1"):
        machine.run(f"{install} /mnt/gpulock_*-{release}_*.deb")
        assert machine.run("dpkg-query -W gpulock").endswith(f"-{release}\n")
        assert "EXPECTED_GPUS=8\n" in machine.run("cat /etc/gpulock/gpulock.conf")
        assert machine.run("dpkg --verify gpulock") == ""

    check_refused_removal(machine, "dpkg --remove gpulock")

    assert "EXPECTED_GPUS=8" in machine.run("cat /etc/gpulock/gpulock.conf")
    machine.run("dpkg --purge gpulock")
    gone = ("/usr/lib/gpulock", "/etc/gpulock", "/var/lib/gpulock")
    said = machine.run(f"ls -d {' '.join(gone)} || true")
    assert said.count("No such file") == len(gone)


def test_a_deb_asks_nothing_and_keeps_what_stood_before_it_and_what_was_taken_away(
    machine: Machine,
) -> None:
    install = "apt-get install -qq -y --no-install-recommends"
    own = "/etc/gpulock/gpulock.conf"
    machine.run(f"mkdir -p /etc/gpulock; echo EXPECTED_GPUS=8 >{own}")

    machine.run(f"{install} /mnt/gpulock_*-1_*.deb")
    assert machine.run(f"cat {own}") == "EXPECTED_GPUS=8\n"
    assert machine.run("dpkg-query -W -f '${Conffiles}' gpulock") == ""
    machine.run(f"rm {own}; {install} /mnt/gpulock_*-2_*.deb; ! ls {own}")

    machine.run(f"dpkg --purge gpulock; {install} /mnt/gpulock_*-1_*.deb")
    machine.run(f"gpulock config --check {own}")


def test_hooks_that_run_follow_the_package_and_outlive_it_and_none_is_missing_meanwhile(
    machine: Machine,
) -> None:
    machine.run("dpkg -i /mnt/gpulock_*-1_*.deb")
    machine.run(f"{INSTALL_HOOKS}{REPACKED}")
    first = machine.run(f"readlink {CURRENT}")
    upgrade, downgrade = "dpkg -i /tmp/later.deb", "dpkg -i /mnt/gpulock_*-1_*.deb"
    steps = [f"{step} >/tmp/said 2>&1; readlink {CURRENT}" for step in (upgrade, downgrade) * 3]

    names = machine.run("\n".join([LOOKS, *steps, "touch /tmp/stop; wait"])).splitlines()

    assert names[1::2] == [first.strip()] * 3
    assert names[0::2] == [names[0]] * 3 and names[0] != names[1]
    looks = machine.run("cat /tmp/looks").splitlines()
    assert len(looks) > len(steps)
    assert [line for line in looks if "not started by sge_shepherd" not in line] == []
    said = machine.run("dpkg -i /tmp/broken.deb")
    assert "the hooks of the version before stay in force" in said
    assert machine.run(f"readlink {CURRENT}") == first
    said = machine.run("GPULOCK_REMOVE=anyway dpkg --purge gpulock")
    assert "both stay" in said
    machine.run(f"test -e /var/lib/gpulock/sge-map; test -x {CURRENT}/prolog/sge")


@pytest.mark.soak
@pytest.mark.parametrize("tool", ["rpm", "dnf"])
def test_an_rpm_is_installed_upgraded_downgraded_and_removed(machine: Machine, tool: str) -> None:
    dnf = "dnf -y --disablerepo='*'"
    commands = {
        "rpm": ("rpm -i", "rpm -U", "rpm -U --oldpackage", "rpm -e"),
        "dnf": (f"{dnf} install", f"{dnf} upgrade", f"{dnf} downgrade", f"{dnf} remove"),
    }
    install, upgrade, downgrade, remove = commands[tool]
    assert "python(abi)" in machine.run(f"! {install} /mnt/gpulock-*-1.*.rpm")
    machine.run(PYTHON_RPM)
    machine.run(f"{install} /mnt/gpulock-*-1.*.rpm")
    check_programs(machine)
    machine.run("echo EXPECTED_GPUS=8 >>/etc/gpulock/gpulock.conf")
    for act, release in ((upgrade, "2"), (downgrade, "1")):
        machine.run(f"{act} /mnt/gpulock-*-{release}.*.rpm")
        assert f"-{release}." in machine.run("rpm -q gpulock")
        assert "EXPECTED_GPUS=8\n" in machine.run("cat /etc/gpulock/gpulock.conf")

    check_refused_removal(machine, f"{remove} gpulock")

    machine.run("test ! -e /usr/lib/gpulock; ! rpm -q gpulock")


def test_the_same_commit_gives_the_same_bytes(packages: Path, tmp_path: Path) -> None:
    again = build(tmp_path / "again", "1", "2")

    first, second = (
        {
            str(path.relative_to(folder)): hashlib.sha256(path.read_bytes()).hexdigest()
            for path in folder.rglob("*")
            if path.is_file()
        }
        for folder in (packages, again)
    )
    assert len(first) > len(("deb", "rpm")) * 2
    assert first == second


@pytest.mark.parametrize("source", ["wheel", "sdist"])
def test_pip_installs_without_a_network(packages: Path, tmp_path: Path, source: str) -> None:
    wheels = packages / "wheels"
    what = "gpulock[web]" if source == "wheel" else str(next(wheels.glob("gpulock-*.tar.gz")))
    venv = tmp_path / "venv"
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", venv], check=True)
    pip = ["-m", "pip", "--python", str(venv / "bin/python3"), "install", "-q", "--no-index"]
    alone = ["unshare", "--net"]
    subprocess.run([*alone, sys.executable, *pip, f"--find-links={wheels}", what], check=True)

    said = subprocess.run([venv / "bin/gpulock", "--version"], capture_output=True, check=True)

    assert said.stdout.decode() == f"gpulock {__version__}\n"
