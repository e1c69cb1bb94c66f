# SPDX-License-Identifier: Apache-2.0
"""The exporter's folder: `sample`, `finished/TOKEN` and the inventory, each renamed in whole."""
