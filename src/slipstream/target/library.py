"""Compile the C++ of the fast pass once per machine, and load it."""

from __future__ import annotations

import ctypes
import hashlib
import os
import platform
import shutil
import subprocess
import tempfile
from dataclasses import dataclass
from functools import cache as remember
from pathlib import Path

from slipstream.target.embedded import cache_root
from slipstream.target.hardware import AMD, processor_flags

SOURCES = Path(__file__).parent / "native"
FLAGS = ("-O3", "-march=native", "-std=c++20", "-shared", "-fPIC", "-pthread")
NEEDED = {"avx512f", "avx512bw", "avx512dq", "avx512vl"}
# What is used beyond that, best first: the flags, and the options that compile without it.
BETTER = {
    "AMX": ({"amx_bf16"}, ("-mno-amx-bf16", "-mno-amx-int8", "-mno-amx-tile")),
    "AVX-512 bfloat16 dot": ({AMD, "avx512_bf16"}, ("-DNO_DOT",)),
    "AVX-512 bfloat16": ({"avx512_bf16"}, ("-mno-avx512bf16",)),
    "AVX-512 VNNI": ({"avx512_vnni"}, ("-mno-avx512vnni",)),
}
TIMEOUT_SECONDS = 120


@dataclass(frozen=True, slots=True)
class Library:
    """The compiled code, or the reason why there is none.

    Args:
        code: the loaded library, or None.
        detail: the compiler and instructions, or the reason.
    """

    code: ctypes.CDLL | None
    detail: str


@remember
def library(*, without: frozenset[str] = frozenset()) -> Library:
    """Compile if needed and load.

    Args:
        without: names in `BETTER` that are not used even where the processor has them.
    """
    flags = processor_flags()
    if platform.machine() != "x86_64" or not flags >= NEEDED:
        return Library(None, "the processor has no AVX-512")
    compiler = next(filter(None, map(shutil.which, (os.environ.get("CXX", "c++"), "g++"))), None)
    if compiler is None:
        return Library(None, "no C++ compiler was found (c++, g++ or $CXX)")
    used = [name for name, (own, _) in BETTER.items() if own <= flags and name not in without]
    options = FLAGS
    for name, (_, refusals) in BETTER.items():
        options += () if name in used else refusals
    try:
        code = ctypes.CDLL(str(_built(compiler, options, flags)))
    except subprocess.SubprocessError as error:
        said = getattr(error, "stderr", None) or str(error).encode()
        return Library(None, f"the compiler failed: {_short(said.decode(errors='replace'))}")
    except (OSError, RuntimeError) as error:  # no home, a full disk, a folder that runs nothing
        return Library(None, f"the compiled code cannot be kept or loaded: {_short(str(error))}")
    if not code.slipstream_ready():
        if "AMX" in used:
            return library(without=without | {"AMX"})
        return Library(None, "the system does not let this process use the instructions")
    code.slipstream_open.restype = ctypes.c_void_p
    code.slipstream_open.argtypes = [ctypes.c_void_p, ctypes.c_int]
    for name in ("close", "rank", "noise", "first"):
        getattr(code, f"slipstream_{name}").restype = None
    code.slipstream_run.restype = ctypes.c_int
    code.slipstream_rank.argtypes = [
        ctypes.c_void_p, ctypes.c_int, ctypes.c_int64, ctypes.c_int, ctypes.c_void_p,
        ctypes.c_void_p,
    ]  # fmt: skip
    code.slipstream_first.argtypes = [
        ctypes.c_void_p, ctypes.c_int, ctypes.c_int64, ctypes.c_void_p,
    ]  # fmt: skip
    code.slipstream_noise.argtypes = [ctypes.c_uint64, ctypes.c_int64, ctypes.c_void_p]
    code.slipstream_close.argtypes = [ctypes.c_void_p]
    code.slipstream_run.argtypes = [ctypes.c_void_p, ctypes.c_void_p]
    code.slipstream_seconds.argtypes = [ctypes.c_void_p]
    code.slipstream_seconds.restype = ctypes.POINTER(ctypes.c_double)
    return Library(code, f"{Path(compiler).name}, {(*used, 'AVX-512')[0]}")


def is_loaded() -> bool:
    """True when something in this process runs compiled code already."""
    return library.cache_info().currsize > 0 and library().code is not None


def _short(text: str) -> str:
    return " ".join(text.split())[:200]


def _built(compiler: str, options: tuple[str, ...], flags: set[str]) -> Path:
    """The library's file, compiled now if it is not there yet."""
    digest = hashlib.sha256(repr((options, sorted(flags))).encode())
    try:
        version = subprocess.run([compiler, "--version"], capture_output=True, check=True).stdout
    except OSError as error:
        raise subprocess.SubprocessError(f"{compiler} does not run: {error.strerror}") from error
    digest.update(version)
    for source in sorted(SOURCES.iterdir()):
        digest.update(source.read_bytes())
    path = cache_root() / f"pass-{digest.hexdigest()[:16]}.so"
    if not path.is_file():
        path.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=path.parent) as work:
            made = Path(work) / path.name
            subprocess.run(
                [compiler, *options, str(SOURCES / "pass.cpp"), "-o", str(made)],
                capture_output=True,
                timeout=TIMEOUT_SECONDS,
                check=True,
            )
            made.replace(path)  # whole or not at all; another process's copy is as good
    return path
