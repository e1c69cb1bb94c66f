# SPDX-License-Identifier: Apache-2.0
"""The families of metrics, each made from a snapshot, and their text. Pure."""
