# SPDX-License-Identifier: Apache-2.0
"""A load for one GPU that needs nothing but the driver: `load.py INDEX [--share 0.5] [...]`.

It speaks CUDA's driver API (libcuda.so.1) through ctypes and brings its kernel as PTX text, which
the driver compiles for the card it finds: arithmetic on all multiprocessors for a share of the
time, and memory that it holds. It prints `running` once the first kernel has come back, and ends
by itself after --seconds. Exit codes: 0 done, 1 the driver refused something (it says which call
and what), 2 there is no CUDA driver. Standard library only.
"""

from __future__ import annotations

import argparse
import ctypes
import os
import sys
import time

LIBRARY = "libcuda.so.1"
# cuda.h
MULTIPROCESSORS, MAJOR, MINOR = 16, 75, 76  # CUdevice_attribute
LOG, LOG_BYTES = 5, 6  # CUjit_option: where the compiler's errors go, and how much fits there
LOG_ROOM = 8192
THREADS, BLOCKS_EACH = 256, 8  # of a block; blocks a multiprocessor: all it can hold of these
LAUNCH = 0.02  # seconds that one launch is to take: the driver's samples are 170 ms and more
PERIOD = 0.1  # seconds in which the share is kept
FIRST = 1000  # rounds of the first launch, by which the others are measured
MOST_ROUNDS = 1 << 31
MIB = 1 << 20
ENTRY = b"spin"
# The oldest PTX that does it: every driver compiles it, from Kepler's to Blackwell's (ptxas 12.9
# and 13.5 take it for sm_90 and sm_100). The result is stored, so that nothing is left out.
PTX = b"""
.version 3.1
.target sm_30
.address_size 64

.visible .entry spin(.param .u64 out, .param .u32 rounds)
{
    .reg .pred %p<2>;
    .reg .f32 %f<3>;
    .reg .b32 %r<8>;
    .reg .b64 %rd<4>;
    ld.param.u64 %rd1, [out];
    ld.param.u32 %r1, [rounds];
    cvta.to.global.u64 %rd1, %rd1;
    mov.u32 %r2, %ctaid.x;
    mov.u32 %r3, %ntid.x;
    mov.u32 %r4, %tid.x;
    mad.lo.u32 %r5, %r2, %r3, %r4;
    cvt.rn.f32.u32 %f1, %r5;
    mov.f32 %f2, 0f3F7FFFFE;
    mov.u32 %r6, 0;
again:
    fma.rn.f32 %f1, %f1, %f2, %f2;
    fma.rn.f32 %f1, %f1, %f2, %f2;
    fma.rn.f32 %f1, %f1, %f2, %f2;
    fma.rn.f32 %f1, %f1, %f2, %f2;
    fma.rn.f32 %f1, %f1, %f2, %f2;
    fma.rn.f32 %f1, %f1, %f2, %f2;
    fma.rn.f32 %f1, %f1, %f2, %f2;
    fma.rn.f32 %f1, %f1, %f2, %f2;
    add.u32 %r6, %r6, 1;
    setp.lt.u32 %p1, %r6, %r1;
    @%p1 bra again;
    mul.wide.u32 %rd2, %r5, 4;
    add.u64 %rd3, %rd1, %rd2;
    st.global.f32 [%rd3], %f1;
    ret;
}
"""
_SIGNATURES: dict[str, tuple[object, ...]] = {
    "cuInit": (ctypes.c_uint,),
    "cuDeviceGet": (ctypes.POINTER(ctypes.c_int), ctypes.c_int),
    "cuDeviceGetAttribute": (ctypes.POINTER(ctypes.c_int), ctypes.c_int, ctypes.c_int),
    "cuDevicePrimaryCtxRetain": (ctypes.POINTER(ctypes.c_void_p), ctypes.c_int),
    "cuCtxSetCurrent": (ctypes.c_void_p,),
    "cuModuleLoadDataEx": (
        ctypes.POINTER(ctypes.c_void_p),
        ctypes.c_char_p,
        ctypes.c_uint,
        ctypes.POINTER(ctypes.c_int),
        ctypes.POINTER(ctypes.c_void_p),
    ),
    "cuModuleGetFunction": (ctypes.POINTER(ctypes.c_void_p), ctypes.c_void_p, ctypes.c_char_p),
    "cuMemAlloc_v2": (ctypes.POINTER(ctypes.c_uint64), ctypes.c_size_t),
    "cuMemsetD8_v2": (ctypes.c_uint64, ctypes.c_ubyte, ctypes.c_size_t),
    "cuLaunchKernel": (
        ctypes.c_void_p,
        *(ctypes.c_uint,) * 7,
        ctypes.c_void_p,
        ctypes.POINTER(ctypes.c_void_p),
        ctypes.POINTER(ctypes.c_void_p),
    ),
    "cuCtxSynchronize": (),
    "cuMemFree_v2": (ctypes.c_uint64,),
    "cuModuleUnload": (ctypes.c_void_p,),
    "cuDevicePrimaryCtxRelease_v2": (ctypes.c_int,),
}


class CudaError(RuntimeError):
    """Say which call the driver refused, and in which words."""


class Cuda:
    """The driver API; each call raises CudaError unless it succeeds."""

    def __init__(self, library: str = LIBRARY) -> None:
        self._library = ctypes.CDLL(library)
        for name, types in _SIGNATURES.items():
            function = getattr(self._library, name)  # AttributeError: no driver API at all
            function.argtypes, function.restype = types, ctypes.c_int

    def call(self, name: str, *arguments: object) -> None:
        """Call a function; raise CudaError."""
        result = int(getattr(self._library, name)(*arguments))
        if result:
            raise CudaError(f"{name}: {self._words(result)}")

    def _words(self, result: int) -> str:
        text = ctypes.c_char_p()
        try:
            failed = self._library.cuGetErrorString(result, ctypes.byref(text))
        except AttributeError:
            failed = 1
        said = (text.value or b"").decode(errors="replace") if not failed else "no words for it"
        return f"error {result}, {said}"


