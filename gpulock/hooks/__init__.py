# SPDX-License-Identifier: Apache-2.0
"""What the hooks of every scheduler share: their frame, cleanup, programs they run.

Hot. What only one scheduler's hooks need stands in `gpulock.sge` or `gpulock.slurm`.
"""
