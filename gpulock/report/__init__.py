# SPDX-License-Identifier: Apache-2.0
"""What became of GPUs that were held: reports of a job, sums of the history.

Cold. The history is written by `daemon.history`; `cli.history` prints it.
"""
