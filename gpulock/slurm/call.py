# SPDX-License-Identifier: Apache-2.0
"""How slurmd called a hook: whose job it is, on which of the machine's nodes, with which GPUs.

Hot. slurmd makes the whole environment of Prolog and Epilog (docs/facts/slurm.md): the names in it
are not the user's, though some values are, so every one is checked here.
"""

from gpulock.errors import UNKNOWN, Refusal, one_line, shorten
from gpulock.node.context import Node
from gpulock.store.owner import Owner

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

DIGITS = 18  # of a number that is believed
MOST_ENTRIES = 1000  # of all ranges in a list
TITLE = "slurmstepd: ["


class SlurmHookCall:
    """One call of Prolog or Epilog.

    `gpus` is SLURM_JOB_GPUS, None where Slurm does not set it: positions in gres.conf, or UUIDs.
    `batch` says whether there is a batch script, which alone can be requeued; `mps` whether the job
    has a part of a GPU by gres/mps.
    """

    def __init__(self, environ: "Mapping[str, str]") -> None:
        """Take what slurmd says; raise Refusal(UNKNOWN) where it is not all there."""
        self.job = str(int(read_slurm_env(environ, "SLURM_JOB_ID", is_slurm_number)))
        self.who = f"job {self.job}"
        self.uid = int(read_slurm_env(environ, "SLURM_JOB_UID", is_slurm_number))
        restart = read_slurm_env(environ, "SLURM_JOB_RESTART_COUNT", is_slurm_number, "0")
        self.restart = int(restart)
        self.slurmd = read_slurm_env(environ, "SLURMD_NODENAME", is_slurm_name)
        self.cluster = read_slurm_env(environ, "SLURM_CLUSTER_NAME", is_slurm_name)
        self.user = one_line(environ.get("SLURM_JOB_USER", "") or str(self.uid))
        self.partition = one_line(environ.get("SLURM_JOB_PARTITION", ""))
        leader = environ.get("SLURM_HET_JOB_ID", "")
        self.leader = leader if is_slurm_number(leader) else ""
        self.nodes = int(read_slurm_env(environ, "SLURM_JOB_NUM_NODES", is_slurm_number, "1"))
        self.gpus = environ.get("SLURM_JOB_GPUS")
        self.mps = "CUDA_MPS_ACTIVE_THREAD_PERCENTAGE" in environ
        sluid = environ.get("SLURM_JOB_SLUID", "")  # 25.11 and later
        self.sluid = sluid if is_slurm_name(sluid) else ""
        self.conf = environ.get("SLURM_CONF", "")
        # every component of a heterogeneous batch job has STDIN, its leader alone has the script
        self.batch = "SLURM_JOB_STDIN" in environ and self.leader in ("", self.job)

    def positions(self) -> list[str]:
        """Return the entries of SLURM_JOB_GPUS, none where it is not set; raise Refusal."""
        entries = expand_gpu_list(self.gpus) if self.gpus is not None else []
        if len(set(entries)) != len(entries):
            raise Refusal(
                UNKNOWN, f"SLURM_JOB_GPUS is {shorten(self.gpus or '')!r}", "look at slurmd"
            )
        return entries

    def make_owner(self, node: Node) -> Owner:
        """Return the record of the job on this node, all but the devices."""
        return Owner(
            scheduler="slurm",
            cluster=self.cluster,
            node=node.name,
            slurmd=self.slurmd,
            sluid=self.sluid,
            job_id=self.job,
            restart=self.restart,
            het_leader="" if self.leader == self.job else self.leader,
            user=self.user,
            uid=self.uid,
            queue=self.partition,
            boot_id=node.boot_id,
            namespaces=node.proc.namespaces(""),
        )


def read_slurm_env(
    environ: "Mapping[str, str]", key: str, is_right: "Callable[[str], bool]", default: str = ""
) -> str:
    """Return a value of slurmd's; raise Refusal(UNKNOWN) where it is none."""
    text = environ.get(key, default)
    if not is_right(text):
        raise Refusal(UNKNOWN, f"{key} is {shorten(text)!r}", "is this slurmd's Prolog or Epilog?")
    return text


def is_slurm_number(text: str) -> bool:
    """Return whether a text is a whole number of sane length."""
    return text.isascii() and text.isdigit() and len(text) <= DIGITS


def is_slurm_name(text: str) -> bool:
    """Return whether a text is a plain host or cluster name, which may be part of a file's."""
    bare = text.replace("-", "").replace("_", "").replace(".", "")
    return bare.isascii() and bare.isalnum() and not text.startswith(".") and len(text) < 200  # noqa: PLR2004


def expand_gpu_list(text: str) -> list[str]:
    """Return the entries of `0,2-3` or of a list of UUIDs; raise Refusal(UNKNOWN)."""
    entries: list[str] = []
    for entry in text.split(","):
        first, dash, last = entry.partition("-")
        if is_slurm_number(entry):
            entries.append(str(int(entry)))
        elif (
            dash
            and is_slurm_number(first)
            and is_slurm_number(last)
            and 0 <= int(last) - int(first) < MOST_ENTRIES - len(entries)
        ):
            entries += [str(n) for n in range(int(first), int(last) + 1)]
        elif entry.startswith(("GPU-", "MIG-")) and entry.isprintable():
            entries.append(entry)
        else:
            raise Refusal(UNKNOWN, f"SLURM_JOB_GPUS is {shorten(text)!r}", "look at slurmd")
    return entries


def parse_stepd_title(cmdline: bytes) -> tuple[str, str]:
    """Return (job id, step) of `slurmstepd: [12.batch]`, empty ones for another text.

    A step daemon that manages the job's steps says `[12.extern stepmgr]`.
    """
    text = cmdline.partition(b"\0")[0].decode("utf-8", "replace").rstrip()
    if not (text.startswith(TITLE) and text.endswith("]")):
        return "", ""
    job, dot, step = text[len(TITLE) : -1].removesuffix(" stepmgr").partition(".")
    return (job, step) if dot and is_slurm_number(job) else ("", "")
