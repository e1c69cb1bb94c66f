# SPDX-License-Identifier: Apache-2.0
"""One node in the world: its folders, its jobs' spool, who was granted what, and what must hold.

The product's own modules run here: their `os`, `time` and `fcntl` are the kernel's of the world.
"""

from __future__ import annotations

import os
import random
import shutil
from pathlib import Path

from gpulock.alloc.claim import Grant
from gpulock.daemon.core.journal import DaemonJournal
from gpulock.daemon.history.writer import HistoryWriter
from gpulock.daemon.main_loop import Rounds
from gpulock.daemon.reconcile.reconcile import DaemonNode
from gpulock.errors import Refusal
from gpulock.node.context import Node
from gpulock.node.devices import SHARE, Device, card_bus_id, lock_ids_overlap
from gpulock.node.settings import Settings
from gpulock.store import boot
from gpulock.store.locks import claims_root
from tests.support import execd
from tests.support.execd import SimulatedJob, SpooledJob
from tests.support.history_site import read_history
from tests.support.jobs import gpus
from tests.support.trees import bus, information
from tests.world.calls import Machine
from tests.world.kernel import Violation
from tests.world.processes import PROC, Process

NAME = os.uname().nodename
USER, OTHER = 1000, 1001
USERS = {USER: "alice", OTHER: "bob"}
PLACES = 2  # on the last card
DAEMONS = ("systemd", "slurmd", "sge_execd")


class Held:
    """A grant that a job was told: it is living while one of `processes` is, until it is over."""

    def __init__(self, who: str, token: str, devices: frozenset[str], uid: int = USER) -> None:
        self.who, self.token, self.devices, self.uid = who, token, devices, uid
        self.processes: list[Process] = []
        self.keeper: Process | None = None  # who stands for the job until its epilog

    def alive(self) -> bool:
        """Return whether a process of the job lives, or its keeper does."""
        keeper = self.keeper is not None and self.keeper.alive
        return keeper or any(process.alive for process in self.processes)


class QuietJournal(DaemonJournal):
    """gpulockd's journal; `said` has its lines."""

    def __init__(self) -> None:
        super().__init__()
        self.said: list[str] = []

    def say(self, level: int, text: str) -> None:
        self.said.append(text)


class WorldNode(DaemonNode):
    """gpulockd's node, of a driver that answers at once."""

    def devices(self, cards: list[Device] | None = None) -> list[Device]:
        return Node.devices(self, cards)


