# SPDX-License-Identifier: Apache-2.0
"""Son of Grid Engine: what its shepherd, spool files and hooks look like from the node."""
