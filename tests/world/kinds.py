# SPDX-License-Identifier: Apache-2.0
"""A node of every kind in the world: two models, a card in MIG mode, one with places.

GPU 0 and 1 are of one model, GPU 2 and 3 of another. GPU 2 has two MIG instances while it is in
MIG mode, GPU 3 two places.
"""

from __future__ import annotations

import os
from pathlib import Path

from gpulock.alloc.reaper import free_locks
from gpulock.cli.admin.devices import reap_device_lock
from gpulock.daemon.reconcile.inventory_file import format_inventory
from gpulock.deadline import Deadline
from gpulock.errors import Refusal
from gpulock.node.context import Node
from gpulock.node.devices import SHARE
from gpulock.node.kinds import CARD
from gpulock.store import atomic, boot, grants
from gpulock.store.gate import Gate
from gpulock.workstation.process_claims import ensure_node_dirs
from tests.support.trees import bus, information
from tests.world.accidents import quarantined, reboot, shepherd_dies, straggler
from tests.world.actors import Cast, Play, gpulockd, reap, run_claim, sge_job, uses
from tests.world.kernel import FREEZE, KILL, Violation
from tests.world.site import NAME, USER, Held, Site

MODELS = ("Tesla V100-PCIE-16GB", "Tesla V100-PCIE-16GB", "NVIDIA A100", "NVIDIA A100")
SPLIT, SHARED = 2, 3
INSTANCES = ("gi1.ci0", "gi2.ci0")
PROFILE = "3g.40gb"
INSTANCE, A100 = f"mig:{PROFILE}", "model:a100*"
COMPLEXES = f"gpu gpu_share=share gpu_a={A100} mig_3g={INSTANCE}"


class KindSite(Site):
    """The node; `split` says whether GPU 2 is in MIG mode."""

    def __init__(self, root: Path) -> None:
        super().__init__(root, len(MODELS), SGE_COMPLEXES=COMPLEXES)
        for number, model in enumerate(MODELS):
            text = information(bus(number), number, Model=model)
            (root / "driver/gpus" / bus(number) / "information").write_text(text)
        (root / "driver-caps").mkdir()
        (root / "dev/nvidia-caps").mkdir()
        rows: list[str] = []
        self.nodes: dict[str, tuple[Path, ...]] = {}
        for number, name in enumerate(INSTANCES):
            gpu, compute = name.split(".")
            minors = (10 * number + 1, 10 * number + 2)
            for path, minor in zip((gpu, f"{gpu}/{compute}"), minors):
                rows.append(f"gpu{SPLIT}/{path}/access {minor}")
            nodes = tuple(root / f"dev/nvidia-caps/nvidia-cap{minor}" for minor in minors)
            for node in nodes:
                node.touch()
            self.nodes[f"{bus(SPLIT)}.{name}"] = nodes
            self.uuids[f"MIG-{number}"] = f"{bus(SPLIT)}.{name}"
        (root / "driver-caps/mig-minors").write_text("\n".join(rows) + "\n")
        self.split = True

    def inventory(self) -> str:
        """Return what the exporter tells of the cards and instances now."""
        pairs = {f"gpu.{bus(number)}.mig": "0" for number in range(len(MODELS))}
        pairs[f"gpu.{bus(SPLIT)}.mig"] = str(int(self.split))
        for number, name in enumerate(INSTANCES if self.split else ()):
            start = f"mig.{bus(SPLIT)}.{name}"
            pairs |= {f"{start}.uuid": f"MIG-{number}", f"{start}.profile": PROFILE}
        return format_inventory(pairs, self.kernel.tree.boot_id)

    def reset(self, seed: int, fresh: bool = False) -> None:
        super().reset(seed, fresh)
        self.split = True
        Path(f"{self.lock_dir}/inventory").write_text(self.inventory())

    def opened(self, devices: frozenset[str]) -> dict[int, Path]:
        found = super().opened(devices)
        paths = [path for name in sorted(devices) for path in self.nodes.get(name, ())]
        return {**found, **{20 + number: path for number, path in enumerate(paths)}}

    def begin(
        self, who: str, token: str, devices: frozenset[str], asks: str = "", uid: int = USER
    ) -> Held:
        """Let a job start, if it has what it asked for. Raises Violation."""
        words, kinds = asks.split(), {site_kind(name) for name in devices}
        wrong = kinds - {kind for word in words for kind in ALLOWED[word]}
        mixed = {*words} in ({"gpu"}, {CARD}) and len(kinds) > 1
        if words and (wrong or mixed or len(words) != len(devices)):
            raise Violation(f"{who} asks for {asks}, and gets {' '.join(sorted(devices))}")
        return super().begin(who, token, devices, asks, uid)

    def finish(self) -> None:
        """Let an administrator give back what was left reserved, then as on any node."""
        self.kernel.full = ()
        node = self.make_rounds().node
        if os.path.isdir(node.store.locks_dir):
            unreserve(node)
        super().finish()


