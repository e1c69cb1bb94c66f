# SPDX-License-Identifier: Apache-2.0
"""What `install slurm` tells the administrator to put into the cluster's files."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

from gpulock.hooks.frame import SECONDS
from gpulock.install.files import find_share_folder
from gpulock.install.slurm.slurm_conf import SlurmConf, add_list_words
from gpulock.node.settings import Settings
from gpulock.slurm.note import REQUEUE_EXIT
from gpulock.slurm.scontrol import ANSWER_SECONDS

SUGGESTED_TIMEOUT: Final = 120
_CALLS: Final = 5  # to slurmctld, at most, after a hook's own deadline
_SPARE: Final = 10.0
HOOK_SECONDS: Final = int(SECONDS + _CALLS * ANSWER_SECONDS + _SPARE)  # Slurm must wait so long
SUBMIT_SCRIPT: Final = find_share_folder() / "prolog/job_submit.lua"

INSTALL_FIRST: Final = (
    "First install gpulock on every node of the cluster, those without GPUs too: where the file",
    "of a Prolog is missing, Slurm drains the node at its next job.",
)


@dataclass(frozen=True)
class WantedLine:
    """A key of slurm.conf that must be, or had better be, otherwise; a hook's has no `why`.

    `is_site`: a hook of the site's stands there. `first` is the command to run before, where
    slurmctld would end without it.
    """

    key: str
    value: str
    now: str = ""
    why: str = ""
    needed: bool = True
    is_site: bool = False
    first: str = ""

    def lines(self) -> list[str]:
        """Return the line for slurm.conf below its reason."""
        line = f"{self.key}={self.value}"
        if self.first:  # whoever pastes all of it stops no slurmctld
            first = "# First, in the folder of the controller's slurm.conf, or slurmctld ends:"
            return [first, f"#   {self.first}", f"# Then {self.why}:", f"#{line}"]
        now = f"now: {self.now}; " if self.now else ""
        return [*([f"# {now}{self.why}"] if self.why else []), line]


def wanted_setting_lines(conf: SlurmConf, settings: Settings) -> list[WantedLine]:
    """Return what is to be set beside the hooks themselves, as far as it is not in force; pure."""
    found: list[WantedLine] = []

    def want(key: str, why: str, *words: str, needed: bool = True, first: str = "") -> None:
        kept = [word for word in conf.words(key) if word.lower() != "nohold"]
        value = add_list_words(kept, *words)
        found.append(WantedLine(key, value, conf.get(key), why, needed, first=first))

    if not conf.has("PrologFlags", "Contain", "X11"):
        want("PrologFlags", "a job's extern step proves that it lives", "Contain")
    if not conf.holds_exit("RequeueExit", REQUEUE_EXIT):
        want("RequeueExit", "a job that finds no GPU waits again", str(REQUEUE_EXIT))
    key, now = "UsePAM", conf.get("UsePAM")
    if settings.isolation == "cgroup" and now.lower() not in ("1", "yes", "true", "y"):
        why = "ISOLATION=cgroup confines a step in its PAM session; see docs/isolation.md"
        found.append(WantedLine(key, "1", now, why))
    timeout = str(max(SUGGESTED_TIMEOUT, HOOK_SECONDS))
    for key, seconds in conf.hook_timeouts().items():
        if seconds is None:
            why = "a hook that hangs does not block the node for ever"
            found.append(WantedLine(key, timeout, "", why, needed=False))
        elif seconds < HOOK_SECONDS:
            why = f"a hook may take {HOOK_SECONDS} s; one that is killed drains the node"
            found.append(WantedLine(key, timeout, str(seconds), why))
    if not conf.has(key := "LaunchParameters", word := "use_interactive_step"):
        want(key, "salloc's shell gets its mask", word, needed=False)
    if not conf.has(key := "SchedulerParameters", word := "nohold_on_prolog_fail"):
        want(key, "jobs that meet a broken node are not held", word, needed=False)
    if not conf.has(key := "JobSubmitPlugins", "lua", "job_submit/lua"):
        why = "no user's SPANK variables drain a node"
        want(key, why, "lua", needed=False, first=f"cp {SUBMIT_SCRIPT} .")
    return found


def slurm_conf_page(wanted: Sequence[WantedLine]) -> list[str]:
    """Return what to put into slurm.conf; empty where all of it is in force; pure."""
    page: list[str] = []
    lines, better = [
        [line for one in wanted if one.needed is n and not one.is_site for line in one.lines()]
        for n in (True, False)
    ]
    if lines:
        page += ["Into slurm.conf, the same on every node and at the controller:", ""]
        page += [f"    {line}" for line in lines]
    for one in [one for one in wanted if one.is_site]:
        page += [
            *([""] if page else []),
            f"{one.key}={one.now} is the site's: take it out if it hands out GPUs itself,",
            f"else let {one.value} run beside it:",
            "see docs/slurm.md.",
        ]
    if better:
        page += ["", "Recommended there:"] if page else ["Recommended in slurm.conf:"]
        page += ["", *[f"    {line}" for line in better]]
    if not page:
        return []
    page += ["", *INSTALL_FIRST] if any(not one.why for one in wanted) else []
    page += ["", "Then, at the controller: scontrol reconfigure (no restart is needed)."]
    return [*page, "Without gpulockd run gpulock reap from cron every minute."]
