# SPDX-License-Identifier: Apache-2.0
"""What this node is: its settings, devices, processes and mounts.

Hot. Modules here read and never write. Nothing here knows of claims or schedulers.
"""
