# SPDX-License-Identifier: Apache-2.0
"""The process that speaks NVML, and the supervisor that starts, restarts and never waits for it.

The supervisor is of the exporter's own process. What a frame says is judged in `state`.
"""
