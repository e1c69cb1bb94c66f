# SPDX-License-Identifier: Apache-2.0
"""The lines of slurm.conf that gpulock wants, hooks and settings, and what is in force of them.

Prolog and Epilog may be a pattern (glob): all that it names is run, in reverse alphabetical
order, until one fails; what names nothing drains the node. TaskProlog is one program.
"""

from __future__ import annotations

import glob
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from gpulock.hooks.frame import SECONDS
from gpulock.install.files import find_share_folder
from gpulock.install.hooks import HookPaths
from gpulock.install.slurm.slurm_conf import SlurmConf
from gpulock.node.settings import Settings
from gpulock.slurm.note import REQUEUE_EXIT
from gpulock.slurm.scontrol import ANSWER_SECONDS

PROLOG, TASK, EPILOG = "Prolog", "TaskProlog", "Epilog"
PATHS: Final = {PROLOG: "prolog/slurm", TASK: "prolog/slurm-task", EPILOG: "epilog/slurm"}
_SCRIPT: Final = 1 << 16  # bytes of a script that may call ours
_CALLS: Final = 5  # to slurmctld, at most, after a hook's own deadline
_SPARE: Final = 10.0
HOOK_SECONDS: Final = int(SECONDS + _CALLS * ANSWER_SECONDS + _SPARE)  # Slurm must wait so long
_TIMEOUT: Final = str(max(120, HOOK_SECONDS))
SUBMIT_SCRIPT: Final = find_share_folder() / "prolog/job_submit.lua"
INSTALL_FIRST: Final = (
    "First install gpulock on every node of the cluster, those without GPUs too: where the file",
    "of a Prolog is missing, Slurm drains the node at its next job.",
)


@dataclass(frozen=True)
class InForceHook:
    """One of Slurm's hooks: gpulock's `own`, what slurm.conf names, what of that leads to it."""

    key: str
    own: Path
    values: tuple[str, ...]
    ours: tuple[Path, ...]


def find_slurm_hooks(
    conf: SlurmConf, paths: HookPaths, slurm_conf: Path | None = None
) -> list[InForceHook]:
    """Return what is in force for each hook.

    A name without a folder is beside this node's slurm.conf, also where slurmd fetched both from
    slurmctld (23.11 and later).
    """
    hooks: list[InForceHook] = []
    for key, hook in PATHS.items():
        own = paths.folder / hook
        values, programs = tuple(conf.get(key).splitlines()), list[Path]()
        for name in values:
            path = slurm_conf.parent / name if slurm_conf else Path(name)
            is_pattern = key != TASK and any(sign in name for sign in "*?[")
            programs += map(Path, sorted(glob.glob(str(path)))) if is_pattern else [path]
        ours = tuple(path for path in programs if leads_to_hook(path, own))
        hooks.append(InForceHook(key, own, values, ours))
    return hooks


def leads_to_hook(path: Path, target: Path) -> bool:
    """Say whether a program is ours, is a link to ours, or is a script that calls it."""
    try:
        if path == target or path.resolve(strict=True) == target.resolve(strict=True):
            return True
        with path.open("rb") as file:
            text = file.read(_SCRIPT)
    except OSError:
        return False
    if not text.startswith(b"#!"):
        return False
    lines = text.decode("utf-8", "replace").splitlines()
    called = " ".join(line for line in lines if not line.lstrip().startswith("#"))
    return str(target) in called.replace('"', " ").replace("'", " ").split()


@dataclass(frozen=True)
class WantedLine:
    """A key of slurm.conf that must be, or had better be, otherwise; a hook's has no `why`."""

    key: str
    value: str
    now: str = ""
    why: str = ""
    needed: bool = True

    @property
    def is_beside_site(self) -> bool:
        """Whether the site has a hook of its own there."""
        return self.key in PATHS and bool(self.now)


# Lists of slurm.conf: the words of which one is enough (the first is what to add), whether jobs
# need it, and what it is for.
_LISTS: Final = {
    "PrologFlags": (("Contain", "X11"), True, "a job's extern step proves that it lives"),
    "RequeueExit": ((str(REQUEUE_EXIT),), True, "a job that finds no GPU waits again"),
    "LaunchParameters": (("use_interactive_step",), False, "salloc's shell gets its mask"),
    "SchedulerParameters": (
        ("nohold_on_prolog_fail",),
        False,
        "jobs that meet a broken node are not held",
    ),
    "JobSubmitPlugins": (
        ("lua", "job_submit/lua"),
        False,
        f"no user's SPANK variables drain a node (first cp {SUBMIT_SCRIPT} beside the controller's"
        " slurm.conf, or slurmctld ends)",
    ),
}
_TIMEOUTS: Final = ("PrologEpilogTimeout", "PrologTimeout", "EpilogTimeout")  # own ones from 25.05


def wanted_setting_lines(conf: SlurmConf, settings: Settings) -> list[WantedLine]:
    """Return what is to be set beside the hooks themselves, as far as it is not in force; pure."""
    wanted: list[WantedLine] = []
    for key, (words, needed, why) in _LISTS.items():
        if not conf.has(key, *words):
            kept = [word for word in conf.words(key) if word.lower() != "nohold"]
            value = ",".join([*kept, words[0]])
            wanted.append(WantedLine(key, value, conf.get(key), why, needed))
    now = conf.get("UsePAM")
    if settings.isolation == "cgroup" and now.lower() not in ("1", "yes", "true", "y"):
        why = "ISOLATION=cgroup confines a step in its PAM session; see docs/isolation.md"
        wanted.append(WantedLine("UsePAM", "1", now, why))
    for key in [key for key in _TIMEOUTS if conf.get(key)] or _TIMEOUTS[:1]:
        seconds = conf.seconds(key)
        if seconds is None:
            why = "a hook that hangs does not block the node for ever"
            wanted.append(WantedLine(key, _TIMEOUT, "", why, needed=False))
        elif seconds < HOOK_SECONDS:
            why = f"a hook may take {HOOK_SECONDS} s; one that is killed drains the node"
            wanted.append(WantedLine(key, _TIMEOUT, str(seconds), why))
    if (now := conf.get(key := "ProctrackType")) in ("proctrack/linuxproc", "proctrack/pgid"):
        why = "Slurm ends leftover processes, which keep a job's GPUs locked; restart all daemons"
        wanted.append(WantedLine(key, "proctrack/cgroup", now, why, needed=False))
    return wanted


def slurm_conf_page(wanted: Sequence[WantedLine]) -> list[str]:
    """Return what to put into slurm.conf by hand; pure."""
    page = [
        "Into slurm.conf, on every node and at the controller, in place of what sets the same key:",
        "",
    ]
    for one in [one for one in wanted if not one.is_beside_site]:
        now = f"now: {one.now}; " if one.now else ""
        page += [f"    # {now}{one.why}"] if one.why else []
        page.append(f"    {one.key}={one.value}")
    for one in [one for one in wanted if one.is_beside_site]:
        page += [
            "",
            f"{one.key}={one.now} is the site's: take it out if it hands out GPUs itself,",
            f"else let {one.value} run beside it: see docs/slurm.md.",
        ]
    page += ["", *INSTALL_FIRST] if any(not one.why for one in wanted) else []
    return [*page, "", "Then, at the controller: scontrol reconfigure (no restart is needed)."]
