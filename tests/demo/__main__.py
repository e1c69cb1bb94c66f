# SPDX-License-Identifier: Apache-2.0
"""`make demo`: the life of a few jobs on a simulated node, by the real hooks."""

from __future__ import annotations

import os
import shutil
import signal
import sys
import textwrap
import time
from types import FrameType
from typing import NoReturn

import click

from gpulock.cli.admin import reap
from gpulock.cli.status import status, why
from gpulock.cli.status.status_view import view_node
from gpulock.daemon.reconcile.reconcile import reconcile_locks
from gpulock.deadline import Deadline
from gpulock.errors import Refusal
from gpulock.install.files import InstallError
from gpulock.node.device_list import nvlink_counts
from gpulock.schedulers.liveness import make_liveness_judge
from gpulock.text import table
from gpulock.text.words import format_count
from tests.demo.stage import DemoJob, DemoNode, open_demo_node

WIDEST = 100  # columns of a scene
PAUSE = 1.0  # seconds after a scene, where somebody watches
SETTLE_SECONDS = 3.0
INDENT = "   "
INTERRUPTED = 130


@click.command()
@click.pass_context
def demo_command(context: click.Context) -> None:
    """Show gpulock at work: a simulated DGX-1, real hooks, a few seconds."""
    if os.environ.get("NO_COLOR") or os.environ.get("TERM") == "dumb":
        context.color = False
    for name in (signal.SIGTERM, signal.SIGHUP):
        signal.signal(name, handle_demo_signal)
    try:
        with open_demo_node() as made:
            Demo(made).play()
    except InstallError as fault:
        raise click.ClickException(str(fault)) from fault
    except Refusal as fault:
        raise click.ClickException(f"{fault.kind}: {fault.why}; {fault.do}") from fault
    except KeyboardInterrupt:
        context.exit(INTERRUPTED)


def handle_demo_signal(number: int, frame: FrameType | None) -> NoReturn:
    """End as Ctrl-C does, so that nothing is left behind."""
    raise KeyboardInterrupt


def gpulock_program_name() -> str:
    """Return what to type for gpulock: the path beside this Python, where PATH has none."""
    beside = os.path.join(os.path.dirname(sys.executable), "gpulock")
    if shutil.which("gpulock") or not os.path.exists(beside):
        return "gpulock"
    return os.path.relpath(beside)


