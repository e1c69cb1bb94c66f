# SPDX-License-Identifier: Apache-2.0
"""Who acts in the world: jobs of both schedulers, `gpulock run`, gpulockd, users.

A job's actor plays its daemon (the shepherd, slurmd, slurmstepd) too, which runs the hooks and the
job in their order. What it starts the job with is what the hook told the job, and nothing else.
"""

from __future__ import annotations

from collections.abc import Callable

from gpulock.alloc.choose import ClaimRequest
from gpulock.alloc.process_owner import RUN
from gpulock.alloc.release import release_locks
from gpulock.daemon.history.writer import HistoryWriter
from gpulock.daemon.reconcile.reconcile import reconcile_locks
from gpulock.deadline import Deadline
from gpulock.errors import Refusal
from gpulock.node.context import Node
from gpulock.node.devices import SHARE, card_bus_id
from gpulock.node.kinds import CARD
from gpulock.schedulers.liveness import make_liveness_judge
from gpulock.sge import epilog as sge_epilog
from gpulock.sge import prolog as sge_prolog
from gpulock.slurm import epilog as slurm_epilog
from gpulock.slurm import prolog as slurm_prolog
from gpulock.slurm import task
from gpulock.workstation import process_claims
from gpulock.workstation.peer import Peer
from gpulock.workstation.user_release import release_for_user
from gpulock.workstation.wire import RELEASE, SocketRequest
from tests.world.kernel import Actor, Killed, Violation
from tests.world.processes import INIT, TICKS, Process
from tests.world.site import NAME, USER, USERS, Held, Site

Play = Callable[[Site], object]
CONFIG = "/etc/gpulock/gpulock.conf"
MASK = "CUDA_VISIBLE_DEVICES"


class Cast:
    """Actors by name; what one must know of another is in `stage`."""

    def __init__(self, **plays: Play) -> None:
        self.plays = plays

    def without(self, name: str) -> Cast:
        """Return the cast with an actor less."""
        return Cast(**{key: play for key, play in self.plays.items() if key != name})

    def actors(self, site: Site) -> list[Actor]:
        """Return the actors of a schedule."""

        def bound(play: Play) -> Callable[[], object]:
            def act() -> None:
                try:
                    play(site)
                except Killed:  # the node went down, or the schedule is over
                    return

            return act

        return [Actor(name, bound(play)) for name, play in self.plays.items()]


def uses(site: Site, mine: Held, process: Process) -> None:
    """Let a job's own process use its devices for a while."""
    for _ in range(2):
        if process.alive:
            site.kernel.step("computes", f"pid {process.pid}, {' '.join(sorted(mine.devices))}")
            site.check()


def sge_job(
    number: int = 11,
    count: int = 1,
    lingers: bool = False,
    runs: int = 1,
    asks: str = "gpu",
    user: int = USER,
) -> Play:
    """Return a job of Grid Engine: prolog, process, epilog, each run under a shepherd of its own.

    With `lingers` a child of its process outlives it, until `straggler` ends it. `asks` are the
    complexes that it asks for, so many of each.
    """

    def play(site: Site) -> None:
        for _ in range(runs):
            sge_run(site, number, count, lingers, asks, user)

    return play


def sge_run(site: Site, number: int, count: int, lingers: bool, asks: str, user: int) -> None:
    """Play one run of a Grid Engine job."""
    kernel, tree = site.kernel, site.kernel.tree
    kernel.step("execd starts", f"job {number}")
    job = site.spooled(number, count, asks=asks, uid=user)
    tree = kernel.tree
    shepherd = tree.spawn(
        "sge_shepherd", ppid=site.execd.pid, uids=(0, 104, 0, 104), cwd=job.folder
    )
    environ = {"JOB_ID": str(number), "SGE_TASK_ID": "undefined", "QUEUE": "gpu.q"}
    words = ["hook", str(shepherd.pid)]

    def hook(main: Callable[[list[str], dict[str, str], str], int]) -> int | None:
        process = tree.spawn("python3", ppid=shepherd.pid)
        return kernel.program(process, lambda: main(words, environ, CONFIG))

    # Behind a failed prolog no epilog runs here, though execd starts one: the harder case.
    if hook(sge_prolog.main) == 0 and shepherd.alive:
        told = (job.folder / "environment").read_text().splitlines()
        mask = next((line for line in told if line.startswith(f"{MASK}=")), "")
        devices = site.devices_of(mask.partition("=")[2])
        kept = (job.folder / "gpulock").read_text()
        token = kept.partition("\ntoken=")[2].partition("\n")[0]
        locked = frozenset(kept.partition("\ndevices=")[2].partition("\n")[0].split(","))
        if frozenset(name.partition(SHARE)[0] for name in locked) != devices:
            raise Violation(f"job {number} sees {devices}, and has {locked}")
        devices = locked
        about = {"ppid": shepherd.pid, "uids": (user,) * 4, "groups": (65400 + number,)}
        process = tree.spawn("job", **about, fds=site.opened(devices))  # type: ignore[arg-type]
        mine = site.begin(f"job {number}", token, devices, " ".join([asks] * count), user)
        mine.processes, mine.keeper = [process], shepherd
        uses(site, mine, process)
        if lingers:
            mine.processes.append(
                tree.spawn("straggler", **about, fds=site.opened(devices))  # type: ignore[arg-type]
            )
        kernel.step("job ends", f"job {number}")
        tree.end(process)
        if shepherd.alive:
            mine.keeper = None
            hook(sge_epilog.main)
    kernel.step("shepherd ends", f"job {number}")
    tree.end(shepherd)


