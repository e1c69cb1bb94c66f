# SPDX-License-Identifier: Apache-2.0
"""The exporter's folder: `sample`, `finished/TOKEN` and the inventory, each renamed in whole.

`gpulock.daemon.core.sample` has the table of the fields and their reader. No value is computed
here.
"""
