# SPDX-License-Identifier: Apache-2.0
"""A command whose output a shell evaluates, which has to see that it failed."""

from __future__ import annotations

from collections.abc import Generator
from contextlib import contextmanager
from typing import Any

import click


class EvaluatedCommand(click.Command):
    """A command whose output a shell evaluates with --export: of one that fails that is `false`."""

    def make_context(self, info_name: str | None, args: list[str], *rest: Any, **more: Any) -> Any:
        """Parse the arguments, which may be wrong."""
        with print_false_on_failure("--export" in args):
            return super().make_context(info_name, args, *rest, **more)

    def invoke(self, ctx: click.Context) -> Any:
        """Run the command."""
        with print_false_on_failure(ctx.params["export"]):
            return super().invoke(ctx)


@contextmanager
def print_false_on_failure(export: bool) -> Generator[None]:
    """Let the shell know: of `eval "$(...)"` it has the status of what was printed alone."""
    try:
        yield
    except BaseException as fault:
        helped = isinstance(fault, click.exceptions.Exit) and not fault.exit_code
        if export and not helped:
            click.echo("false")
        raise
