# SPDX-License-Identifier: Apache-2.0
"""What qconf prints is read as it was meant, long lines broken up with backslashes included."""

from __future__ import annotations

from pathlib import Path

import pytest

from gpulock.install.sge.qconf import (
    Qconf,
    QconfError,
    parse_host_overrides,
    parse_qconf_object,
)

DENIED = """#!/bin/sh
echo 'denied: host "node1" is not an admin host' >&2
exit 1
"""
BROKEN_UP = """\
qname                 gpu.q
prolog                NONE,[glnode1=root@/usr/bin/env -i JOB_ID=$job_id \\
                      /bin/true]
epilog                NONE
"""


def test_a_line_broken_up_with_a_backslash_is_whole_again() -> None:
    pairs = parse_qconf_object(BROKEN_UP)

    assert pairs["prolog"] == "NONE,[glnode1=root@/usr/bin/env -i JOB_ID=$job_id /bin/true]"
    assert pairs["epilog"] == "NONE"


def test_the_value_of_each_host_is_told_from_the_queues() -> None:
    value = "/site/p a,[node1=root@/x y],[@gpus=NONE]"

    assert parse_host_overrides(value) == ("/site/p a", {"node1": "root@/x y", "@gpus": "NONE"})
    assert parse_host_overrides("NONE") == ("NONE", {})


@pytest.mark.parametrize("value", ["NONE,[a=b", "NONE,[ab]", "NONE,[a=b[c]]"])
def test_an_override_that_is_not_understood_is_an_error(value: str) -> None:
    with pytest.raises(QconfError, match="by hand"):
        parse_host_overrides(value)


def test_a_client_that_hangs_or_fails_is_one_line(tmp_path: Path) -> None:
    program = tmp_path / "qconf"
    program.write_text("#!/bin/sh\n[ $1 = -x ] || exec sleep 9\necho no such thing >&2\nexit 1\n")
    program.chmod(0o755)
    qconf = Qconf(tmp_path, {}, seconds=0.3)

    with pytest.raises(QconfError, match=r"did not answer in 0\.3 s"):
        qconf.run("qconf", "-sc")
    with pytest.raises(QconfError, match="qconf -x failed: no such thing"):
        qconf.run("qconf", "-x")
    with pytest.raises(QconfError, match="SGE_BINARIES"):
        qconf.run("qstat")


def test_a_host_that_may_not_ask_is_told_the_call_that_lets_it(tmp_path: Path) -> None:
    program = tmp_path / "qconf"
    program.write_text(DENIED)
    program.chmod(0o755)

    with pytest.raises(QconfError, match="on the master: qconf -ah node1"):
        Qconf(tmp_path, {}).run("qconf", "-sel")
