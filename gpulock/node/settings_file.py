# SPDX-License-Identifier: Apache-2.0
"""The settings file of this node: whom it must belong to, and what counts where it has a fault.

Hot. A file that root obeys must be root's and writable by no other user. No mode, owner or value of
it breaks a node: the last file without a fault counts, and without one the node's state is unknown.

STATE_DIR/settings.obeyed is a copy of that last file. Hooks and gpulockd write it as soon as they
obey a changed file; its time is the file's, in whole seconds of st_ctime. A copy that cannot be
brought up to date is removed: it would not be the last one. Who may not read the file may not read
the copy. The end mark shows that it is whole.
"""

import errno
import os
import stat
import time

from gpulock.errors import UNKNOWN, Refusal
from gpulock.node.settings import Settings, parse_settings
from gpulock.store import atomic

DEFAULT_PATH = "/etc/gpulock/gpulock.conf"
UID_MAP = "/proc/self/uid_map"
WHOLE_MAP = ["0", "0", "4294967295"]  # outside of any user namespace
OVERFLOW_UID = 65534  # of every user that a user namespace does not know
HEAD = "# gpulock-settings 2: the last of {!r} without a fault; not to be edited\n"
END = "\n# gpulock-settings: the end\n"
COPY_LIMIT = 2 * atomic.LIMIT  # bytes: a file, and the two lines above
READ_BITS = 0o644  # of the file's mode, which the copy has as well
MAY_CHANGE_UNSEEN = 1  # time of a copy whose file may still change within the same second


def read_settings(path: str, uid: "int | None" = None, keep: bool = False) -> Settings:
    """Read the settings of this node; raise Refusal(UNKNOWN) where none can be believed.

    A missing default file means the defaults; any other missing file is an error. The file must
    belong to root or to `uid` (the caller) and be writable by no other user. In the place of a file
    that is empty, gone or has a fault the last one without a fault counts, and `faults` tells why.
    Who obeys as root passes `keep`: a file without a fault is the last one from now on.
    """
    caller = os.geteuid() if uid is None else uid
    info, text = None, ""
    outcome: "Settings | Refusal"
    try:
        info = os.stat(path)
        check_file_owner(path, info, caller)
        text = atomic.read_text(os.path.realpath(path) if os.path.islink(path) else path)
        outcome = parse_settings_file(text, path, caller)
    except FileNotFoundError:
        missing = Refusal(UNKNOWN, f"no settings file {path}", "name one that is there")
        outcome = Settings({}, path) if path == DEFAULT_PATH else missing
    except OSError as fault:
        outcome = Refusal(UNKNOWN, f"settings: {path}: {fault.strerror}", "name a file")
        if isinstance(fault, PermissionError):  # the copy's mode may be that of an earlier file
            raise Refusal(
                UNKNOWN, outcome.why, "its owner can make it readable: chmod 644"
            ) from fault
    except ValueError as fault:
        do = "correct the file" if text else f"chown root {path}; chmod 644 {path}"
        outcome = Refusal(UNKNOWN, f"settings: {fault}", do)
    if isinstance(outcome, Refusal) or outcome.ignored or not text or info is None:
        return recover_settings(outcome, path, text, caller)
    if keep:
        try:
            of = int(os.stat(outcome.copy_path).st_mtime)
        except OSError:
            of = 0
        if of != int(info.st_ctime):
            write_copy(outcome, text, info)
    return outcome


def check_file_owner(path: str, info: os.stat_result, caller: int) -> None:
    """Raise ValueError for a file that another user than root or `caller` may have written.

    Raises OSError for what is no regular file: no advice is to change the owner or mode of that.
    Raises Refusal where nobody can say so: in a user namespace all others are one user
    (user_namespaces(7)).
    """
    if not stat.S_ISREG(info.st_mode):
        raise OSError(errno.EINVAL, "not a regular file", path)
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


def recover_settings(outcome: "Settings | Refusal", path: str, text: str, caller: int) -> Settings:
    """Return what counts in the place of a file that has a fault, and tell it.

    That is the last file without a fault. Where there is none, or only this one may ask for
    isolation, the keys that are understood count; raises the refusal of any other fault.
    `text` is nothing of a file that others may have written.
    """
    copy = read_copy(find_copy_place(text, path, caller), caller)
    if copy is None or (copy.isolation == "off" and may_ask_for_isolation(text)):
        if isinstance(outcome, Refusal):
            raise outcome
        return outcome
    if isinstance(outcome, Refusal):
        faults = [outcome.why.removeprefix("settings: ")]
    else:
        faults = list(outcome.faults) or [f"{path}: is empty or gone"]
    faults[-1] += f": the settings obeyed last stay in force ({copy.copy_path})"
    copy.faults = tuple(faults)
    return copy


def find_copy_place(text: str, path: str, caller: int) -> Settings:
    """Return settings whose `copy_path` is that of a file with a fault."""
    try:
        return parse_settings_file(find_state_dir_line(text), path, caller)
    except ValueError:
        return Settings({}, path)


def read_copy(place: Settings, caller: int) -> "Settings | None":
    """Return the last settings of the file `place.path`, None where none are believed."""
    try:
        for path in (place.state_dir, place.copy_path):
            info = os.stat(path)
            if info.st_uid not in (0, caller) or info.st_mode & (stat.S_IWGRP | stat.S_IWOTH):
                return None
        text = atomic.read_text(place.copy_path, COPY_LIMIT)
        if not text.startswith(HEAD.format(os.path.abspath(place.path))):
            return None
        settings = parse_settings_file(text, place.path, caller)
    except (OSError, ValueError):
        return None
    return settings if text.endswith(END) and settings.state_dir == place.state_dir else None


def write_copy(settings: Settings, text: str, info: os.stat_result) -> None:
    """Make the copy that of a file without a fault, which root obeys; what fails leaves none.

    `text` and `info` are the file's. The copy is readable to the same users.
    """
    path = settings.copy_path
    try:
        now = os.stat(settings.path)
        if (now.st_ino, now.st_ctime) != (info.st_ino, info.st_ctime):
            atomic.remove_quietly(path)  # it changes right now: the next hook writes it
            return
        head = HEAD.format(os.path.abspath(settings.path))
        data = f"{head}{text}{END}".encode("utf-8", "surrogateescape")
        owner = (0, info.st_gid) if os.geteuid() == 0 else None
        atomic.replace_file(path, data, info.st_mode & READ_BITS, None, owner)
        changed = int(info.st_ctime)
        of = changed if changed + 1 < time.time() else MAY_CHANGE_UNSEEN
        os.utime(path, (of, of), follow_symlinks=False)
    except OSError:
        atomic.remove_quietly(path)


def find_state_dir_line(text: str) -> str:
    """Return the line of STATE_DIR of a file with a fault, nothing where it names no folder."""
    for line in text.split("\n"):
        name, _, value = line.partition("=")
        if name.strip() == "STATE_DIR" and value.strip().lstrip("'\"").startswith("/"):
            return line
    return ""


def may_ask_for_isolation(text: str) -> bool:
    """Return whether a file with a fault may ask for isolation: by any value but `off`."""
    for line in text.upper().split("\n"):
        name, _, value = line.partition("=")
        asks = "ISOLATION" in name and not name.lstrip().startswith("#")
        if asks and value.strip().strip("'\"") != "OFF":
            return True
    return False
