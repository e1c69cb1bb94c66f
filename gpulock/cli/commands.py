# SPDX-License-Identifier: Apache-2.0
"""The commands of `gpulock`: a table, from which each is imported when it is used."""

from __future__ import annotations

from typing import Final

# section, then each command and the module that has it, in the order of `gpulock --help`
SECTIONS: Final[dict[str, dict[str, str]]] = {
    "Look": {
        "status": "status.status",
        "why": "status.why",
        "report": "history",
        "history": "history",
        "inventory": "admin.inventory",
        "config": "admin.config",
    },
    "Hold GPUs": {
        "run": "claims.run",
        "claim": "claims.claim",
        "release": "claims.release",
        "queue": "claims.queue",
    },
    "Administer": {
        "reap": "admin.reap",
        "reserve": "admin.devices",
        "unreserve": "admin.devices",
        "quarantine": "admin.devices",
        "restore": "admin.devices",
        "test": "admin.devices",
        "forget-locks": "admin.forget",
    },
    "Set up": {
        "install": "admin.install",
        "uninstall": "admin.install",
        "doctor": "admin.install",
        "simulate": "admin.simulate",
    },
}
MODULES: Final = {name: module for own in SECTIONS.values() for name, module in own.items()}
NAMES: Final = list(MODULES)
