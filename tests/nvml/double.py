# SPDX-License-Identifier: Apache-2.0
"""The double of NVIDIA's management library, as tests use it.

    with Double(tmp_path / "nvml", preset="dgx1") as nvml:
        subprocess.run([...], env={**os.environ, **nvml.env})     # a client: pynvml
        nvml.set("gpu0.temperature", 91)                           # while it runs
        nvml.load(0, 87)                                           # busy from now on
        nvml.fail("nvmlDeviceGetPowerUsage", ERROR_GPU_IS_LOST, gpu=3)
        assert nvml.calls()["nvmlDeviceGetComputeRunningProcesses_v3"] == 0

README.md beside this lists the keys.
"""

from __future__ import annotations

import ctypes
import fcntl
import os
import time
import uuid
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Literal, NamedTuple

from gpulock.simulate.node import write_simulated_node
from tests.nvml.build import library
from tests.nvml.cards import driver_version, instance_keys, missing_from, node_keys

ERROR_NOT_SUPPORTED, ERROR_NO_PERMISSION = 3, 4
ERROR_DRIVER_NOT_LOADED, ERROR_GPU_IS_LOST, ERROR_UNKNOWN = 9, 15, 999
Hang = Literal["deaf", "undead"]
MAX_INSTANCES = 16  # MIG devices of a card: double.h
_LINKS = ("state", "remote.type", "remote.bus_id", "tx_kib", "rx_kib")  # keys of an NVLink
_UNITS = {"K": 10, "M": 20, "G": 30}  # powers of two
_PAST = 100  # steps of a number that are remembered


class Process(NamedTuple):
    """A process on a card. `kind`: C compute, G graphics, M compute by MPS."""

    pid: int
    memory: str  # 512M; `-` where the driver cannot say
    kind: Literal["C", "G", "M"] = "C"
    instance: tuple[int, int] | None = None  # gi, ci


