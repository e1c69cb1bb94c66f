# SPDX-License-Identifier: Apache-2.0
"""What the exporter's user can make root do: at most half of a node's cards go out of service.

The exporter here is its user's: each word of its files is hostile (docs/quarantine.md).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from pathlib import Path

import pytest
from hypothesis import given, settings  # noqa: TID251 (a count alone)
from hypothesis import strategies as st

from gpulock.alloc import states
from gpulock.alloc.node_view import read_node_view
from gpulock.daemon.core import sample
from gpulock.daemon.health.findings import findings_from_sample
from gpulock.daemon.history.files import LINE_LIMIT
from gpulock.daemon.history.record import (
    MOST_MEMORY,
    ClaimedDevice,
    ExporterSamples,
    believed_usage,
    build_history_record,
    encode_history_record,
    use_over_time,
)
from gpulock.daemon.idle.policy import IdlePolicy, claim_idle_seconds
from gpulock.daemon.reconcile.inventory_file import (
    InventoryPublisher,
    check_inventory,
    format_inventory,
)
from gpulock.daemon.reconcile.reconcile import Chore, DriverCard
from gpulock.node.device_list import apply_nvml_inventory, nvlink_counts
from gpulock.node.devices import Device
from gpulock.store import kv
from tests.support.health_site import Ward
from tests.support.mutations import try_a_million
from tests.support.pairs import zip_equal
from tests.support.trees import BOOT, bus, record

CARDS = 8
MIB = 1 << 20


class Hostile(Ward):
    """A node of eight cards whose exporter belongs to an attacker."""

    def __init__(self, root: Path, **keys: str) -> None:
        super().__init__(root, CARDS, **keys)
        self.lines: list[str] = []
        self.publisher, self.idle = InventoryPublisher(self.journal), IdlePolicy(self.lines.append)

    def invent(self, *lines: str) -> None:
        """Let the attacker write an inventory."""
        text = "\n".join(["gpulock-inventory 1", f"boot_id={BOOT}", *lines]) + "\n"
        (self.exporter / "inventory").write_text(text, errors="surrogateescape")

    def chores(self) -> tuple[Chore, ...]:
        return (self.publisher, self.checker, self.health, self.idle)

    def turn(self, times: int = 2) -> None:
        """Let gpulockd do rounds without another sample of the exporter's."""
        self.round(times, sampled=False)

    def states(self) -> list[str]:
        """Return the state of each device."""
        node = self.node()
        rows = states.device_states(node.devices(), read_node_view(node, self.now), CARDS)
        return [row.state for row in rows]

    def usable(self) -> int:
        """Return how many whole cards a job can have."""
        return self.states().count(states.FREE)

    def instances(self, number: int, *names: str) -> None:
        """Let the driver show instances of a card."""
        for name in names:
            folder = self.driver / f"capabilities/gpu{number}/mig" / name.replace(".", "/")
            folder.mkdir(parents=True, exist_ok=True)


@pytest.fixture
def node(tmp_path: Path) -> Hostile:
    return Hostile(tmp_path)


def split(node: Hostile, cards: int) -> None:
    node.turn()
    node.invent(*[f"gpu.{bus(number)}.mig=1" for number in range(cards)])
    node.turn(4)


def fail(node: Hostile, cards: int) -> None:
    for number in range(CARDS - cards, CARDS):
        node.log_xid(number)
    node.round(3)


def fill(node: Hostile, cards: int) -> None:
    for number in range(cards):
        node.tell(number, f"memory_used={300 * MIB}")
    node.round(9)


@pytest.mark.parametrize(
    "acts", [((split, 3), (fail, 5)), ((fail, CARDS), (split, CARDS)), ((fill, CARDS),)]
)
def test_mig_mode_faults_and_memory_are_one_half_together(
    node: Hostile, acts: tuple[tuple[Callable[[Hostile, int], None], int], ...]
) -> None:
    for act, cards in acts:
        act(node, cards)
    assert node.usable() == CARDS // 2
    assert [line for line in node.said() if "more than half of this node" in line]


def test_mig_mode_of_every_card_is_believed_of_half_and_none_is_missing(node: Hostile) -> None:
    split(node, CARDS)
    assert node.out() == [], "no card is quarantined: the driver shows each"
    assert node.usable() == CARDS // 2
    assert states.MISSING not in node.states()


