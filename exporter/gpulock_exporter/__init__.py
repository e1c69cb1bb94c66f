# SPDX-License-Identifier: Apache-2.0
"""The exporter: what every GPU of this node does, and for whom."""
