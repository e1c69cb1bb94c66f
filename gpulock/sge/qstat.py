# SPDX-License-Identifier: Apache-2.0
"""Ask qmaster for a job, when execd's own file of it is missing.

Hot, but loaded only then. The real binary is started, not Debian's wrapper script (6 against 50
ms), with an environment of ours, and ended at a deadline: qmaster's host may not answer at all.
"""

import os

from gpulock.deadline import Deadline
from gpulock.errors import UNKNOWN, Refusal
from gpulock.hooks.subprocess import SchedulerProgram
from gpulock.node.settings import Settings
from gpulock.sge.cull import LayoutError, SgeJob

HINT = "is qmaster up?"
# In the head of an answer: the schema of 8.1.9, and of those that kept its names.
OCS_SCHEMA = "/hpc-gridware/clusterscheduler/raw/master/source/dist/util/resources/schemas/qstat/"
SCHEMA = "/darcs/sge/source/dist/util/resources/schemas/qstat/detailed_job_info.xsd"


TYPE_CHECKING = False
if TYPE_CHECKING:
    from gpulock.sge.cull import Granted


def query_qmaster_job(settings: Settings, job: str, task: str) -> SgeJob:
    """Return the job as qmaster knows it; raise Refusal(UNKNOWN) for no or a strange answer."""
    qstat = make_sge_client(settings, "qstat")
    answer = qstat.output(["-j", job, "-xml"], Deadline(settings.sge_qstat_timeout))
    try:
        return parse_qstat_job(answer.decode("utf-8", "replace"), job, task)
    except ValueError as fault:
        raise Refusal(UNKNOWN, f"qstat's answer: {fault}", HINT) from fault


def make_sge_client(settings: Settings, name: str) -> SchedulerProgram:
    """Return one of Grid Engine's programs with its environment; raise Refusal for none."""
    pairs = {
        "PATH": "/usr/bin:/bin",
        "SGE_ROOT": settings.sge_root,
        "SGE_CELL": settings.sge_cell,
        "SGE_QMASTER_PORT": settings.sge_qmaster_port,
        "SGE_EXECD_PORT": settings.sge_execd_port,
    }
    env = {key: value for key, value in pairs.items() if value}
    for folder in client_folders(settings):
        if os.access(f"{folder}/{name}", os.X_OK):
            return SchedulerProgram(f"{folder}/{name}", env, HINT)
    where = settings.sge_binaries or f"{settings.sge_root or 'SGE_ROOT'}/bin"
    raise Refusal(UNKNOWN, f"no {name} in {where}", "set SGE_BINARIES")


def client_folders(settings: Settings) -> list[str]:
    """Return where the clients may be: SGE_BINARIES, else below SGE_ROOT/bin, one a machine."""
    if settings.sge_binaries or not settings.sge_root:
        return [settings.sge_binaries] if settings.sge_binaries else []
    top = f"{settings.sge_root}/bin"
    try:
        return [f"{top}/{name}" for name in sorted(os.listdir(top))]
    except OSError:
        return []


def parse_qstat_job(xml: str, job: str, task: str = "1") -> SgeJob:
    """Return the job in `qstat -j N -xml`; raise ValueError unless the answer is unmistakable.

    qstat writes `<` of a value as an entity, so a tag is always qstat's own. Exactly one job
    with that number must be there, and at most one list of hard requests. A job that asks for
    nothing has no such list: that is believed only of a qstat that calls the list so, else
    LayoutError is raised.
    """
    head = xml.partition("<djob_info>")[0]
    ocs = OCS_SCHEMA in head
    if SCHEMA not in head and not ocs:
        raise LayoutError("a qstat that is not known wrote it")
    if not xml.rstrip().endswith("</detailed_job_info>"):
        raise ValueError("it is cut off")
    number = single_xml_element(xml, "JB_job_number")
    if number != job:
        raise ValueError(f"it is of job {number[:20]}")
    found = SgeJob(
        int(number),
        single_xml_element(xml, "JB_owner"),
        int(single_xml_element(xml, "JB_uid")),
        [],
    )
    for block in list_xml_elements(
        xml, "JRS_hard_resource_list" if ocs else "JB_hard_resource_list"
    ):
        names = list_xml_elements(block, "CE_name")
        values = list_xml_elements(block, "CE_doubleval")
        flags = list_xml_elements(block, "CE_consumable")
        if not len(names) == len(values) == len(flags):
            raise ValueError("a request lacks its value")
        for name, value, flag in zip(names, values, flags):
            found.requests.append((name, float(value), int(flag)))
    if ocs:
        found.granted = parse_qstat_grants(xml, task)
    return found


def parse_qstat_grants(xml: str, task: str) -> "list[Granted]":
    """Return what Open Cluster Scheduler granted one task of a job; raise ValueError."""
    tasks = [piece.partition("</JAT_task_number>") for piece in xml.split("<JAT_task_number>")[1:]]
    ours = [rest for number, _, rest in tasks if number.strip() == task]
    if len(ours) != 1:
        raise ValueError(f"task {task} is there {len(ours)} times")
    found: list[Granted] = []
    for block in list_xml_elements(ours[0], "JAT_granted_resources_list"):
        for one in block.split("<GRU_type>")[1:]:
            name = list_xml_elements(one, "GRU_name")
            if not name:
                continue  # of the binding
            ids = list_xml_elements(one, "RESL_value")
            times = list_xml_elements(one, "RESL_amount")
            if len(name) != 1 or len(ids) != len(times):
                raise ValueError("a grant lacks its amount")
            cards = [(card, int(count)) for card, count in zip(ids, times)]
            amount = float(single_xml_element(one, "GRU_amount"))
            found.append((name[0], amount, cards, single_xml_element(one, "GRU_host")))
    return found


def list_xml_elements(xml: str, tag: str) -> list[str]:
    """Return the text inside every element of one tag (none of ours nests in itself)."""
    found: list[str] = []
    for piece in xml.split(f"<{tag}>")[1:]:
        inner, end, _ = piece.partition(f"</{tag}>")
        if not end:
            raise ValueError(f"<{tag}> has no end")
        found.append(inner.strip())
    return found


def single_xml_element(xml: str, tag: str) -> str:
    """Return the text of the one element of a tag; raise ValueError for none or several."""
    found = set(list_xml_elements(xml, tag))
    if len(found) != 1:
        raise ValueError(f"{len(found)} different {tag}")
    return found.pop()
