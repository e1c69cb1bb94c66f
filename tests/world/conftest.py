# SPDX-License-Identifier: Apache-2.0
"""The site that a module's tests play on."""

from __future__ import annotations

import gc
from collections.abc import Iterator

import pytest

from tests.world.product import inhabited
from tests.world.site import Site


@pytest.fixture(scope="module")
def site(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Site]:
    """Return a node that the product lives in: of two GPUs, or of the kind that is asked for.

    No garbage is collected meanwhile.
    """
    kind: type[Site] = getattr(request, "param", Site)
    made = kind(tmp_path_factory.mktemp("world"))
    gc.collect()
    gc.freeze()
    gc.disable()
    try:
        with inhabited(made):
            yield made
    finally:
        gc.enable()
