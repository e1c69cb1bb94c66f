# SPDX-License-Identifier: Apache-2.0
"""What `install slurm` tells the administrator to put into the cluster's files."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Final

from gpulock.hooks.frame import SECONDS
from gpulock.install.files import find_share_folder
from gpulock.install.hooks import HookPaths
from gpulock.install.slurm.configured_hooks import PATHS, InForceHook
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

RESTART: Final = (
    "Then restart slurmd on these nodes, and slurmctld. A `scontrol reconfigure` between this",
    "change and the restart ends every slurmd with a fatal error (22.05).",
)


@dataclass(frozen=True)
class SlurmSettingAdvice:
    """A key of slurm.conf that must be, or had better be, otherwise.

    `first` is the command to run before, where slurmctld would end without it.
    """

    key: str
    value: str
    now: str
    why: str
    needed: bool = True
    first: str = ""

    def lines(self) -> list[str]:
        """Return the line for slurm.conf below its reason."""
        line = f"{self.key}={self.value}"
        if self.first:  # whoever pastes all of it stops no slurmctld
            first = "# First, in the folder of the controller's slurm.conf, or slurmctld ends:"
            return [first, f"#   {self.first}", f"# Then {self.why}:", f"#{line}"]
        return [f"# {f'now: {self.now}; ' if self.now else ''}{self.why}", line]


def slurm_setting_advice(conf: SlurmConf, settings: Settings) -> list[SlurmSettingAdvice]:
    """Return what is to be set beside the hooks themselves, as far as it is not in force; pure."""
    found: list[SlurmSettingAdvice] = []

    def want(key: str, why: str, *words: str, value: str = "", needed: bool = True) -> None:
        kept = [word for word in conf.words(key) if word.lower() != "nohold"]
        value = value or add_list_words(kept, *words)
        found.append(SlurmSettingAdvice(key, value, conf.get(key), why, needed))

    if not conf.has("PrologFlags", "Contain", "X11"):
        want("PrologFlags", "a job's extern step proves that it lives", "Contain")
    if not conf.holds_exit("RequeueExit", REQUEUE_EXIT):
        want("RequeueExit", "a job that finds no GPU waits again", str(REQUEUE_EXIT))
    pam = conf.get("UsePAM").lower() in ("1", "yes", "true", "y")
    if settings.isolation == "cgroup" and not pam:
        why = "ISOLATION=cgroup confines a step in its PAM session; see docs/isolation.md"
        want("UsePAM", why, value="1")
    enough = HOOK_SECONDS
    timeout = str(max(SUGGESTED_TIMEOUT, enough))
    for key, seconds in conf.hook_timeouts().items():
        if seconds is None:
            why = "a hook that hangs does not block the node for ever"
            found.append(SlurmSettingAdvice(key, timeout, "", why, needed=False))
        elif seconds < enough:
            why = f"a hook may take {enough} s; one that is killed drains the node"
            found.append(SlurmSettingAdvice(key, timeout, str(seconds), why))
    if not conf.has("LaunchParameters", "use_interactive_step"):
        why = "salloc's shell gets its mask"
        want("LaunchParameters", why, "use_interactive_step", needed=False)
    if not conf.has("SchedulerParameters", "nohold_on_prolog_fail"):
        why = "jobs that meet a broken node are not held"
        want("SchedulerParameters", why, "nohold_on_prolog_fail", needed=False)
    if not conf.has("JobSubmitPlugins", "lua", "job_submit/lua"):
        key, why = "JobSubmitPlugins", "no user's SPANK variables drain a node"
        first = f"cp {SUBMIT_SCRIPT} ."
        words, now = add_list_words(conf.words(key), "lua"), conf.get(key)
        found.append(SlurmSettingAdvice(key, words, now, why, needed=False, first=first))
    return found


def slurm_conf_page(
    conf: SlurmConf, hooks: list[InForceHook], paths: HookPaths, settings: Settings
) -> list[str]:
    """Return what to put into slurm.conf; empty where all of it is in force; pure."""
    found = slurm_setting_advice(conf, settings)
    lines = [f"{hook.key}={PATHS[hook.key](paths)}" for hook in hooks if not hook.values]
    lines += [line for want in found if want.needed for line in want.lines()]
    better = [line for want in found if not want.needed for line in want.lines()]
    page: list[str] = []
    if lines:
        page += ["Into slurm.conf, the same on every node and at the controller:", ""]
        page += [f"    {line}" for line in lines]
    for hook in hooks:
        if hook.values and not hook.ours:
            page += [
                *([""] if page else []),
                f"{hook.key}={hook.text} is the site's: take it out if it hands out GPUs itself,",
                f"else let {PATHS[hook.key](paths)} run beside it:",
                "see docs/slurm.md.",
            ]
    if better:
        page += ["", "Recommended there:"] if page else ["Recommended in slurm.conf:"]
        page += ["", *[f"    {line}" for line in better]]
    if not page:
        return []
    page += ["", *INSTALL_FIRST] if not all(hook.ours for hook in hooks) else []
    page += ["", "Then, at the controller: scontrol reconfigure (no restart is needed)."]
    return [*page, "Without gpulockd run gpulock reap from cron every minute."]


def gres_conf_page(gres_conf: Path | None) -> list[str]:
    """Return what gres.conf must have for Slurm to leave the choice to gpulock; pure."""
    return [
        f"Into {gres_conf or 'gres.conf'}, since SLURM_DEVICE_SELECTION=gpulock: Flags=no_gpu_env",
        "on every Name=gpu line, or Slurm names other cards to jobs than gpulock locks.",
        "",
        *RESTART,
    ]
