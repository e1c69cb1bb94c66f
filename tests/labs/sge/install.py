# SPDX-License-Identifier: Apache-2.0
"""Have Debian's Grid Engine and what the machines are made with installed, and nothing started."""

from __future__ import annotations

from typing import Final

from tests.labs.common import debian

_PACKAGES: Final = {
    "gridengine-master": "/usr/lib/gridengine/sge_qmaster",
    "gridengine-exec": "/usr/lib/gridengine/sge_execd",
    "gridengine-client": "/usr/lib/gridengine/qsub",
    "iproute2": "ip",
    "util-linux": "nsenter",
}
# No cell of the host's own: the lab brings its cell in its scratch folder.
_ANSWERS: Final = "gridengine-common shared/gridengineconfig boolean false\n"


def install() -> bool:
    """Install what is missing; return whether anything was."""
    return debian.install(_PACKAGES, _ANSWERS)
