# SPDX-License-Identifier: Apache-2.0
"""From nothing to the first job as Debian's packages set Grid Engine up, and back to nothing.

The daemons run since before, the host has no configuration of its own, and their user is
`sgeadmin`: `gpulock install sge` and a restart of execd have to do.
"""

from __future__ import annotations

import contextlib
import re
import subprocess
from collections.abc import Generator, Iterator
from pathlib import Path

import psutil
import pytest

from tests.labs.killed import KILLED_ITEMS, points_of_changes
from tests.labs.sge import config
from tests.labs.sge.bare_node import INSTALL, NODE, ON_NODE, PREFIX, Node, bare_node
from tests.labs.sge.cluster import NODES
from tests.labs.sge.install import PROGRAMS
from tests.labs.sge.lab import GridEngine, without
from tests.labs.sge.machines import PATH
from tests.support.wait import wait_until

pytestmark = pytest.mark.lab
SENSOR_PROGRAM = Path(PREFIX, "current/prolog/sge-sensor")


@pytest.fixture
def node(sge: GridEngine) -> Iterator[Node]:
    """Give a node whose host has no configuration of its own, of a cell that knows no GPU."""
    groups = config.gid_range(sge.lab, NODES.index(NODE) + 1)
    shared = sge.qconf("-sconf", "global").partition("gid_range")[2].split()[0]
    sensor = sge.lab / "site-sensor"
    sensor.write_text("#!/bin/sh\nwhile read -r line; do echo begin; echo end; done\n")
    sensor.chmod(0o755)
    sge.set_conf("load_sensor", str(sensor), host=NODE)
    wait_until(lambda: running(sensor), why="execd to take the host's own configuration")
    sge.qconf("-dconf", NODE)
    sge.set_conf("gid_range", groups)  # no two nodes on one kernel may share one
    wait_until(lambda: not running(sensor), why="execd to have none but the global configuration")
    for name in NODES:
        sge.set_exechost(name, "slots=16")
    known = sge.qconf("-sc")  # also what a test of another file has added
    ours = [line.split()[0] for line in known.splitlines() if line.startswith("gpu")]
    sge.load("-Mc", "complexes", without(known, ours))
    yield from bare_node(sge, "gpu")
    for name in NODES:
        sge.set_exechost(name, config.EXECHOST_VALUES)
    if NODE in sge.qconf("-sconfl").split():
        sge.qconf("-dconf", NODE)
    sge.load("-Aconf", NODE, f"gid_range {groups}\n")
    sge.set_conf("gid_range", shared)


def running(program: Path) -> bool:
    """Return whether some process runs a script."""
    every = psutil.process_iter(["cmdline"], ad_value=())
    return any(str(program) in one.info["cmdline"] for one in every)


def reports_sensor(node: Node) -> bool:
    """Return whether qmaster has values of the load sensor."""
    return "gpu.free" in node.sge.qconf("-se", NODE)


def on_terminal(*words: str) -> list[str]:
    """Return a command line that runs a client on a terminal of its own."""
    line = " ".join(words)
    return ["script", "--quiet", "--return", "--command", line, "/dev/null"]


@contextlib.contextmanager
def client_on_terminal(node: Node, *words: str) -> Generator[None]:
    """Run a client of glalice on a terminal."""
    sge, user = node.sge, node.sge.users["glalice"]
    line = [str(PROGRAMS / words[0]), *ON_NODE[:2], "-l", "gpu=1", "-now", "n", *words[1:]]
    enter = sge.machines[sge.master].enter(uid=user.uid, cwd=str(user.home))
    client = subprocess.Popen(
        [*enter, *on_terminal(*line)],
        env={"PATH": PATH, **sge.login("glalice")},
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
    )
    try:
        yield
    finally:
        sge.qdel("-u", "*")
        client.kill()
        client.wait()


def assert_queue_goes_on(node: Node) -> None:
    """Assert that the queue is open, has no lock, and runs the next job."""
    assert node.sge.queue_states()[NODE] == "", node.sge.qstat("-f", "-explain", "E")
    assert node.run("-l", "gpu=2", script="echo $CUDA_VISIBLE_DEVICES\n")[1] == "0,1\n"
    wait_until(
        lambda: not list(node.sge.path_in(NODE, "/run/gpulock/locks").iterdir()),
        why="all locks to be gone",
    )


def assert_login_ends(node: Node, program: str) -> None:
    """Assert that a login is removed and stops no queue: it asks ever more rarely, and is told."""
    sge, name = node.sge, f"by_{program}"
    with client_on_terminal(node, program, "-N", name):
        wait_until(
            lambda: sge.client("qacct", "-j", name, check=False).returncode == 0,
            why=f"{name} to be in accounting",
        )
        assert "glalice" not in sge.qstat("-u", "*")
        assert_queue_goes_on(node)


