"""The same service by a distributed engine: its command, and what has to be exported first.

The drafter's files go through `slipstream convert`; the settings are those that `slipstream tune`
would export for them. What an engine cannot express is said, not left out silently.
"""

from __future__ import annotations

import json
import shlex
from collections.abc import Sequence
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version

from slipstream.errors import SettingError
from slipstream.tune.exports import sglang_flags, vllm
from slipstream.tune.optimum import PLAIN, Setting

ENGINES = ("vllm", "sglang")
DIALECTS = {"vllm": "vllm", "sglang": "specforge"}
CHECKED = {"vllm": "0.32", "sglang": "0.5.23"}  # the versions whose flags were read


@dataclass(frozen=True, slots=True)
class Handover:
    """How another engine serves the same.

    Args:
        command: what to run, as words.
        convert: what to run first, as words; empty when nothing has to be exported.
        notes: what is different there.
    """

    command: tuple[str, ...]
    convert: tuple[str, ...]
    notes: tuple[str, ...]

    def __str__(self) -> str:
        lines = [shlex.join(words) for words in (self.convert, self.command) if words]
        return "\n".join(lines)


def handover(
    engine: str,
    setting: Setting,
    *,
    model: str,
    loadable: str,
    source: str | None,
    folder: str,
    host: str,
    port: int,
    max_length: int | None = None,
) -> Handover:
    """The command that serves a model with a drafter elsewhere.

    Args:
        engine: "vllm" or "sglang".
        setting: method and tree.
        model: as we call it.
        loadable: an id or a path that the engine can load itself.
        source: our drafter's folder or zoo name; None for methods without a network.
        folder: where the exported drafter lies or will lie.
        host: address to listen on.
        port: of it.
        max_length: context, tokens.

    Raises:
        SettingError: that engine has no such method.
    """
    speculation = _speculation(engine, setting, folder)
    where = ("--host", host, "--port", str(port))
    if engine == "vllm":
        words = ["vllm", "serve", loadable, *where]
        words += [] if max_length is None else ["--max-model-len", str(max_length)]
        if speculation:
            words += ["--per-request-spec-decode-metrics", "summary"]
    else:
        words = ["python", "-m", "sglang.launch_server", "--model-path", loadable, *where]
        words += [] if max_length is None else ["--context-length", str(max_length)]
    convert: tuple[str, ...] = ()
    if source is not None:
        convert = (
            "slipstream", "convert", "--from", source, "--to", DIALECTS[engine],
            "--model", model, "--output", folder,
        )  # fmt: skip
    return Handover((*words, *speculation), convert, tuple(_notes(engine, setting)))


def _speculation(engine: str, setting: Setting, folder: str) -> Sequence[str]:
    """The flags of the method."""
    if setting.method == PLAIN.method:
        return ()
    if engine == "vllm":
        config = vllm(setting, {}, folder)
        found = None if config is None else ["--speculative-config", json.dumps(config)]
    else:
        found = sglang_flags(setting, folder)
    if found is None:
        raise SettingError(
            "method", setting.method, f"one that {engine} has", "see `slipstream methods`"
        )
    return found


def _notes(engine: str, setting: Setting) -> list[str]:
    notes = [f"the flags are those of {engine} {CHECKED[engine]}"]
    try:
        notes.append(f"{engine} {version(engine)} is installed here")
    except PackageNotFoundError:
        notes.append(f"{engine} is not installed here")
    if engine == "vllm" and setting.tree not in ("chain", PLAIN.tree):
        notes.append(
            f"vLLM drafts chains: the {setting.tree} tree becomes a chain of {setting.depth}"
        )
    if setting.lookup:
        notes.append(f"{engine} does not unite a drafter with prompt lookup: it is left out")
    notes.append("lengths by batch size come from `slipstream tune`; without it one length is used")
    return notes
