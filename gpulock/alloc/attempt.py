# SPDX-License-Identifier: Apache-2.0
"""A claim at work. Hot."""

from gpulock.alloc.choose import ClaimRequest
from gpulock.node.context import Node
from gpulock.store.owner import Owner

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable

    from gpulock.alloc.liveness import Judge
    from gpulock.alloc.reaper import Reaper


class ClaimAttempt:
    """A claim at work: for whom, of what, and what was looked at before the gate.

    `devices` are the node's. `ahead` is the look by which locks are freed, None until it is needed.
    """

    __slots__ = ("_judge", "_make_judge", "ahead", "devices", "node", "template", "want")

    def __init__(
        self, node: Node, template: Owner, want: ClaimRequest, make_judge: "Callable[[], Judge]"
    ) -> None:
        self.node = node
        self.template = template
        self.want = want
        self.devices = node.devices()
        self.ahead: "Reaper | None" = None
        self._make_judge = make_judge
        self._judge: "Judge | None" = None

    def judge(self) -> "Judge":
        """Return the judge of this attempt, made when it is first needed."""
        if self._judge is None:
            self._judge = self._make_judge()
        return self._judge

    def renew_judge(self) -> "Judge":
        """Return a judge that looks anew."""
        self._judge = self._make_judge()
        return self._judge
