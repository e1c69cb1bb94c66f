# SPDX-License-Identifier: Apache-2.0
"""`gpulock install slurm` and `uninstall slurm`: this node's files, slurm.conf and gres.conf.

Cold. The changes are made and undone by `install.change` and `install.undo`.
"""
