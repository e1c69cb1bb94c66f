# SPDX-License-Identifier: Apache-2.0
"""STATE_DIR/settings.obeyed: the last settings file without a fault, copied whole.

Hot, but loaded only where the file has a fault or has changed. Hooks and gpulockd write the copy as
soon as they obey a changed file; its time is the file's, in whole seconds of st_ctime. A copy that
cannot be brought up to date is removed: it would not be the last one. Who may not read the file may
not read the copy. The end mark shows that it is whole.
"""

import os
import stat
import time

from gpulock.errors import Refusal
from gpulock.node.settings import Settings
from gpulock.store import atomic

HEAD = "# gpulock-settings 2: the last of {!r} without a fault; not to be edited\n"
END = "\n# gpulock-settings: the end\n"
READ_BITS = 0o644  # of the file's mode, which the copy has as well
MAY_CHANGE_UNSEEN = 1  # time of a copy whose file may still change within the same second


TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable

    Parser = Callable[[str, str, int], Settings]


def recover_settings(
    found: "Settings | Refusal", path: str, text: str, caller: int, parse: "Parser"
) -> Settings:
    """Return what counts in the place of a file that has a fault, and tell it.

    That is the last file without a fault. Where there is none, or only this one may ask for
    isolation, the keys that are understood count; raises the refusal of any other fault.
    `text` is nothing of a file that others may have written.
    """
    copy = read_copy(find_copy_place(text, path, caller, parse), caller, parse)
    if copy is None or (copy.isolation == "off" and may_ask_for_isolation(text)):
        if isinstance(found, Refusal):
            raise found
        return found
    if isinstance(found, Refusal):
        faults = [found.why.removeprefix("settings: ")]
    else:
        faults = list(found.faults) or [f"{path}: is empty or gone"]
    faults[-1] += f": the settings obeyed last stay in force ({copy.copy_path})"
    copy.faults = tuple(faults)
    return copy


def find_copy_place(text: str, path: str, caller: int, parse: "Parser") -> Settings:
    """Return settings whose `copy_path` is that of a file with a fault."""
    try:
        return parse(find_state_dir_line(text), path, caller)
    except ValueError:
        return Settings({}, path)


def read_copy(place: Settings, caller: int, parse: "Parser") -> "Settings | None":
    """Return the last settings of the file `place.path`, None where none are believed."""
    try:
        for path in (place.state_dir, place.copy_path):
            info = os.stat(path)
            if info.st_uid not in (0, caller) or info.st_mode & (stat.S_IWGRP | stat.S_IWOTH):
                return None
        text = atomic.read_text(place.copy_path, 2 * atomic.LIMIT)
        if not text.startswith(HEAD.format(os.path.abspath(place.path))):
            return None
        settings = parse(text, place.path, caller)
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
