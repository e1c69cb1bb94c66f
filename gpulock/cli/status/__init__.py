# SPDX-License-Identifier: Apache-2.0
"""`gpulock status`: every device of this node, who holds it and what it does.

Cold. All nodes at once: `gpulock.cli.cluster`. One job or device in depth: `gpulock.cli.why`.
"""
