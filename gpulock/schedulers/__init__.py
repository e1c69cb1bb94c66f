# SPDX-License-Identifier: Apache-2.0
"""What needs all schedulers at once: the judge of any lock on this node."""
