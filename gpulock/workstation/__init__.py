# SPDX-License-Identifier: Apache-2.0
"""Claims without a scheduler: processes as owners, the socket of gpulockd, and the wait queue.

Warm. `gpulock run`, `claim` and `release` are its clients (`gpulock.cli.claims`).
"""
