# SPDX-License-Identifier: Apache-2.0
"""What runs beside the hooks: reconcile, adopt."""
