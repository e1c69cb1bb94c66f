# SPDX-License-Identifier: Apache-2.0
"""Doctor finds each fault that is planted in a node of Slurm, and says what to do."""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Iterator
from functools import partial

import pytest

from gpulock import __version__
from gpulock.install.doctor import doctor, slurm
from gpulock.install.doctor.check import FAULT, OK, WARNING, Finding, Report, report_lines
from gpulock.install.files import InstallError
from gpulock.install.slurm import site
from gpulock.slurm.gres_map import gres_conf_version
from gpulock.slurm.steps import SlurmSteps
from tests.support.faults import raising, returning
from tests.support.install_site import be_real, harm, keep_copy, put_back, worst_of
from tests.support.scripts import write_script
from tests.support.slurm_node import SlurmNode, make_slurm_node
from tests.support.trees import public_place

pytestmark = pytest.mark.slow

Plant = Callable[[SlurmNode], None]


@pytest.fixture(scope="module")
def installed() -> Iterator[SlurmNode]:
    """Install a node once where tasks may enter, with all that the installer asks for."""
    with public_place() as top, pytest.MonkeyPatch.context() as patch:
        node = make_slurm_node(top / "root", patch)
        node.install()
        node.put_hooks()
        node.put_recommended()
        be_real(node.config)
        patch.setattr(SlurmSteps, "is_slurmd_seen", lambda *_: True)
        patch.setattr("gpulock.install.doctor.doctor.find_execds", list)
        keep_copy(node.root)
        yield node


@pytest.fixture
def node(installed: SlurmNode) -> Iterator[SlurmNode]:
    """Return the installed node, and put it right again after the test."""
    yield installed
    put_back(installed.root)
    version = gres_conf_version(str(installed.conf.with_name("gres.conf")))  # of the copy
    text = re.sub(r"(?m)^gres_version=.*$", f"gres_version={version}", installed.map.read_text())
    installed.map.write_text(text)


def run(node: SlurmNode) -> Report:
    return doctor.run_doctor(node.config)


def found(node: SlurmNode) -> dict[str, Finding]:
    """Return the worst finding of each name."""
    return worst_of(run(node))


