# SPDX-License-Identifier: Apache-2.0
"""Texts for gres.conf and job_submit.lua, where gpulock chooses, and the settings file; pure."""

from __future__ import annotations

from pathlib import Path
from typing import Final

from gpulock.install.slurm.gres import GresEntry

RESTART: Final = (
    "Then restart slurmd on these nodes, and slurmctld. A `scontrol reconfigure` between this",
    "change and the restart ends every slurmd with a fatal error (22.05).",
)


def gres_conf_page(entries: list[GresEntry], gres_conf: Path | None) -> list[str]:
    """Return the lines of gres.conf with which Slurm leaves the choice to gpulock; pure."""
    lines = [
        f"    Name=gpu {f'Type={e.type} ' if e.type else ''}File={e.file} Flags=no_gpu_env"
        for e in entries
    ]
    return [
        f"Into {gres_conf or 'gres.conf'}, since SLURM_DEVICE_SELECTION=gpulock: Flags=no_gpu_env",
        "on every Name=gpu line, or Slurm names other cards to jobs than gpulock locks. Here:",
        "",
        *(lines or ["    Name=gpu File=/dev/nvidia[0-N] Flags=no_gpu_env"]),
        "",
        *RESTART,
    ]


def job_submit_lua_page(names: tuple[str, ...]) -> list[str]:
    """Return the job_submit.lua for SLURM_COUNT=comment; pure."""
    return [
        "Into slurm.conf, since SLURM_COUNT=comment: JobSubmitPlugins=lua, and into job_submit.lua",
        "beside it, at the controller (a user's own comment is replaced, and may not be changed",
        "later: the prolog believes it):",
        "",
        *[f"    {line}".rstrip() for line in LUA.replace("@GRES@", names[0]).splitlines()],
    ]


LUA: Final = """\
function slurm_job_submit(job, partitions, uid)
   if job.tres_per_job or job.tres_per_socket or job.tres_per_task then
      slurm.log_user("ask for GPUs by --gres=@GRES@:N")
      return slurm.ERROR
   end
   job.comment = job.tres_per_node or ""
   return slurm.SUCCESS
end

function slurm_job_modify(job, record, partitions, uid)
   if job.comment and job.comment ~= (record.comment or "") then
      slurm.log_user("the comment is gpulock's: it says how many GPUs a node of the job gets")
      return slurm.ERROR
   end
   if job.tres_per_node then
      job.comment = job.tres_per_node
   end
   return slurm.SUCCESS
end
"""


def slurm_settings_text(text: str | None, wanted: dict[str, str], present: frozenset[str]) -> str:
    """Return the settings file with the keys added that it lacks; a new one says more; pure."""
    added = "".join(f"{name}={value}\n" for name, value in wanted.items() if name not in present)
    if text is None:
        return f"{_NEW}{added}"
    if not added:
        return text
    start = text if text.endswith("\n") or not text else f"{text}\n"
    return f"{start}{_ADDED}{added}"


_ADDED: Final = "# written by gpulock install slurm; a key that stands here already is kept\n"
_NEW: Final = """\
# gpulock's settings on this node, KEY=VALUE; `gpulock config` explains every key.
# written by gpulock install slurm
#SLURM_DEVICE_SELECTION=slurm  slurm, or gpulock (gres.conf: Flags=no_gpu_env) picks the devices
#REQUEUE_EXIT=213              must stand in RequeueExit of slurm.conf
#SLURM_WAIT=15                 seconds to wait for a device that Slurm gave and a lock still holds
#HIDE_UNREQUESTED=yes          an empty mask for jobs that asked for no GPU
"""
