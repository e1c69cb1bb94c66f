# SPDX-License-Identifier: Apache-2.0
"""`gpulock status --cluster`: all nodes, as Prometheus knows them. Cold."""