def test_a_node_that_is_well_is_one_line(node: SlurmNode, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(doctor, "daemon_checks", lambda _: [])
    name = os.uname().nodename.partition(".")[0]
    assert [*report_lines(run(node), with_all=False)] == [
        f"ok: {name}, 8 GPUs, Slurm 22.05.8, hooks {__version__}, no ConstrainDevices: a job can"
        " open any GPU, ISOLATION=off (22 checks; --all)"
    ]


def test_lines_that_are_not_in_force_are_one_cause_with_where_to_put_them(
    node: SlurmNode, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(doctor, "daemon_checks", lambda _: [])
    for key in ("Prolog", "TaskProlog", "RequeueExit"):
        node.set_in_force(key, "(null)")

    assert [*report_lines(run(node), with_all=False)] == [
        "x installation: slurm.conf lacks Prolog, TaskProlog, RequeueExit=213.",
        "    gpulock install slurm --dry-run prints the lines: put them into slurm.conf, or its"
        " template (Ansible, Puppet), then scontrol reconfigure once",
    ]


def put(key: str, value: str) -> Plant:
    return lambda node: node.put(key, value)


def shell(command: str) -> Plant:
    return lambda node: harm(node.root, command)


def both(*plants: Plant) -> Plant:
    """Plant one after another."""

    def plant(node: SlurmNode) -> None:
        for one in plants:
            one(node)

    return plant


CONSTRAINED = shell("echo ConstrainDevices=Yes >etc-slurm/cgroup.conf")
constrain = both(CONSTRAINED, put("TaskPlugin", "task/affinity,task/cgroup"))


def gpulock_chooses(node: SlurmNode) -> None:
    node.set(SLURM_DEVICE_SELECTION="gpulock")


def reorder(node: SlurmNode, numbers: str = "[2,0-1,3-7]") -> None:
    node.list_gpus(f"Type=(null) Count=8 Index=0 ID=7 File={node.device(numbers)}")
    gres = node.conf.with_name("gres.conf")
    gres.write_text(f"Name=gpu File={node.device(numbers)}\n")
    node.install()


def two_models(node: SlurmNode) -> None:
    """Let gpulock select by positions that Slurm counts, on a node whose last cards are H200."""
    gpulock_chooses(node)
    for path in sorted(node.root.glob("node/proc/driver/nvidia/gpus/*/information"))[4:]:
        path.write_text(re.sub(r"(?m)^Model:.*$", "Model: NVIDIA H200", path.read_text()))


def own_timeouts(node: SlurmNode, prolog: str = "30", epilog: str = "120") -> None:
    """Print what 25.05 and later do where the two differ."""
    text = (node.state / "config").read_text()
    own = f"EpilogTimeout = {epilog}\nPrologTimeout = {prolog}"
    (node.state / "config").write_text(re.sub(r"PrologEpilogTimeout .*", own, text))


def by_spank(*numbers: int, without_task_prolog: bool = True) -> Plant:
    """Let the plugin be installed, with these lines of plugstack.conf."""

    def plant(node: SlurmNode) -> None:
        node.give_plugin()
        node.install()
        node.stack(*[node.spank_lines[number] for number in numbers or (0, 1, 2)])
        if without_task_prolog:
            node.put("TaskProlog", "(null)")

    return plant


def pyxis_alone(node: SlurmNode) -> None:
    harm(node.root, "mkdir d; echo optional /usr/lib/slurm/spank_pyxis.so >d/pyxis.conf")
    node.stack(f"include {node.root}/d/*")


def nothing_listed(node: SlurmNode) -> None:
    node.list_gpus()
    node.map.unlink()
    node.install()


NO_HASH = put("DebugFlags", "Gres,NO_CONF_HASH")
DIFFERENT = "Different Ours=0x8a3b57c5 Slurmctld=0x1c0ffee"


other_gres = shell("echo '# other' >etc-slurm/gres.conf")


def an_older_slurm_conf(node: SlurmNode, *, lacks: str = "(Prolog|TaskProlog|Epilog)") -> None:
    """Leave this node with a file that names no hook, while slurmctld has read another."""
    harm(node.root, f"sed -i -E '/^{lacks}=/d' etc-slurm/slurm.conf")
    node.set_in_force("HASH_VAL", DIFFERENT)


# `installation` has said already that slurmctld goes by no hook
hooks_nowhere = both(an_older_slurm_conf, put("Prolog", "(null)"), put("Epilog", "(null)"))
without_task_prolog = partial(an_older_slurm_conf, lacks="TaskProlog")  # SPANK may run it
no_gres_types = both(nothing_listed, put("GresTypes", "(null)"))
long_epilog = partial(own_timeouts, prolog="120", epilog="65534")
unplugged = both(CONSTRAINED, put("TaskPlugin", "task/affinity"))
FLAG_EACH = shell("sed -i 's/^Name=gpu.*/& Flags=no_gpu_env/I' etc-slurm/gres.conf")


@pytest.mark.parametrize(
    ("plant", "name", "says", "do"),
    [
        (pyxis_alone, "installation", "spank_gpulock.so is not there", "as its first line"),
        (by_spank(1, 0), "installation", "lacks lines of gpulock's", "as its first line"),
        (an_older_slurm_conf, "slurm.conf", "it lacks Prolog and Epilog, so jobs", "reconfigure"),
        (both(an_older_slurm_conf, NO_HASH), "slurm.conf", "it lacks Prolog", "the controller's"),
        (put("Prolog", "/site/prolog"), "installation", "slurm.conf lacks Prolog", "install slurm"),
        (put("RequeueExit", "75"), "installation", "RequeueExit=75,213", "scontrol reconfigure"),
        (no_gres_types, "gres.conf", "no job gets a GPU", "GresTypes=gpu"),
        (own_timeouts, "installation", "PrologTimeout=120", "install slurm"),
        (both(gpulock_chooses, constrain), "ConstrainDevices", "to other cards", "=slurm"),
        (gpulock_chooses, "gres.conf", "Slurm names cards too", "restart slurmd"),
        (reorder, "order of gres.conf", "Slurm's GPU 0 is card 2 to CUDA", "PCI bus"),
        (other_gres, "installation", "slurm-map", "gpulock install slurm"),
        (put("SLURM_VERSION", "21.08.8"), "slurmctld", "this Slurm is 21.08", "uninstall slurm"),
    ],
)
def test_a_planted_fault_is_found(
    node: SlurmNode, plant: Plant, name: str, says: str, do: str
) -> None:
    plant(node)

    check = found(node)[name]

    assert (check.state, says in check.what, do in check.do) == (FAULT, True, True), check


@pytest.mark.parametrize(
    ("plant", "name", "says"),
    [
        (put("PrologEpilogTimeout", "(null)"), "recommended", "does not block the node"),
        (put("SchedulerParameters", "(null)"), "recommended", "are not held"),
        (nothing_listed, "gres.conf", "no job gets a GPU"),
        (without_task_prolog, "slurm.conf", "is not what slurmctld has read"),
        (hooks_nowhere, "slurm.conf", "is not what slurmctld has read"),
        (put("ProctrackType", "proctrack/linuxproc"), "recommended", "leftover processes"),
        (put("PrologFlags", "Contain,RunInJob"), "PrologFlags", "frees no GPU"),
        (put("JobSubmitPlugins", "(null)"), "recommended", "SPANK variables drain a node"),
        (put("LaunchParameters", "(null)"), "recommended", "salloc's shell gets its mask"),
        (unplugged, "ConstrainDevices", "without effect"),
        (long_epilog, "recommended", "does not block the node"),
        (by_spank(without_task_prolog=False), "SPANK", "fails inside containers of pyxis"),
    ],
)
def test_what_is_only_doubtful_is_a_warning(
    node: SlurmNode, plant: Plant, name: str, says: str
) -> None:
    plant(node)

    check = found(node)[name]

    assert (check.state, says in check.what) == (WARNING, True), check
    assert check.do


def masks_by_uuid(node: SlurmNode) -> None:
    reorder(node)
    gres = node.conf.with_name("gres.conf")
    gres.write_text(f"AutoDetect=nvidia\n{gres.read_text().strip()} Flags=env_uuid\n")
    node.install()


def hooks_beside_slurm_conf(node: SlurmNode) -> None:
    """Name them without a folder: slurmd fetches them as files, and each calls ours."""
    targets = {"Prolog": node.paths.slurm_prolog, "TaskProlog": node.paths.slurm_task}
    for key, target in targets.items():
        script = node.conf.with_name(f"{key}.sh")
        write_script(script, f"exec {target}")
        node.put(key, f"{key}.sh")
    node.conf.with_name("epilog.d").mkdir()
    node.conf.with_name("epilog.d").joinpath("50-gpulock").symlink_to(node.paths.slurm_epilog)
    node.put("Epilog", "epilog.d/*")


@pytest.mark.parametrize(
    ("plant", "names"),
    [
        (by_spank(), ("SPANK", "installation")),
        (both(reorder, constrain), ("order of gres.conf", "ConstrainDevices", "installation")),
        (both(reorder, two_models), ("order of gres.conf", "installation")),
        (both(gpulock_chooses, FLAG_EACH), ("gres.conf",)),
        (masks_by_uuid, ("order of gres.conf", "installation")),
        (partial(own_timeouts, prolog="120"), ("installation",)),
        (hooks_beside_slurm_conf, ("installation",)),
        (put("JobSubmitPlugins", "logging,job_submit/lua"), ("recommended",)),
        (put("PrologFlags", "Alloc,X11"), ("installation",)),  # which implies Contain
        (both(put("HASH_VAL", DIFFERENT), NO_HASH), ("slurm.conf",)),
    ],
)
def test_what_is_right_in_another_way_is_well(
    node: SlurmNode, plant: Plant, names: tuple[str, ...]
) -> None:
    plant(node)

    checks = found(node)

    assert {name: checks[name].state for name in names} == dict.fromkeys(names, OK)


def test_a_fatal_message_of_slurmd_is_shown_whole(node: SlurmNode) -> None:
    said = "slurmd: fatal: Hybrid mode is not supported. Mounted cgroups are: 9:x:/\n8:pids:/\n"
    (node.state / "gres").write_text("slurmd: debug: of no use\n" + said)
    slurmd = node.root / "slurm/sbin/slurmd"
    slurmd.write_text(slurmd.read_text().replace("return 0\n\n\nif", "return 1\n\n\nif"))

    check = found(node)["installation"]

    assert said.removeprefix("slurmd: ").replace("\n", " ").strip() in check.what
    assert "of no use" not in check.what


def test_without_slurmctld_it_is_a_warning_and_what_asks_slurmctld_is_silent(
    node: SlurmNode,
) -> None:
    (node.state / "down").touch()

    report = run(node)

    (check,) = [one for one in report.findings if one.name != "gpulockd"]
    assert (check.name, check.state) == ("slurmctld", WARNING)
    assert "Unable to contact slurm controller" in check.what
    assert "scontrol ping" in check.do
    assert {"installation", "recommended", "order of gres.conf"} < {*report.silent}


def test_hooks_that_a_user_cannot_run_are_a_fault(
    node: SlurmNode, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(
        slurm,
        "try_slurm_hooks",
        raising(InstallError("interpreter /root/python3: users may not enter /root")),
    )

    check = found(node)["trial of hooks"]

    assert check.state == FAULT
    assert "users may not enter /root" in check.what


def test_without_slurmd_it_is_a_fault_and_without_slurm_nothing(
    node: SlurmNode, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(site, "find_slurmds", returning(list[object]()))
    assert found(node)["slurmd"].state == FAULT, "it is gone"
    harm(node.root, f"rm -r {node.hooks} {node.map}")
    monkeypatch.setattr(doctor, "find_slurmds", returning(list[object]()))

    report = run(node)

    assert "no scheduler" in report.facts
    assert [one.name for one in report.findings] == ["gpulockd"]
