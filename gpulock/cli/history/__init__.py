# SPDX-License-Identifier: Apache-2.0
"""`gpulock history` and `gpulock report`: what finished claims did with their GPUs.

Cold. Options and their answers; sums and texts are made in `report`.
"""
