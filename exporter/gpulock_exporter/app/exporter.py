# SPDX-License-Identifier: Apache-2.0
"""One node as it is served: ticks in, metrics and page out.

One thread ticks, once a second, with a frame or without. What a request wants of the last tick is
made by the first that asks, in a thread of the server's. None waits for the driver, for /proc or
for a file: a tick that hangs there leaves what the last one told.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Mapping, Sequence
from functools import cache

import gpulock
from gpulock.alloc.process_scan import ProcessScan
from gpulock.daemon.core.background_call import BackgroundCall, NoAnswerError
from gpulock.errors import Refusal, one_line
from gpulock.node.context import Node
from gpulock.node.devices import Device
from gpulock.slurm.steps import is_slurm_job_process
from gpulock_exporter.files.publish import ExporterFolder
from gpulock_exporter.files.sample_file import restore_exporter_memory, sample_text
from gpulock_exporter.frame import Frame, normalize_bus_id
from gpulock_exporter.metrics.exposition import collect_families
from gpulock_exporter.metrics.families import PROCESS, LabelUser, render_families
from gpulock_exporter.state.claim_accounting import Accounts
from gpulock_exporter.state.collector_state import CollectorState
from gpulock_exporter.state.join import take_snapshot
from gpulock_exporter.state.local_state import read_local_state
from gpulock_exporter.state.snapshot import ExporterHealth, Moment, NodeSnapshot
from gpulock_exporter.web.http import (
    Handler,
    HttpRequest,
    HttpResponse,
    SampleBody,
    error_response,
    route_by_path,
)
from gpulock_exporter.web.page import PAGE_HEADERS, RELOAD, PageOptions, render_page
from gpulock_exporter.web.utilisation_history import UtilizationHistory
from gpulock_exporter.worker.supervisor import HungCard, Supervisor

LIST_PERIOD = 5.0  # seconds between two readings of the driver's own list
DRIVER_SECONDS = 0.5  # for which a tick waits for it: a driver that is well takes 30 us a card
QUIET = 30.0  # seconds between two lines on one subject: what comes and goes does not flood
REASON_CHARACTERS = 300  # characters of a reason that are shown
STUCK = "the exporter itself hangs: its values are old; /proc/PID/task/*/stack shows where"
AGAIN = (("Retry-After", "1"), ("Refresh", "5"))


class Shown:
    """What a tick left, and what a scrape gets of it; made once somebody asks. `at` is when."""

    def __init__(self, at: Moment, snapshot: Callable[[], NodeSnapshot], user: LabelUser) -> None:
        self.at = at
        self.snapshot = snapshot
        self.body = SampleBody(
            lambda: render_families([*collect_families(snapshot(), user), *PROCESS.collect()])
        )


class Exporter:
    """One node; `tick` is called by one thread, the handlers by many."""

    def __init__(
        self,
        node: Node,
        clock: Callable[[], Moment],
        say: Callable[[str], object] = lambda _: None,
    ) -> None:
        settings = node.settings
        self._node = node
        self._clock = clock
        self._say = say
        self._journal = FaultJournal()
        self._label_user = LabelUser(settings.label_user)
        self.folder = ExporterFolder(settings.exporter_dir)
        self._history = UtilizationHistory()
        self._fault = "no sample yet"
        self.devices: list[Device] | None = None  # as the driver listed them last
        self._asked: BackgroundCall[list[Device]] | None = None
        self._list_due = 0.0
        self._shown: Shown | None = None
        self._unwritten: str | None = None  # why files were not written last; None: not tried yet
        # of who changes `_state`, or reads it in another thread; held while nothing is waited for
        self._lock = threading.Lock()
        self._state = CollectorState(
            node.boot_id,
            settings,
            lambda: ProcessScan(node.proc, {"slurm": is_slurm_job_process}),
        )

    def open(self) -> None:
        """Go on from where an earlier exporter of this boot stopped; raise OSError."""
        self.folder.open()
        now, left = self._clock().boottime, self.folder.last()
        self._state.memory = restore_exporter_memory(left, self._node.boot_id, now)

    def tick(self, frames: Sequence[Frame], supervisor: Supervisor) -> None:
        """Take what came, write the files, and let it be asked for."""
        now = self._clock()
        self.list_devices(now.boottime)
        facts = read_local_state(self._node, now.boottime)
        if self._unwritten is not None:
            facts.note("files", self._unwritten)
        classified = self._state.classify_frames(frames, facts, now)
        hung = name_hung_cards(supervisor.left_out(), self.devices)
        devices, cards = self.devices, self._driver_cards()
        with self._lock:
            over = self._state.tick(classified, facts, now, hung, cards)
            self._state.memory.totals.number_cards({one.bus: one.index for one in devices or ()})
            self._fault = supervisor.fault
            fresh = self._state.is_fresh(now)
            health = ExporterHealth(
                gpulock.__version__,
                unkillable=supervisor.unkillable,
                collectors=self._state.collectors(facts, fresh),
            )
            seen = self._state.devices.items()
            self._history.add({name: one.utilization if fresh else None for name, one in seen})
            made = cache(lambda: take_snapshot(self._state, devices, facts, now, health))
            self._shown = Shown(now, made, self._label_user)
        self._write(over, now)
        self._tell(health, now)

    def list_devices(self, now: float) -> None:
        """Take what the driver lists; its files in /proc may hang whoever reads them."""
        patience = 0.0
        if self._asked is None:
            if now < self._list_due:
                return
            self._list_due, patience = now + LIST_PERIOD, DRIVER_SECONDS
            self._asked = BackgroundCall(self._node.devices)
        if not self._asked.wait(patience):
            return
        try:
            self.devices = self._asked.answer()
        except NoAnswerError:
            pass  # no thread could be started: what it listed last stands
        except Refusal:
            self.devices = []  # there is no driver
        except OSError:
            self.devices = None
        self._asked = None

    def _driver_cards(self) -> frozenset[str] | None:
        """Return the bus ids of the cards that the driver lists now, None where nobody knows."""
        if self.devices is None:
            return None
        root = f"{self._node.settings.driver_root}/gpus"  # a stat takes no lock of the driver's
        cards = {device.bus for device in self.devices if not device.fault}
        return frozenset(bus for bus in cards if os.path.lexists(f"{root}/{bus}"))

    def _tell(self, health: ExporterHealth, now: Moment) -> None:
        """Tell the journal why something fails, and that it is well again."""
        faults = {name: fault for name, fault in health.collectors.items() if fault}
        faults |= {f"GPU at {bus}": lost.why for bus, lost in self._state.memory.lost.items()}
        if self._fault:
            faults["driver"] = self._fault
        for line in self._journal.lines(faults, now.boottime):
            self._say(f"gpulock-exporter: {line}")

    def handler(self) -> Handler:
        """Return what answers requests."""
        return route_by_path(
            {
                "/": self._when_told(self._page),
                "/metrics": self._when_told(lambda shown, request: shown.body.response(request)),
                "/-/healthy": self._healthy,
            }
        )

    def _when_told(self, answer: Callable[[Shown, HttpRequest], HttpResponse]) -> Handler:
        """Return what answers by the last moment, once there is one, and while it may be true."""

        def handle(request: HttpRequest) -> HttpResponse:
            if self._shown is None:
                return error_response(503, "the first second is not over yet", *AGAIN)
            if stuck := self._stuck():
                return stuck
            with self._lock:
                shown = self._shown
                shown.snapshot()
            return answer(shown, request)

        return handle

    def _stuck(self) -> HttpResponse | None:
        """Return the answer where the last tick is so long ago that what it told may be untrue.

        What it reads of processes in /proc can take a lock that one which hangs in the driver has.
        """
        oldest = self._clock().boottime - self._node.settings.max_sample_age
        stuck = self._shown is not None and self._shown.at.boottime < oldest
        return error_response(503, STUCK, *AGAIN) if stuck else None

    def _page(self, shown: Shown, request: HttpRequest) -> HttpResponse:
        """Answer a person, who asks for a page that loads itself again by `/?live`."""
        live = request.query.startswith("live")
        about = PageOptions(
            self._node.name,
            self._label_user,
            self._node.boot_id,
            self._node.settings.max_sample_age,
            self._fault,
            live,
        )
        text = render_page(shown.snapshot(), self._history, about).encode("utf-8", "replace")
        headers = (*PAGE_HEADERS, ("Refresh", str(RELOAD))) if live else PAGE_HEADERS
        return HttpResponse(200, text, "text/html; charset=utf-8", headers)

    def _healthy(self, _: HttpRequest) -> HttpResponse:
        """Answer a watchdog: this process is at work, whatever the driver does."""
        return self._stuck() or HttpResponse(200, b"gpulock-exporter is healthy\n")

    def _write(self, over: Mapping[str, Accounts], now: Moment) -> None:
        """Write what the rest of gpulock reads; the next tick tells where it could not."""
        self._unwritten = ""
        try:
            self.folder.hold()
            self.folder.write_sample(sample_text(self._state, now, self._fault))
            self.folder.write_finished(over, self._state.boot_id, now)
            self.folder.write_inventory(self._state.devices, self._state.boot_id)
        except (OSError, ValueError, Refusal) as fault:
            self._unwritten = str(fault)


def name_hung_cards(
    hung: Mapping[int, HungCard], listed: Sequence[Device] | None
) -> dict[str, str]:
    """Return why each card that hangs is left out, by bus id. Pure.

    One that hung before it told its bus id has that place in the driver's own list.
    """
    places = {device.index: device.bus for device in listed or ()}
    words_by_bus = {
        normalize_bus_id(card.call.bus) or places.get(index, ""): card.words()
        for index, card in hung.items()
    }
    return {bus: words for bus, words in words_by_bus.items() if bus}


class FaultJournal:
    """Log lines for faults and recoveries: one for each change, not one a second. Pure."""

    def __init__(self) -> None:
        self._faults: dict[str, str] = {}
        self._at: dict[str, float] = {}

    def lines(self, faults: Mapping[str, str], now: float) -> list[str]:
        """Return what is new; `faults` has the reason of each subject that fails now.

        `now` is in seconds, of any clock that does not run back.
        """
        new: list[str] = []
        for subject in sorted({*faults, *self._faults}):
            fault, last = faults.get(subject, ""), self._faults.get(subject, "")
            if fault == last or now - self._at.get(subject, -QUIET) < QUIET:
                continue
            self._at[subject] = now
            if fault:
                self._faults[subject] = fault
                new.append(f"{subject}: {one_line(fault)[:REASON_CHARACTERS]}")
            else:
                del self._faults[subject]
                new.append(f"{subject}: recovered")
        return new