def test_no_users_terminal_stops_a_queue(node: Node) -> None:
    """Of twelve such jobs nine left the queue in error, and every job waited.

    A qrsh with a command is in error, for qstat. A login is removed by Grid Engine itself.
    """
    node.install_anew()
    sge = node.sge
    with client_on_terminal(node, "qrsh", "hostname"):
        wait_until(lambda: "Eqw" in sge.qstat("-u", "*"), why="the job to be refused")
        number = sge.qstat("-u", "*").splitlines()[2].split()[0]
        assert "use qrsh -pty no COMMAND" in sge.qstat("-j", number)
        assert_queue_goes_on(node)
    assert_login_ends(node, "qlogin")
    assert_login_ends(node, "qrsh")


def test_a_host_without_a_configuration_gets_one_and_all_of_it_can_be_taken_out(
    node: Node,
) -> None:
    """execd takes a new one when it starts: written anew, the global one undid others' edits."""
    objects, files = node.objects(), node.files()
    assert not re.search(r"(?m)^gpu", objects["-sc"]) and "gpu" not in objects["-se"]

    assert "\ninstalled: sge\n" in node.install_anew()
    assert "nothing to change: sge is in force" in node.install()
    assert "nothing to change: sge --cluster is in force" in node.install_cluster()
    wait_until(lambda: reports_sensor(node), why="the sensor's values to arrive")
    assert node.run("-l", "gpu=2", script="echo $CUDA_VISIBLE_DEVICES\n")[1] == "0,1\n"
    assert re.search(r"(?m)^gpu +gpu +INT +<= +YES +YES ", node.objects()["-sc"])
    assert "gpu=8" in node.objects()["-se"]
    assert node.objects()["-sconf"] == objects["-sconf"]
    whole = node.objects()
    assert f"- {NODE} in @gpulock" in node.uninstall("--dry-run")
    assert f"hosts are in @gpulock: {NODE}" in node.uninstall_cluster()
    assert node.objects() == whole
    said = node.uninstall()

    assert "uninstalled: sge" in said
    assert not reports_sensor(node)
    forget_all(node, said)
    assert (node.objects(), node.files()) == (objects, files)
    assert "nothing to do" in node.uninstall()


def forget_all(node: Node, said: str) -> None:
    """Take out what an uninstallation left in the cluster, as it names it."""
    node.obey(said)
    assert "uninstalled: sge --cluster" in node.uninstall_cluster()
    node.forget_complexes()
    node.sge.load("-Mc", "complexes", without(node.sge.qconf("-sc"), ["gpu"]))


def test_a_manager_installs_the_clusters_part_from_the_masters_machine(node: Node) -> None:
    """No file is left there, and no execd runs: qmaster says which cell it is."""
    sge = node.sge
    master = Node(sge, sge.master)
    assert "installed: sge --cluster" in master.install_cluster()
    assert f"[@gpulock=root@{PREFIX}/current/prolog/drop-env" in node.objects()["-sq gpu.q"]
    assert "uninstalled: sge --cluster" in master.uninstall("--cluster")
    assert not sge.path_in(sge.master, "/var/lib/gpulock/install.lock").exists()


@pytest.mark.timeout(3600)
def test_an_installation_killed_at_a_change_is_taken_out(node: Node) -> None:
    """Grid Engine answers as it did before: the recorded one of the unit tests may differ."""
    node.sge.load("-Aconf", NODE, "xterm /usr/bin/xterm\n")
    node.restart_execd()
    node.install()  # what stays for other hosts is there
    node.uninstall()
    objects, files = node.objects(), node.files()
    for point in points_of_changes(node.install("--dry-run")):
        assert "\ninstalled: sge\n" not in node.python(KILLED_ITEMS, str(point), *INSTALL)
        said = node.uninstall()  # before the map is written, nothing is installed
        assert "uninstalled: sge" in said or "nothing to do: sge" in said, point
        assert (node.objects(), node.files()) == (objects, files), point
    node.sge.qconf("-dconf", NODE)


def test_a_sensor_that_has_not_reported_yet_is_waited_for_by_an_uninstallation(
    node: Node,
) -> None:
    """execd has the new configuration, and qmaster has no value of its sensor."""
    objects, files = node.objects(), node.files()
    node.install()
    node.restart_execd()
    wait_until(lambda: running(SENSOR_PROGRAM), why="execd to start the sensor")

    said = node.uninstall()

    assert "uninstalled: sge" in said
    forget_all(node, said)
    assert (node.objects(), node.files()) == (objects, files)
    assert not running(SENSOR_PROGRAM)
    assert node.run(script="echo ran\n")[1] == "ran\n"
