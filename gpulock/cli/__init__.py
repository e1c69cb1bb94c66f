# SPDX-License-Identifier: Apache-2.0
"""The command line: `gpulock COMMAND`.

Cold. A command's module is imported when that command is used, so that `gpulock status` costs
what status needs. A refusal becomes one line and an exit code here, and nowhere else.
"""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Generator, Sequence
from contextlib import contextmanager
from importlib import import_module
from io import TextIOWrapper
from typing import Any, NoReturn

import click

from gpulock import __version__
from gpulock.cli.commands import MODULES, NAMES, SECTIONS
from gpulock.cli.session import Session, echo_wrapped
from gpulock.errors import BROKEN, Refusal
from gpulock.node.settings_file import DEFAULT_PATH

HELP_WIDTH = 1 << 10  # characters of a command's first sentence
EVALUATED = ("claim", "release")
REFUSED, NODE_BROKEN = 1, 3  # 2, usage, is click's own


class LazyGroup(click.Group):
    """A group whose commands are imported on use, and whose refusals are one line."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        """Return the names in the order of the help."""
        return NAMES

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        """Import one command."""
        return import_command(cmd_name) if cmd_name in MODULES else None

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """List the commands by section, each with its first sentence."""
        for section, names in SECTIONS.items():
            rows = [(name, import_command(name).get_short_help_str(HELP_WIDTH)) for name in names]
            with formatter.section(section):
                formatter.write_dl(rows)

    def invoke(self, ctx: click.Context) -> Any:
        """Run the command; translate what it raises."""
        try:
            with print_false_on_failure(ctx):
                return super().invoke(ctx)
        except Refusal as refusal:
            exit_with_refusal(ctx, refusal, NODE_BROKEN if refusal.kind == BROKEN else REFUSED)
        except BrokenPipeError:
            raise  # click ends quietly when the reader of our output has gone
        except OSError as fault:
            if is_output_error(fault):
                raise  # not the node is broken, but where our output goes: `main` says so
            exit_with_refusal(ctx, Refusal(BROKEN, str(fault), "run gpulock doctor"), NODE_BROKEN)
        except KeyboardInterrupt:
            signal.signal(signal.SIGINT, signal.SIG_DFL)
            os.kill(os.getpid(), signal.SIGINT)  # a shell's script ends with us


@contextmanager
def print_false_on_failure(ctx: click.Context) -> Generator[None]:
    """Let a shell know that a command failed whose output it evaluates (--export).

    Of `eval "$(...)"` it has the status of what was printed alone.
    """
    export = "--export" in ctx.args
    try:
        yield
    except BaseException as fault:
        helped = isinstance(fault, click.exceptions.Exit) and not fault.exit_code
        if export and ctx.invoked_subcommand in EVALUATED and not helped:
            click.echo("false")
        raise


def import_command(name: str) -> click.Command:
    """Return a command of the table."""
    module = import_module(f"gpulock.cli.{MODULES[name]}")
    command: click.Command = getattr(module, f"{name.replace('-', '_')}_command")
    return command


def exit_with_refusal(ctx: click.Context, refusal: Refusal, code: int) -> NoReturn:
    """Say one line and end with `code`."""
    echo_wrapped(refusal.sentence(ctx.invoked_subcommand or "gpulock"))
    ctx.exit(code)


@click.group(cls=LazyGroup, context_settings={"help_option_names": ["-h", "--help"]})
@click.option(
    "--config",
    metavar="FILE",
    default=DEFAULT_PATH,
    show_default=True,
    help="Settings file of the node.",
)
@click.version_option(__version__, prog_name="gpulock", message="%(prog)s %(version)s")
@click.pass_context
def command_group(ctx: click.Context, config: str) -> None:
    """Show and manage which GPU of this node is whose."""
    ctx.obj = Session(config, ctx.obj or ())
    if os.environ.get("NO_COLOR") or os.environ.get("TERM") == "dumb":
        ctx.color = False


def reopen_closed_streams() -> None:
    """Give the standard streams that the caller closed a place to go, before a file takes it."""
    for name in ("stdin", "stdout", "stderr"):
        if getattr(sys, name) is None:  # the lowest number that is free is its own
            fd = os.open(os.devnull, os.O_RDWR)
            os.set_inheritable(fd, True)
            setattr(sys, name, os.fdopen(fd, "r" if name == "stdin" else "w"))
        stream = getattr(sys, name)
        if isinstance(stream, TextIOWrapper) and stream.errors == "strict":
            stream.reconfigure(errors="backslashreplace")  # a comment's letters, in any locale


def is_output_error(fault: OSError) -> bool:
    """Return whether it was our own output that could not be written: all of it goes by echo."""
    step = fault.__traceback__
    while step is not None and step.tb_frame.f_code is not click.echo.__code__:
        step = step.tb_next
    return step is not None


def same_program() -> tuple[str, ...]:
    """Return the arguments that start this program once more, nothing where they are not known."""
    try:
        with open("/proc/self/cmdline", "rb") as file:
            words = [os.fsdecode(word) for word in file.read().split(b"\0")[1:-1]]
    except OSError:
        return ()
    return (sys.executable, *words) if sys.executable else ()


def main(argv: Sequence[str] | None = None) -> NoReturn:
    """Run the command line and exit."""
    reopen_closed_streams()
    try:
        program = () if argv is not None else same_program()
        command_group.main(args=argv, prog_name="gpulock", obj=program)
    except OSError as fault:
        if not is_output_error(fault):
            raise
        os.dup2(os.open(os.devnull, os.O_WRONLY), 1)  # or the interpreter's end fails once more
        click.echo(f"gpulock: cannot write the output: {fault.strerror}", err=True)
        sys.exit(REFUSED)
    raise AssertionError("click returned")
