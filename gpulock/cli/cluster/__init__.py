# SPDX-License-Identifier: Apache-2.0
"""`gpulock status --cluster`: all nodes, as Prometheus knows them.

Cold. Nothing here looks at this node: that is `cli.status`.
"""