@pytest.mark.parametrize("policy", ["missing", "missing xid ecc"])
def test_what_the_driver_put_out_comes_back_whatever_the_exporter_says(
    node: Hostile, policy: str
) -> None:
    node.settings["QUARANTINE_ON"] = policy
    node.turn()
    files = [node.driver / "gpus" / bus(number) / "information" for number in range(1, CARDS)]
    texts = [file.read_text() for file in files]
    for file in files:
        file.write_text("")
    node.turn(3)
    assert len(node.out()) == CARDS - 1
    for file, text in zip_equal(files, texts):
        file.write_text(text)
    for number in range(CARDS):
        node.tell(number, "recovery_action=1", "remap_failure=1")
    node.round(9)
    assert len(node.out()) <= CARDS // 2


WORDS = st.text("gpumilnk.:0123456789abcdf=\x1b\r;, -/'\"\udcff$", max_size=40)
KEYS = st.sampled_from(
    [
        *(f"gpu.{bus(n)}.{word}" for n in range(4) for word in ("mig", "uuid", "memory_mib")),
        *(f"mig.{bus(n)}.gi1.ci0.{word}" for n in range(3) for word in ("uuid", "profile")),
        *(f"link.{bus(n)}.{bus(n + 1)}" for n in range(3)),
        f"gpu.{bus(0)}.nvswitch",
    ]
)
VALUES = st.sampled_from(["1", "0", "GPU-1", "MIG-1", "GPU-00000000-aaaa", "99999999"]) | WORDS
INVENTORIES = st.lists(st.tuples(KEYS | WORDS, VALUES).map("=".join), max_size=20)


def holds_of_devices(found: list[Device]) -> None:
    """See that a node is the driver's; its last card has an instance by the driver."""
    assert {device.bus for device in found} == {bus(number) for number in range(CARDS)}
    assert len([d for d in found if d.withheld and d.bus != bus(7)]) <= CARDS // 2
    assert bus(7) not in [d.id for d in found if not d.withheld]
    uuids = [device.uuid for device in found if device.uuid]
    assert len(set(uuids)) == len(uuids)
    assert all(one.isascii() and one.replace("-", "").isalnum() for one in uuids)
    assert all(kv.is_single_line(device.profile) for device in found)


@pytest.mark.attack
@pytest.mark.slow
@given(INVENTORIES)
def test_whatever_an_inventory_says_the_driver_decides(
    tmp_path_factory: pytest.TempPathFactory, lines: list[str]
) -> None:
    """Tried: any inventory of the exporter's user.

    Stopped by: the driver's own word and `/proc` decide.
    """
    node = Hostile(tmp_path_factory.mktemp("node"))
    node.instances(7, "gi1.ci0")
    node.invent(*lines)
    node.turn(1)
    holds_of_devices(node.node().devices())
    assert node.out() == []


def publish(lines: list[str]) -> None:
    """Check an inventory as gpulockd does, and add it to a driver's cards."""
    cards = {bus(n): DriverCard(n, f"GPU-{n:08d}-aaaa" if n % 2 else "") for n in range(CARDS)}
    instances = {name: frozenset({"gi1.ci0"} if name == bus(7) else ()) for name in cards}
    try:
        told = kv.decode_pairs("\n".join(lines))
    except kv.MalformedError:
        told = {}
    checked, _ = check_inventory(told, cards, instances)
    pairs = kv.decode_pairs(format_inventory(checked, BOOT), "gpulock-inventory 1")
    devices = [Device(name, card.minor) for name, card in cards.items()]
    for device in devices:
        device.uuid = cards[device.bus].uuid
    holds_of_devices(apply_nvml_inventory(devices, pairs))
    assert all(count >= 0 for count in nvlink_counts(pairs).values())


def lines_of(data: bytes) -> list[str]:
    """Return bytes as the lines of a file that gpulockd reads."""
    return data.decode("utf-8", "surrogateescape").split("\n")


@pytest.mark.soak
@pytest.mark.timeout(14_400)
def test_a_million_inventories() -> None:
    lines = [f"gpu.{bus(0)}.mig=1", f"gpu.{bus(0)}.uuid=GPU-1", f"gpu.{bus(1)}.memory_mib=81920"]
    lines += [f"mig.{bus(0)}.gi1.ci0.uuid=MIG-1", f"mig.{bus(0)}.gi1.ci0.profile=1g.10gb"]
    lines += [f"link.{bus(0)}.{bus(1)}=4", f"gpu.{bus(0)}.nvswitch=1"]
    more = [f"gpu.{bus(number)}.mig=1" for number in range(CARDS)]
    more += [f"mig.{bus(7)}.gi1.ci0.uuid=MIG-7", f"gpu.{bus(3)}.uuid=GPU-00000000-aaaa"]
    samples = ("\n".join(lines).encode(), "\n".join(more).encode())
    try_a_million(samples, lambda data: publish(lines_of(data)))


