# SPDX-License-Identifier: Apache-2.0
"""SHARE_MPS: where the MPS of a card listens, whose it is, and what a job's place of it is.

Hot, loaded where SHARE_MPS is set and a share is held, or a job brings what one had. gpulockd
starts NVIDIA's MPS for the user of a card. Before that it writes STATE_DIR-mps/CARD/server, and
`mps` beside the record of each claim of a place once it answers (docs/shares.md, MPS). The card is
that user's until gpulockd has removed CARD.
"""

import os
import time

from gpulock.errors import BUSY, Refusal
from gpulock.store import atomic, kv

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Iterable

    from gpulock.deadline import Deadline
    from gpulock.node.context import Node
    from gpulock.node.devices import Device
    from gpulock.node.settings import Settings
    from gpulock.store.owner import Owner

PIPES, LOGS, SERVER = "pipe", "log", "server"  # in the folder of a card
LINE = "gpulock-mps 1"  # begins SERVER
PIPE_DIRECTORY = "CUDA_MPS_PIPE_DIRECTORY"
LOG_DIRECTORY = "CUDA_MPS_LOG_DIRECTORY"  # of the daemon: no job gets it from us
PERCENTAGE = "CUDA_MPS_ACTIVE_THREAD_PERCENTAGE"
MEMORY_LIMIT = "CUDA_MPS_PINNED_DEVICE_MEM_LIMIT"
READY_SECONDS = 20.0  # for which a job waits
PAUSE = 0.02  # seconds between two looks


def mps_folder(mps_dir: str, bus: str) -> str:
    """Return the folder of a card's MPS; a colon in a path would be two binds to a container."""
    return f"{mps_dir}/{bus.replace(':', '-')}"


def mps_variables(places: "list[Device]", settings: "Settings") -> list[tuple[str, str]]:
    """Return what a job needs to use the MPS of the card on which it has these places.

    The limit of memory is left out where nobody knows how much the card has.
    """
    card, count = places[0], len(places)
    percentage = max(1, 100 * count // card.places)
    variables = [
        (PIPE_DIRECTORY, f"{mps_folder(settings.mps_dir, card.bus)}/{PIPES}"),
        (PERCENTAGE, str(percentage)),
    ]
    if card.memory_mib:
        limit = card.memory_mib * count // card.places
        variables.append((MEMORY_LIMIT, f"0={limit}M"))
    return variables


def stale_mps_names(pairs: "Iterable[tuple[str, str]]", mps_dir: str) -> set[str]:
    """Return which of a job's own variables are of an MPS of gpulockd's, and of another grant.

    `qsub -V` or sbatch in a job with a share brings them along. A limit goes with the pipes that it
    came with. An MPS that the user runs elsewhere is the user's business.
    """
    stale: set[str] = set()
    for name, value in pairs:
        if not value.startswith(f"{mps_dir}/"):
            continue
        if name.endswith(PIPE_DIRECTORY):
            twin = name.removesuffix(PIPE_DIRECTORY)  # of a container
            stale |= {name, f"{twin}{PERCENTAGE}", f"{twin}{MEMORY_LIMIT}"}
        elif name.endswith(LOG_DIRECTORY):
            stale.add(name)
    return stale


def wait_for_mps(node: "Node", record: "Owner", deadline: "Deadline") -> None:
    """Return once the MPS of a claim's card answers; raise Refusal where it does not in time."""
    limit, begun = deadline.sooner(READY_SECONDS), time.monotonic()
    while True:
        said = node.store.read_mps(record.token)
        if is_mps_mark_running(node, said):
            return
        if said.startswith("!") or limit.left() <= 0:
            waited = time.monotonic() - begun
            why = said[1:].strip() or f"gpulockd has not started it in {waited:.0f} s"
            raise Refusal(
                BUSY, f"the MPS of this card is not ready: {why}", "gpulock doctor says more"
            )
        time.sleep(min(PAUSE, limit.left()))


def is_mps_mark_running(node: "Node", said: str) -> bool:
    """Return whether the MPS that a claim's mark names is seen to run."""
    try:
        pid, start = map(int, said.split())
        return node.proc.running(pid, start)
    except (OSError, ValueError):
        return False


def read_mps_user(folder: str) -> "tuple[int, str]":
    """Return the user and the boot of a card's MPS; -1 where that cannot be read: nobody's."""
    try:
        pairs = kv.decode_pairs(atomic.read_text(f"{folder}/{SERVER}"), LINE)
        return int(pairs["uid"]), pairs["boot_id"]
    except (OSError, KeyError, ValueError):
        return -1, ""  # where there is none gpulockd makes it first, or removes it this moment


def cards_with_mps(settings: "Settings", boot_id: str, uid: "int | None") -> dict[str, str]:
    """Return the cards, by bus id, whose MPS is still there and not of user `uid`, with the words.

    With None also those of anybody: a job of a whole card waits until MPS has ended.
    """
    try:
        names = os.listdir(settings.mps_dir)
    except OSError:
        return {}  # there is no MPS
    cards: dict[str, str] = {}
    for name in names:
        if name.startswith("."):
            continue
        user, boot = read_mps_user(f"{settings.mps_dir}/{name}")
        if (uid is None or user != uid) and boot in ("", boot_id):
            whose = f"MPS of uid {user}" if user >= 0 else "an MPS"
            cards[name.replace("-", ":", 2)] = f"{whose} ends on it"
    return cards
