# SPDX-License-Identifier: Apache-2.0
"""The exporter's folder, held as the exporter holds it."""

from __future__ import annotations

from collections.abc import Generator
from contextlib import contextmanager

from gpulock_exporter.app.folder import FolderHold


@contextmanager
def hold_exporter_folder(folder: str) -> Generator[None]:
    """Be the exporter that writes `folder`; raise Refusal where another one is, or OSError."""
    hold = FolderHold(folder)
    hold.take()
    try:
        yield
    finally:
        hold.release()
