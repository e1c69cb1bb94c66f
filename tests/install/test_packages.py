# SPDX-License-Identifier: Apache-2.0
"""The packages, as the package managers of distributions install, upgrade and remove them."""

from __future__ import annotations

import os
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Final, NamedTuple

import build
import pytest

from gpulock import __version__
from gpulock.sge.hook import TRIAL_JOB
from tests.install.job_load import CURRENT, NODE
from tests.install.roots import Machine, copy_demo
from tests.labs.common.installed import SOAK

pytestmark = [pytest.mark.install, pytest.mark.root, pytest.mark.timeout(900)]
ROOT: Final = Path(__file__).resolve().parents[2]
MACHINE: Final = {"x86_64": "amd64", "aarch64": "arm64"}[os.uname().machine]
LIBRARY: Final = f"/{build.USR}/{build.LIBRARY}"
PYTHON: Final = f"PYTHONPATH={LIBRARY} python3"
PLAY: Final = f"{PYTHON} -m tests.install.job_load"
# What `gpulock install sge` does to the node itself.
INSTALL_HOOKS: Final = f"""
cat >/tmp/hooks.py <<'END'
from pathlib import Path
from gpulock.install.items import FileItem, Wanted, run_items
from gpulock.install.versions import SGE, Hooks
from gpulock.node.settings_file import DEFAULT_PATH, read_settings
from gpulock.sge.card_map import format_card_map
settings = read_settings(DEFAULT_PATH)
mark = FileItem(Path(settings.state_dir, "sge-map"), format_card_map("node1", {{}}))
run_items([mark, Hooks(settings, SGE)], Wanted.PRESENT, Path(settings.state_dir), print)
END
{PYTHON} /tmp/hooks.py
"""
EXPORTER: Final = "127.0.0.1:19465"
START: Final = f"gpulock-exporter --config {NODE}/gpulock.conf --listen {EXPORTER}"
USERS: Final = f"""
echo WEB_CONFIG=/srv/web.yml >>{NODE}/gpulock.conf
python3 >/srv/web.yml <<'END'
import bcrypt
print("basic_auth_users:\\n  alice:", bcrypt.hashpw(b"secret", bcrypt.gensalt(4)).decode())
END
"""
# Every module of such a package has its release, and hooks note those of all that they have loaded.
RELEASE: Final = "\nRELEASE = {!r}\n"
NOTES: Final = """
_main = main

def main(argv, environ, config):
    import sys
    code = _main(argv, environ, config)
    ours = [one for name, one in sys.modules.items() if name.partition(".")[0] == "gpulock"]
    with open("/run/releases", "a") as file:
        file.write(" ".join([environ["JOB_ID"], *{one.RELEASE for one in ours}]) + "\\n")
    return code
"""
BROKEN: Final = "raise RuntimeError\n"  # a release of which no hook runs
LOAD: Final = (20, 500, 80) if SOAK else (4, 40, 8)  # changes of the package, short and long jobs
# rpm's own database knows nothing of Debian's Python.
PYTHON_RPM: Final = """
cat >/tmp/python.spec <<'END'
Name: python3
Version: 3
Release: 1
Summary: stands for the Python of this machine
License: none
BuildArch: noarch
Provides: python(abi) = 3.9
Provides: /usr/bin/python3
Provides: python3-psutil = 5.9
Provides: util-linux = 2.38
%description
%files
END
rpmbuild -bb --define '_rpmdir /tmp' /tmp/python.spec
rpm -i /tmp/noarch/python3-*.rpm
"""


class Built(NamedTuple):
    """What packages are made of: the files, and what packs them."""

    root: Path
    tools: Path
    folder: Path  # of the packages of this commit

    def pack(self, folder: Path, release: str) -> None:
        """Make the packages of a release."""
        folder.mkdir(exist_ok=True)
        build.pack_root(self.root, MACHINE, release, self.tools, folder)


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Built]:
    """Two releases of the packages of this machine, which differ by their number."""
    top = tmp_path_factory.mktemp("packages")
    made = Built(top / "root", top / "tools", top / "built")
    made.folder.mkdir()
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv(build.EPOCH, os.environ.get(build.EPOCH, ""))
        build.set_source_time()
        build.fetch_tools(made.tools)
        wheel = build.build_distributions(made.folder, made.tools)
        build.write_root(made.root, MACHINE, wheel, made.tools)
        for release in ("1", "2"):
            made.pack(made.folder, release)
        yield made