# --- its sample -----------------------------------------------------------------------------------

TOKEN = "feedface"
HELD = 1000.0  # seconds
NOW = 5000.0
FIELD_NAMES = [*sample.TYPES["device"], *sample.TYPES["token"], "x.79"]
NUMBERS = ["0", "1", "1e308", "9" * 18, "4990", "5000", "nan", "-1", "1,1", "1e-320"]
PAIRS = st.tuples(
    st.sampled_from(FIELD_NAMES), st.sampled_from(NUMBERS) | st.floats().map(str) | WORDS
).map("=".join)
HEADS = st.sampled_from(
    ["", f"device {bus(0)} ", f"device {bus(9)} ", f"token {TOKEN} {bus(0)} ", "token . .. ", " "]
)
LINES = st.lists(st.tuples(HEADS, st.lists(PAIRS, max_size=8).map(" ".join)).map("".join))


def believe(lines: list[str]) -> None:
    """Let root believe a sample: what it makes of it stays within what root itself knows."""
    head = [sample.SAMPLE_LINE, f"boot_id={BOOT}"]
    found = sample.parse_sample("\n".join([*head, *lines]), sample.SAMPLE_LINE)
    devices = [Device(bus(number), number) for number in range(CARDS)]
    said = list(findings_from_sample(found, devices))
    assert {one.device for one in said} <= {one.id for one in devices}
    assert all(0 < one.mark < 1 << 60 and len(one.words) < 120 for one in said)
    assert max(Counter(one.device for one in said).values(), default=0) < 64
    own = record(token=TOKEN, claimed_boottime=NOW - HELD)
    account = found.tokens.get(TOKEN, {}).get(bus(0)) or sample.ClaimUsage({})
    usage = believed_usage(account, own, HELD, None)
    assert 0 <= (usage["busy_seconds"] or 0) <= (usage["observed_seconds"] or 0) <= HELD
    assert (usage["foreign_seconds"] or 0) <= HELD
    assert (usage["memory_peak_bytes"] or 0) <= MOST_MEMORY
    use = (use_over_time(account) or {"use": []})["use"]
    assert len(use) <= sample.BUCKETS
    assert all(0 <= one <= sample.MILLI for one in use if one is not None)
    idle = claim_idle_seconds(own, [bus(0)], found.tokens.get(TOKEN, {}), NOW)
    assert idle is None or 0 <= idle <= HELD, "no claim idles for longer than it is held"
    part = ClaimedDevice(bus(0), own, 1.7e9, held=HELD)
    advice = ExporterSamples("")
    advice.last = found
    line = encode_history_record(build_history_record([part], advice, {}))
    assert len(line) < LINE_LIMIT and line.count(b"\n") == 1


@pytest.mark.attack
@pytest.mark.slow
@settings(max_examples=300)
@given(LINES)
def test_whatever_a_sample_says_root_believes_no_more_than_it_knows(lines: list[str]) -> None:
    """Tried: any sample of the exporter's user.

    Stopped by: root bounds each value by what it knows itself: cards, claims and time.
    """
    believe(lines)


@pytest.mark.soak
@pytest.mark.timeout(14_400)
def test_a_million_samples() -> None:
    fields = " ".join(f"{name}={NUMBERS[n % len(NUMBERS)]}" for n, name in enumerate(FIELD_NAMES))
    plain = " ".join(f"{name}=4990" for name in FIELD_NAMES)
    device, token = f"device {bus(0)}", f"token {TOKEN} {bus(0)}"
    texts = [f"{device} {fields}\n{token} {plain}", f"{device} {plain}\n{token} {fields}"]
    texts += [
        f"{device} x.79=1,1.0 idle=2.5\n{token} busy=12.5 observed=90 used=1,2,3 covered=4,5,6"
    ]
    try_a_million(tuple([text.encode() for text in texts]), lambda data: believe(lines_of(data)))


def test_a_card_that_is_gone_is_noted_as_that_also_beyond_the_half(node: Hostile) -> None:
    node.turn()
    for number in range(CARDS):
        node.log_xid(number)
    (node.driver / "gpus" / bus(CARDS - 1) / "information").write_text("")
    node.round(3)
    assert node.out() == [bus(number) for number in (0, 1, 2, 3, CARDS - 1)]
    assert node.reason(CARDS - 1).startswith("missing: ")
    assert "xid" not in node.reason(CARDS - 1)
