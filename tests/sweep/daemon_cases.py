# SPDX-License-Identifier: Apache-2.0
"""A round of gpulockd is stopped: nothing is lost, and nothing freed that a living job holds.

It starts where a job lives, one died, a claim was cut short, one of an earlier boot has no line in
the history, the exporter has something to publish and a killed process left files half written.
Then another gpulockd comes, and each claim that is over has one line.
"""

from __future__ import annotations

import os
import shutil
import time
from collections.abc import Sequence
from functools import partial
from pathlib import Path

from gpulock.errors import Refusal
from gpulock.node.device_list import INVENTORY_LINE
from gpulock.node.device_list import read_nvml_inventory as read_inventory
from gpulock.store import grants
from tests.support.history_site import read_history
from tests.support.trees import OTHER_BOOT, record
from tests.sweep.play import KILLED, Case
from tests.sweep.sge import Reap
from tests.sweep.stage import GONE


class Round(Reap):
    """A round of gpulockd. `removed` is what somebody has removed: the round puts that back.

    Where the round was disturbed, the next claim does. It is `locks_dir` or `claims_dir`.
    """

    def __init__(self, root: Path, *, gone: int = 2, removed: str = "") -> None:
        super().__init__(root, gone=gone)
        self.removed = removed
        self.stood: dict[str, bytes] = {}
        self.over: list[str] = []  # the tokens of claims that owe a line

    def prepare(self) -> None:
        """Leave something to publish, and something to sweep; remove what is to be removed."""
        super().prepare()
        node = self.stage.node
        folder = Path(node.settings.exporter_dir)
        folder.mkdir(exist_ok=True)
        bus = node.devices()[0].bus
        text = f"{INVENTORY_LINE}\nboot_id={node.boot_id}\ngpu.{bus}.memory_mib=4242\n"
        (folder / "inventory").write_text(text)
        Path(node.store.path, ".verdicts.4194305.0123456789ab").touch()
        about = {"devices": (bus,), "node": node.name, "claimed_at": time.time() - 7200}
        earlier = record(token="earlier", boot_id=OTHER_BOOT, claimed_boottime=1.0, **about)
        grants.note_owed_line(node.settings.state_dir, node.store, earlier)
        gone = {lock.owner.token for lock in self.stage.locks(GONE).values() if lock.owner}
        self.over = sorted(["earlier", *gone])
        if self.removed:
            self.stood = self.stage.records(*self.living)
            shutil.rmtree(getattr(node.store, self.removed))

    def set_out(self) -> None:
        """Bring the node into its state; what the living held then is what they are to hold."""
        super().set_out()
        self.others = self.stood or self.others

    def unharmed(self, by: str) -> None:
        """Expect the living jobs' locks as they were; before they are all back, no claim of all."""
        if not self.removed or by not in ("the fault", "the round"):
            super().unharmed(by)
            return
        try:
            grant = self.stage.claim_rest(len(self.stage.node.devices()))
        except Refusal:
            return
        self.wrong.append(f"{by}, all is granted: {grant.owner.devices}")

    def run(self, head: Sequence[str] = ()) -> int:
        """Go round once."""
        return self.node.run(self.node.other, [*head, *self.stage.command_of("round")])

    def proper(self) -> None:
        """Expect that it does all that there is to do."""
        super().proper()
        self.whole("undisturbed")

    def course(self, code: int) -> None:
        """Let the next gpulockd come: it finishes what was begun."""
        self.unharmed("the round")
        ended = self.run()
        self.expect(ended == 0, f"the next gpulockd exits {ended}")
        self.whole("after the next gpulockd", says_how=code == KILLED)
        super().course(code)

    def whole(self, when: str, *, says_how: bool = True) -> None:
        """Expect a published inventory, no file half written, and a line of each claim.

        It says how the claim was released, but where a disk may not have taken that: `says_how`.
        """
        node = self.stage.node
        told = read_inventory(node.store.path, node.boot_id)
        self.expect("4242" in told.values(), f"{when}, the inventory is not published")
        left = [name for name in os.listdir(node.store.path) if name.startswith(".")]
        self.expect(not left, f"{when}, there is still {left}")
        found = read_history(Path(node.settings.state_dir))
        lines = sorted(line["token"] for line in found)
        self.expect(lines == self.over, f"{when}, the history has {lines}, not {self.over}")
        how = {line["how"] for line in found} - ({"reap"} if says_how else {"reap", "unknown"})
        self.expect(not how, f"{when}, the history says {how}")


CASES = (
    Case("gpulockd", Round),
    Case("gpulockd, locks removed", partial(Round, removed="locks_dir"), 2),
    Case("gpulockd, records removed", partial(Round, removed="claims_dir"), 2),
)