@pytest.fixture(scope="module")
def packages(built: Built) -> Path:
    """The folder of these packages."""
    return built.folder


@pytest.fixture(scope="module")
def marked(built: Built, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two releases whose hooks note what they load, and a third whose hooks do not run."""
    folder = tmp_path_factory.mktemp("marked")
    library = built.root / f".{LIBRARY}/gpulock"
    texts = {path: path.read_text() for path in library.rglob("*.py")}
    hooks = (library / "sge/prolog.py", library / "sge/epilog.py")
    for release, more in (("1", NOTES), ("2", NOTES), ("3", BROKEN)):
        for path, text in texts.items():
            path.write_text(text + RELEASE.format(release) + (more if path in hooks else ""))
        built.pack(folder, release)
    for path, text in texts.items():
        path.write_text(text)
    return folder


def new_machine(top: Path, packages: Path) -> Machine:
    """Return a machine of this Debian, which has the package managers of Fedora too."""
    top.mkdir()
    made = Machine(top, packages)
    copy_demo(top / "upper/opt", "install")
    return made


@pytest.fixture
def machine(packages: Path, tmp_path: Path) -> Machine:
    """A machine with the packages of this commit."""
    return new_machine(tmp_path / "machine", packages)


def check_programs(machine: Machine) -> None:
    """Run each program, as an administrator does first, and look at what is not to be there."""
    programs = ("gpulock", "gpulockd", "gpulock-exporter")
    said = machine.run("; ".join(f"{name} --version" for name in programs))
    assert said.split("\n") == [*(f"{name} {__version__}" for name in programs), ""]
    shown = machine.run(f"cd /opt && {PYTHON} -m tests.demo")
    assert "8 GPUs: 8 free" in shown, "hooks of the package run jobs"
    machine.run("! gpulock demo")
    machine.run("test ! -e /etc/gpulock/gpulock.conf; gpulock config")
    assert machine.run("find /usr/lib/gpulock -name '*.so'") == "", "compiled: the distribution's"
    share = f"{LIBRARY}/gpulock/share/prolog"
    start = f"{share}/drop-env"
    machine.run(f"code=0; {start} || code=$?; test $code = 100; {start} /bin/true 1 0 gpu.q")
    spank = (ROOT / "prolog/spank/spank_gpulock.c").read_text()
    assert machine.run(f"cat {share}/spank/spank_gpulock.c") == spank
    machine.run("ls /usr/share/man/man1/gpulock-run.1.gz /usr/lib/systemd/system/gpulockd.service")
    completed = "autoload -U compinit; compinit -D -u; print $_comps[gpulock]"
    assert machine.run(f"zsh -c '{completed}'") == "_gpulock\n"
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


def test_lintian_finds_no_error_in_a_deb(machine: Machine) -> None:
    said = machine.run(
        "lintian --profile debian --allow-root --fail-on error /mnt/gpulock_*-1_*.deb"
    )
    assert "E: " not in said


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


def test_a_deb_keeps_settings_that_stood_before_it(machine: Machine) -> None:
    install = "apt-get install -qq -y --no-install-recommends"
    own = "/etc/gpulock/gpulock.conf"
    machine.run(f"mkdir -p /etc/gpulock; echo EXPECTED_GPUS=8 >{own}")

    machine.run(f"{install} /mnt/gpulock_*-1_*.deb")
    assert machine.run(f"cat {own}") == "EXPECTED_GPUS=8\n"
    assert machine.run("dpkg-query -W -f '${Conffiles}' gpulock") == ""


@pytest.mark.timeout(900 + 75 * LOAD[0])
@pytest.mark.parametrize(
    ("prepare", "install", "back"),
    [
        pytest.param("true", "dpkg -i /mnt/gpulock_*-{}_*.deb", "", id="dpkg"),
        pytest.param(PYTHON_RPM, "rpm -U /mnt/gpulock-*-{}.*.rpm", " --oldpackage", id="rpm"),
    ],
)
def test_no_hook_is_missing_or_mixed_while_packages_change_under_jobs(
    marked: Path, tmp_path: Path, prepare: str, install: str, back: str
) -> None:
    machine = new_machine(tmp_path / "machine", marked)
    machine.run(prepare)
    machine.run(install.format(1))
    machine.run(f"gpulock simulate {NODE} --for-scheduler; cp {NODE}/*.conf /etc/gpulock")
    machine.run(INSTALL_HOOKS)
    first = machine.run(f"readlink {CURRENT}")
    changes, short, long = LOAD
    commands = f"'{install.format(2)}' '{install.format(1)}{back}'"

    play = f"cd /opt; {PLAY} {changes} {short} {long} {commands}"
    said = machine.run(play, seconds=75 * changes)

    names = said.splitlines()
    assert names[1::2] == [first.strip()] * (changes // 2)
    assert names[0::2] == [names[0]] * (changes // 2) and names[0] != names[1]
    notes = [line.split() for line in machine.run("cat /run/releases").splitlines()]
    assert [note for note in notes if len(note) != len(("job", "release"))] == [], "mixed"
    assert {release for _, release in notes} == {"1", "2"}
    jobs = Counter(job for job, _ in notes if job != TRIAL_JOB)
    assert len(jobs) >= short + long and {*jobs.values()} == {2}, "a prolog and an epilog each"
    assert machine.run("gpulock reap; ls /run/gpulock/locks").splitlines()[1:] == []
    said = machine.run(install.format(3))
    assert "the hooks of the version before stay in force" in said
    assert machine.run(f"readlink {CURRENT}") == first


def scrape_until(metric: str, words: str = "") -> str:
    """Return a script that starts the exporter, asks it until a metric is there, and ends it."""
    ask = f"until curl -sf {EXPORTER}/metrics {words} | grep {metric}; do sleep 0.5; done"
    return f"ip link set lo up; {START} & {ask}; kill $!; wait $! || true"


def test_users_of_the_exporter_need_libraries_of_the_distribution(machine: Machine) -> None:
    machine.run(f"dpkg -i /mnt/gpulock_*-1_*.deb; gpulock simulate {NODE}; {USERS}")
    machine.run(scrape_until("gpulock_exporter_build_info", "-u alice:secret"))

    for module in ("bcrypt", "yaml"):
        machine.run(f"rm -r /usr/lib/python3*/dist-packages/{module}")
        assert f": python3-{module}, " in machine.run(START, status=3)
        assert f"gpulock {__version__}" in machine.run("gpulock --version")


def test_what_make_install_puts_below_a_prefix_runs_there(machine: Machine, packages: Path) -> None:
    program = [sys.executable, str(ROOT / "packaging/build.py"), "--prefix", "/opt/gpulock"]
    subprocess.run([*program, str(packages / "stage")], check=True, timeout=600)

    machine.run("cp -a /mnt/stage/opt/gpulock /opt; ln -s /opt/gpulock/*bin/* /usr/bin")
    assert machine.run("gpulockd --version") == f"gpulockd {__version__}\n"
    machine.run(f"gpulock simulate {NODE}; {scrape_until('^gpulock_gpu_utilization_ratio')}")


def test_hooks_of_a_scheduler_outlive_the_package(machine: Machine) -> None:
    machine.run(f"dpkg -i /mnt/gpulock_*-1_*.deb; {INSTALL_HOOKS}")
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
    program = [sys.executable, str(ROOT / "packaging/build.py"), str(tmp_path / "again")]
    env = {name: value for name, value in os.environ.items() if name != build.EPOCH}
    subprocess.run([*program, "--machine", MACHINE], check=True, timeout=600, env=env)

    made = {path.name: path.read_bytes() for path in (tmp_path / "again").iterdir()}
    assert len(made) == len(("deb", "rpm", "wheel", "sdist"))
    assert [name for name, data in made.items() if (packages / name).read_bytes() != data] == []


@pytest.mark.parametrize("source", ["whl", "tar.gz"])
def test_pip_installs_without_a_network_what_was_fetched_with_one(
    packages: Path, tmp_path: Path, source: str
) -> None:
    pip, wheels, venv = [sys.executable, "-m", "pip"], tmp_path / "wheels", tmp_path / "venv"
    what = f"{next(packages.glob(f'gpulock-*.{source}'))}[web]"
    subprocess.run([*pip, "wheel", "-q", "--wheel-dir", wheels, what], check=True)
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", venv], check=True)
    pip += ["--python", str(venv / "bin/python3"), "install", "-q", "--no-index"]
    alone = ["unshare", "--net"]
    subprocess.run([*alone, *pip, f"--find-links={wheels}", "gpulock[web]"], check=True)

    said = subprocess.run([venv / "bin/gpulock", "--version"], capture_output=True, check=True)

    assert said.stdout.decode() == f"gpulock {__version__}\n"
