# SPDX-License-Identifier: Apache-2.0
"""`gpulock doctor`: look at everything a job's GPUs depend on, and change nothing.

Cold. One module a subject. What is wrong now with one device or job is told by `cli.status.why`.
"""
