# SPDX-License-Identifier: Apache-2.0
"""Files and programs of an installation: read, replaced whole and durably, run with a deadline.

Nothing earlier is kept, and so nothing is ever put back over what an administrator wrote since.
"""

from __future__ import annotations

import os
import subprocess
from collections.abc import Generator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Final

from filelock import FileLock, Timeout

import gpulock
from gpulock.store import atomic

LOCK: Final = "install.lock"  # in STATE_DIR


class InstallError(RuntimeError):
    """Say what could not be installed, and what to do: one line."""


def run_program(
    command: Sequence[str | Path],
    seconds: float,
    env: Mapping[str, str] | None,
    do: str = "",
    **more: Any,
) -> subprocess.CompletedProcess[str]:
    """Run a program to its end, whatever that is; raise InstallError where it comes to none.

    `do` is said then; `more` are options of `subprocess.run`.
    """
    given: dict[str, Any] = {"input": "", "errors": "replace", "timeout": seconds, **more}
    name, do = " ".join(map(str, command[:3])), f"; {do}" if do else ""
    try:
        return subprocess.run(
            command, env=env, capture_output=True, text=True, check=False, **given
        )
    except subprocess.TimeoutExpired as late:
        raise InstallError(f"{name} gave no answer within {seconds:g} s{do}") from late
    except OSError as fault:
        name = str(more.get("executable") or command[0])
        raise InstallError(f"{name} cannot be run: {fault.strerror}{do}") from fault


def find_share_folder() -> Path:
    """Return where the templates are: in the installed package, or in the checkout."""
    package = Path(gpulock.__file__).resolve().parent
    installed = package / "share"
    return installed if installed.is_dir() else package.parent


def read_file(path: Path) -> str | None:
    """Return the text of a file, None where there is none; raise InstallError."""
    try:
        return atomic.read_text(str(path))
    except FileNotFoundError:
        return None
    except OSError as fault:
        raise InstallError(f"{path}: {fault.strerror}; look at it") from fault


def write_file(path: Path, text: str) -> None:
    """Replace a file whole and durably, and make its folder; raise InstallError."""
    try:
        make_public_folder(path.parent)
        data = text.encode("utf-8", "surrogateescape")
        atomic.replace_file(str(path), data, durable=True)
    except OSError as fault:
        raise InstallError(f"{path}: {fault.strerror}; are you root?") from fault


def remove_file(path: Path) -> None:
    """Remove a file that may be there, so that no power cut brings it back; raise InstallError."""
    try:
        os.unlink(path)
        atomic.fsync_path(f"{path.parent}/.")
    except FileNotFoundError:
        return
    except OSError as fault:
        raise InstallError(f"{path}: {fault.strerror}; are you root?") from fault


def make_public_folder(path: Path) -> None:
    """Make a folder and what is above it, mode 0755 whatever the umask; raise OSError.

    It outlives a power cut, and so does what is made durable in it. A kill leaves none half open.
    """
    umask = os.umask(0o022)
    try:
        for folder in [*reversed(path.parents), path]:
            if not folder.is_dir():
                folder.mkdir(0o755)
                folder.chmod(0o755)  # without what it inherited from the folder above
                atomic.fsync_path(f"{folder.parent}/.")
    finally:
        os.umask(umask)


@contextmanager
def lock_installation(state_dir: Path) -> Generator[None, None, None]:
    """Let one process at a time change the installation of a node; raise InstallError.

    No user can open the file, and so block us.
    """
    path = state_dir / LOCK
    lock = FileLock(str(path), timeout=0, mode=0o600)
    try:
        make_public_folder(state_dir)
        lock.acquire()
    except Timeout as busy:
        raise InstallError(
            f"gpulock install or uninstall runs already (fuser -v {path}); wait until it ends"
        ) from busy
    except OSError as fault:
        raise InstallError(f"{path}: {fault.strerror}; are you root?") from fault
    try:
        yield
    finally:
        lock.release()
