# SPDX-License-Identifier: Apache-2.0
"""What the releases of Slurm differ in, as far as tests go by it: the one place that says so.

No test is left out on a release. Where its premise is not to be had there it is set in another way,
or the test judges what that release does instead. Each is a release, compared with `Slurm.release`.
"""

from __future__ import annotations

from typing import Final

# From here on a login file runs in a PID namespace, so that none of its children outlives it.
ENDS_LOGIN_FILES: Final = (23, 11)
# From here on slurmd starts itself anew at `scontrol reconfigure`, as another process.
STARTS_ANEW: Final = (23, 11)
# From here on job_container.conf says which folders are a job's own (Dirs).
NAMES_PRIVATE_FOLDERS: Final = (23, 2)
# From here on a job's own node may manage its steps (enable_stepmgr).
HAS_STEPMGR: Final = (24, 5)
# From here on slurmd finds the cards itself, by what the driver shows in /proc.
FINDS_CARDS: Final = (24, 11)
# From here on a job whose login file fails is requeued and held; one that may not be is cancelled.
HOLDS_FAILED_LOGINS: Final = (25, 5)
# From here on the scope of a node's jobs may be in a slice of the site's own (CgroupSlice).
HAS_SLICE: Final = (25, 11)
# From here on NamespaceType=namespace/tmpfs says what JobContainerType=job_container/tmpfs said.
NAMES_NAMESPACES: Final = (25, 11)
# From here on the cgroup of a job has the job's SLUID for a name.
HAS_SLUIDS: Final = (26, 5)
# From here on Slurm's own masks may name cards by UUID (Flags=env_uuid).
MASKS_BY_UUID: Final = (26, 5)
