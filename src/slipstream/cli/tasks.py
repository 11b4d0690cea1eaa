"""What `bench`, `tune` and `verify` share: prompts by task, engines on one target, its twin."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from slipstream.cli import options as o
from slipstream.cli.checks import check_at_least_one
from slipstream.cli.output import tell
from slipstream.errors import PromptTooLongError, SettingError

if TYPE_CHECKING:
    from slipstream.bench.tasks import BenchPrompt

TasksOption = Annotated[
    str | None,
    typer.Option(
        "--tasks",
        metavar="X,Y",
        help="Prompt sets that ship: mt_bench, translation, summarization, qa, math_reasoning, "
        "rag, gsm8k, humaneval, mbpp, multilingual, or SET/FAMILY; mt_bench where neither this "
        "nor --prompts is given.",
    ),
]
TaskLimitOption = Annotated[
    int, typer.Option("--limit", help="Prompts per task, spread evenly over it.")
]


def refuse_idle(context: typer.Context, names: Sequence[str], where: str) -> None:
    """Refuse options that were typed and would do nothing.

    Args:
        context: of the command.
        names: of its parameters.
        where: when they do nothing.

    Raises:
        SettingError: one of them was typed.
    """
    for name in names:
        source = context.get_parameter_source(name)
        if source is not None and source.name == "COMMANDLINE":
            found = context.params[name]
            raise SettingError(name.replace("_", "-"), found, f"nothing {where}", "leave it out")


def read_texts(tasks: str | None, prompts: Path | None, limit: int) -> dict[str, list[Any]]:
    """Task → its prompts before the tokenizer, as (id, messages or text) pairs.

    Args:
        tasks: names separated by commas; None takes the default unless `prompts` is given.
        prompts: a JSONL file of the user's own, which becomes one task named like the file.
        limit: prompts per task.

    Raises:
        SlipstreamError: an unknown task, a file that cannot be read, or both were given.
    """
    check_at_least_one("limit", limit)
    if prompts is not None:
        if tasks is not None:
            raise SettingError(
                "tasks", f"'{tasks}'", "nothing beside --prompts", "give one of the two"
            )
        from slipstream.cli.prompts import read_prompts

        read = list(enumerate(read_prompts(None, prompts)))
        some = read if limit >= len(read) else [read[i * len(read) // limit] for i in range(limit)]
        if len(some) < len(read):
            tell(f"{prompts}: {limit} of {len(read)} prompts, see --limit")
        return {prompts.stem: [(str(row), prompt) for row, prompt in some]}
    from slipstream.bench.tasks import read_task
    from slipstream.cli.prompts import Prompt

    tasks = "mt_bench" if tasks is None else tasks
    names = [name.strip() for name in tasks.split(",") if name.strip()]
    if not names:
        raise SettingError("tasks", f"'{tasks}'", "names separated by commas", "try mt_bench")
    return {
        name: [(row.id, Prompt((row.text,))) for row in read_task(name, limit=limit)]
        for name in names
    }


def encode_tasks(
    target: Any, texts: dict[str, list[Any]], *, raw: bool
) -> dict[str, list[BenchPrompt]]:
    """Token ids of every prompt, checked against the context.

    Raises:
        PromptTooLongError: a prompt leaves no room for an answer.
    """
    from slipstream.bench.tasks import BenchPrompt
    from slipstream.engine.prompts import encode

    encoded: dict[str, list[BenchPrompt]] = {}
    for task, rows in texts.items():
        encoded[task] = []
        for name, prompt in rows:
            first = prompt.first(raw=raw)
            ids = encode(first, target.tokenizer, target.spec.vocab_size, raw=raw)
            if len(ids) >= target.spec.max_length:
                raise PromptTooLongError(
                    f"prompt {name} of {task} has {len(ids)} tokens, expected fewer than "
                    f"{target.spec.max_length}",
                    "leave it out, or choose another model",
                )
            encoded[task].append(BenchPrompt(task, name, tuple(ids)))
    return encoded


def setups_of(setup: o.Setup, specs: Sequence[Any], drafter: str | None) -> dict[str, o.Setup]:
    """One checked setup per method.

    Args:
        setup: the target's.
        specs: methods with settings.
        drafter: checkpoint for the methods that hold a network and name none themselves.

    Raises:
        SlipstreamError: a method's settings or its drafter are wrong; nothing was loaded.
    """
    from dataclasses import replace

    from slipstream import methods

    setups, unused = {}, drafter is not None
    for spec in specs:
        changes = dict(spec.settings)
        if drafter is not None and methods.get(spec.method).needs_checkpoint:
            unused = unused and "drafter" in changes
            changes.setdefault("drafter", drafter)
        setups[spec.name] = replace(setup, method=spec.method, **changes)
    if unused:
        raise SettingError(
            "drafter", drafter, "nothing: no method here takes it", "leave it out of the command"
        )
    return setups


def load_engines(setups: dict[str, o.Setup]) -> dict[str, Any]:
    """One engine per method, all on one target; plain decoding must be among them."""
    engines = {"none": setups["none"].load()}
    target = engines["none"].target
    return {name: engines.get(name) or setup.load(model=target) for name, setup in setups.items()}


def twin_of(target: Any) -> Callable[[], Any]:
    """Loads the same model in float64, once, when asked."""
    from functools import cache

    from slipstream.target.hf import load_target

    return cache(
        lambda: load_target(target.spec.name, dtype="float64", device=str(target.spec.device))
    )


def prompt_mode(target: Any, raw: bool) -> dict[str, object]:
    """How prompts became ids: raw, or the chat template with its variables."""
    mode = getattr(target.tokenizer, "template_mode", {})
    return {"mode": "raw"} if raw else {"mode": "chat", "template": dict(mode)}
