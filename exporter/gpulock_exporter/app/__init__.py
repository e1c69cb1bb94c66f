# SPDX-License-Identifier: Apache-2.0
"""The program gpulock-exporter: options, threads, signals, and one node served by HTTP.

It puts the other packages together. What can be decided without threads and signals is in those.
"""
