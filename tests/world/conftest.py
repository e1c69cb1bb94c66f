# SPDX-License-Identifier: Apache-2.0
"""The site that a module's tests play on."""

from __future__ import annotations

import gc
from collections.abc import Iterator

import pytest

from tests.world.product import inhabited
from tests.world.site import Site


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Site]:
    """Return a node of two GPUs, in which the product's modules live."""
    made = Site(tmp_path_factory.mktemp("world"))
    gc.collect()
    gc.freeze()
    gc.disable()
    try:
        with inhabited(made):
            yield made
    finally:
        gc.enable()
