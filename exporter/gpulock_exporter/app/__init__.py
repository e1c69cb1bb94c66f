# SPDX-License-Identifier: Apache-2.0
"""The program gpulock-exporter: options, threads, signals, and one node served by HTTP."""
