# SPDX-License-Identifier: Apache-2.0
"""A package of Debian's contrib, unpacked into a folder: what it depends on is not free.

Run as a program: RELEASE PACKAGE FOLDER. It is taken from the archive of this machine's own
packages, whose sources stay as they are.
"""

from __future__ import annotations

import subprocess
import sys
import tempfile
from pathlib import Path

from tests.support.mirror import mirror_arguments

_KEYS = Path("/usr/share/keyrings/debian-archive-keyring.gpg")
_SECONDS = 300.0


def unpack_contrib_package(release: str, package: str, folder: Path) -> None:
    """Unpack a package; raise RuntimeError with the words of what failed."""
    archives = mirror_arguments()
    if not archives:
        raise RuntimeError(f"{package}: no source of apt is Debian's own archive")
    signed = f"[signed-by={_KEYS}] " if _KEYS.exists() else ""
    with tempfile.TemporaryDirectory(prefix="gpulock-contrib-") as made:
        scratch = Path(made)
        sources = scratch / "sources.list"
        sources.write_text(f"deb {signed}{archives[0]} {release} contrib\n")
        for inner in ("lists/partial", "cache/archives/partial"):
            (scratch / inner).mkdir(parents=True)
        options = {
            "Dir::Etc::SourceList": sources,
            "Dir::Etc::SourceParts": "/dev/null",
            "Dir::State::Lists": scratch / "lists",
            "Dir::Cache": scratch / "cache",
            "APT::Sandbox::User": "root",
            "Acquire::Check-Valid-Until": "false",  # an archive may be behind
        }
        apt = ["apt-get", "-qq", *(word for k, v in options.items() for word in ("-o", f"{k}={v}"))]
        _run([*apt, "update"], scratch)
        _run([*apt, "download", package], scratch)
        (file,) = scratch.glob("*.deb")
        folder.mkdir(parents=True, exist_ok=True)
        _run(["dpkg-deb", "-x", str(file), str(folder)], scratch)


def _run(command: list[str], folder: Path) -> None:
    try:
        done = subprocess.run(
            command, cwd=folder, capture_output=True, text=True, check=False, timeout=_SECONDS
        )
    except subprocess.TimeoutExpired as late:
        raise RuntimeError(f"{' '.join(command)} did not end") from late
    if done.returncode:
        raise RuntimeError(f"{' '.join(command)} failed:\n{done.stdout}{done.stderr}")


if __name__ == "__main__":
    unpack_contrib_package(sys.argv[1], sys.argv[2], Path(sys.argv[3]))
