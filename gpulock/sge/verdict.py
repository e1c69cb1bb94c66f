# SPDX-License-Identifier: Apache-2.0
"""Whether a Grid Engine job is alive, from the node alone (docs/facts/grid-engine.md).

Hot, loaded when a lock must be judged. Not the spool directory (it stays for seconds after
the end and vanishes while processes live), not qstat (`qdel -f` drops a job whose process lives).
"""

from gpulock.alloc.liveness import Judge, process_verdict, shepherd_verdict
from gpulock.alloc.process_scan import ProcessScan
from gpulock.node.context import Node
from gpulock.sge.members import SgeMembers
from gpulock.sge.shepherds import why_execd_hidden
from gpulock.store.locks import Lock
from gpulock.store.verdicts import ALIVE, DEAD, SHEPHERD, UNKNOWN, Verdict

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable

    from gpulock.alloc.job_processes import JobProcesses
    from gpulock.alloc.liveness import LivenessRule


def make_sge_rule(node: Node) -> "LivenessRule":
    """Return the rule for locks of Grid Engine; `simulated` ones have no group and no execd."""
    simulated = bool(node.settings.simulation)

    def judge(
        lock: Lock, scan: ProcessScan, job_processes: "Callable[[Lock], JobProcesses]"
    ) -> Verdict:
        record = lock.owner
        assert record is not None
        if runs := shepherd_verdict(lock, scan, "its shepherd"):
            return runs
        if not simulated and (blind := scan.why_blind_about(record.uid) or why_execd_hidden(scan)):
            return Verdict(UNKNOWN, blind)
        job = job_processes(lock)
        for pid, clause in job.pids.items():
            return Verdict(ALIVE, f"its process {pid} runs without a shepherd: it {clause}")
        if job.doubt:
            return Verdict(UNKNOWN, job.doubt)
        return Verdict(DEAD, f"its shepherd is gone, {describe_empty_job(lock, scan)}", SHEPHERD)

    return judge


def describe_empty_job(lock: Lock, scan: ProcessScan) -> str:
    """Return the proof that no process of a job is left, as a clause."""
    record = lock.owner
    assert record is not None
    if not record.add_grp_id:
        return "its session is empty"
    if scan.carriers(record.add_grp_id):
        return f"its group {record.add_grp_id} is another job's now"
    return f"no process carries its group {record.add_grp_id}"


def make_sge_judge(node: Node) -> Judge:
    """Return a judge of the locks that a Grid Engine node may hold."""
    rules: "dict[str, LivenessRule]" = {"sge": make_sge_rule(node), "process": process_verdict}
    return Judge(node.boot_id, ProcessScan(node.proc), rules, {"sge": SgeMembers(node)})