class Demo:
    """The scenes, one after another."""

    def __init__(self, made: DemoNode) -> None:
        self.stage = made
        self.width = min(table.terminal_width(), WIDEST)
        self._scene = 0

    def play(self) -> None:
        """Play every scene."""
        click.echo(click.style("gpulock demo", bold=True) + ": a DGX-1 with 8 V100, made of files")
        self.text("No GPU, no scheduler, no root; prolog and epilog are the real ones.")
        self.scene("A job asks for 2 GPUs and gets a pair that talks fast.")
        pair = self.submit("qsub -l gpu=2 train.sh", 101, "2")
        self.tell_links(pair)
        self.scene("Two tasks of an array: each has a GPU of its own.")
        first = self.submit("qsub -t 7-8 -l gpu=1 sweep.sh", 102, "1", 7)
        second = self.submit("", 102, "1", 8)
        self.scene("Four more, and the node is full.")
        four = self.submit("qsub -l gpu=4 big.sh", 103, "4")
        self.status()
        self.scene("No GPU is left: the job goes back into the queue, with the reason.")
        self.refused("qsub -l gpu=1 late.sh", 104, "1", "Grid Engine queues it again")
        self.scene("Half a GPU makes no sense: the job is stopped, the queue goes on.")
        self.refused("qsub -l gpu=1.5 half.sh", 105, "1.5", "job in error")
        self.scene("A job that asks for none sees none, even on a node full of them.")
        self.submit("qsub cpu.sh", 106).finish()
        self.killed_shepherd(second)
        self.scene("The jobs end; their epilogs give everything back.")
        for play in (pair, first, four):
            play.finish()
        self.settle()
        self.status()
        if not self.all_free():
            raise click.ClickException("the demo did not end with every GPU free: report a bug")
        self.scene("Small jobs may share a GPU, where the site says which (SHARES=7:4).")
        self.stage.allow_shares()
        ask = "qsub -l gpu_share=1 class.sh"
        places = [self.submit(ask, 107, "1", asked="gpu_share")]
        places.append(self.submit("", 108, "1", asked="gpu_share"))
        for play in places:
            play.finish()
        self.settle()
        name = gpulock_program_name()
        click.echo(f"\nTry it: {name} simulate DIR, then {name} --config DIR/gpulock.conf status")

    def tell_links(self, pair: DemoJob) -> None:
        """Say how fast the two GPUs of a job talk."""
        node, mask = self.stage.node(), pair.variables()["CUDA_VISIBLE_DEVICES"].split(",")
        first, second = [device for device in node.devices() if str(device.index) in mask]
        links = format_count(
            nvlink_counts(node.inventory).get((first.bus, second.bus), 0), "NVLink"
        )
        self.text(
            f"GPU {first.index} and GPU {second.index} share {links}; "
            f"most pairs of this machine have one or none."
        )

    def killed_shepherd(self, task: DemoJob) -> None:
        """Show that a lock outlives its shepherd exactly as long as the job does."""
        self.scene(f"The shepherd of job {task.name} is killed. Its process computes on.")
        self.command(f"kill -9 {task.shepherd.pid}")
        task.shepherd.kill()
        self.command(f"gpulock why {task.name}")
        self.show(why.explain_subject(self.stage.node(), task.name, self.width - len(INDENT))[0])
        self.pause()
        self.text("Alive, so held: no other job can land on that GPU. Now the process ends.")
        task.end_job_process()
        self.command("gpulock reap")
        node = self.stage.node()
        report = reconcile_locks(node, make_liveness_judge(node), Deadline(reap.REAP_SECONDS))
        self.show(reap.format_reap_report(node, report))

    def all_free(self) -> bool:
        """Return whether nothing is held."""
        return all(row.state == "free" for row in view_node(self.stage.node(), judging=True).rows())

    def settle(self) -> None:
        """Reconcile, as gpulockd does, what an epilog on a busy machine could not be sure of."""
        deadline = Deadline(SETTLE_SECONDS)
        while not self.all_free() and deadline.left() > 0:
            node = self.stage.node()
            reconcile_locks(node, make_liveness_judge(node), deadline)

    def submit(
        self, line: str, job_id: int, gpus: str = "", task: int = 0, asked: str = "gpu"
    ) -> DemoJob:
        """Run a job's prolog and show the mask it got; raise Refused where it does not run."""
        if line:
            self.command(line)
        play = self.stage.submit(job_id, gpus, task, asked=asked)
        if play.prolog_status:
            raise click.ClickException(
                f"job {play.name} did not start: {play.output().strip()}; see TMPDIR"
            )
        mask = play.variables()["CUDA_VISIBLE_DEVICES"] or '""'
        words = {
            "CUDA_VISIBLE_DEVICES": mask,
            "GPULOCK_SHARE": play.variables().get("GPULOCK_SHARE"),
        }
        told = [f"{name}={click.style(word, fg='green')}" for name, word in words.items() if word]
        click.echo(f"{INDENT}job {play.name.ljust(6)} {' '.join(told)}")
        return play

    def refused(self, line: str, job_id: int, gpus: str, what: str) -> None:
        """Show the exit status of a prolog and the line that its user reads."""
        self.command(line)
        play = self.stage.submit(job_id, gpus)
        code = click.style(f"prolog exits {play.prolog_status}", fg="yellow")
        click.echo(f"{INDENT}job {play.name.ljust(6)} {code}: {what}")
        for told in play.output().splitlines():
            self.text(told)

    def status(self) -> None:
        """Show `gpulock status`."""
        self.command("gpulock status")
        view = view_node(self.stage.node(), judging=True)
        rows = view.rows()
        self.show(status.format_status_lines(view, rows, self.width - len(INDENT)))

    def scene(self, title: str) -> None:
        """Begin a scene."""
        if self._scene:
            self.pause()
        self._scene += 1
        click.echo(f"\n{click.style(f'{self._scene}. {title}', bold=True)}")

    def command(self, line: str) -> None:
        """Show a command as it would be typed."""
        click.echo(f"{INDENT}{click.style('$', dim=True)} {click.style(line, fg='cyan')}")

    def text(self, line: str) -> None:
        """Show a sentence, wrapped."""
        for n, part in enumerate(textwrap.wrap(line, self.width - 2 * len(INDENT))):
            click.echo((2 if n else 1) * INDENT + part)

    def show(self, lines: list[str]) -> None:
        """Show what a command printed."""
        click.echo("\n".join(INDENT + line for line in lines))

    def pause(self) -> None:
        """Give a reader time; a log needs none."""
        if sys.stdout.isatty():
            time.sleep(PAUSE)


if __name__ == "__main__":
    demo_command(prog_name="gpulock demo")
