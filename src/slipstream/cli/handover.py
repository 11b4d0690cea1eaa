"""What `slipstream serve` does for another engine: export the drafter, say the command, start."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import typer

from slipstream import assemble, methods
from slipstream.cli import options as o
from slipstream.cli.output import tell
from slipstream.errors import SettingError

KEYS = {"vllm": "set VLLM_API_KEY to it", "sglang": "add --api-key with it"}
CHOSEN = ("method", "tree", "budget", "depth", "topk", "lookup")


def read_tuned(path: Path) -> tuple[dict[str, Any], dict[int, int]]:
    """What tuning chose: fields of a setup, and the chain's best length by batch size.

    Args:
        path: of a result of `slipstream tune --output`.

    Raises:
        SettingError: the file is no such result.
    """
    from slipstream.tune.optimum import Setting

    try:
        value = json.loads(path.read_text(encoding="utf-8"))
        best, by_rows = dict(value["best"]), value["lengths_by_rows"]
        lengths = {int(rows): int(each["depth"]) for rows, each in by_rows.items()}
        setting = Setting(**{name: best[name] for name in CHOSEN})
        return {"method": setting.method, **setting.options()}, lengths
    except (OSError, ValueError, TypeError, KeyError, AttributeError):
        raise SettingError(
            "tuned", path, "a result of `slipstream tune`", "slipstream tune --output FILE.json"
        ) from None


def hand_over(
    engine: str,
    setup: o.Setup,
    output: Path | None,
    *,
    lengths: Mapping[int, int],
    start: bool,
    words: Sequence[str] = (),
    key: str | None = None,
    **listen: Any,
) -> None:
    """Print the other engine's command; with everything in place, become that engine.

    Args:
        engine: "vllm" or "sglang".
        setup: what is served.
        output: folder to export the drafter to; None only says how.
        lengths: batch size to the length of a chain.
        start: run the command if the engine is installed.
        words: more of the command, in the engine's own flags.
        key: that opens its API; it is handed to the engine and never printed.
        **listen: address, port and context; see `serve.distributed.handover`.
    """
    from slipstream.serve.distributed import PLAIN_READ_OUT, dialect_for, handover
    from slipstream.tune.optimum import Setting

    record = methods.get(setup.method)
    wishes = ("tree", "verifier", "budget", "depth", "topk", "width")
    shape = assemble.decide(record, **{name: getattr(setup, name) for name in wishes})
    setting = Setting(record.name, shape.tree, shape.budget, shape.depth, shape.topk, setup.lookup)
    source, folder = None, str(output or f"{record.name}-for-{engine}")
    if "huggingface" in record.formats and _is_whole(setup):
        folder = _whole_model(setup, engine, output)
    elif record.needs_checkpoint:
        source = setup.drafter or f"zoo:{record.name}"
    if source is not None and record.name in PLAIN_READ_OUT:
        _refuse_shifted(source, engine, setup)
    found = handover(
        engine,
        setting,
        model=setup.model,
        loadable=_loadable(setup.model),
        source=source,
        folder=folder,
        lengths=lengths,
        **listen,
    )
    found = replace(found, command=(*found.command, *words))
    for note in found.notes:
        tell(f"note: {note}")
    if key is not None:
        tell(f"note: the API key is not printed; {KEYS[engine]} when you run the command yourself")
    if source is not None and output is not None:
        from slipstream.cli.convert import convert

        convert(
            source=source, output=output, to=dialect_for(engine, record.name), model=setup.model
        )
        typer.echo(str(found).splitlines()[-1])
    else:
        typer.echo(str(found))
    if start and found.can_start and (source is None or output is not None):
        _become(found.command, engine, key)


def _is_whole(setup: o.Setup) -> bool:
    """Whether a model of its own drafts, not a small network of ours, which is exported as one."""
    from slipstream.formats.detect import is_own_language_model

    name = setup.drafter
    if name is None or name.startswith("zoo:"):
        return False
    return not is_own_language_model(Path(name).expanduser())


def _whole_model(setup: o.Setup, engine: str, output: Path | None) -> str:
    """The model that drafts, as the engine loads it.

    Raises:
        SettingError: it should be exported.
    """
    name = str(setup.drafter)
    if output is not None:
        raise SettingError(
            "output", output, f"nothing: {engine} loads {name} as it is", "leave it out"
        )
    return _loadable(name)


def _refuse_shifted(source: str, engine: str, setup: o.Setup) -> None:
    """Raises SettingError for a block drafter whose slots say the token after their own.

    What is not on this disk yet is not looked at.
    """
    from slipstream.formats.dialects.zlab import is_shifted

    if not source.startswith("zoo:") and not Path(source).expanduser().is_dir():
        return
    path = assemble.locate(source, setup.method, setup.model) / "config.json"
    config = json.loads(path.read_text(encoding="utf-8")) if path.is_file() else {}
    if is_shifted(config):
        raise SettingError(
            "drafter",
            f"{source}, whose slots say the token after their own",
            f"one that {engine} reads: slot j says token j",
            "train one with `slipstream train --method dflash --set is_shifted=false`",
        )


def _become(command: tuple[str, ...], engine: str, key: str | None) -> None:
    """Run the command in place of this process, so that signals reach it."""
    if key is not None and engine == "vllm":
        os.environ["VLLM_API_KEY"] = key
    elif key is not None:  # sglang reads it from its command alone
        command = (*command, "--api-key", key)
    program = sys.executable if command[0] == "python" else command[0]
    sys.stdout.flush()
    os.execvp(program, [program, *command[1:]])


def _loadable(model: str) -> str:
    """A name other engines can load: an embedded model is a file on this machine."""
    from slipstream.target.embedded import CATALOGUE, locate

    return str(locate(model)) if model in CATALOGUE else model
