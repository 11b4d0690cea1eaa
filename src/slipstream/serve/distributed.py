"""The same service by a distributed engine: its command, and what has to be exported first.

The drafter's files go through `slipstream convert`; the settings are those that `slipstream tune`
would export for them. What an engine cannot express is said, not left out silently.
"""

from __future__ import annotations

import json
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version

from slipstream.errors import SettingError
from slipstream.tune.exports import sglang_flags, vllm
from slipstream.tune.optimum import PLAIN, Setting

ENGINES = ("vllm", "sglang")
DIALECTS = {"vllm": "vllm", "sglang": "specforge"}
"""What an engine's drafters are converted to, `OTHERS` aside."""
OTHERS = {
    ("vllm", "chain"): "transformers",
    ("sglang", "chain"): "transformers",
    ("vllm", "dflash"): "speculators",
    ("vllm", "ddtree"): "speculators",
    ("vllm", "dspark"): "speculators",
    ("sglang", "dflash"): "dflash",
    ("sglang", "ddtree"): "dflash",
}
PLAIN_READ_OUT = ("dflash", "ddtree")
"""Methods whose drafters both engines read one way: slot j says token j."""
CHECKED = {"vllm": "0.32", "sglang": "0.5.23"}  # the versions whose flags were read


@dataclass(frozen=True, slots=True)
class Handover:
    """How another engine serves the same.

    Args:
        command: what to run, as words.
        convert: what to run first, as words; empty when nothing has to be exported.
        notes: what is different there.
        can_start: the engine is installed here, in a version whose flags these are.
    """

    command: tuple[str, ...]
    convert: tuple[str, ...]
    notes: tuple[str, ...]
    can_start: bool = False

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
    lengths: Mapping[int, int] | None = None,
) -> Handover:
    """The command that serves a model with a drafter elsewhere.

    Args:
        engine: "vllm" or "sglang".
        setting: method and tree.
        model: as we call it.
        loadable: an id or a path that the engine can load itself.
        source: our drafter's folder or zoo name; None where nothing has to be exported: methods
            without a network, and whole models that draft.
        folder: where the exported drafter lies or will lie, or the model that drafts.
        host: address to listen on.
        port: of it.
        max_length: context, tokens.
        lengths: batch size to the length of a chain, as `slipstream tune` finds them.

    Raises:
        SettingError: that engine has no such method.
    """
    speculation = _speculation(engine, setting, folder, lengths or {})
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
            "slipstream", "convert", "--from", source, "--to", dialect_for(engine, setting.method),
            "--model", model, "--output", folder,
        )  # fmt: skip
    notes = [_about_version(engine), *_differences(engine, setting, lengths or {})]
    return Handover((*words, *speculation), convert, tuple(notes), is_checked(engine))


def dialect_for(engine: str, method: str) -> str:
    """The dialect in which an engine reads a method's drafters.

    Example:
        >>> dialect_for("vllm", "eagle3"), dialect_for("vllm", "dspark")
        ('vllm', 'speculators')
    """
    return OTHERS.get((engine, method), DIALECTS[engine])


def installed(engine: str) -> str | None:
    """The version of an engine that is installed here."""
    try:
        return version(engine)
    except PackageNotFoundError:
        return None


def is_checked(engine: str) -> bool:
    """True when the installed version has the flags that were read: the same major and minor."""
    here = installed(engine)
    return here is not None and here.split(".")[:2] == CHECKED[engine].split(".")[:2]


def _speculation(
    engine: str, setting: Setting, folder: str, lengths: Mapping[int, int]
) -> Sequence[str]:
    """The flags of the method."""
    if setting.method == PLAIN.method:
        return ()
    if engine == "vllm":
        config = vllm(setting, lengths, folder)
        found = None if config is None else ["--speculative-config", json.dumps(config)]
    else:
        found = sglang_flags(setting, folder)
    if found is None:
        raise SettingError(
            "method", setting.method, f"one that {engine} has", "see `slipstream methods`"
        )
    return found


def _about_version(engine: str) -> str:
    here, read = installed(engine), f"the flags are those of {engine} {CHECKED[engine]}"
    if here is None:
        return f"{read}; {engine} is not installed here"
    if is_checked(engine):
        return f"{read}; {here} is installed here"
    return f"{read}, but {here} is installed here: look at its --help before you start it"


def _differences(engine: str, setting: Setting, lengths: Mapping[int, int]) -> list[str]:
    """What is not the same there as here."""
    notes = []
    if engine == "vllm" and setting.tree not in ("chain", PLAIN.tree):
        length = max([setting.depth, *lengths.values()])
        notes.append(f"vLLM drafts chains: the {setting.tree} tree becomes a chain of {length}")
    if setting.method in PLAIN_READ_OUT:
        notes.append(
            f"{engine} takes slot j of a block for token j: a drafter that was trained with "
            "is_shifted cannot be served there"
        )
    if setting.lookup:
        notes.append(f"{engine} does not unite a drafter with prompt lookup: it is left out")
    if engine == "vllm" and not lengths:
        notes.append("one length serves every batch size; `slipstream tune` finds one for each")
    if engine == "sglang" and lengths:
        notes.append("one length serves every batch size: give sglang_adaptive.json of `tune`")
    return notes
