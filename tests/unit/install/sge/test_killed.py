# SPDX-License-Identifier: Apache-2.0
"""A killed `install sge` leaves nothing that another run does not put back."""

from __future__ import annotations

from contextlib import nullcontext
from pathlib import Path

import pytest

from gpulock.install.sge.qconf import Qconf
from tests.support.install_site import Site, make_site
from tests.support.killed import ALL_OR_SAMPLE, KilledSite, Left

pytestmark = pytest.mark.slow


class KilledSge(KilledSite):
    """A host of a recorded Grid Engine."""

    def __init__(self, site: Site, patch: pytest.MonkeyPatch) -> None:
        self.site = site
        site.install_cluster()
        run = Qconf.run

        def counted(qconf: Qconf, program: str, *args: str) -> str:
            """Be a client of Grid Engine, which does its work or does not."""
            shows = program != "qconf" or args[0].startswith("-s")
            with nullcontext() if shows else self.one_call(args[0]):
                return run(qconf, program, *args)

        patch.setattr(Qconf, "run", counted)
        (site.root / "profile.d").mkdir()
        super().__init__(site.root)

    def apply(self) -> None:
        self.site.install()

    def undo(self) -> list[str]:
        return self.site.uninstall().clauses()

    def left(self) -> Left:
        """Return all that there is; of what qconf shows each key with its value."""
        found = super().left()
        for hook in ("prolog", "epilog"):
            found.pop(f"sge/state/kept-{hook}", None)
            found[hook] = self.site.in_force(hook)
        for name in [name for name in found if name.startswith("sge/state/")]:
            del found[name]
            text = (self.root / name).read_text().replace("\\\n", "")
            rows = [one.split(None, 1) for one in text.splitlines() if one[:1] != "#"]
            found |= {f"{name} {row[0]}": "".join(row[-1].split()) for row in rows if row[1:]}
        return found


@pytest.fixture
def played(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> KilledSge:
    return KilledSge(make_site(tmp_path / "site", monkeypatch), monkeypatch)


@ALL_OR_SAMPLE
def test_an_installation_killed_anywhere_is_taken_back_or_completed(
    played: KilledSge, share: int
) -> None:
    assert played.killed_installations(share) == []


@ALL_OR_SAMPLE
def test_an_uninstallation_killed_anywhere_is_completed_by_another(
    played: KilledSge, share: int
) -> None:
    assert played.killed_uninstallations(share) == []
