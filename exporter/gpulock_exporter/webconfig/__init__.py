# SPDX-License-Identifier: Apache-2.0
"""web-config.yml: TLS, client certificates and users with passwords, as in the exporter-toolkit.

Who may ask is decided here; what is answered is made in `web`.
"""
