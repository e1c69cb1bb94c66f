# SPDX-License-Identifier: Apache-2.0
"""`gpulock history` and `gpulock report`: what finished claims did with their GPUs. Cold."""
