"""What a number was measured on: hardware, versions, revision, and whether others were busy."""

from __future__ import annotations

import os
import platform
import re
import subprocess
import time
from importlib import metadata
from pathlib import Path

import torch

from slipstream.target.library import library
from slipstream.target.protocol import Target, TargetSpec

BUSY_SHARE = 0.10  # share of all CPU time that others take before a run is called busy
WATCH_SECONDS = 0.5


def describe(target: Target) -> dict[str, object]:
    """The environment of a run on `target`, with no paths in it."""
    spec = target.spec
    return {
        "cpu": cpu_model(),
        "num_cores": physical_cores(),
        "num_threads": torch.get_num_threads(),
        "device": spec.device.type,
        "accelerator": torch.cuda.get_device_name(spec.device)
        if spec.device.type == "cuda"
        else None,
        "python": platform.python_version(),
        "platform": f"{platform.system()} {platform.machine()}",
        "versions": {name: _version(name) for name in ("slipstream", "torch", "transformers")},
        "dtype": spec.weights.partition(",")[0] or str(spec.dtype).removeprefix("torch."),
        "weights": spec.weights or None,
        "decoder": spec.decoder,
        "instructions": _instructions(spec),
        "model": _without_folders(spec.name),
        "revision": git_revision(),
        "load_average": list(os.getloadavg()) if hasattr(os, "getloadavg") else None,
    }


def _instructions(spec: TargetSpec) -> str | None:
    """What the passes of a CPU are made of: two processors of one name may differ by it."""
    if spec.device.type != "cpu":
        return None
    if spec.decoder == "compiled":
        return library().detail.partition(", ")[2]
    return torch.backends.cpu.get_cpu_capability()


def _version(name: str) -> str | None:
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return None


def _without_folders(name: str) -> str:
    return Path(name).name if Path(name).expanduser().exists() else name


def cpu_model() -> str:
    """The processor's name, as the system gives it."""
    try:
        found = re.search(r"model name\s*:\s*(.+)", Path("/proc/cpuinfo").read_text())
    except OSError:
        found = None
    return found[1].strip() if found else platform.processor() or platform.machine()


def physical_cores() -> int:
    """Cores, counting the threads of a core once; logical processors where it cannot be told."""
    try:
        text = Path("/proc/cpuinfo").read_text()
    except OSError:
        text = ""
    pairs = set(re.findall(r"physical id\s*:\s*(\d+)[\s\S]*?core id\s*:\s*(\d+)", text))
    available = os.cpu_count() or 1
    return min(len(pairs), available) if pairs else available


def git_revision() -> str | None:
    """Short commit of the checkout this package runs from, "+" when files differ; else None."""
    root = Path(__file__).resolve().parents[3]
    if not (root / ".git").exists() or not (root / "pyproject.toml").exists():
        return None
    try:
        commit = _git(root, "rev-parse", "--short=12", "HEAD")
        changes = _git(root, "status", "--porcelain", "--untracked-files=no", "--", "src", "zoo")
    except (OSError, subprocess.SubprocessError):
        return None
    return commit + ("+" if changes else "")


def _git(root: Path, *arguments: str) -> str:
    ran = subprocess.run(
        ["git", "-C", str(root), *arguments], capture_output=True, text=True, timeout=10, check=True
    )
    return ran.stdout.strip()


def busy_share(seconds: float = WATCH_SECONDS) -> float | None:
    """Share of all CPU time that others take while this process waits; None where unknown.

    Args:
        seconds: how long to watch; this process must be idle meanwhile.
    """
    before = _cpu_ticks()
    time.sleep(seconds)
    after = _cpu_ticks()
    if before is None or after is None or after[1] <= before[1]:
        return None
    return (after[0] - before[0]) / (after[1] - before[1])


class Watch:
    """How much of all CPU time others take while this process works, from now on."""

    def __init__(self) -> None:
        self._before = _cpu_ticks()
        self._own = _own_seconds()

    def others(self) -> float | None:
        """Their share since the watch began; None where the system does not tell."""
        after = _cpu_ticks()
        if self._before is None or after is None or after[1] <= self._before[1]:
            return None
        own = (_own_seconds() - self._own) * os.sysconf("SC_CLK_TCK")
        return max(0.0, after[0] - self._before[0] - own) / (after[1] - self._before[1])


def _own_seconds() -> float:
    """CPU seconds of this process and of its children that ended."""
    times = os.times()
    return times.user + times.system + times.children_user + times.children_system


def _cpu_ticks() -> tuple[int, int] | None:
    """(busy, all) clock ticks of all processors since start-up."""
    try:
        numbers = [int(n) for n in Path("/proc/stat").read_text().split("\n")[0].split()[1:9]]
    except (OSError, ValueError):
        return None
    idle = numbers[3] + numbers[4]
    return sum(numbers) - idle, sum(numbers)
