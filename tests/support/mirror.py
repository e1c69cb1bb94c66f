# SPDX-License-Identifier: Apache-2.0
"""The archive from which a Debian root of another release is made: this machine's own of Debian.

Run as a program it prints it. What lies beside it among the sources of apt is no such archive: that
of -security, backports, other programs' own. It is told by the names in its Release file, as apt
knows them once it has read that, in whatever form the sources are written.
"""

from __future__ import annotations

import subprocess

_FORMAT = "$(ORIGIN)|$(LABEL)|$(REPO_URI)"


def choose_mirror(told: str) -> str:
    """Return the archive by lines of ORIGIN|LABEL|URL, nothing where none is Debian's; pure."""
    for line in told.splitlines():
        origin, label, url = line.split("|", 2)
        if origin == label == "Debian" and not url.startswith("cdrom:"):
            return url
    return ""


def mirror_arguments() -> list[str]:
    """Return the archive of this machine's own packages; without one mmdebstrap has its own."""
    command = ["apt-get", "indextargets", "--format", _FORMAT]
    found = choose_mirror(subprocess.check_output(command, text=True))
    return [found] if found else []


if __name__ == "__main__":
    print(*mirror_arguments(), sep="\n", end="")
