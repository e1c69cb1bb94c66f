# SPDX-License-Identifier: Apache-2.0
"""Grid Engine: what its shepherd, spool files and hooks look like from the node.

Hot. What writes its configuration is in `install.sge`, what asks qmaster in `daemon.slots`.
"""
