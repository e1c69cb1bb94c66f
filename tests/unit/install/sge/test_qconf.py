# SPDX-License-Identifier: Apache-2.0
"""What qconf prints is read as it was meant, and a line of ours is told from the site's."""

from __future__ import annotations

from pathlib import Path

import pytest

from gpulock.install.files import InstallError
from gpulock.install.sge.qconf import Qconf, parse_host_overrides
from gpulock.install.sge.queue_hooks import (
    HOOKS,
    hook_line,
    is_hook_line,
    join_hooks,
    site_command,
)
from gpulock.install.sge.site import choose_sge_host
from tests.support.scripts import write_script

CURRENT = Path("/usr/lib/gpulock/hooks/current")
OURS = hook_line(CURRENT, "prolog")


def test_the_value_of_each_host_is_told_from_the_queues() -> None:
    value = "/site/p a,[node1=root@/x y],[@gpus=NONE]"

    assert parse_host_overrides(value) == ("/site/p a", {"node1": "root@/x y", "@gpus": "NONE"})
    assert parse_host_overrides("NONE") == ("NONE", {})
    for wrong in ("NONE,[a=b", "NONE,[ab]", "NONE,[a=b[c]]"):
        with pytest.raises(InstallError, match="by hand"):
            parse_host_overrides(wrong)


def test_a_client_that_hangs_or_fails_is_one_line(tmp_path: Path) -> None:
    write_script(tmp_path / "qconf", "[ $1 != -sc ] || exec sleep 9\necho no such >&2\nexit 1")
    qconf = Qconf("", "", str(tmp_path), seconds=0.3)

    for words, says in (
        (("qconf", "-sc"), r"qconf -sc gave no answer within 0\.3 s; is qmaster up\?"),
        (("qconf", "-x"), "qconf -x failed: no such"),
        (("qstat",), "SGE_BINARIES"),
    ):
        with pytest.raises(InstallError, match=says):
            qconf.run(*words)


@pytest.mark.parametrize("hook", HOOKS)
@pytest.mark.parametrize(
    "site", ["", "/site/hook", "sgeadmin@/site/hook $queue -x", "root@hook a=b"]
)
def test_our_own_line_is_known_again_with_the_sites_command(hook: str, site: str) -> None:
    line = join_hooks(CURRENT, hook, site)

    assert (is_hook_line(CURRENT, hook, line), site_command(line)) == (True, site)
    assert line.startswith(f"root@{CURRENT}/prolog/drop-env {CURRENT}/{hook}/sge ")
    assert line.endswith(f" $job_owner {site}" if site else " $queue")


@pytest.mark.parametrize(
    ("line", "hook"),
    [
        *((f"{OURS} {more}", "prolog") for more in ("mine", "$job_owner", "other /x")),
        (OURS, "epilog"),
        (OURS.replace("drop-env", "other"), "prolog"),
        ("root@/site/prolog/sge", "prolog"),
        ("", "prolog"),
    ],
)
def test_a_line_of_the_sites_or_one_that_somebody_edited_is_not_taken_apart(
    line: str, hook: str
) -> None:
    assert not is_hook_line(CURRENT, hook, line)


@pytest.mark.parametrize("site", ["/a,b", "/a [x]", '/a "x y"', "/a\\b", "/odd=path/hook"])
def test_a_command_that_cannot_be_carried_over_is_refused(site: str) -> None:
    with pytest.raises(InstallError, match="cannot be kept"):
        join_hooks(CURRENT, "prolog", site)


@pytest.mark.parametrize(
    ("hosts", "spool", "host"),
    [
        (["node1", "node2"], "", "node1"),
        (["node1.example.org", "node2"], "", "node1.example.org"),
        (["Node1"], "", "Node1"),
        (["node1", "gpu-7"], "gpu-7", "gpu-7"),
        (["GPU-7.a", "node1"], "gpu-7", "GPU-7.a"),
        (["node1.a", "node1.b"], "node1", ""),
        (["node1", "node1.a"], "node1", "node1"),
        (["node2"], "spool", ""),
    ],
)
def test_a_machine_is_one_host_by_its_spool_or_its_name(
    hosts: list[str], spool: str, host: str
) -> None:
    assert choose_sge_host(hosts, spool, "node1") == host
    assert choose_sge_host(["node1.a", "node1.b"], "node1", "node1.b") == "node1.b"
