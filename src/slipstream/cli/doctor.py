"""`slipstream doctor`: is this environment fit to run, and does a drafter serve as it trained?"""

from __future__ import annotations

import os
import platform
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from importlib import metadata
from json import loads
from pathlib import Path
from typing import Annotated, Any

import typer

from slipstream.cli import options as o
from slipstream.cli.checks import (
    DEFAULT_MODEL,
    check_at_least_one,
    check_model,
    check_name,
    set_thinking,
)
from slipstream.cli.output import json_output, quiet_libraries
from slipstream.errors import CheckpointError, SettingError, SlipstreamError


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


def doctor(
    drafter: Annotated[
        str | None,
        typer.Option(
            "--drafter", metavar="FOLDER|zoo:METHOD", help="Say what is wrong with this drafter."
        ),
    ] = None,
    model: o.ModelOption = DEFAULT_MODEL,
    method: Annotated[
        str | None, typer.Option("--method", metavar="NAME", help="The drafter's; else its files'.")
    ] = None,
    prompts: o.PromptsOption = None,
    limit: Annotated[int, typer.Option("--limit", help="Prompts to answer.")] = 8,
    max_new_tokens: o.MaxNewTokensOption = 96,
    thinking: o.ThinkingOption = None,
    dtype: o.DtypeOption = "auto",
    device: o.DeviceOption = "auto",
    threads: o.ThreadsOption = None,
    json: o.JsonOption = False,
) -> None:
    """Check the environment, or with --drafter whether a drafter serves as it was trained.

    A drafter, in any project's files, is fed with the target's own features on a few answers and
    compared with other readings of its files: template, mask, layer ids, norms, RoPE base,
    vocabulary map, number type, thinking mode, context length. What is wrong is named.
    """
    check_name("dtype", dtype, o.DTYPES)
    if thinking is not None:
        check_name("thinking", thinking, ("on", "off"))
    for name, value in (("limit", limit), ("max-new-tokens", max_new_tokens)):
        check_at_least_one(name, value)
    if drafter is None and (method is not None or prompts is not None):
        name, value = ("method", method) if method is not None else ("prompts", prompts)
        raise SettingError(name, value, "nothing without --drafter", "give --drafter FOLDER")
    with json_output(json) as writer:
        quiet_libraries()
        if drafter is None:
            checks: Sequence[Any] = [look() for look in LOOKS]
        else:
            check_model(model)
            folder, named = _drafter(drafter, method, model)
            questions = _questions(prompts, limit)
            from slipstream.parity.checks import examine
            from slipstream.target.hf import load_target

            target = load_target(model, dtype=dtype, device=device, threads=threads)
            set_thinking(target.tokenizer, thinking)
            asked = [q for q in questions if _fits(target, q, max_new_tokens)]
            if not asked:
                raise SettingError(
                    "prompts", len(questions), f"prompts that fit {model}'s context with an answer",
                    "give shorter ones with --prompts",
                )  # fmt: skip
            checks = examine(target, named, folder, asked, num_tokens=max_new_tokens)
        if json:
            writer.write({"checks": [asdict(check) for check in checks]})
        else:
            _table(checks)
    if not all(check.ok for check in checks):
        raise typer.Exit(1)


def _drafter(name: str, method: str | None, model: str) -> tuple[Path, str]:
    """A drafter's folder and its method: as given, or as its files say in any dialect."""
    from slipstream import assemble, methods

    folder = assemble.locate(name, method or "eagle3", model)
    record = methods.get(method or _method_of(folder))
    if not record.is_trainable:
        names = ", ".join(m.name for m in methods.all() if m.is_trainable)
        raise SettingError("method", record.name, f"one that is trained here: {names}")
    return folder, record.name


def _method_of(folder: Path) -> str:
    """Whose network a folder holds; EAGLE-3's where that does not show, so that reading it says."""
    from slipstream.formats import detect

    try:
        config = loads((folder / "config.json").read_text(encoding="utf-8"))
        stored = (config.get("slipstream") or {}).get("method")
    except (OSError, ValueError, AttributeError):
        stored = None
    if stored or detect.is_own_language_model(folder):
        return stored or "chain"
    try:
        return detect.detect(folder).dialect.method
    except CheckpointError:
        return "eagle3"


def _questions(file: Path | None, limit: int) -> list[str]:
    """User texts of a file, or the shorter ones of a prompt set that ships."""
    if file is not None:
        from slipstream.cli.prompts import read_prompts

        return [prompt.turns[0] for prompt in read_prompts(None, file, limit=limit)]
    from slipstream.bench.tasks import read_task

    return sorted((row.text for row in read_task("mt_bench")), key=len)[:limit]


def _fits(target: Any, question: str, num_tokens: int) -> bool:
    """Whether a prompt and its answer fit the target's context."""
    tokenizer = target.tokenizer
    chat = [{"role": "user", "content": question}]
    ids = tokenizer.encode_chat(chat) if tokenizer.has_template else tokenizer.encode(question)
    return len(ids) + num_tokens <= target.spec.max_length


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


def _compiled() -> Check:
    """Whether bfloat16 passes run as compiled code; without it they only take longer."""
    from slipstream.target.library import library

    found = library()
    if found.code is not None:
        return Check("compiled pass", True, found.detail)
    return Check("compiled pass", True, f"not here: {found.detail}; torch's products run instead")


LOOKS: tuple[Callable[[], Check], ...] = (
    _python,
    *(_package(name) for name in ("torch", "transformers", "safetensors", "accelerate", "gguf")),
    _cpu,
    _threads,
    _device,
    _dtypes,
    _compiled,
    _memory,
    _default_model,
    _cache,
    _zoo,
)


def _table(checks: Sequence[Any]) -> None:
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    table = Table(box=None, pad_edge=False, show_header=False)
    for check in checks:
        mark = Text("ok", style="green") if check.ok else Text("FAIL", style="bold red")
        table.add_row(mark, check.name, Text(check.detail))
    Console(highlight=False).print(table)
