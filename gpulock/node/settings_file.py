# SPDX-License-Identifier: Apache-2.0
"""The settings file of this node: whom it must belong to, and what counts where it has a fault.

Hot. A file that root obeys must be root's and writable by no other user. No mode, owner or value of
it breaks a node: the last file without a fault counts, and without one the node's state is unknown.
"""

import os
import stat

from gpulock.errors import UNKNOWN, Refusal
from gpulock.node.settings import Settings, parse_settings
from gpulock.store import atomic

DEFAULT_PATH = "/etc/gpulock/gpulock.conf"
UID_MAP = "/proc/self/uid_map"
WHOLE_MAP = ["0", "0", "4294967295"]  # outside of any user namespace
OVERFLOW_UID = 65534  # of every user that a user namespace does not know


def read_settings(path: str, uid: "int | None" = None, keep: bool = False) -> Settings:
    """Read the settings of this node; raise Refusal(UNKNOWN) where none can be believed.

    A missing default file means the defaults; any other missing file is an error. The file must
    belong to root or to `uid` (the caller) and be writable by no other user. In the place of a file
    that is empty, gone or has a fault the last one without a fault counts, and `faults` tells why.
    Who obeys as root passes `keep`: a file without a fault is the last one from now on.
    """
    caller = os.geteuid() if uid is None else uid
    info, text = None, ""
    found: "Settings | Refusal"
    try:
        info = os.stat(path)
        check_file_owner(path, info, caller)
        text = atomic.read_text(os.path.realpath(path) if os.path.islink(path) else path)
        found = parse_settings_file(text, path, caller)
    except FileNotFoundError:
        missing = Refusal(UNKNOWN, f"no settings file {path}", "name one that is there")
        found = Settings({}, path) if path == DEFAULT_PATH else missing
    except OSError as fault:
        found = Refusal(UNKNOWN, f"settings: {path}: {fault.strerror}", "name a file")
        if isinstance(fault, PermissionError):  # the copy's mode may be that of an earlier file
            raise Refusal(
                UNKNOWN, found.why, "its owner can make it readable: chmod 644"
            ) from fault
    except ValueError as fault:
        do = "correct the file" if text else f"chown root {path}; chmod 644 {path}"
        found = Refusal(UNKNOWN, f"settings: {fault}", do)
    if isinstance(found, Refusal) or found.ignored or not text or info is None:
        from gpulock.node.last_settings import recover_settings

        return recover_settings(found, path, text, caller, parse_settings_file)
    if keep:
        try:
            of = int(os.stat(found.copy_path).st_mtime)
        except OSError:
            of = 0
        if of != int(info.st_ctime):
            keep_copy(found, text, info)
    return found


def keep_copy(settings: Settings, text: str, info: os.stat_result) -> None:
    """Make the file the last one that was obeyed; without the program for it there is none."""
    try:
        from gpulock.node.last_settings import write_copy
    except ImportError:  # its folder could not be read, and no hook is lost for a copy
        atomic.remove_quietly(settings.copy_path)
    else:
        write_copy(settings, text, info)


def check_file_owner(path: str, info: os.stat_result, caller: int) -> None:
    """Raise ValueError for a file that another user than root or `caller` may have written.

    Raises Refusal where nobody can say so: in a user namespace all others are one user
    (user_namespaces(7)).
    """
    if info.st_uid == OVERFLOW_UID != caller and atomic.read_text(UID_MAP).split() != WHOLE_MAP:
        why = f"settings: {path}: nobody can say whose it is in this user namespace"
        raise Refusal(UNKNOWN, why, "run gpulock outside of it")
    if info.st_uid not in (0, caller) or info.st_mode & (stat.S_IWGRP | stat.S_IWOTH):
        raise ValueError(
            f"{path}: belongs to uid {info.st_uid}, mode {info.st_mode & 0o7777:o},"
            " and must be root's or the caller's and writable by no other user"
        )


def parse_settings_file(text: str, path: str, caller: int) -> Settings:
    """Parse what is in a settings file or its copy; raise ValueError."""
    settings = parse_settings(text, path, path == DEFAULT_PATH)
    if settings.simulation:
        check_simulation_marker(settings, caller)
    return settings


def check_simulation_marker(settings: Settings, caller: int) -> None:
    """Raise ValueError for a simulation marker not the caller's; root obeys none but its own."""
    try:
        info = os.lstat(settings.simulation)
        first = atomic.read_text(settings.simulation).split("\n", 1)[0]
    except OSError as fault:
        raise ValueError(f"{settings.path}: simulation marker: {fault}") from fault
    if info.st_uid != caller or first != "gpulock-simulation 1":
        why = f"{settings.simulation} is no marker of uid {caller}"
        raise ValueError(f"{settings.path}: {why}")
