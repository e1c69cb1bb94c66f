# SPDX-License-Identifier: Apache-2.0
"""The settings file of this node: whom it must belong to, and what counts where it has a fault.

Hot. A file that root obeys must be root's and writable by no other user.
"""

import os
import stat

from gpulock.errors import BROKEN, Refusal
from gpulock.node.settings import Settings, parse_settings
from gpulock.store import atomic

DEFAULT_PATH = "/etc/gpulock/gpulock.conf"


def read_settings(path: str, uid: "int | None" = None, keep: bool = False) -> Settings:
    """Read the settings of this node; raise Refusal(BROKEN) where they cannot be believed.

    A missing default file means the defaults; any other missing file is an error. The file must
    belong to root or to `uid` (the caller) and be writable by no other user. In the place of a file
    that is empty, gone or not understood what root obeyed last counts, and `faults` tells why.
    Who obeys as root passes `keep`: what is read is what was obeyed last from now on.
    """
    caller = os.geteuid() if uid is None else uid
    info, text = None, ""
    found: "Settings | Refusal"
    try:
        info = os.stat(path)
        if info.st_uid not in (0, caller) or info.st_mode & (stat.S_IWGRP | stat.S_IWOTH):
            why = (
                f"settings: {path}: belongs to uid {info.st_uid}, mode {info.st_mode & 0o7777:o},"
                " and must be root's or the caller's and writable by no other user"
            )
            raise Refusal(BROKEN, why, "correct the file")
        text = atomic.read_text(atomic.resolve_link(path))
        found = parse_settings(text, path)
    except FileNotFoundError:
        missing = Refusal(BROKEN, f"no settings file {path}", "name one that is there")
        found = Settings({}, path) if path == DEFAULT_PATH else missing
    except OSError as fault:
        found = Refusal(BROKEN, f"settings: {path}: {fault.strerror}", "name a file")
        if isinstance(fault, PermissionError):  # the copy's mode may be that of an earlier file
            raise Refusal(BROKEN, found.why, "its owner can make it readable: chmod 644") from fault
    except ValueError as fault:
        found = Refusal(BROKEN, f"settings: {fault}", "correct the file")
    settings = found
    if isinstance(settings, Refusal) or settings.faults or not text:
        from gpulock.node.last_settings import recover_settings

        settings = recover_settings(settings, path, text, caller)
    if settings.simulation:
        check_simulation_marker(settings, caller)
    if keep and info and text and isinstance(found, Settings):
        try:
            of = int(os.stat(settings.copy_path).st_mtime)
        except OSError:
            of = 0
        if of != int(info.st_ctime):
            from gpulock.node.last_settings import write_copy

            write_copy(settings, info)
    return settings


def check_simulation_marker(settings: Settings, uid: int) -> None:
    """Refuse a simulation marker that is not the caller's; root obeys none but its own."""
    try:
        info = os.lstat(settings.simulation)
        first = atomic.read_text(settings.simulation).split("\n", 1)[0]
    except OSError as fault:
        raise Refusal(BROKEN, f"simulation marker: {fault}", "run gpulock simulate") from fault
    if info.st_uid != uid or first != "gpulock-simulation 1":
        raise Refusal(
            BROKEN,
            f"{settings.simulation} is no marker of uid {uid}",
            "use a simulated node of your own",
        )