class Double:
    """A machine's worth of GPUs behind a libnvidia-ml.so.1 of our own.

    `node` is a folder that `gpulock simulate` wrote, which then agrees with what NVML says; else
    one of `preset` is written below `folder`. `driver` plays another release than the node's: it
    decides which functions and fields there are. `hidden` takes further functions away.
    """

    def __init__(
        self,
        folder: Path,
        *,
        preset: str = "dgx1",
        gpus: int | None = None,
        node: Path | None = None,
        driver: str | None = None,
        hidden: Iterable[str] = (),
    ) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self.node = node or write_simulated_node(folder / "node", preset, gpus).directory
        self.driver = driver or driver_version(self.node)
        self.library = library(missing_from(self.driver) | set(hidden))
        self.control = folder / "control"
        self._settings: dict[str, str] = {}
        self._changes = 0
        self._keys = node_keys(self.node, self.driver)
        self._slots = int(self._keys["devices"])
        for suffix in ("calls", "held"):  # a client may be somebody else
            path = folder / f"control.{suffix}"
            path.unlink(missing_ok=True)
            path.touch()
            path.chmod(0o666)
        self._write()

    def __enter__(self) -> Double:
        return self

    def __exit__(self, *_: object) -> None:
        """Let go of every call that hangs."""
        self.reset()

    @property
    def env(self) -> dict[str, str]:
        """Return the environment by which a client comes to the double."""
        before = os.environ.get("LD_LIBRARY_PATH")
        paths = [str(self.library.parent), *([before] if before else [])]
        return {"LD_LIBRARY_PATH": ":".join(paths), "NVML_DOUBLE": str(self.control)}

    def load_here(self) -> None:
        """Make this process's own pynvml find the double, by its soname.

        One library a process: of two doubles with different functions the first one counts.
        """
        ctypes.CDLL(str(self.library))
        os.environ["NVML_DOUBLE"] = str(self.control)

    def set(self, key: str, value: object) -> None:
        """Set one key; see update()."""
        self.update({key: value})

    def update(self, settings: Mapping[str, object]) -> None:
        """Set keys, all at one moment; None takes a feature away."""
        for key, value in settings.items():
            self._settings.pop(key, None)  # the last line counts, also of gpu* and gpu0
            self._settings[key] = "" if value is None else str(value)
        self._write()

    def reset(self) -> None:
        """Go back to the preset: no setting, no error, no hang."""
        self._settings.clear()
        self._write()

    def load(self, gpu: int, percent: float) -> None:
        """Keep a GPU busy from now on: its utilisation and the driver's samples of it."""
        key, when = f"gpu{gpu}.utilization.gpu", round(time.time() * 1e6)
        past = (self._settings.get(key) or self._keys.get(key) or "0").split(",")
        self.set(key, ",".join([*past[-_PAST:], f"{percent}@{when}"]))

    def samples(self, gpu: int, samples: Iterable[tuple[int, int]]) -> None:
        """Put (microseconds since 1970, percent) in place of the driver's buffer."""
        self.set(f"gpu{gpu}.samples.gpu", " ".join(f"{at}:{value}" for at, value in samples))

    def processes(self, gpu: int, processes: Iterable[Process], growth: int = 0) -> None:
        """Put processes on a GPU; `growth` more start each time a client asks how many."""
        texts: list[str] = []
        for process in processes:
            instance = "".join(f":{part}" for part in process.instance or ())
            memory = (1 << 64) - 1 if process.memory == "-" else plain_number(process.memory)
            texts.append(f"{process.pid}:{process.kind}:{memory}{instance}")
        key = f"gpu{gpu}.processes"
        self.update({key: ",".join(texts) or "none", f"{key}.growth": growth})

    def split(self, gpu: int, profiles: Sequence[str]) -> None:
        """Put a card into MIG mode with these instances, `3g.40gb`; none: MIG mode off."""
        model = self._keys[f"gpu{gpu}.name"]
        keys: dict[str, object] = {"mig.mode": int(bool(profiles))}
        keys |= {"mig.mode.pending": keys["mig.mode"], "mig.max": max(7, len(profiles))}
        for number in range(MAX_INSTANCES):
            keys[f"mig{number}.uuid"] = None
        for number, profile in enumerate(profiles):
            place = f"{self._keys[f'gpu{gpu}.uuid']} {self._changes} {number}"
            told = {
                "uuid": f"MIG-{uuid.uuid5(uuid.NAMESPACE_OID, place)}",
                "profile": profile,
                "memory_mib": str(int(profile.partition(".")[2].removesuffix("gb")) * 1024),
            }
            own = instance_keys(model, f"gi{number + 1}.ci0", told)
            keys |= {f"mig{number}.{key}": value for key, value in own.items()}
        self.update({f"gpu{gpu}.{key}": value for key, value in keys.items()})

    def fail(self, call: str, error: int, *, gpu: int | None = None) -> None:
        """Make calls fail: `call` may have * in it; error 0 lifts it."""
        self.set(_rule("error", call, gpu), error)

    def lose(self, gpu: int) -> None:
        """Let a card fall off the bus: every call that speaks of it says that it is lost."""
        self.fail("*", ERROR_GPU_IS_LOST, gpu=gpu)

    def hang(self, call: str, manner: Hang, *, gpu: int | None = None) -> None:
        """Make calls not come back until the rule goes (unset, reset, or the end of the double)."""
        self.set(_rule("hang", call, gpu), manner)

    def crash(self, call: str, signal: int = 6, *, gpu: int | None = None) -> None:
        """Make calls kill their process."""
        self.set(_rule("crash", call, gpu), signal)

    def calls(self) -> Counter[str]:
        """Return how often each function was called so far, by all clients together."""
        return Counter((self.control.parent / "control.calls").read_text().splitlines())

    def held(self) -> bool:
        """Return whether a client is between nvmlInit and nvmlShutdown (a GPU reset would fail)."""
        with (self.control.parent / "control.held").open() as file:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                return True
        return False

    def _write(self) -> None:
        """Replace the control file: a client sees all of a change, or nothing.

        It knows a change by inode, size and time; the kernel's time has ticks and an inode comes
        round again, so each file gets another size.
        """
        self._changes += 1
        keys = self._every_key()
        lines = [f"{key}={value}" for key, value in keys.items()]
        lines.append("#" * (1 + self._changes % 97))
        new = self.control.with_suffix(".new")
        new.write_text("".join(f"{line}\n" for line in lines))
        new.chmod(0o644)
        new.rename(self.control)

    def _every_key(self) -> dict[str, str]:
        """Return each key of each slot, the last that was set last: gpu*, nvlink.* written out."""
        keys: dict[str, str] = {}
        for key, value in (*self._keys.items(), *self._settings.items()):
            slots = range(self._slots) if key.startswith("gpu*.") else range(1)
            for one in [key.replace("gpu*", f"gpu{slot}", 1) for slot in slots]:
                keys.pop(one, None)
                keys[one] = plain_number(value)
        for slot in range(self._slots):
            of = f"gpu{slot}.nvlink."
            links = range(int(keys.get(f"{of}count") or 0))
            for name in _LINKS:
                every = keys.pop(f"{of}*.{name}", "")
                told = [keys.setdefault(f"{of}{link}.{name}", every) for link in links]
                if name.endswith("_kib") and any(told):
                    keys.setdefault(f"{of}all.{name}", str(sum(map(int, told))))
        return keys


def plain_number(value: str) -> str:
    """Return 512M as a number; other values as they are."""
    unit = _UNITS.get(value[-1:], 0)
    return str(int(value[:-1]) << unit) if unit and value[:-1].isdecimal() else value


def _rule(kind: str, call: str, gpu: int | None) -> str:
    return f"{'' if gpu is None else f'gpu{gpu}.'}{kind}.{call}"
