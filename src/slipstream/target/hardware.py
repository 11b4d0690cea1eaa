"""What this machine offers: device, number type, cores."""

from __future__ import annotations

import contextlib
import ctypes
import os
import re
import threading
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import torch

from slipstream.errors import SettingError, UnknownNameError

DTYPES = {
    "bfloat16": torch.bfloat16,
    "float16": torch.float16,
    "float32": torch.float32,
    "float64": torch.float64,
}

# How weights may be stored; they are multiplied as bfloat16, or (a8) by activations in 8 bits.
WEIGHTS = ("int8", "int4", "w8a8", "w4a8")

AMD = "amd"  # beside a processor's flags: its dot products of bfloat16 are fast

HUGE_PAGE = 2 << 20  # bytes, of x86-64 and most of ARM
MADV_HUGEPAGE = 14  # of Linux

MAX_THREADS = 1024  # torch crashes where the system has no room for its threads


def pick_device(device: str | torch.device = "auto") -> torch.device:
    """The device a name means; `auto` is the first CUDA device, or the CPU.

    Raises:
        SettingError: the device is not there.
    """
    if device == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        picked = torch.device(device)
    except RuntimeError as error:
        raise SettingError("device", device, "auto, cpu, or cuda", str(error)) from error
    if picked.type not in ("cpu", "cuda"):
        raise SettingError("device", device, "auto, cpu, or cuda", "use --device cpu")
    if picked.type == "cuda" and (picked.index or 0) >= torch.cuda.device_count():
        raise SettingError("device", device, "one this machine has", "use --device cpu")
    return picked


def pick_dtype(dtype: str | torch.dtype, device: torch.device) -> torch.dtype:
    """The number type a name means; `auto` is bfloat16 where the hardware multiplies it.

    Raises:
        UnknownNameError: no such type.
    """
    if isinstance(dtype, torch.dtype):
        return dtype
    if dtype in WEIGHTS:  # how weights are stored; they are multiplied as bfloat16
        return torch.bfloat16
    if dtype == "auto":
        return torch.bfloat16 if has_bfloat16(device) else torch.float32
    if dtype not in DTYPES:
        raise UnknownNameError("dtype", dtype, ["auto", *DTYPES, *WEIGHTS])
    return DTYPES[dtype]


def has_bfloat16(device: torch.device) -> bool:
    """True where bfloat16 products run in hardware."""
    if device.type == "cuda":
        return torch.cuda.is_bf16_supported(including_emulation=False)
    try:
        return bool(torch.ops.mkldnn._is_mkldnn_bf16_supported())
    except (AttributeError, RuntimeError):
        return False


def trains_faster_in_bfloat16(device: torch.device) -> bool:
    """True where large bfloat16 products outrun float32 ones.

    On GPUs, on CPUs with AMX, and on AMD's with AVX-512's bfloat16 products, which Intel's without
    AMX have too, but slower than float32 ones (Sapphire Rapids: 150 and 260 Gop/s on two cores).
    """
    if device.type == "cuda":
        return has_bfloat16(device)
    has_tiles = bool(getattr(torch.cpu, "_is_amx_tile_supported", lambda: False)())
    return has_tiles or {AMD, "avx512_bf16"} <= processor_flags()


def physical_cores() -> int:
    """Cores this process may use, hyper-threads counted once."""
    try:
        allowed = os.sched_getaffinity(0)
    except AttributeError:  # not Linux
        return max(1, (os.cpu_count() or 2) // 2)
    cores = set()
    for cpu in allowed:
        siblings = Path(f"/sys/devices/system/cpu/cpu{cpu}/topology/thread_siblings_list")
        try:
            cores.add(siblings.read_text().strip())
        except OSError:
            cores.add(str(cpu))
    return max(1, len(cores))


def return_memory() -> None:
    """Give freed memory back to the system, where the C library would keep it (glibc)."""
    with contextlib.suppress(OSError, AttributeError):
        ctypes.CDLL(None).malloc_trim(0)


def room_in_huge_pages(num_bytes: int) -> torch.Tensor:
    """[num_bytes] uint8 for numbers that every pass reads, in large pages where there are any.

    A pass reads the weights faster that way: there are fewer pages to look up, and a processor
    that reads ahead stops at the end of a page. Nothing is written, so memory is taken as it fills.
    """
    room = torch.empty(num_bytes + HUGE_PAGE, dtype=torch.uint8, device="cpu")
    room = room[-room.data_ptr() % HUGE_PAGE :][:num_bytes]
    with contextlib.suppress(OSError, AttributeError):
        advise = ctypes.CDLL(None).madvise
        advise(ctypes.c_void_p(room.data_ptr()), ctypes.c_size_t(num_bytes), MADV_HUGEPAGE)
    return room


def use_threads(threads: int | None) -> int:
    """Set how many CPU threads the target uses; None takes OMP_NUM_THREADS or physical cores.

    Returns:
        The number set.

    Raises:
        SettingError: threads is below 1 or above 1024.
    """
    if threads is None:
        wanted = os.environ.get("OMP_NUM_THREADS", "")
        threads = int(wanted) if wanted.isdigit() and int(wanted) else physical_cores()
    if not 1 <= threads <= MAX_THREADS:
        raise SettingError("threads", threads, f"1 to {MAX_THREADS}", "leave it out for the cores")
    torch.set_num_threads(threads)
    return threads


_resting = threading.local()


@contextlib.contextmanager
def resting_threads() -> Iterator[None]:
    """Let torch run its own operations on this thread alone; `num_threads` stays what it was.

    Between two compiled passes torch has a few small operations. To wake its threads for them, and
    to put the passes' own threads back on their cores, takes longer than the operations.

    Only this thread is told, and only torch's OpenMP: `torch.set_num_threads` tells all threads
    that begin meanwhile too, and makes torch's other pool anew. Without OpenMP nothing changes.
    """
    openmp = _openmp()
    if openmp is None or getattr(_resting, "count", 0):
        yield
        return
    count = torch.get_num_threads()  # which settles this thread's count, if new
    try:
        _resting.count = count
        openmp.omp_set_num_threads(1)
        yield
    finally:
        openmp.omp_set_num_threads(count)
        _resting.count = 0


@cache
def _openmp() -> ctypes.CDLL | None:
    """The OpenMP library that torch runs on, if it can be told apart."""
    try:
        maps = Path("/proc/self/maps").read_text(encoding="utf-8")
    except OSError:
        return None
    names = set(re.findall(r"/\S*lib(?:gomp|iomp5|omp)[-.\w]*\.so[.\d]*", maps))
    own = [name for name in names if Path(name).is_relative_to(Path(torch.__file__).parents[1])]
    found = own or sorted(names)
    return ctypes.CDLL(found[0]) if len(found) == 1 else None


def threads_of(decoder: str) -> contextlib.AbstractContextManager[None]:
    """What torch's own threads do while such a decoder runs: beside compiled passes they rest."""
    return resting_threads() if decoder == "compiled" else contextlib.nullcontext()


def num_threads() -> int:
    """Threads of a compiled pass: torch's, also while those rest."""
    return getattr(_resting, "count", 0) or torch.get_num_threads()


def processor_flags() -> set[str]:
    """What the system says the processor can do, and `AMD` where that is its maker."""
    try:
        text = Path("/proc/cpuinfo").read_text(encoding="utf-8")
    except OSError:
        return set()
    line = next((line for line in text.splitlines() if line.startswith("flags")), "")
    maker = {AMD} if "AuthenticAMD" in text else set()
    return set(line.partition(":")[2].split()) | maker
