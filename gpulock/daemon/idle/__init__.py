# SPDX-License-Identifier: Apache-2.0
"""The held-idle policy: find claims that do nothing, warn, run a command, terminate.

Warm. Whether a device is idle is the exporter's word; nothing here asks the driver.
"""
