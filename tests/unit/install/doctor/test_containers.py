# SPDX-License-Identifier: Apache-2.0
"""What `gpulock doctor` says of containers on a node."""

from __future__ import annotations

import grp
import os
from collections.abc import Callable
from pathlib import Path

import pytest

from gpulock.install.doctor import containers
from gpulock.install.doctor.check import FAULT, OK, WARNING, Finding, run_checks
from gpulock.install.doctor.containers import container_checks
from gpulock.install.doctor.doctor import DoctorOptions, run_doctor
from gpulock.node.settings import Settings
from gpulock.node.settings_file import read_settings
from gpulock.simulate.node import write_simulated_node

VERSION = "570.172.08"
BANNER = f"NVRM version: NVIDIA UNIX Open Kernel Module for x86_64  {VERSION}  Release Build\n"
RULES = "user bind control = yes\nenable overlay = yes\nmount dev = yes\n# always use nv = yes\n"


class Node:
    """A node that is not simulated, whose files are all below one folder."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.files = write_simulated_node(root / "node", "workstation")
        keys = read_settings(str(self.files.config)).__dict__
        names = ("driver_root", "sys_root", "dev_root", "lock_dir", "state_dir")
        self.keys = {name.upper(): str(keys[name]) for name in names}
        (Path(self.keys["DRIVER_ROOT"]) / "version").write_text(BANNER)
        self.set = root / "sets" / VERSION

    def with_set(self) -> None:
        """Put a whole driver set where every user can read it."""
        for part in ("bin", "lib"):
            (self.set / part).mkdir(parents=True)
        (self.set / f"lib/libcuda.so.{VERSION}").touch()
        (self.set / "lib/libcuda.so.1").symlink_to(f"libcuda.so.{VERSION}")
        (self.set / "bin/nvidia-smi").touch()
        for path in (self.set.parent, *self.set.parent.rglob("*")):
            path.chmod(0o755)
        self.keys["DRIVER_DIR"] = str(self.root / "sets")

    def write(self, name: str, text: str) -> Path:
        """Write a file below the node's root."""
        path = self.root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
        return path

    def checks(self) -> list[Finding]:
        """Return what doctor finds, OK for what it does not."""
        report = run_checks(container_checks(Settings(dict(self.keys)), self.root))
        return [*report.findings, *(Finding(name, OK, "") for name in report.passed)]

    def of(self, name: str) -> Finding:
        """Return the only check of a name."""
        (found,) = [check for check in self.checks() if check.name == name]
        return found


