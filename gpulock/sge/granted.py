# SPDX-License-Identifier: Apache-2.0
"""What Open Cluster Scheduler granted a job on this host; pure.

Hot, loaded only for such a job. qmaster has counted already: scopes (`-scope master -l`), slots and
the kinds of consumables (YES, JOB, HOST) are in the amounts (docs/facts/grid-engine.md, the spooled
job of Open Cluster Scheduler).
"""

from gpulock.errors import INVALID_REQUEST, Refusal
from gpulock.sge.cull import MOST

GLOBAL = "global"  # qmaster's host of what is no single host's

TYPE_CHECKING = False
if TYPE_CHECKING:
    from gpulock.sge.cull import Granted, SgeJob


def count_granted_gpus(job: "SgeJob", complexes: tuple[str, ...], host: str) -> int:
    """Return how many GPUs of `host` were granted; raise Refusal for what makes no sense."""
    ours = granted_gpus(job, complexes)
    names = {name for name, _, _ in job.requests if name in complexes}
    if len(names) > 1:
        asked = ", ".join(sorted(names))
        raise Refusal(INVALID_REQUEST, f"GPUs are asked for twice ({asked})", "use one complex")
    if names and not ours:
        raise Refusal(
            INVALID_REQUEST,
            f"-l {names.pop()} was granted by no host",
            "its amount belongs into complex_values of the hosts, not of queues",
        )
    here = [one for one in ours if is_of_host(one, host)]
    amount = sum([one[1] for one in here])
    if not amount >= 0 or amount > MOST or amount != int(amount):
        raise Refusal(INVALID_REQUEST, f"{amount:g} is no number of GPUs", "ask for whole GPUs")
    return int(amount)


def granted_gpus(job: "SgeJob", complexes: tuple[str, ...]) -> "list[Granted]":
    """Return what was granted of the GPU complexes; raise Refusal where no host has it."""
    ours = [one for one in job.granted or () if one[0] in complexes]
    for name, _, _, host in ours:
        if host == GLOBAL:
            raise Refusal(
                INVALID_REQUEST,
                f"{name} is a value of the host global: no host's GPUs",
                "its amount belongs into complex_values of the hosts",
            )
    return ours


def is_of_host(one: "Granted", host: str) -> bool:
    """Return whether something was granted on a host, as qmaster writes its name."""
    return one[3].lower() == host.lower()


def list_other_hosts(job: "SgeJob", complexes: tuple[str, ...], host: str) -> list[str]:
    """Return the other hosts that grant the job GPUs; raise Refusal."""
    ours = granted_gpus(job, complexes)
    return sorted({one[3] for one in ours if one[1] > 0 and not is_of_host(one, host)})


def granted_devices(
    job: "SgeJob", complexes: tuple[str, ...], host: str, state_dir: str
) -> tuple[str, ...]:
    """Return the devices whose ids this host granted, none where it granted a count alone.

    Raises Refusal.
    """
    here = [one for one in granted_gpus(job, complexes) if is_of_host(one, host) and one[2]]
    if not here:
        return ()
    from gpulock.sge.card_map import resolve_card_ids

    devices = [d for name, _, ids, _ in here for d in resolve_card_ids(state_dir, name, ids)]
    if len(devices) != sum([one[1] for one in here]) or len({*devices}) != len(devices):
        raise Refusal(
            INVALID_REQUEST, "the ids that were granted are not as many as the GPUs", "see qstat -j"
        )
    return tuple(devices)
