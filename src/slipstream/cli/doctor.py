"""`slipstream doctor`: is this environment fit to run?"""

from __future__ import annotations

import os
import platform
from collections.abc import Callable
from dataclasses import asdict, dataclass
from importlib import metadata
from pathlib import Path

import typer

from slipstream.cli import options as o
from slipstream.cli.checks import DEFAULT_MODEL
from slipstream.cli.output import json_output, quiet_libraries
from slipstream.errors import SlipstreamError


@dataclass(frozen=True, slots=True)
class Check:
    """One thing looked at.

    Args:
        name: what was looked at.
        ok: False when it stops something from working.
        detail: what was found, and what to do about it.
    """

    name: str
    ok: bool
    detail: str


def doctor(json: o.JsonOption = False) -> None:
    """Check the environment: versions, devices, number types, default model, cache folder."""
    with json_output(json) as writer:
        quiet_libraries()
        checks = [look() for look in LOOKS]
        if json:
            writer.write({"checks": [asdict(check) for check in checks]})
        else:
            _table(checks)
    if not all(check.ok for check in checks):
        raise typer.Exit(1)


def _python() -> Check:
    found = platform.python_version_tuple()
    is_new = (int(found[0]), int(found[1])) >= (3, 11)
    return Check("python", is_new, f"{platform.python_version()} (3.11 or newer)")


def _package(name: str) -> Callable[[], Check]:
    def look() -> Check:
        try:
            return Check(name, True, metadata.version(name))
        except metadata.PackageNotFoundError:
            return Check(name, False, f"not installed: pip install {name}")

    return look


def _cpu() -> Check:
    name = platform.processor() or platform.machine()
    info = Path("/proc/cpuinfo")
    if info.is_file():
        for line in info.read_text(encoding="utf-8", errors="replace").splitlines():
            if line.startswith("model name"):
                name = line.partition(":")[2].strip()
                break
    from slipstream.target.hardware import physical_cores

    return Check("cpu", True, f"{name}, {physical_cores()} physical cores usable")


def _threads() -> Check:
    import torch

    wait = os.environ.get("OMP_WAIT_POLICY", "not set")
    return Check("threads", True, f"torch uses {torch.get_num_threads()}, OMP_WAIT_POLICY {wait}")


def _device() -> Check:
    import torch

    if not torch.cuda.is_available():
        return Check("device", True, "cpu (no CUDA device)")
    names = [torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count())]
    return Check("device", True, f"cuda: {', '.join(names)}")


def _dtypes() -> Check:
    """Which number types compute here, and which of them the hardware has."""
    import torch

    from slipstream.target.hardware import has_bfloat16

    device = "cuda" if torch.cuda.is_available() else "cpu"
    working = []
    for dtype in (torch.float32, torch.bfloat16, torch.float16, torch.float64):
        try:
            a = torch.ones(8, 8, dtype=dtype, device=device)
            (a @ a).sum().item()
            working.append(str(dtype).removeprefix("torch."))
        except RuntimeError:
            continue
    detail = ", ".join(working)
    if device == "cpu":
        capability = torch.backends.cpu.get_cpu_capability()
        has_bf16 = has_bfloat16(torch.device("cpu"))
        detail += f"; {capability}, bfloat16 {'in hardware' if has_bf16 else 'emulated'}"
    return Check("dtypes", "float32" in working, detail)


def _memory() -> Check:
    try:
        page = os.sysconf("SC_PAGE_SIZE")
        total = os.sysconf("SC_PHYS_PAGES") * page / 2**30
        free = os.sysconf("SC_AVPHYS_PAGES") * page / 2**30
    except (ValueError, OSError, AttributeError):
        return Check("memory", True, "unknown")
    return Check("memory", total >= 2, f"{total:.1f} GiB, {free:.1f} GiB free (2 GiB needed)")


def _default_model() -> Check:
    from slipstream.target.embedded import locate

    try:
        path = locate(DEFAULT_MODEL)
    except SlipstreamError as error:
        return Check("default model", False, f"{error}; {error.hint}")
    return Check("default model", True, f"{DEFAULT_MODEL}: {path.name}")


def _cache() -> Check:
    from slipstream.target.embedded import cache_root

    place = root = cache_root()
    while not place.exists() and place != place.parent:
        place = place.parent
    is_writable = place.is_dir() and os.access(place, os.W_OK | os.X_OK)
    advice = "" if is_writable else " is not writable: set XDG_CACHE_HOME to a folder that is"
    return Check("cache folder", is_writable, f"{root}{advice}")


def _zoo() -> Check:
    from slipstream.assemble import zoo_folder
    from slipstream.cli.zoo import read_zoo

    names = [entry["name"] for entry in read_zoo(zoo_folder())]
    return Check("zoo", True, ", ".join(names) or "no drafters (they are part of a checkout)")


LOOKS: tuple[Callable[[], Check], ...] = (
    _python,
    *(_package(name) for name in ("torch", "transformers", "safetensors", "accelerate", "gguf")),
    _cpu,
    _threads,
    _device,
    _dtypes,
    _memory,
    _default_model,
    _cache,
    _zoo,
)


def _table(checks: list[Check]) -> None:
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    table = Table(box=None, pad_edge=False, show_header=False)
    for check in checks:
        mark = Text("ok", style="green") if check.ok else Text("FAIL", style="bold red")
        table.add_row(mark, check.name, Text(check.detail))
    Console(highlight=False).print(table)