def site_kind(name: str) -> str:
    """Return of which kind a lock of this node is."""
    if SHARE in name:
        return "share"
    number = next(n for n in range(len(MODELS)) if name.startswith(bus(n)))
    return PROFILE if ".gi" in name else MODELS[number]


ALLOWED: dict[str, frozenset[str]] = {
    **dict.fromkeys(("gpu", CARD), frozenset(MODELS)),
    **dict.fromkeys(("gpu_a", A100), frozenset(MODELS[SPLIT:])),
    **dict.fromkeys(("mig_3g", INSTANCE), frozenset((PROFILE,))),
    **dict.fromkeys(("gpu_share", "share"), frozenset(("share",))),
}


def mig_is_switched() -> Play:
    """Return an administrator who takes GPU 2 out of MIG mode, and puts it in again later."""

    def play(site: Site) -> None:
        assert isinstance(site, KindSite)
        kernel = site.kernel
        kernel.wait(lambda: os.path.isdir(f"{site.lock_dir}/locks"), "LOCK_DIR")
        for split in (False, True):
            kernel.step("MIG mode", "on" if split else "off")
            site.split = split

            def publish() -> int:
                atomic.replace_file(f"{site.lock_dir}/inventory", site.inventory().encode())
                return 0

            kernel.program(kernel.tree.spawn("gpulockd"), publish)
            kernel.sleep(1.0)

    return play


def reserved(device: str) -> Play:
    """Return an administrator who reserves a whole card, and gives it back."""

    def play(site: Site) -> None:
        kernel = site.kernel
        kernel.wait(lambda: os.path.isdir(f"{site.lock_dir}/locks"), "LOCK_DIR")
        process = kernel.tree.spawn("gpulock")

        def main() -> int:
            node = Node(site.settings, NAME)
            record = boot.reserve_owner(device, {"by": "root"}, node.boot_id, NAME)
            try:
                ensure_node_dirs(node)
                with Gate(node.store, Deadline(10.0)):
                    if reap_device_lock(node, node.devices(), device) is not None:
                        return 1
                    grants.make_claim(node.store, record)
                mine = site.begin("a reserve", record.token, frozenset([device]))
                mine.processes = [process]
                uses(site, mine, process)
                site.held.remove(mine)
                unreserve(node)
            except Refusal as refusal:
                site.log.append(str(refusal))
                return 1
            return 0

        kernel.program(process, main)

    return play


def unreserve(node: Node) -> None:
    """Give back what an administrator holds. Raises Refusal."""
    with Gate(node.store, Deadline(10.0)):
        for lock in node.store.read_all_locks().values():
            if lock.owner and lock.owner.is_reserve():
                free_locks(node, [lock], "unreserved by root")


SHARE_JOB = sge_job(31, 1, asks="gpu_share")
MIG_JOB = sge_job(41, 1, asks="mig_3g")
MIG_RUN = run_claim(1, kind=INSTANCE)
A100_JOB = sge_job(42, 1, asks="gpu_a")
KIND_CASTS: dict[str, Cast] = {
    "instances": Cast(one=MIG_JOB, two=MIG_RUN, three=sge_job(43, 2, asks="mig_3g"), d=gpulockd(2)),
    "models": Cast(
        one=run_claim(1), two=run_claim(1, kind=A100), plain=sge_job(11, 2), d=gpulockd(2)
    ),
    "several_kinds": Cast(
        one=sge_job(44, 1, asks="gpu_a gpu mig_3g"),
        two=MIG_RUN,
        three=sge_job(11, 2),
        d=gpulockd(2),
    ),
    "mig_mode": Cast(
        one=MIG_JOB, root=mig_is_switched(), two=sge_job(45, 2, asks="gpu_a"), d=gpulockd(2)
    ),
    "instance_dies": Cast(one=MIG_JOB, end=shepherd_dies(), d=gpulockd(2), two=MIG_RUN),
    "instance_straggler": Cast(
        one=sge_job(46, 1, lingers=True, asks="mig_3g"),
        two=sge_job(43, 2, asks="mig_3g"),
        root=reap(),
        end=straggler(),
    ),
    "quarantine": Cast(
        one=MIG_JOB, root=quarantined(bus(SPLIT)), two=MIG_RUN, d=gpulockd(1), whole=A100_JOB
    ),
    "reserve": Cast(one=MIG_JOB, root=reserved(bus(SPLIT)), two=MIG_RUN, d=gpulockd(2)),
    "reserve_of_places": Cast(
        one=SHARE_JOB, root=reserved(bus(SHARED)), two=run_claim(1, share=True), whole=A100_JOB
    ),
    "reboot": Cast(one=MIG_JOB, power=reboot(), two=A100_JOB, d=gpulockd(2)),
}
KIND_POINTS: tuple[tuple[str, str, str], ...] = (
    ("instances", "one", KILL),
    ("instances", "two", FREEZE),
    ("several_kinds", "one", KILL),
    ("mig_mode", "one", "root"),
    ("mig_mode", "two", "root"),
    ("quarantine", "two", "root"),
    ("reserve", "two", "root"),
    ("reserve", "root", KILL),
    ("reserve_of_places", "one", "root"),
    ("reboot", "two", "power"),
)
