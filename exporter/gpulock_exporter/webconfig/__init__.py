# SPDX-License-Identifier: Apache-2.0
"""web-config.yml: TLS, client certificates and users with passwords, as in the exporter-toolkit."""
