# SPDX-License-Identifier: Apache-2.0
"""`gpulock run`, `claim` and `release`: GPUs for processes of one's own. Cold."""
