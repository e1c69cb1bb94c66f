# SPDX-License-Identifier: Apache-2.0
"""Why a claim was not granted: four kinds, one sentence.

Hot. The scheduler packages translate a kind into their exit code (docs/{grid-engine,slurm}.md); the
sentence always says what failed, for which job, why, and what to do.
"""

import errno

BUSY = "busy"  # not enough devices free now
INVALID_REQUEST = "invalid request"  # the request can never be granted
BROKEN = "broken"  # a fault of this node that lasts (docs/reliability.md has each)
UNKNOWN = "unknown"  # the request, or the state of the node, could not be found out
KINDS = (BUSY, INVALID_REQUEST, BROKEN, UNKNOWN)
# Bytes that a daemon of a scheduler is given at once: some of them read a line into a buffer of
# fixed size, and end with it (docs/facts/grid-engine.md, submission verifiers).
LINE_BYTES = 1000
WHY_BYTES = 600  # of the reason in it: what to do follows
VALUE_BYTES = 40  # of a value that a user chose
PASSING = (  # errors that users can cause, or that pass by themselves
    errno.ENOSPC,
    errno.EDQUOT,
    errno.ENOMEM,
    errno.EMFILE,
    errno.ENFILE,
    errno.EAGAIN,
    errno.EINTR,
    errno.EBUSY,
    errno.ESTALE,
    errno.ETIMEDOUT,
    errno.ESRCH,
)


class Refusal(Exception):
    """Refuse a claim: `kind` decides the exit code, `why` and `do` are for people."""

    def __init__(self, kind: str, why: str, do: str) -> None:
        super().__init__(why)
        self.kind = kind
        self.why = why
        self.do = do

    def sentence(self, who: str) -> str:
        """Return the one line that goes to stderr and syslog; `who` names the job or command."""
        why = shorten(self.why, WHY_BYTES)
        return shorten(one_line(f"gpulock: {who}: {self.kind}: {why}; {self.do}"), LINE_BYTES)


class UnexpectedError(Refusal):
    """Refuse because of a fault nobody foresaw: one user's jobs break no node by it."""

    def __init__(self, why: str) -> None:
        super().__init__(UNKNOWN, why, "report this as a bug")


class LockTimeout(Refusal):
    """Refuse because the gate stayed shut until the deadline: who holds it is not known."""

    def __init__(self, path: str) -> None:
        super().__init__(
            UNKNOWN, f"timed out on the lock {path}", f"see who holds it: fuser -v {path}"
        )


def os_error_kind(fault: BaseException, missing: str = UNKNOWN) -> str:
    """Return BROKEN for an error that lasts, else UNKNOWN; `missing` for a file that is not there.

    What is no error of the system's, such as a bad value, breaks no node either.
    """
    if isinstance(fault, FileNotFoundError):
        return missing
    return BROKEN if isinstance(fault, OSError) and fault.errno not in PASSING else UNKNOWN


def one_line(text: str) -> str:
    """Return `text` with every control character shown as `?`: log lines cannot be forged."""
    if text.isprintable():
        return text
    return "".join([c if c.isprintable() else "?" for c in text])


def quote_text(text: str) -> str:
    """Return what a user wrote in quotes, which it cannot end: it is no word of gpulock's."""
    return f'"{text.replace(chr(34), chr(39))}"'


def shorten(text: str, most: int = VALUE_BYTES) -> str:
    """Return `text` with at most `most` bytes in UTF-8: of a longer one the beginning, and dots."""
    if 4 * len(text) <= most:
        return text
    data = text.encode("utf-8", "backslashreplace")
    return text if len(data) <= most else data[: most - 3].decode("utf-8", "ignore") + "..."


def format_requested_gpus(count: int) -> str:
    """Return how many GPUs are asked for, in words."""
    return "1 GPU asked for" if count == 1 else f"{count} GPUs asked for"
