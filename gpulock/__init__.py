# SPDX-License-Identifier: Apache-2.0
"""gpulock: which GPU is whose, on one node."""

__version__ = "0.1.0"  # a literal: importlib.metadata would cost every job 39 ms