@pytest.fixture
def node(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Node:
    def only_here(folder: Path) -> list[Finding]:
        # pytest's own folders above are closed to other users
        return [c for c in original(folder) if str(tmp_path) + "/" in c.what]

    original = containers.check_folders_readable
    monkeypatch.setattr(containers, "check_folders_readable", only_here)
    return Node(tmp_path)


def test_a_node_without_containers_has_nothing_to_mend(node: Node) -> None:
    assert {check.state for check in node.checks()} == {OK}


def test_a_whole_driver_set_is_well(node: Node) -> None:
    node.with_set()
    assert node.of("driver set").state == OK


def no_set(node: Node) -> None:
    node.set.rename(node.set.with_name("535.5.1"))


def no_libcuda(node: Node) -> None:
    (node.set / "lib/libcuda.so.1").unlink()


def another_libcuda(node: Node) -> None:
    (node.set / "lib/libcuda.so.535.5.1").touch()
    (node.set / "lib/libcuda.so.1").unlink()
    (node.set / "lib/libcuda.so.1").symlink_to("libcuda.so.535.5.1")


def open_folder(node: Node) -> None:
    (node.set / "lib").chmod(0o777)


def hidden_library(node: Node) -> None:
    (node.set / "lib/libcuda.so.1").resolve().chmod(0o600)


def open_library(node: Node) -> None:
    (node.set / "lib/libcuda.so.1").resolve().chmod(0o646)


def library_of_a_group(node: Node) -> None:
    path = (node.set / "lib/libcuda.so.1").resolve()
    os.chown(path, -1, os.getegid() or 7)
    path.chmod(0o664)


def two_binds(node: Node) -> None:
    node.keys["DRIVER_DIR"] += ",/evil"


@pytest.mark.parametrize(
    ("plant", "says", "do"),
    [
        (no_set, "no driver set for this node's driver 570.172.08", "put the driver's files"),
        (no_libcuda, "libcuda.so.1 is missing", "copy the libraries of driver 570.172.08"),
        (another_libcuda, "is of driver 535.5.1", "copy that of 570.172.08"),
        (open_folder, "anybody may change", "chmod -R go-w"),
        (hidden_library, "libcuda.so.1 (mode 0600), nor 1 more", "chmod -R o+rX"),
        (open_library, "anybody may change", "chmod -R go-w"),
        (library_of_a_group, "group ", "chmod -R go-w"),
        (two_binds, "cannot be bound", "plain path"),
    ],
)
def test_a_fault_of_the_driver_set_is_found(
    node: Node, plant: Callable[[Node], None], says: str, do: str
) -> None:
    node.with_set()
    plant(node)

    check = node.of("driver set")
    assert (check.state, says in check.what, do in check.do) == (FAULT, True, True)


@pytest.mark.parametrize(
    ("place", "mode", "named"),
    [(".", 0o750, VERSION), ("lib", 0o751, "lib"), ("bin", 0o750, "bin"), ("..", 0o700, "sets")],
)
def test_a_driver_set_that_users_cannot_read_is_a_fault(
    node: Node, place: str, mode: int, named: str
) -> None:
    node.with_set()
    (node.set / place).chmod(mode)

    check = node.of("driver set")
    assert check.state == FAULT
    assert f"users cannot read {(node.set / place).resolve()}" in check.what
    assert check.do.endswith(named)


def test_a_set_without_nvidia_smi_still_computes(node: Node) -> None:
    node.with_set()
    (node.set / "bin/nvidia-smi").unlink()
    assert node.of("driver set").state == WARNING


@pytest.mark.parametrize(
    "place", ["etc/apptainer/apptainer.conf", "usr/local/etc/apptainer/apptainer.conf"]
)
def test_apptainers_own_rules_forbid_nothing(node: Node, place: str) -> None:
    node.with_set()
    node.write(place, RULES)
    assert node.of("apptainer.conf").state == OK


@pytest.mark.parametrize(
    ("rules", "state", "says"),
    [
        ("user bind control = no\n", FAULT, "are not bound onto /nvbin"),
        ("enable overlay = no\nenable underlay = no\n", FAULT, "does not start"),
        ("mount dev = minimal\n", WARNING, "without --nv a container has no GPU"),
        ("use nvidia-container-cli = yes\n", WARNING, "shows all GPUs"),
    ],
)
@pytest.mark.parametrize("program", ["apptainer", "singularity"])
def test_a_rule_that_keeps_a_container_from_its_gpus_is_told(
    node: Node, program: str, rules: str, state: str, says: str
) -> None:
    node.with_set()
    path = node.write(f"etc/{program}/{program}.conf", RULES + rules)

    check = node.of(f"{program}.conf")
    assert (check.state, says in check.what) == (state, True)
    assert str(path) in check.do


@pytest.mark.parametrize(
    "rules",
    [
        "#user bind control = no\n",
        "enable overlay = no\nenable underlay = yes\n",
        "mount dev = minimal\nalways use nv = yes\n",
    ],
)
def test_a_rule_that_does_no_harm_is_not_told(node: Node, rules: str) -> None:
    node.with_set()
    node.write("etc/apptainer/apptainer.conf", RULES + rules)
    assert node.of("apptainer.conf").state == OK


def test_binds_are_nobodys_matter_where_none_are_given(node: Node) -> None:
    node.write("etc/apptainer/apptainer.conf", RULES + "user bind control = no\n")
    assert node.of("apptainer.conf").state == OK


def spec_in(node: Node, folder: Path) -> None:
    from gpulock.daemon.reconcile import cdi
    from gpulock.node.context import Node as Seen

    node.keys["CDI_DIR"] = str(folder)
    settings = Settings(dict(node.keys))
    cdi.update_cdi_spec(
        settings, cdi.format_cdi_spec(cdi.build_cdi_spec(settings, Seen(settings).devices()))
    )


@pytest.fixture
def folder(node: Node, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return a folder in which podman looks."""
    path = node.root / "run/cdi"
    monkeypatch.setattr(containers, "CDI_FOLDERS", (str(path),))
    return path


def test_a_spec_of_this_node_is_well(node: Node, folder: Path) -> None:
    spec_in(node, folder)
    assert node.of("CDI").state == OK


def test_a_spec_that_is_not_there_or_of_another_day_is_to_be_written(
    node: Node, folder: Path
) -> None:
    node.keys["CDI_DIR"] = str(folder)
    assert (node.of("CDI").state, "is missing" in node.of("CDI").what) == (WARNING, True)
    spec_in(node, folder)
    (Path(node.keys["DEV_ROOT"]) / "nvidia-uvm").unlink()

    check = node.of("CDI")
    assert (check.state, "is not as the node is" in check.what) == (WARNING, True)
    assert "gpulock cdi --write" in check.do


def test_a_second_spec_of_our_kind_is_a_fault(node: Node, folder: Path) -> None:
    spec_in(node, folder)
    (folder / "old.json").write_text('{"kind": "gpulock.io/gpu"}')
    (folder / "nvidia.json").write_text('{"kind": "nvidia.com/gpu"}')

    told = [(c.state, c.do) for c in node.checks() if c.name == "CDI" and c.state != OK]
    assert told == [(FAULT, f"remove {folder}/old.json")]


def test_a_folder_in_which_nobody_looks_is_told(node: Node) -> None:
    spec_in(node, node.root / "elsewhere")
    assert [c.state for c in node.checks() if c.name == "CDI"] == [WARNING]


def test_without_its_driver_set_a_node_has_no_spec(node: Node, folder: Path) -> None:
    node.keys |= {"CDI_DIR": str(folder), "DRIVER_DIR": str(node.root)}
    assert node.of("CDI").state == FAULT


@pytest.mark.parametrize(("mask", "state"), [("index", WARNING), ("uuid", OK)])
def test_a_mask_of_indexes_means_nothing_in_enroot(node: Node, mask: str, state: str) -> None:
    node.write("usr/bin/enroot", "")
    node.keys["VISIBLE_DEVICES"] = mask
    assert node.of("enroot").state == state


def test_enroot_without_the_hook_has_no_mask(node: Node) -> None:
    node.write("usr/bin/enroot", "")
    node.keys["VISIBLE_DEVICES"] = "uuid"
    node.write("etc/enroot/hooks.d/98-nvidia.sh", "")
    assert [c.state for c in node.checks() if "no mask of the job" in c.what] == [WARNING]
    node.write("etc/enroot/hooks.d/97-gpulock.sh", "")
    assert node.of("enroot").state == OK


def test_podman_without_the_hook_is_told_where_nvidias_gives_every_gpu(node: Node) -> None:
    node.write("usr/bin/podman", "")
    assert node.of("podman").state == OK
    node.write("etc/cdi/nvidia.yaml", "")
    check = node.of("podman")
    assert (check.state, "every GPU" in check.what) == (WARNING, True)
    assert "--podman" in check.do
    node.write("usr/share/containers/oci/hooks.d/97-gpulock.json", "")
    assert node.of("podman").state == OK


def daemon_socket(node: Node, name: str, mode: int) -> Path:
    """Put a socket of a container daemon there; return it."""
    path = node.write(name, "")
    path.chmod(mode)
    for folder in path.parents:
        if folder != node.root and node.root in folder.parents:
            folder.chmod(0o755)
    return path


@pytest.fixture
def group(monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    """Let the sockets of this node belong to a group with these members."""

    def made(*members: str) -> None:
        found = grp.struct_group(("docker", "x", 998, list(members)))
        monkeypatch.setattr(grp, "getgrgid", {os.getgid(): found}.__getitem__)

    return made


@pytest.mark.parametrize(
    ("name", "daemon"),
    [("run/docker.sock", "Docker"), ("run/podman/podman.sock", "podman's service")],
)
def test_users_who_may_start_containers_of_a_daemon_are_named(
    node: Node, group: Callable[..., None], name: str, daemon: str
) -> None:
    """Such a container is root's and of no job: no mask, ISOLATION or end of a job reaches it."""
    group("alice", "bob")
    daemon_socket(node, name, 0o660)
    check = node.of("container daemons")
    assert check.state == WARNING
    assert f"alice, bob may start containers of {daemon}" in check.what
    assert "no mask" in check.what
    assert "out of group docker" in check.do


def test_a_socket_that_anybody_may_use_is_told(node: Node, group: Callable[..., None]) -> None:
    group()
    daemon_socket(node, "run/docker.sock", 0o666)
    check = node.of("container daemons")
    assert (check.state, "any user may start" in check.what) == (WARNING, True)


@pytest.mark.parametrize(("mode", "members"), [(0o660, ("root",)), (0o600, ("alice",))])
def test_a_daemon_for_root_alone_is_no_way_round(
    node: Node, group: Callable[..., None], mode: int, members: tuple[str, ...]
) -> None:
    group(*members)
    daemon_socket(node, "run/docker.sock", mode)
    assert node.of("container daemons").state == OK


def test_a_socket_in_a_closed_folder_is_roots(node: Node, group: Callable[..., None]) -> None:
    """/run/podman has mode 0700."""
    group("alice")
    daemon_socket(node, "run/podman/podman.sock", 0o666).parent.chmod(0o700)
    assert node.of("container daemons").state == OK


def test_docker_that_gives_every_gpu_unasked_is_told(node: Node) -> None:
    node.write("etc/docker/daemon.json", '{"default-runtime": "nvidia"}')
    check = node.of("Docker")
    assert (check.state, "whose image says all" in check.what) == (WARNING, True)
    assert "default-runtime" in check.do
    node.write("etc/docker/daemon.json", '{"runtimes": {"nvidia": {"path": "x"}}}')
    assert node.of("Docker").state == OK


def dockerd_of(node: Node, release: str) -> None:
    """Put a daemon of Docker there that says its release."""
    program = node.write("usr/bin/dockerd", f"#!/bin/sh\necho Docker version {release}, build 1\n")
    program.chmod(0o755)


@pytest.mark.parametrize(
    ("release", "conf", "state"),
    [
        ("26.1.5+dfsg1", "", WARNING),
        ("26.1.5+dfsg1", '{"features": {"cdi": true}}', OK),
        ("28.1.1", '{"features": {}}', WARNING),
        ("28.2.0", "", OK),
        ("29.0.1", '{"features": {"cdi": false}}', WARNING),
        ("nobody knows", "", WARNING),
        ("28.2.0", "{", WARNING),
    ],
)
def test_docker_that_takes_no_names_of_cdi_is_told(
    node: Node, release: str, conf: str, state: str
) -> None:
    dockerd_of(node, release)
    if conf:
        node.write("etc/docker/daemon.json", conf)
    assert node.of("Docker").state in (OK, WARNING)
    node.keys["CDI_DIR"] = "/var/run/cdi"
    check = node.of("Docker")
    assert check.state == state
    if state == WARNING and conf != "{":
        assert ("$GPULOCK_CDI" in check.what, "features" in check.do) == (True, True)


def test_docker_that_runs_with_older_settings_is_told(node: Node) -> None:
    dockerd_of(node, "26.1.5")
    node.keys["CDI_DIR"] = "/run/cdi"
    conf = node.write("etc/docker/daemon.json", '{"features": {"cdi": true}}')
    started = node.write("run/docker.pid", "1\n")
    os.utime(conf, (1000, 1000))
    os.utime(started, (2000, 2000))
    assert node.of("Docker").state == OK
    os.utime(started, (500, 500))
    check = node.of("Docker")
    assert (check.state, "systemctl restart docker" in check.do) == (WARNING, True)


def test_doctor_says_it_of_a_simulated_node_too_but_looks_nowhere_else(tmp_path: Path) -> None:
    files = write_simulated_node(tmp_path / "node", "dgx1")
    config = Path(files.config)
    config.write_text(config.read_text() + f"DRIVER_DIR={tmp_path}/sets\n")

    report = run_doctor(DoctorOptions(config))
    assert ("driver set" in report.failed, "CDI" in report.passed) == (True, True)
    assert not {"apptainer.conf", "enroot", "container daemons"} & {*report.passed, *report.failed}
