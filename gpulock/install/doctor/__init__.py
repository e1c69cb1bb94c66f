# SPDX-License-Identifier: Apache-2.0
"""`gpulock doctor`: look at everything a job's GPUs depend on, and change nothing. Cold."""
