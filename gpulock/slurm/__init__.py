# SPDX-License-Identifier: Apache-2.0
"""Slurm's prolog, task prolog and epilog, and what its nodes tell of a job."""
