# SPDX-License-Identifier: Apache-2.0
"""`gpulock install slurm` and `uninstall slurm`: this node's part. Cold."""
