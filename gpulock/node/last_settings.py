# SPDX-License-Identifier: Apache-2.0
"""The settings that root obeyed last, for when the file has a fault: STATE_DIR/settings.obeyed.

Hot, but loaded only where the file has a fault or has changed. Hooks and gpulockd write the copy as
soon as they obey a changed file; its time is the file's, in whole seconds of st_ctime. A copy that
cannot be brought up to date is removed: an old one would bring back an old LOCK_DIR, where every
GPU is free. Who may not read the file may not read the copy. The end mark shows that it is whole.
"""

import os
import stat
import time

from gpulock.errors import Refusal
from gpulock.node.settings import Settings, parse_settings
from gpulock.store import atomic

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Mapping

HEAD = "# gpulock-settings 1: obeyed last of {!r}; not to be edited\n"
END = "# end\n"
READ_BITS = 0o644  # of the file's mode, which the copy has as well
MAY_CHANGE_UNSEEN = 1  # time of a copy whose file may still change within the same second
LEVELS = ("off", "group", "cgroup")  # of ISOLATION, the strictest last


def recover_settings(found: "Settings | Refusal", path: str, text: str, caller: int) -> Settings:
    """Return what counts in the place of a file that has a fault, and tell it.

    The settings obeyed last. Raises the refusal that was found where there are none, and where the
    file asks for more isolation than they have.
    """
    if not isinstance(found, Refusal):
        return keep_missing_keys(found, caller)
    place = parse_settings(find_state_dir_line(text), path)
    settings = read_copy(place, caller)
    if settings is None or isolation_asked(text) > LEVELS.index(settings.isolation):
        raise found
    why = found.why.removeprefix("settings: ")
    settings.faults = (f"{why}: the settings obeyed last stay in force ({place.copy_path})",)
    return settings


def keep_missing_keys(settings: Settings, caller: int) -> Settings:
    """Return the settings of a file with an unknown key, with what the keys that it lacks said.

    The unknown key may be another version's name of one of them, or its misspelling. Likewise of
    an empty file: the program that rewrites it may have cut it short a moment ago.
    """
    copy = read_copy(settings, caller)
    before = copy.given if copy else {}
    kept = {name: value for name, value in before.items() if name not in settings.given}
    if not kept:
        return settings
    merged = parse_settings(format_given_keys({**settings.given, **kept}), settings.path)
    names = ", ".join(sorted(kept))
    why = "while a key is unknown" if settings.faults else "while it is empty or gone"
    told = f"{settings.path}: {names} stay as they were {why}"
    merged.faults = (*settings.faults, told)
    return merged


def read_copy(place: Settings, caller: int) -> "Settings | None":
    """Return the settings obeyed last of the file `place.path`, None where none are believed."""
    try:
        for path in (place.state_dir, place.copy_path):
            info = os.stat(path)
            if info.st_uid not in (0, caller) or info.st_mode & (stat.S_IWGRP | stat.S_IWOTH):
                return None
        text = atomic.read_text(place.copy_path, 2 * atomic.LIMIT)
        if not text.startswith(HEAD.format(os.path.abspath(place.path))) or "\0" in text:
            return None
        settings = parse_settings(text, place.path)
    except (OSError, ValueError):
        return None
    return settings if text.endswith(END) and settings.state_dir == place.state_dir else None


def write_copy(settings: Settings, info: os.stat_result) -> None:
    """Make the copy that of `settings`, which root obeys; what fails leaves none.

    `info` is the file's. The copy is readable to the same users.
    """
    path, default = settings.copy_path, parse_settings("", settings.path)
    if path != default.copy_path and read_copy(default, os.geteuid()):
        atomic.remove_quietly(default.copy_path)
    try:
        now = os.stat(settings.path)
        if (now.st_ino, now.st_ctime) != (info.st_ino, info.st_ctime):
            atomic.remove_quietly(path)  # it changes right now: the next hook writes it
            return
        head = HEAD.format(os.path.abspath(settings.path))
        data = f"{head}{format_given_keys(settings.given)}{END}".encode("utf-8", "surrogateescape")
        owner = (0, info.st_gid) if os.geteuid() == 0 else None
        atomic.replace_file(path, data, info.st_mode & READ_BITS, None, owner)
        changed = int(info.st_ctime)
        of = changed if changed + 1 < time.time() else MAY_CHANGE_UNSEEN
        os.utime(path, (of, of), follow_symlinks=False)
    except OSError:
        atomic.remove_quietly(path)


def format_given_keys(given: "Mapping[str, str]") -> str:
    """Return lines of which parse_settings gives the same values back. Pure."""
    return "".join([f"{name}='{value}'\n" for name, value in given.items()])


def find_state_dir_line(text: str) -> str:
    """Return the line of STATE_DIR of a file with a fault, nothing where it names no folder."""
    for line in text.splitlines():
        name, _, value = line.partition("=")
        if name.strip() == "STATE_DIR" and value.strip().lstrip("'\"").startswith("/"):
            return line
    return ""


def isolation_asked(text: str) -> int:
    """Return how much isolation a file with a fault asks for at most: an index of LEVELS.

    What cannot be understood asks for the most.
    """
    most = 0
    for line in text.upper().splitlines():
        name, _, value = line.partition("=")
        if "ISOLATION" in name and not name.lstrip().startswith("#"):
            level = value.strip().strip("'\"").lower()
            most = max(most, LEVELS.index(level) if level in LEVELS else len(LEVELS) - 1)
    return most
