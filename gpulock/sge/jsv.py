# SPDX-License-Identifier: Apache-2.0
"""The job submission verifier of Grid Engine: turn away what no hook could grant.

Hot: one process a qmaster thread, asked for every job. It may reject and nothing else: what a
hook believes is read on the node. Line protocol of jsv(1): START, PARAM and ENV lines, BEGIN,
QUIT. A job with a newline in an argument, a name or a path is turned away: in 8.1.9 it makes a
line of its own here and in the shepherd's config, where it can name another prolog.
"""

import os
import select

from gpulock.errors import LINE_BYTES, Refusal, one_line, shorten
from gpulock.node.settings import Settings
from gpulock.node.settings_file import read_settings

FORGED = "a newline in an argument, name or path, or more than 90 kB: submit without"
LONGEST = 90_000  # bytes: of a longer line the shepherd makes several (fgets of 100,000 in 8.1.9)
QUIET_MILLISECONDS = 5  # after BEGIN


def main(argv: list[str], config: str) -> int:
    """Serve until QUIT or the end of the input: `sge-jsv [COMPLEX...]`.

    Without names they are SGE_COMPLEXES of the settings: jsv_url takes no arguments.
    """
    settings = read_jsv_settings(config)
    names = tuple(argv[1:]) or settings.sge_complexes
    params: dict[str, str] = {}
    forged = within = False
    source = JsvInput(0)
    while (line := source.line()) is not None:
        word, _, rest = line.partition(" ")
        if word in ("START", "QUIT") and within:
            forged = True  # the job's own text: qmaster says neither between START and BEGIN
        elif word == "START":
            params, forged, within = {}, False, True
            send_jsv_line("STARTED")
        elif word == "PARAM":
            name, _, value = rest.partition(" ")
            params[name] = value
            forged = forged or len(line.encode("utf-8", "surrogateescape")) > LONGEST
        elif word == "BEGIN":
            forged, within = source.drop() or forged, False
            why = FORGED if forged else jsv_reject_reason(params, names, settings.sge_kinds)
            send_jsv_line(f"RESULT STATE REJECT gpulock: {why}" if why else "RESULT STATE ACCEPT")
        elif word == "QUIT":
            break
        elif word != "ENV":
            forged = True
    return 0


def read_jsv_settings(config: str) -> Settings:
    """Return the settings, the defaults where they cannot be read."""
    try:
        return read_settings(config)
    except Refusal as refusal:
        os.write(2, refusal.sentence("sge-jsv").encode("utf-8", "backslashreplace") + b"\n")
        return Settings({})


class JsvInput:
    """Read lines as they come; bytes that are no UTF-8 survive as surrogates."""

    def __init__(self, fd: int) -> None:
        self._fd = fd
        self._lines: list[bytes] = []  # whole ones, the next at the end
        self._parts: list[bytes] = []  # of a line that has no end yet
        self._poll = select.poll()
        self._poll.register(fd, select.POLLIN)

    def line(self) -> "str | None":
        """Return the next line, None at the end."""
        while not self._lines:
            data = os.read(self._fd, 1 << 16)
            if not data:
                return None
            first, *more = data.split(b"\n")
            self._parts.append(first)
            if more:
                self._lines = [b"".join(self._parts), *more[:-1]]
                self._lines.reverse()
                self._parts = [more[-1]]
        return self._lines.pop().decode("utf-8", "surrogateescape")

    def drop(self) -> bool:
        """Throw away what comes after BEGIN; return whether there was anything.

        qmaster sends nothing more then: an earlier BEGIN was the job's own text.
        """
        more = bool(self._lines or b"".join(self._parts))
        self._lines, self._parts = [], []
        while self._poll.poll(QUIET_MILLISECONDS) and os.read(self._fd, 1 << 16):
            more = True
        return more


def send_jsv_line(line: str) -> None:
    """Send one line, with nothing in it that could end it early, or end qmaster by its length."""
    os.write(1, shorten(one_line(line), LINE_BYTES).encode() + b"\n")


def jsv_reject_reason(
    params: dict[str, str], names: tuple[str, ...], of_kind: dict[str, str]
) -> str:
    """Return why a job with these parameters is turned away, or nothing; pure.

    `of_kind` are the kinds that complexes count: a job may ask for several, each once.
    """
    hard, soft = (
        {name: text for name, text in parse_jsv_resources(params.get(key, "")) if name in names}
        for key in ("l_hard", "l_soft")
    )
    for name in soft:
        return f"-soft -l {name}: GPUs are granted or not; ask for them with -hard"
    for name, value in hard.items():
        if not (value.isascii() and value.isdigit()):
            return f"-l {name}={shorten(value)}: ask for a whole number of GPUs"
    kinds = [of_kind.get(name, "") for name in hard]
    if len(set(kinds)) < len(kinds):
        return f"GPUs are asked for twice ({', '.join(hard)}); use one complex"
    return ""


def parse_jsv_resources(value: str) -> list[tuple[str, str]]:
    """Return the (name, value) pairs of a resource list."""
    pairs = [item.partition("=") for item in value.split(",") if item]
    return [(name.strip(), text.strip()) for name, _, text in pairs]