def slurm_job(
    number: int = 21,
    count: int = 1,
    restart: int = 0,
    first: int = 0,
    lingers: bool = False,
    late: bool = False,
    shard: bool = False,
) -> Play:
    """Return a job of Slurm: Prolog, batch step with TaskProlog, Epilog.

    With `late` it was requeued, and its Epilog is left of a slurmd that was killed. With `shard` it
    asks for a part of a GPU.
    """
    chosen = ",".join(f"GPU-{n:08d}-aaaa" for n in range(first, first + count))
    given = {
        "SLURM_JOB_ID": str(number),
        "SLURM_JOB_UID": str(USER),
        "SLURM_JOB_USER": "alice",
        "SLURM_JOB_RESTART_COUNT": str(restart),
        "SLURMD_NODENAME": "n1",
        "SLURM_CLUSTER_NAME": "lab",
        "SLURM_JOB_GPUS": chosen,
        "SLURM_JOB_STDIN": "/dev/null",
    }

    def play(site: Site) -> None:
        kernel, environ = site.kernel, dict(given)
        kernel.step("slurmd starts", f"job {number}")
        tree = kernel.tree
        control = {"JobID": str(number), "Uid": str(USER), "State": "RUNNING"}
        control |= {"Array": str(number), "Task": "N/A", "Batch": "1"}
        if shard:
            site.give_shards()
            control["Gres"] = "gres:shard:1"
        site.control[str(number)] = {**control, "Restarts": str(restart)}

        def hook(context: str, main: Callable[[dict[str, str], str], int]) -> int | None:
            process = tree.spawn("python3", ppid=site.slurmd.pid)
            if late and context == "epilog_slurmd":
                process.ppid, process.name = INIT, "late epilog"
                environ["SLURM_JOB_RESTART_COUNT"] = str(restart + 1)
            process.environ = {**environ, "SLURM_SCRIPT_CONTEXT": context}
            return kernel.program(process, lambda: main(environ, CONFIG))

        done = hook("prolog_slurmd", slurm_prolog.main) == 0
        token = site.noted_token(f"tasks/n1.{number}")
        if done:
            stepd = tree.spawn("slurmstepd", ppid=site.slurmd.pid)
            stepd.title = f"slurmstepd: [{number}.batch]"
            slurm_task(site, number, environ, stepd, lingers, token, shard)
            kernel.step("step ends", f"job {number}")
            tree.end(stepd)
        site.control[str(number)]["State"] = "PENDING" if late else "COMPLETING"
        site.control[str(number)]["Restarts"] = str(restart + late)
        kernel.now += 1 / TICKS  # slurmd takes longer than a tick of its processes' clock
        hook("epilog_slurmd", slurm_epilog.main)
        kernel.step("slurmd ends", f"job {number}")
        if not late:
            site.control[str(number)]["State"] = "COMPLETED"

    return play


def next_run(job: Play) -> Play:
    """Return the next run of a Slurm job, which begins while the Epilog of the last one runs."""

    def late(site: Site) -> bool:
        return any(one.name == "late epilog" for one in site.kernel.tree.by_pid.values())

    def play(site: Site) -> None:
        site.kernel.wait(lambda: late(site), "a late epilog")
        job(site)

    return play


def slurm_task(
    site: Site,
    number: int,
    environ: dict[str, str],
    stepd: Process,
    lingers: bool,
    token: str,
    shard: bool,
) -> None:
    """Play the task of a Slurm job: its TaskProlog, and what it says the task gets."""
    kernel, tree = site.kernel, site.kernel.tree
    users = {"SLURM_JOB_ID": str(number), "SLURMD_NODENAME": "n1"}
    child = tree.spawn("python3", ppid=stepd.pid, uids=(USER,) * 4)
    chosen = [str(int(uuid.split("-")[1])) for uuid in environ["SLURM_JOB_GPUS"].split(",")]
    own = {**users, MASK: ",".join(chosen), "SLURM_GPUS_ON_NODE": str(len(chosen))}
    allowed = kernel.program(child, lambda: task.main(own, CONFIG)) == 0
    if stepd.alive:
        site.check_waiting(f"job {number}", token)
    if not (allowed and stepd.alive):
        return
    lines = child.output.decode().splitlines()
    mask = next((line for line in lines if line.startswith(f"export {MASK}=")), "")
    devices = site.devices_of(mask.partition("=")[2])
    if shard:
        noted = site.noted_devices(f"tasks/n1.{number}")
        if frozenset(card_bus_id(name) for name in noted) != devices:
            raise Violation(f"job {number} sees {devices}, and its note has {noted}")
        devices = noted
    about = {"ppid": stepd.pid, "uids": (USER,) * 4, "fds": site.opened(devices)}
    process = tree.spawn("task", **about)  # type: ignore[arg-type]
    process.environ = users
    mine = site.begin(f"job {number}", token, devices)
    mine.processes = [process]
    uses(site, mine, process)
    if lingers:
        left = tree.spawn("straggler", **about)  # type: ignore[arg-type]
        left.environ = users
        mine.processes.append(left)
    kernel.step("task ends", f"job {number}")
    tree.end(process)


