# SPDX-License-Identifier: Apache-2.0
"""A simulated node: the files of the NVIDIA driver and of sysfs.

Cold. Every part is a pure function from a machine to a tree of files; `node.write_node` is the
only one that writes.
"""
