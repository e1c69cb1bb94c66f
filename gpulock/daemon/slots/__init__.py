# SPDX-License-Identifier: Apache-2.0
"""Keep the scheduler's count of this node's GPUs in step with the GPUs in service.

Warm. Which GPUs are in service is decided in `gpulock.daemon.health`.
"""