class Site:
    """The node at `root`, with `count` GPUs."""

    def __init__(self, root: Path, count: int = 2, **keys: str) -> None:
        self.root, self.count = root, count
        self.lock_dir, self.state_dir = f"{root}/run", f"{root}/state"
        self.records = claims_root(self.lock_dir)
        self.spool = root / execd.SPOOL
        for number in range(count):
            folder = root / "driver/gpus" / bus(number)
            folder.mkdir(parents=True)
            (folder / "information").write_text(information(bus(number), number))
        (root / "dev").mkdir()
        for number in range(count):
            (root / f"dev/nvidia{number}").touch()
        self.settings = Settings(
            {
                "LOCK_DIR": self.lock_dir,
                "STATE_DIR": self.state_dir,
                "PROC_ROOT": PROC,
                "DRIVER_ROOT": f"{root}/driver",
                "SYS_ROOT": f"{root}/sys",
                "DEV_ROOT": f"{root}/dev",
                "SLURM_SHARDS": "share",
                "SHARES": f"{count - 1}:{PLACES}",
                "SGE_COMPLEXES": "gpu gpu_share=share",
                **keys,
            }
        )
        self.uuids = {f"GPU-{number:08d}-aaaa": bus(number) for number in range(count)}
        self.jobs: dict[int, tuple[tuple[int, str, int], SpooledJob]] = {}
        self.environments: dict[int, bytes] = {}
        self.kernel = Machine(
            (self.lock_dir, self.records, self.state_dir, f"{self.spool}/active"),
            (f"{self.lock_dir}/locks", f"{self.records}/claims"),
            self.check,
        )
        self.log: list[str] = []

    # --- a schedule begins ----------------------------------------------------------------------

    def reset(self, seed: int, fresh: bool = False) -> None:
        """Boot the node, with nothing claimed; `fresh`: nothing was ever claimed in this boot."""
        for folder in (self.lock_dir, self.records, self.state_dir):
            shutil.rmtree(folder, ignore_errors=True)
            os.mkdir(folder, 0o755)
        self.kernel.reset(random.Random(seed))
        self.held: list[Held] = []
        self.tokens: set[str] = set()
        self.lost = self.short = False  # records were lost, or a disk was full, in this schedule
        self.closed = False  # the folder of all records was lost
        self.losing = self.losses = 0  # how many `rm` are at it, and how many there were
        self.control: dict[str, dict[str, str]] = {}
        self.given_back: set[tuple[str, str]] = set()  # token, device
        self.log.clear()
        self.start_daemons()
        self.others: set[Process] = set()
        if not fresh:
            node = self.make_rounds().node
            boot.begin_boot(node.store, self.state_dir, node.boot_id, NAME)

    def start_daemons(self) -> None:
        """Let execd and slurmd run."""
        tree = self.kernel.tree
        self.execd = tree.spawn("sge_execd", uids=(0, 104, 0, 104), cwd=self.spool)
        self.slurmd = tree.spawn("slurmd")

    def boot(self, keeps: bool) -> None:
        """Go down and come up: no process is left, and LOCK_DIR only where it is on a disk."""
        kernel = self.kernel
        for process in list(kernel.tree.by_pid.values()):
            kernel.kill(process)
        for actor in kernel.actors:
            if actor.begun and actor is not kernel.actor:
                actor.doomed = actor.gone = True
        kernel.boot()
        if not keeps:
            shutil.rmtree(self.lock_dir, ignore_errors=True)
            shutil.rmtree(self.records, ignore_errors=True)
        self.closed = False
        self.start_daemons()

    def make_rounds(self) -> Rounds:
        """Return a gpulockd that starts now."""
        self.journal = QuietJournal()
        node = WorldNode(self.settings, NAME)
        return Rounds(node, self.journal, [HistoryWriter(self.journal.said.append)])

    def spooled(self, number: int, count: int, asks: str = "gpu", uid: int = USER) -> SpooledJob:
        """Return the spool of a Grid Engine job of a user's as execd leaves it.

        The job asks for so many of each complex in `asks`.
        """
        asked, found = self.jobs.get(number, ((0, "", uid), None))
        if found is None or asked != (count, asks, uid):
            job = SimulatedJob(
                number,
                ("/bin/true",),
                uid=uid,
                owner=USERS[uid],
                add_grp_id=65400 + number,
                resources=tuple(gpus(count, name) for name in asks.split()),
            )
            if found is not None:
                found.job_file.unlink()
                shutil.rmtree(found.folder)
            found = execd.spool_job(self.root, job)
            self.jobs[number] = (count, asks, uid), found
            self.environments[number] = (found.folder / "environment").read_bytes()
        for file in os.listdir(found.folder):
            if file not in ("config", "pe_hostfile"):
                os.unlink(found.folder / file)
        (found.folder / "environment").write_bytes(self.environments[number])
        return found

    # --- what must hold -------------------------------------------------------------------------

    def give_shards(self) -> None:
        """Let slurmd give out shards of this node's GPUs, as `gpulock install slurm` notes it."""
        Path(f"{self.state_dir}/slurm-map").write_text("gpulock-slurm-map 1\nshared=shard\n")

    def noted_token(self, name: str) -> str:
        """Return the token in a file beside the records, nothing where there is none."""
        return self.read_field(f"{self.records}/{name}", "token")

    def read_field(self, path: str, key: str) -> str:
        """Return a field of a record, nothing where there is none."""
        try:
            with open(path) as file:
                text = file.read()
        except OSError:
            return ""
        return text.partition(f"\n{key}=")[2].partition("\n")[0]

    def begin(
        self, who: str, token: str, devices: frozenset[str], asks: str = "", uid: int = USER
    ) -> Held:
        """Let a user's job start with a grant: from now on it is an owner. Raises Violation.

        `asks` has a word for each device, the complex or the kind that it asked for.
        """
        del asks
        mine = Held(who, token, devices, uid)
        for other in self.held:
            both = {a for a in other.devices for b in devices if lock_ids_overlap(a, b)}
            if other.alive() and both:
                raise Violation(f"{', '.join(sorted(both))}: {other.who} has it, and now {who}")
        last = f"{bus(self.count - 1)}{SHARE}"
        taken = [*devices, *[name for one in self.held if one.alive() for name in one.devices]]
        if len([name for name in taken if name.startswith(last)]) > PLACES:
            raise Violation(f"a card of {PLACES} places has {' '.join(sorted(taken))}")
        self.held.append(mine)
        alive = [one for one in self.held if one is mine or one.alive()]
        users = {one.uid for one in alive for name in one.devices if name.startswith(last)}
        if len(users) > 1 and self.settings.share_users == "one":
            raise Violation(f"a card that is one user's has places of {users}")
        self.check()
        return mine

    def check_waiting(self, who: str, token: str) -> None:
        """Raise Violation where the record of a job is gone whose first task just begins."""
        record = f"{self.records}/claims/{token}/record"
        safe = not token or self.lost or self.closed or self.read_field(record, "devices")
        if not safe:
            raise Violation(f"{who} lives, and its record is gone before its first task")

    def check(self) -> None:
        """Raise Violation where a device of a living owner is in no record of its claim.

        A record is enough: a device is taken if a record or a lock names it.
        """
        if self.lost or self.closed:
            return
        for mine in self.held:
            if mine.alive():
                record = f"{self.records}/claims/{mine.token}/record"
                named = self.read_field(record, "devices").split(",")
                for device in mine.devices:
                    if device not in named:
                        raise Violation(f"{mine.who} lives, and its record of {device} is gone")
        for token, device in self.given_back:
            if device in self.read_field(f"{self.records}/claims/{token}/record", "devices"):
                raise Violation(f"{device} was given back, and is claim {token}'s again")

    def crashed(self, fault: BaseException) -> Refusal:
        """Say that a program met what nobody foresaw."""
        raise Violation(f"a program failed: {type(fault).__name__}: {fault}") from fault

    def restored(self, losses: int) -> None:
        """Expect locks and records again: after so many losses a reconcile began, and it is over.

        Raises Violation.
        """
        if losses != self.losses:
            return
        self.lost = False
        for mine in self.held:
            for device in mine.devices:
                here = os.path.isdir(f"{self.lock_dir}/locks/{device}")
                if mine.alive() and not (here or self.closed or self.short):
                    raise Violation(f"{mine.who} lives, and its lock of {device} is not put back")

    def finish(self) -> None:
        """Let everything end and gpulockd do one round: then nothing is left. Raises Violation."""
        kernel = self.kernel
        for process in list(kernel.tree.by_pid.values()):
            if process.name not in DAEMONS and process not in self.others:
                kernel.kill(process)
        kernel.full = ()
        rounds = self.make_rounds()
        done = rounds.run_round(kernel.now) is not None
        if self.closed and not done:  # a person has to say that no job is left
            node = rounds.node
            boot.begin_boot(node.store, self.state_dir, node.boot_id, NAME)
            done = rounds.run_round(kernel.now) is not None
        for fd in [*kernel.files]:  # of this last gpulockd, which is no program's
            kernel.forget(fd)
        if not done:
            raise Violation(f"the last round failed: {rounds.summary}")
        for folder in (
            f"{self.lock_dir}/locks",
            *(f"{self.records}/{name}" for name in ("claims", "finished")),
            *([] if self.closed else [f"{self.state_dir}/owed"]),
        ):
            left = os.listdir(folder) if os.path.isdir(folder) else []
            left = [name for name in left if not name.startswith(".")]
            if left:
                raise Violation(f"{folder} has {', '.join(left)} at the end")
        lines = self.history()
        for token in set(lines):
            if lines.count(token) > 1:
                raise Violation(f"claim {token} has {lines.count(token)} lines in the history")
        for mine in self.held:
            if mine.token not in lines and not self.short and not self.closed:
                raise Violation(f"{mine.who} has no line in the history")

    def history(self) -> list[str]:
        """Return the tokens of the history's lines."""
        return [line["token"] for line in read_history(Path(self.state_dir))]

    # --- devices --------------------------------------------------------------------------------

    def devices_of(self, mask: str) -> frozenset[str]:
        """Return the devices that a mask names, by index or UUID."""
        words = [part for part in mask.split(",") if part]
        return frozenset(self.uuids[one] if one in self.uuids else bus(int(one)) for one in words)

    def opened(self, devices: frozenset[str]) -> dict[int, Path]:
        """Return what a process has open that uses these devices."""
        cards = {card_bus_id(name) for name in devices}
        minors = [number for number in range(self.count) if bus(number) in cards]
        return {3 + number: self.root / f"dev/nvidia{number}" for number in minors}

    def noted_devices(self, name: str) -> frozenset[str]:
        """Return the lock ids in a task's note."""
        text = Path(f"{self.records}/{name}").read_text()
        return frozenset(text.partition("\ndevices=")[2].partition("\n")[0].split(","))

    def granted(self, grant: Grant) -> frozenset[str]:
        """Return the devices of a grant."""
        return frozenset(device.id for device in grant.devices)
