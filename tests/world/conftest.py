# SPDX-License-Identifier: Apache-2.0
"""The site that a module's tests play on."""

from __future__ import annotations

import gc
from collections.abc import Iterator

import pytest

from tests.world.health import HealthSite
from tests.world.kinds import KindSite
from tests.world.product import inhabited
from tests.world.site import Site


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Site]:
    """Return a node of two GPUs, in which the product's modules live."""
    yield from lived_in(Site(tmp_path_factory.mktemp("world")))


@pytest.fixture(scope="module")
def kind_site(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Site]:
    """Return a node with GPUs of every kind, likewise."""
    yield from lived_in(KindSite(tmp_path_factory.mktemp("world")))


@pytest.fixture(scope="module")
def health_site(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Site]:
    """Return a node whose cards sicken and are tested, likewise."""
    yield from lived_in(HealthSite(tmp_path_factory.mktemp("world")))


def lived_in(made: Site) -> Iterator[Site]:
    """Let the product's modules live in a node; no garbage is collected meanwhile."""
    gc.collect()
    gc.freeze()
    gc.disable()
    try:
        with inhabited(made):
            yield made
    finally:
        gc.enable()
