# SPDX-License-Identifier: Apache-2.0
"""SHARE_MPS: NVIDIA's MPS for the user of a shared card, started with the first share of it.

Warm. What a job is told of its MPS is in `job.mps`.
"""
