# SPDX-License-Identifier: Apache-2.0
"""A machine on which gpulock's package has installed both services, once for a file of tests."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.labs.systemd.gpulock import Node, Package, booted_node, make_package


@pytest.fixture(scope="module")
def package(tmp_path_factory: pytest.TempPathFactory) -> Package:
    """Install what is in the checkout."""
    return make_package(tmp_path_factory.mktemp("gpulock"))


@pytest.fixture(scope="module", params=["hybrid", "unified"])
def installed(request: pytest.FixtureRequest, package: Package) -> Iterator[Node]:
    """Boot a machine with cgroup v1 beside v2, and one with v2 alone."""
    with booted_node(package, str(request.param)) as node:
        node.gpulock("install", "systemd")
        yield node


@pytest.fixture
def node(installed: Node) -> Iterator[Node]:
    """Give a test both services, freshly started; none of its changes stays."""
    yield installed
    installed.prepare_again()
