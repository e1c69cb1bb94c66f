# SPDX-License-Identifier: Apache-2.0
"""The installer believes a scheduler's daemon only where root runs it, and what is beside it too.

Any user can start a process named sge_execd or slurmd, with another qconf or scontrol beside it.
"""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from gpulock.daemon.idle.command import why_untrusted_program
from gpulock.install.daemons import SchedulerDaemon, find_scheduler_daemons
from gpulock.install.files import InstallError
from gpulock.install.setting_faults import find_setting_faults
from gpulock.install.sge.site import find_execds, find_sge_binaries
from gpulock.install.slurm import site as slurm_site
from gpulock.install.slurm.site import Slurmd, find_slurm_site, find_slurmds
from gpulock.node.procfs import Proc
from gpulock.node.settings import Settings, parse_settings
from tests.support.trees import FakeProc

ME = os.geteuid()
STRANGER = 1234 if ME != 1234 else 1235
ADMIN = 4321


class Machine:
    """A /proc with daemons in it, and programs beside them."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.fake = FakeProc(root / "proc")
        self.proc = self.fake.root
        self._namespaces("self")

    def program(self, name: str, mode: int = 0o755) -> Path:
        """Put a program there."""
        path = self.root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(b"\x7fELF")
        path.chmod(mode)
        return path

    def run(
        self,
        pid: int,
        name: str,
        program: Path,
        uids: tuple[int, int] = (ME, ME),
        ppid: int = 1,
        words: str = "",
        **env: str,
    ) -> None:
        """Start a process: `uids` are its real and its effective one."""
        entry, every = self.proc / str(pid), (*uids, uids[1], uids[1])
        self.fake.add(pid, name, ppid=ppid, uids=every, cwd=self.root, exe=str(program))
        self._namespaces(str(pid))
        (entry / "cmdline").write_text(words.replace(" ", "\0"))
        (entry / "environ").write_text("\0".join(f"{key}={value}" for key, value in env.items()))

    def _namespaces(self, name: str) -> None:
        (self.proc / name / "ns").mkdir(exist_ok=True)
        for kind in ("uts", "mnt"):
            (self.proc / name / "ns" / kind).symlink_to(f"{kind}:[1]")


@pytest.fixture
def machine(tmp_path: Path) -> Machine:
    return Machine(tmp_path)


@pytest.mark.parametrize("name", ["slurmd", "slurmd-wlm"])
def test_a_daemon_is_found_with_what_it_was_started_with(machine: Machine, name: str) -> None:
    program = machine.program("sge/bin/sge_execd")
    machine.run(7, "sge_execd", program, (ME, ADMIN), SGE_ROOT="/sge", X="a=b")
    conf = "/x/slurm.conf"
    slurmd = machine.program("slurm/sbin/slurmd")
    words = "slurmd -N n1"
    machine.run(8, name, slurmd, words=words, SLURM_CONF=conf, LD_LIBRARY_PATH="/opt/lib")

    [execd] = find_execds(machine.proc)
    [found] = find_slurmds(Settings({"SLURM_CONF": conf}), machine.proc)

    assert find_slurmds(Settings({"SLURM_CONF": "/another"}), machine.proc) == []
    assert (execd.pid, execd.env) == (7, {"SGE_ROOT": "/sge", "X": "a=b"})
    assert (execd.program, execd.folder) == (program, machine.root)
    assert execd.owners == {0, ME, ADMIN}, "its admin user may own what is beside it"
    assert (found.pid, found.program, found.conf, found.node) == (8, slurmd, conf, "n1")
    assert found.libraries == "/opt/lib"


def test_a_strangers_process_of_that_name_is_not_even_read(machine: Machine) -> None:
    machine.run(7, "sge_execd", machine.program("evil/sge_execd"), (STRANGER, STRANGER))
    machine.run(8, "slurmd", machine.program("evil/slurmd"), (STRANGER, STRANGER))
    for pid in (7, 8):
        for name in ("environ", "cmdline"):  # a reader of these hangs where the process hangs
            (machine.proc / str(pid) / name).unlink()
            os.mkfifo(machine.proc / str(pid) / name)

    assert find_execds(machine.proc) == []
    assert find_slurmds(Settings({}), machine.proc) == []


def test_a_name_that_reads_like_roots_uids_is_nobodys(machine: Machine) -> None:
    """Any process may change its name between two looks at it."""
    machine.run(7, "sge_execd", machine.program("sge_execd"), (STRANGER, STRANGER))
    status = machine.proc / "7/status"
    name = f"Name:\tUid:\t{ME}\t{ME}\t{ME}"
    status.write_text(status.read_text().replace("Name:\tsge_execd", name))

    assert Proc(str(machine.proc)).status(7).uids[0] == STRANGER
    assert find_execds(machine.proc) == []
    machine.run(8, "sge_execd", machine.program("own/sge_execd"))
    status.write_bytes(status.read_bytes().replace(b"Uid:", b"\xff\xfe", 1))  # it is no text
    (machine.proc / "7/comm").write_bytes(b"\xff\xfe\n")
    assert [execd.pid for execd in find_execds(machine.proc)] == [8], "and hides no other"


def test_a_setuid_programs_link_of_that_name_is_no_daemon(machine: Machine) -> None:
    """A user's link `sge_execd` to sudo: root's uid, the user's environment and directory."""
    machine.run(7, "sge_execd", machine.program("bin/sudo", 0o4755), SGE_ROOT="/tmp/evil")
    machine.run(8, "sge_execd", machine.program("home/sge_execd", 0o4755), SGE_ROOT="/tmp/evil")
    machine.run(9, "sge_execd", machine.program("bin/other"), SGE_ROOT="/tmp/evil")

    assert find_execds(machine.proc) == []


