# SPDX-License-Identifier: Apache-2.0
"""Whose subordinate uids there are (subuid(5)), and to which user a uid belongs by them.

Hot, loaded where processes of ordinary users are looked at. A user runs programs as these uids in a
user namespace. A set-user-id file that one of them owns runs as it outside of any.
"""

from gpulock.store import atomic

SUBUID, PASSWD, NSSWITCH = "/etc/subuid", "/etc/passwd", "/etc/nsswitch.conf"
LARGEST = 1 << 22  # bytes
COLONS = 2  # of a line of subuid(5): NAME:FIRST:COUNT


class SubordinateUids:
    """The ranges of subordinate uids, and the accounts of this node's own passwd(5).

    No name service is asked: it may never answer.
    """

    def __init__(self, subuid: str = SUBUID, passwd: str = PASSWD) -> None:
        lines = read_lines(subuid)
        users = [line.split(":") for line in read_lines(passwd)] if lines else []
        uids = {user[0]: int(user[2]) for user in users if user[2:] and user[2].isdecimal()}
        self._accounts = {*uids.values()}
        self._ranges: list[tuple[int, int, int]] = []
        for name, first, count in [line.split(":") for line in lines if line.count(":") == COLONS]:
            if first.isdecimal() and count.isdecimal():
                start = int(first)
                owner = int(name) if name.isdecimal() else uids.get(name, start)
                self._ranges.append((start, start + int(count), owner))

    def owner(self, uid: int) -> int:
        """Return the user in whose range a uid is, else the uid itself.

        The first uid of the range stands for a user whom passwd(5) does not name.
        """
        if uid not in self._accounts:
            for first, end, owner in self._ranges:
                if first <= uid < end:
                    return owner
        return uid


def read_lines(path: str) -> list[str]:
    """Return the lines of a file, none of one that cannot be read."""
    try:
        return atomic.read_text(path, LARGEST).split("\n")
    except (OSError, ValueError):
        return []


def may_have_subordinate_uids(
    uid: int, user: str, subuid: str = SUBUID, nsswitch: str = NSSWITCH
) -> bool:
    """Return whether a user may have subordinate uids (subuid(5)); without a name, anybody."""
    try:
        lines = atomic.read_text(subuid, LARGEST).split("\n")
    except FileNotFoundError:
        lines = []
    except OSError:
        return True
    own = (f"{user}:", f"{uid}:") if user else ("",)
    if any([line.startswith(own) for line in lines if line]):
        return True
    try:
        return "\nsubid:" in f"\n{atomic.read_text(nsswitch)}"
    except FileNotFoundError:
        return False
    except OSError:
        return True
