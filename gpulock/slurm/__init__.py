# SPDX-License-Identifier: Apache-2.0
"""Slurm: its Prolog, TaskProlog and Epilog, and what its nodes tell of a job.

Hot. What writes slurm.conf is in `install.slurm`, what gpulockd asks slurmctld in `daemon`.
"""