def test_another_machines_daemon_and_a_fork_of_ours_are_left_out(machine: Machine) -> None:
    slurmd = machine.program("sbin/slurmd")
    machine.run(7, "slurmd", slurmd)
    machine.run(8, "slurmd", slurmd, ppid=7)  # about to become a hook
    machine.run(9, "slurmd", slurmd)
    (machine.proc / "9/ns/mnt").unlink()
    (machine.proc / "9/ns/mnt").symlink_to("mnt:[2]")

    assert [daemon.pid for daemon in find_scheduler_daemons("slurmd", machine.proc)] == [7]


# --- which programs are run ----------------------------------------------------------------------


@pytest.mark.parametrize(
    ("place", "mode"),
    [("", 0), ("a/bin/qconf", 0o775), ("a/bin", 0o757), ("a", 0o777)],
)
def test_a_program_that_others_can_replace_is_not_run(
    machine: Machine, place: str, mode: int
) -> None:
    path, link = machine.program("a/bin/qconf"), machine.root / "link"
    link.symlink_to(path)
    if mode:
        (machine.root / place).chmod(mode)

    said = f"{machine.root / place} is writable by others" if mode else ""
    for one in (path, link):
        assert (why := why_untrusted_program(one, (0, ME))).startswith(said)
        assert bool(why) is bool(mode)
    assert f"{path} belongs to uid {ME}" in why_untrusted_program(path, (STRANGER,))


def test_a_folder_that_a_link_stands_in_counts_as_well(tmp_path: Path) -> None:
    program, links = tmp_path / "safe/program", tmp_path / "open"
    program.parent.mkdir()
    program.touch(0o755)
    links.mkdir(0o755)
    (links / "hop").symlink_to(program.parent)
    (tmp_path / "way").symlink_to("open/hop")
    for path in (links / "hop/program", tmp_path / "way/program"):
        assert why_untrusted_program(path, (0, ME)) == ""
        links.chmod(0o777)
        assert f"{links} is writable by others" in why_untrusted_program(path, (0, ME))
        links.chmod(0o755)


@pytest.mark.root
def test_a_link_of_a_strangers_in_a_sticky_folder_is_not_followed(tmp_path: Path) -> None:
    tmp_path.chmod(0o1777)
    link = tmp_path / "link"
    link.symlink_to("/bin/sh")
    assert why_untrusted_program(link, (0,)) == ""
    os.lchown(link, STRANGER, STRANGER)
    assert f"{link} belongs to uid {STRANGER}" in why_untrusted_program(link, (0,))


@pytest.mark.parametrize("key", ["IDLE_COMMAND", "HEALTH_COMMAND"])
def test_a_program_of_the_callers_is_a_fault_of_the_settings_but_in_a_simulation(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, key: str
) -> None:
    """Root's gpulockd does not run it."""
    program, caller = tmp_path / "program", ME or STRANGER
    program.touch(0o755)
    if not ME:
        os.chown(program, caller, caller)
        monkeypatch.setattr(os, "geteuid", lambda: caller)
    given = f"{key}={program}"
    (fault,) = find_setting_faults(parse_settings(given, ""))
    assert fault == f"{given}: not run, {program} belongs to uid {caller}"
    assert not [*find_setting_faults(parse_settings(f"{given}\nSIMULATION=/marker", ""))]


@pytest.mark.parametrize("opened", ["bin", "bin/qselect"])
def test_no_client_is_run_that_others_could_have_put_there(machine: Machine, opened: str) -> None:
    execd = SchedulerDaemon(7, 1, ME, machine.root / "bin/sge_execd", machine.root, (), {})
    with pytest.raises(InstallError, match=r"no qconf beside .*; set SGE_BINARIES"):
        find_sge_binaries(execd)
    for name in ("qconf", "qstat", "qselect"):
        machine.program(f"bin/{name}")
    assert find_sge_binaries(execd) == str(machine.root / "bin")
    (machine.root / opened).chmod(0o777)

    with pytest.raises(InstallError, match=f"{opened} is writable by others.*set SGE_BINARIES"):
        find_sge_binaries(execd)


@pytest.mark.parametrize("name", ["bin/scontrol", "sbin/slurmd"])
def test_no_program_of_slurms_is_run_that_others_can_write(
    machine: Machine, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    scontrol, slurmd = machine.program("bin/scontrol"), machine.program("sbin/slurmd")
    monkeypatch.setattr(slurm_site, "find_slurmds", lambda _: [Slurmd(7, slurmd)])
    (machine.root / name).chmod(0o777)

    with pytest.raises(InstallError, match=f"{name} is writable by others.*set SLURM_BINARIES"):
        find_slurm_site(Settings({}))

    by_hand = Settings({"SLURM_BINARIES": str(scontrol.parent)})  # an administrator's word
    site = find_slurm_site(by_hand)
    assert (site.binaries, site.slurmd) == (scontrol.parent, Slurmd(7, slurmd))
