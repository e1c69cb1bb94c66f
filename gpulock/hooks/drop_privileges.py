# SPDX-License-Identifier: Apache-2.0
"""Keep a process that becomes an ordinary user's from being traced by that user.

Hot by its place, loaded only in the process of a report. Who traces another must have all its
permitted capabilities (ptrace(2), ptrace access mode checking); signals still reach it. The one
that it keeps lets a process wake a machine that sleeps, and nothing else (capabilities(7)).
"""

import ctypes
import os

CAP_WAKE_ALARM = 35  # linux/capability.h, as all below
VERSION_3, WORDS = 0x20080522, 6  # of effective, permitted and inheritable, low bits then high
PR_SET_KEEPCAPS, PR_CAP_AMBIENT, PR_CAP_AMBIENT_RAISE = 8, 47, 2  # linux/prctl.h


def become_untraced_user(uid: int) -> None:
    """Become a user for good, with that capability alone, over an exec too; raise OSError."""
    libc = ctypes.CDLL(None, use_errno=True)
    if uid:
        check_libc_result(libc.prctl(PR_SET_KEEPCAPS, 1, 0, 0, 0))
    os.setuid(uid)
    if not uid:
        return  # root is traced by root
    header = (ctypes.c_uint32 * 2)(VERSION_3, 0)
    bit = 1 << CAP_WAKE_ALARM - 32
    check_libc_result(libc.capset(header, (ctypes.c_uint32 * WORDS)(0, 0, 0, bit, bit, bit)))
    check_libc_result(libc.prctl(PR_CAP_AMBIENT, PR_CAP_AMBIENT_RAISE, CAP_WAKE_ALARM, 0, 0))


def check_libc_result(result: int) -> None:
    """Raise OSError for a call that failed."""
    if result != 0:
        code = ctypes.get_errno()
        raise OSError(code, os.strerror(code))
