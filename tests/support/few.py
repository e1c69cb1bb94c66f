# SPDX-License-Identifier: Apache-2.0
"""How much hypothesis tries where a test is one of many."""

from hypothesis import settings

FEW = settings(max_examples=60, deadline=None, derandomize=True, database=None)
