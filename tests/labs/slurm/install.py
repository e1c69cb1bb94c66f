# SPDX-License-Identifier: Apache-2.0
"""Where the private root has Slurm's own files."""

from __future__ import annotations

from pathlib import Path
from typing import Final

PLUGINS: Final = Path("usr/lib/x86_64-linux-gnu/slurm-wlm")
NVML_PLUGIN: Final = Path("/srv/slurm-nvml") / PLUGINS  # tests/root/packages.py