class Load:
    """The kernel on one card, with memory that is held; as a context."""

    def __init__(self, cuda: Cuda, index: int, memory_mib: int) -> None:
        self._cuda = cuda
        self._device, self._context = ctypes.c_int(), ctypes.c_void_p()
        self._module, self._kernel = ctypes.c_void_p(), ctypes.c_void_p()
        self._memory = ctypes.c_uint64()
        cuda.call("cuInit", 0)
        cuda.call("cuDeviceGet", ctypes.byref(self._device), index)
        self.capability = f"{self._attribute(MAJOR)}.{self._attribute(MINOR)}"
        self._blocks = BLOCKS_EACH * self._attribute(MULTIPROCESSORS)
        self._bytes = max(memory_mib * MIB, 4 * THREADS * self._blocks)

    def __enter__(self) -> Load:
        call = self._cuda.call
        call("cuDevicePrimaryCtxRetain", ctypes.byref(self._context), self._device)
        call("cuCtxSetCurrent", self._context)
        self._compile()
        call("cuModuleGetFunction", ctypes.byref(self._kernel), self._module, ENTRY)
        call("cuMemAlloc_v2", ctypes.byref(self._memory), self._bytes)
        call("cuMemsetD8_v2", self._memory, 0, self._bytes)
        return self

    def __exit__(self, *_: object) -> None:
        """Give back what was taken; what fails then is over anyway when the process ends."""
        for name, taken in (
            ("cuMemFree_v2", self._memory),
            ("cuModuleUnload", self._module),
            ("cuDevicePrimaryCtxRelease_v2", self._device),
        ):
            try:
                self._cuda.call(name, taken)
            except CudaError as fault:
                print(fault, file=sys.stderr)

    def launch(self, rounds: int) -> float:
        """Run the kernel; return the seconds it took."""
        out, count = ctypes.c_uint64(self._memory.value), ctypes.c_uint(rounds)
        places = (ctypes.c_void_p * 2)(ctypes.addressof(out), ctypes.addressof(count))
        began = time.monotonic()
        grid = (self._blocks, 1, 1, THREADS, 1, 1)
        self._cuda.call("cuLaunchKernel", self._kernel, *grid, 0, None, places, None)
        self._cuda.call("cuCtxSynchronize")
        return time.monotonic() - began

    def _attribute(self, number: int) -> int:
        value = ctypes.c_int()
        self._cuda.call("cuDeviceGetAttribute", ctypes.byref(value), number, self._device)
        return value.value

    def _compile(self) -> None:
        """Let the driver compile the kernel; raise CudaError with its compiler's words."""
        log = ctypes.create_string_buffer(LOG_ROOM)
        options = (ctypes.c_int * 2)(LOG, LOG_BYTES)
        values = (ctypes.c_void_p * 2)(ctypes.addressof(log), LOG_ROOM)
        try:
            self._cuda.call(
                "cuModuleLoadDataEx", ctypes.byref(self._module), PTX, 2, options, values
            )
        except CudaError as fault:
            raise CudaError(f"{fault}\n{log.value.decode(errors='replace')}".rstrip()) from fault


def rounds_for(rounds: int, seconds: float) -> int:
    """Return how many rounds a launch of LAUNCH takes, where `rounds` took `seconds`. Pure."""
    return max(1, min(MOST_ROUNDS, int(rounds * LAUNCH / max(seconds, 1e-6))))


def rest(worked: float, share: float) -> float:
    """Return how long to do nothing after so many seconds of work. Pure."""
    return worked / share - worked


def spin(load: Load, share: float, seconds: float) -> int:
    """Keep the card busy for a share of the time; return how many launches that were."""
    load.launch(FIRST)  # the first one loads what is not loaded yet
    rounds = FIRST
    for _ in range(3):  # the clocks rise meanwhile
        rounds = rounds_for(rounds, load.launch(rounds))
    print("running", flush=True)
    launches, end = 0, time.monotonic() + seconds
    while time.monotonic() < end:
        began = time.monotonic()
        while time.monotonic() < min(end, began + share * PERIOD):
            load.launch(rounds)
            launches += 1
        time.sleep(rest(time.monotonic() - began, share))
    return launches


def main() -> int:
    """Load a card; return the exit code."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("index", type=int, help="which GPU, as nvidia-smi counts them")
    parser.add_argument("--seconds", type=float, default=20.0)
    parser.add_argument("--share", type=float, default=1.0, help="of the time, above 0 to 1")
    parser.add_argument("--memory-mib", type=int, default=1024)
    options = parser.parse_args()
    if not 0 < options.share <= 1:
        parser.error("--share is above 0, and 1 at most")
    os.environ["CUDA_DEVICE_ORDER"] = "PCI_BUS_ID"  # libcuda reads it at cuInit
    os.environ.pop("CUDA_VISIBLE_DEVICES", None)
    try:
        cuda = Cuda()
    except (OSError, AttributeError) as fault:
        print(f"no CUDA driver here: {fault}", file=sys.stderr)
        return 2
    try:
        with Load(cuda, options.index, options.memory_mib) as load:
            launches = spin(load, options.share, options.seconds)
    except CudaError as fault:
        print(f"GPU {options.index}: {fault}", file=sys.stderr)
        return 1
    print(f"GPU {options.index} of capability {load.capability}: {launches} launches")
    return 0


if __name__ == "__main__":
    sys.exit(main())
