# SPDX-License-Identifier: Apache-2.0
"""`gpulock run`, `claim` and `release`: GPUs for processes of one's own, and locks that are freed.

Cold. Who decides is `alloc`, or gpulockd through `workstation`; here users are told.
"""
