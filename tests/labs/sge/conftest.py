# SPDX-License-Identifier: Apache-2.0
"""What of Grid Engine's tests is not for the one that is there."""

from __future__ import annotations

import pytest

from tests.labs.sge.install import INSTALLATION

OF_OCS = "test_rsmap.py"  # no other Grid Engine has complexes of that type


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Leave out the tests of another Grid Engine, also of files that were named."""
    if not INSTALLATION.is_ocs:
        left_out = [one for one in items if one.path.name == OF_OCS]
        items[:] = [one for one in items if one not in left_out]
        config.hook.pytest_deselected(items=left_out)
