# SPDX-License-Identifier: Apache-2.0
"""What Open Cluster Scheduler granted a job: how many GPUs of which host, and their ids (RSMAP).

Hot, loaded only for a job whose file has grants: Son of Grid Engine writes none.
"""

from gpulock.errors import INVALID_REQUEST, UNKNOWN, Refusal
from gpulock.node.settings import Settings
from gpulock.sge.card_map import resolve_card_ids
from gpulock.sge.spool import Spool, count_sge_job_hosts
from gpulock.sge.spooled_job import MOST_GPUS, SgeJob

TYPE_CHECKING = False
if TYPE_CHECKING:
    from gpulock.sge.spooled_job import Granted

GLOBAL = "global"  # qmaster's host of what is no single host's


def count_granted_gpus(job: SgeJob, name: str, host: str) -> int:
    """Return how many GPUs of `host` a complex granted; raise Refusal for what makes no sense."""
    ours = granted_gpus(job, (name,))
    if not ours:
        raise Refusal(
            INVALID_REQUEST,
            f"-l {name} was granted by no host",
            "its amount belongs into complex_values of the hosts, not of queues",
        )
    amount = sum([one[1] for one in ours if is_of_host(one, host)])
    if not amount >= 0 or amount > MOST_GPUS or amount != int(amount):
        raise Refusal(INVALID_REQUEST, f"{amount:g} is no number of GPUs", "ask for whole GPUs")
    return int(amount)


def granted_gpus(job: SgeJob, complexes: tuple[str, ...]) -> "list[Granted]":
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


def list_other_hosts(job: SgeJob, complexes: tuple[str, ...], host: str) -> list[str]:
    """Return the other hosts that grant the job GPUs; raise Refusal."""
    ours = granted_gpus(job, complexes)
    return sorted({one[3] for one in ours if one[1] > 0 and not is_of_host(one, host)})


def wanted_devices(spool: Spool, settings: Settings, job: SgeJob) -> tuple[str, ...]:
    """Return the devices whose ids this host granted (RSMAP), none where it granted a count alone.

    Raises Refusal.
    """
    host = spool.need("host")
    here = [
        one for one in granted_gpus(job, settings.sge_complexes) if is_of_host(one, host) and one[2]
    ]
    if not here:
        return ()
    devices: list[str] = []
    for name, _, ids, _ in here:
        devices += resolve_card_ids(settings.state_dir, name, [card for card, _ in ids])
    times = sum([count for one in here for _, count in one[2]])
    if not len({*devices}) == times == sum([one[1] for one in here]):
        why = "the ids that were granted are not one for each GPU: a GPU has one job"
        raise Refusal(INVALID_REQUEST, why, "name each id of a complex once in complex_values")
    return tuple(devices)


def check_host_name(spool: Spool, settings: Settings, job: SgeJob) -> None:
    """Raise Refusal where a job of one host was granted GPUs under another name than the host's."""
    host = spool.need("host")
    there = list_other_hosts(job, settings.sge_complexes, host)
    if there and (spool.need("pe") == "none" or count_sge_job_hosts(spool) == 1):
        raise Refusal(
            UNKNOWN,
            f"GPUs were granted on {' '.join(there)}, but the job's only host is {host}",
            "give this host one name (see host_aliases)",
        )
