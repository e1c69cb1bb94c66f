# SPDX-License-Identifier: Apache-2.0
"""`gpulock install slurm` and `uninstall slurm`: this node's files, slurm.conf and gres.conf.

Cold. What is put in place and taken away are items of `install.items`.
"""
