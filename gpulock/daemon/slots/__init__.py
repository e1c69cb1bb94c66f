# SPDX-License-Identifier: Apache-2.0
"""What the schedulers grant of this node: ids of an RSMAP, the map of Slurm.

Warm. Which GPUs are in service is decided in `gpulock.daemon.health`.
"""
