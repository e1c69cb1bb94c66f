# SPDX-License-Identifier: Apache-2.0
"""What all commands share: the node that `--config` names, and who may change it."""

from __future__ import annotations

import os
import pwd
import re
import shlex
import sys
from contextlib import suppress
from datetime import datetime, time, timedelta

import click

from gpulock.cli.commands import NAMES
from gpulock.errors import INVALID_REQUEST, Refusal, one_line
from gpulock.node.context import Node
from gpulock.node.procfs import Proc
from gpulock.node.settings import Settings
from gpulock.node.settings_file import DEFAULT_PATH, read_settings
from gpulock.system_log import NOTICE, log_to_system
from gpulock.text import table
from gpulock.text.words import parse_duration

FOR_EVER = "for ever"
JUST_PAST = 3  # hours: who types a time within them has hardly meant the next day
CLOCK = re.compile("[0-9]{1,2}:[0-9]{2}")
PAST = "7d, 12h, 14:00, 2026-11-01 or 2026-11-01T12:30"
PUBLIC = 0o022  # umask: everybody may read the records, or `status` would be root's alone


def name_config(text: str) -> str:
    """Return a text whose commands have the --config that was given."""
    context = click.get_current_context(silent=True)
    session = context.find_object(Session) if context else None
    if session is None or session.config == DEFAULT_PATH:
        return text
    given = f"gpulock --config {shlex.quote(session.config)} "
    return re.sub(rf"\bgpulock (?=({'|'.join(NAMES)})\b)", lambda _: given, text)


class CommandRefusedError(Refusal):
    """Refuse a command, where its kind says nothing: why, and what to do."""

    def __init__(self, why: str, do: str = "") -> None:
        super().__init__(INVALID_REQUEST, why, do)
        self.args = (f"{why}; {do}" if do else why,)

    def sentence(self, who: str) -> str:
        """Return the one line that goes to stderr."""
        return one_line(f"gpulock: {who}: {self}")


def echo_wrapped(text: str, indent: str = "  ", err: bool = True) -> None:
    """Print a sentence, in lines that fit where that is a terminal; its commands can be copied."""
    width = table.sentence_width(sys.stderr if err else sys.stdout)
    for line in table.wrap_sentence(name_config(text), width, indent):
        click.echo(line, err=err)


def echo_note(text: str) -> None:
    """Tell the administrator something, in lines that fit."""
    echo_wrapped(f"note: {text}", "      ", err=False)


def parse_duration_option(ctx: click.Context, param: click.Parameter, value: str | None) -> float:
    """Return the seconds of an option, 0 without it; FOR_EVER has no end."""
    try:
        seconds = float("inf") if value == FOR_EVER else parse_duration(value or "0")
    except ValueError as fault:
        hint = ". Put -- before the command." if ctx.command.name == "run" else ""
        raise click.BadParameter(f"{fault}{hint}", ctx, param) from fault
    if seconds and value and value.isdigit() and param.name in ("seconds", "wait"):
        raise click.BadParameter("say the unit, as in 2h or 90m.", ctx, param)
    if value is not None and not seconds and param.name != "wait":
        raise click.BadParameter("the time must be longer than 0.", ctx, param)
    return seconds


def parse_time(text: str, now: float, after: float = 0.0) -> float:
    """Return a point in time (epoch): `7d` (ago), `14:00` (the last), `2026-11-01 12:30`.

    Raises ValueError.

    Of one that lies ahead: `2h` from now, or `14:00`, the first one `after` some time.
    """
    forms = "14:00, 2h (from now) or 2026-12-01T14:00" if after else PAST
    try:
        if not CLOCK.fullmatch(text):
            if re.match("[0-9]{4}-", text):
                return datetime.fromisoformat(text).timestamp()
            return now + parse_duration(text) * (1 if after else -1)
        today = datetime.fromtimestamp(after or now)
        at = datetime.combine(today, time.fromisoformat(text.zfill(5)))
        tomorrow = at + timedelta(days=1)
        if not after:
            return (at if at <= today else at - timedelta(days=1)).timestamp()
        if at > today or today - at > timedelta(hours=JUST_PAST):
            return (at if at > today else tomorrow).timestamp()
        fault = "is past" if after <= now else "is before the start"
        fault += f"; for the next day write {tomorrow:%Y-%m-%dT%H:%M}"
    except (ValueError, OverflowError):
        fault = f"is no time: {forms}"
    raise ValueError(f"{text!r} {fault}")


class Session:
    """One call of the command line: its settings file, and the node behind it.

    `program` starts the same call once more; nothing where it is none of a process of its own.
    """

    def __init__(self, config: str, program: tuple[str, ...] = ()) -> None:
        self.config = config
        self.program = program

    def settings(self) -> Settings:
        """Return the settings; raise Refusal."""
        return read_settings(self.config)

    def node(self) -> Node:
        """Return the node, to look at; raise Refusal."""
        return Node(self.settings())

    def writable_node(self) -> Node:
        """Return the node, to change; raise Refusal for all but the owner of LOCK_DIR."""
        node = self.node()
        uid = find_node_owner(node)
        if uid not in (None, os.geteuid()):
            raise CommandRefusedError(
                f"only {uid_to_user_name(uid)} may change locks in {node.store.path}"
            )
        os.umask(PUBLIC)
        for fault in node.settings.faults:
            echo_wrapped(f"gpulock: {one_line(fault)}")
        return node


def find_node_owner(node: Node) -> int | None:
    """Return the uid that owns LOCK_DIR, or the records where it is gone; None without either."""
    for path in (node.store.path, node.store.root):
        try:
            return os.lstat(path).st_uid
        except FileNotFoundError:
            continue
    return None


def owns_lock_dir(node: Node) -> bool:
    """Return whether the caller owns LOCK_DIR, and so may see and change everything."""
    try:
        return find_node_owner(node) == os.geteuid()
    except OSError:
        return False


def uid_to_user_name(uid: int) -> str:
    """Return the name of a user, its number where there is none."""
    try:
        return pwd.getpwuid(uid).pw_name
    except KeyError:
        return f"uid {uid}"


def describe_caller() -> str:
    """Return who is at the keyboard, for notes and logs: the login, and whom it became."""
    name = uid_to_user_name(os.getuid())
    try:
        with open("/proc/self/loginuid", encoding="ascii") as file:
            login = int(file.read())
    except (OSError, ValueError):
        return name
    known = login not in (0xFFFFFFFF, os.getuid())
    return f"{uid_to_user_name(login)} as {name}" if known else name


def find_calling_shell(proc: Proc) -> int:
    """Return the process that called us; of a shell's fork for `$(...)` or a pipe the shell.

    Such a fork has the shell's own program and arguments, and is over in a moment: a claim that
    it held would be nobody's.
    """
    pid = os.getppid()
    with suppress(OSError, ValueError):
        own = process_signature(proc, pid)
        while (above := proc.stat(pid).ppid) > 1 and process_signature(proc, above) == own:
            pid = above
    return pid


def process_signature(proc: Proc, pid: int) -> tuple[str, bytes, int]:
    """Return what a fork has in common with its parent: program, arguments, session."""
    return proc.link(pid, "exe"), proc.read_memory(pid, "cmdline"), proc.stat(pid).session


def log_to_syslog(settings: Settings, line: str) -> None:
    """Write one line to syslog; a simulation has none."""
    if settings.simulation:
        return
    log_to_system(NOTICE, line)
