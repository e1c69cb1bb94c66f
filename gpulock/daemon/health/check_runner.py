# SPDX-License-Identifier: Apache-2.0
"""Become HEALTH_COMMAND: run as a file, `python -IS check_runner.py PARENT UID GID PROGRAM ...`.

gpulockd starts it first and locks the card in the name of its pid. A byte on stdin says that the
card is locked. The end of stdin says that it is not, or that gpulockd is gone. The kernel kills the
program when gpulockd dies.
"""

import os
import sys

SET_DEATH_SIGNAL, SET_NO_NEW_PRIVILEGES = 1, 38  # linux/prctl.h
KILL = 9
NOT_STARTED = 127


def run_checked_program(words: "list[str]") -> None:
    """Wait for the word to go, give up all rights, and become the program; raise OSError."""
    parent, uid, gid = [int(word) for word in words[:3]]
    if not os.read(0, 1):
        return
    if os.geteuid() == 0:
        os.setgroups([])
        os.setresgid(gid, gid, gid)
        os.setresuid(uid, uid, uid)
    import ctypes

    kernel = ctypes.CDLL(None, use_errno=True)
    kernel.prctl(SET_NO_NEW_PRIVILEGES, 1, 0, 0, 0)
    kernel.prctl(SET_DEATH_SIGNAL, KILL, 0, 0, 0)  # after the change of user, which forgets it
    if os.getppid() != parent:
        return
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    os.chdir("/")
    os.execve(words[3], words[3:], dict(os.environ))


if __name__ == "__main__":
    try:
        run_checked_program(sys.argv[1:])
    except OSError as fault:
        os.write(2, f"{sys.argv[4]}: {fault.strerror}\n".encode())
    sys.exit(NOT_STARTED)