def run_claim(
    count: int = 1,
    comment: str = RUN,
    stays: bool = False,
    found: bool = True,
    share: bool = False,
    kind: str = "",
    user: int = USER,
) -> Play:
    """Return `gpulock run`, or with another comment `gpulock claim` for a shell that stays.

    Of a command that is not `found` the claim is given back at once. With `share` it asks for
    places on a card, with `kind` for devices of that kind.
    """
    kinds = ((kind, count),) if kind else ()

    def play(site: Site) -> None:
        kernel, tree = site.kernel, site.kernel.tree
        process = tree.spawn("gpulock", uids=(user,) * 4)

        def main() -> int:
            node, name = Node(site.settings, NAME), USERS[user]
            try:
                process_claims.ensure_node_dirs(node)
                owner = process_claims.make_process_owner(node, process.pid, name, comment)
                grant = process_claims.claim_for_process(
                    node, owner, ClaimRequest(count, share=share, kinds=kinds), Deadline(30.0)
                )
            except (Refusal, OSError) as refusal:
                site.log.append(str(refusal))
                return 1
            if not found:
                token = grant.owner.token
                judge = make_liveness_judge(node)
                try:
                    release_locks(node, lambda o: o.token == token, judge, Deadline(10.0), "none")
                except Refusal as refusal:
                    site.log.append(str(refusal))
                return 127
            process.fds = {n: str(path) for n, path in site.opened(site.granted(grant)).items()}
            asked = " ".join([kind or ("share" if share else CARD)] * count)
            devices = site.granted(grant)
            mine = site.begin(f"run {process.pid}", grant.owner.token, devices, asked, user)
            mine.processes = [process]
            uses(site, mine, process)
            if stays:
                kernel.wait(lambda: not mine.processes, "its release")
            kernel.step("command ends", f"run {process.pid}")
            return 0

        kernel.program(process, main)

    return play


def user_release(part: bool = False) -> Play:
    """Return a user who gives back what a process of theirs holds, by gpulockd's hand.

    With `part` it gives back the first device of several, and goes on with the others.
    """

    def held(site: Site) -> list[Held]:
        return [one for one in site.held if one.who.startswith("run") and one.alive()]

    def play(site: Site) -> None:
        kernel = site.kernel
        kernel.wait(lambda: held(site), "a claim")
        if not (found := held(site)):
            return  # it has ended since
        mine = found[0]
        owner = mine.processes[0]
        devices = tuple(sorted(mine.devices))[:1] if part else ()
        owner.fds = {n: path for n, path in owner.fds.items() if part and n != min(owner.fds)}
        mine.devices = mine.devices - set(devices)  # who has it open still is refused
        if not part:
            mine.processes = []
        request = SocketRequest(RELEASE, owner.pid, owner.start, devices=devices)
        process = kernel.tree.spawn("gpulockd")

        def main() -> int:
            try:
                release_for_user(
                    Node(site.settings, NAME),
                    Peer(owner.pid, USER, USER, -1),
                    request,
                    Deadline(10.0),
                )
                site.given_back |= {(mine.token, device) for device in devices}
            except Refusal as refusal:
                site.log.append(str(refusal))
            return 0

        kernel.program(process, main)
        if part:
            mine.processes = []

    return play


def gpulockd(rounds: int = 1) -> Play:
    """Return rounds of gpulockd, which is one process; one that is killed is started again."""

    def play(site: Site) -> None:
        kernel, left = site.kernel, rounds

        def main() -> int:
            nonlocal left
            mine = site.make_rounds()
            while left:
                left -= 1
                losses = -1 if site.losing else site.losses
                if mine.run_round(kernel.now):
                    site.restored(losses)
                kernel.sleep(1.0)
            return 0

        while left:
            if kernel.program(kernel.tree.spawn("gpulockd"), main) is None:
                kernel.sleep(1.0)

    return play


def reap() -> Play:
    """Return `gpulock reap` of an administrator's."""

    def play(site: Site) -> None:
        kernel = site.kernel
        process = kernel.tree.spawn("gpulock")

        def main() -> int:
            node = Node(site.settings, NAME)
            try:
                judge = make_liveness_judge(node)
                report = reconcile_locks(node, judge, Deadline(120.0))
                HistoryWriter(site.log.append).run(node, report, kernel.now)
            except (Refusal, OSError) as refusal:
                site.log.append(str(refusal))
                return 1
            return 0

        losses = -1 if site.losing else site.losses
        if kernel.program(process, main) == 0:
            site.restored(losses)

    return play
