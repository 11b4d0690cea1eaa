"""`slipstream train`: a drafter for a target, from answers or from features on disk."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, Any

import typer

from slipstream import assemble
from slipstream.cli import options as o
from slipstream.cli.checks import (
    DEFAULT_MODEL,
    check_at_least_one,
    check_model,
    check_name,
    check_output_folder,
)
from slipstream.cli.output import console, json_output, quiet_libraries
from slipstream.cli.progress import progress_bar
from slipstream.errors import DataError, OutputError, SettingError


def train(
    data: Annotated[
        Path,
        typer.Option("--data", metavar="FILE|STORE", help="JSONL with answers, or a store."),
    ],
    output: Annotated[Path, typer.Option("--output", metavar="DIR", help="The run's folder.")],
    model: o.ModelOption = DEFAULT_MODEL,
    method: o.MethodOption = "eagle3",
    drafter: Annotated[
        str | None, typer.Option("--drafter", metavar="FOLDER", help="Start from this drafter.")
    ] = None,
    lora_rank: Annotated[
        int | None, typer.Option("--lora-rank", help="Train adapters of this rank on --drafter.")
    ] = None,
    steps: Annotated[int, typer.Option("--steps", help="Optimizer steps.")] = 1000,
    save_every: Annotated[int, typer.Option("--save-every", help="Steps between states.")] = 200,
    evaluate_every: Annotated[
        int, typer.Option("--evaluate-every", help="Steps between evaluations by decoding.")
    ] = 200,
    max_length: Annotated[int, typer.Option("--max-length", help="Tokens of a packed row.")] = 1024,
    rows: Annotated[int, typer.Option("--rows", help="Packed rows of a batch.")] = 1,
    accumulate: Annotated[int, typer.Option("--accumulate", help="Batches of a step.")] = 1,
    learning_rate: Annotated[float, typer.Option("--learning-rate", help="Highest.")] = 1e-3,
    optimizer: Annotated[str, typer.Option("--optimizer", help="adamw or muon.")] = "adamw",
    num_unrolled: Annotated[
        int | None,
        typer.Option("--num-unrolled", help="eagle3: steps of the training-time test."),
    ] = None,
    draft_vocab_size: Annotated[
        int | None,
        typer.Option("--draft-vocab-size", help="Target ids the drafter can say."),
    ] = None,
    initial: Annotated[
        str | None,
        typer.Option("--initial", help="First weights: target (its last layer) or random."),
    ] = None,
    precision: Annotated[
        str,
        typer.Option(
            "--precision",
            help="no; bf16: the forward pass under autocast; auto: bf16 where it is faster.",
        ),
    ] = "no",
    shard: Annotated[
        bool,
        typer.Option("--shard", help="Several processes: split network and optimizer (FSDP2)."),
    ] = False,
    recompute: Annotated[
        bool, typer.Option("--recompute", help="Less memory: recompute MLP activations.")
    ] = False,
    milestone_every: Annotated[
        int | None, typer.Option("--milestone-every", help="Steps between drafters kept for good.")
    ] = None,
    tracker: Annotated[
        str, typer.Option("--tracker", help="none, tensorboard or wandb, beside metrics.jsonl.")
    ] = "none",
    given: Annotated[
        list[str] | None,
        typer.Option("--set", metavar="NAME=VALUE", help="A setting of the method; repeatable."),
    ] = None,
    held_out: Annotated[
        int, typer.Option("--held-out", help="Last texts, kept for evaluation.")
    ] = 64,
    eval_prompts: Annotated[
        int, typer.Option("--eval-prompts", help="Held-out prompts decoded at evaluations.")
    ] = 8,
    eval_tokens: Annotated[int, typer.Option("--eval-tokens", help="Tokens decoded of each.")] = 64,
    max_prompt: Annotated[
        int | None, typer.Option("--max-prompt", help="Skip rows with longer prompts, tokens.")
    ] = None,
    loops: Annotated[
        str | None,
        typer.Option(
            "--loops", help="Repetition loops at an answer's end: keep, cut (the default), drop."
        ),
    ] = None,
    last_turn_only: Annotated[
        bool, typer.Option("--last-turn-only", help="Learn from the last answer of a row only.")
    ] = False,
    online: Annotated[
        bool, typer.Option("--online", help="Compute features as it trains; nothing on disk.")
    ] = False,
    thinking: o.ThinkingOption = None,
    limit: o.LimitOption = None,
    seed: o.SeedOption = 0,
    resume: Annotated[bool, typer.Option("--resume", help="Go on in an existing output.")] = False,
    dtype: o.DtypeOption = "auto",
    device: o.DeviceOption = "auto",
    threads: o.ThreadsOption = None,
    json: o.JsonOption = False,
) -> None:
    """Train a drafter; held-out tokens per pass are measured by real decoding as it goes."""
    check_name("dtype", dtype, o.DTYPES)
    check_name("loops", loops or "cut", ("cut", "drop", "keep"))
    check_name("precision", precision, ("no", "bf16", "auto"))
    _check_tracker(tracker)
    if thinking is not None:
        check_name("thinking", thinking, ("on", "off"))
    if lora_rank is not None and drafter is None:
        raise SettingError(
            "lora-rank", lora_rank, "nothing without --drafter", "name the drafter to adapt"
        )
    for name, value in (
        ("steps", steps), ("save-every", save_every), ("evaluate-every", evaluate_every),
        ("rows", rows), ("accumulate", accumulate), ("num-unrolled", num_unrolled),
        ("draft-vocab-size", draft_vocab_size), ("limit", limit), ("threads", threads),
        ("max-prompt", max_prompt), ("eval-tokens", eval_tokens),
        ("milestone-every", milestone_every), ("lora-rank", lora_rank),
    ):  # fmt: skip
        check_at_least_one(name, value)
    for name, value in (("held-out", held_out), ("eval-prompts", eval_prompts)):
        if value < 0:
            raise SettingError(name, value, "0 or more")
    if max_length < 8:
        raise SettingError("max-length", max_length, "8 or more")
    _check_trainable(method)
    check_model(model)
    if not data.exists():
        raise DataError(f"{data}: no such file or folder", "give a JSONL file or a feature store")
    if data.is_dir():
        _check_made(
            online=online or None, limit=limit, max_prompt=max_prompt, loops=loops,
            last_turn_only=last_turn_only or None,
        )  # fmt: skip
    is_main = os.environ.get("RANK", "0") == "0"  # as `torchrun` and `accelerate launch` say
    if is_main:
        check_output_folder(output, resume=resume)
        _check_run(output)
    if not online:
        _check_shared(data)
    start_from = None if drafter is None else str(assemble.locate(drafter, method, model))
    wishes = {
        "num_unrolled": num_unrolled, "draft_vocab_size": draft_vocab_size, "initial": initial,
    } | _parsed(given or [])  # fmt: skip
    settings = _method_settings(
        method, {k: v for k, v in wishes.items() if v is not None}, has_drafter=drafter is not None
    )
    quiet_libraries()
    from slipstream.cli.training import Run
    from slipstream.train.adapters import check_installed
    from slipstream.train.config import TrainConfig
    from slipstream.train.loop import share_of

    config = _validated(
        TrainConfig,
        method=method, steps=steps, rows=rows, max_length=max_length, accumulate=accumulate,
        learning_rate=learning_rate, optimizer=optimizer,
        seed=seed, save_every=save_every, milestone_every=milestone_every,
        evaluate_every=evaluate_every, held_out=held_out, precision=_precision(precision, device),
        shard=shard, recompute=recompute, lora_rank=lora_rank,
        tracker=None if tracker == "none" else tracker,
    )  # fmt: skip

    check_installed(lora_rank)
    _check_adapted(lora_rank, settings)
    share_of(config, int(os.environ.get("WORLD_SIZE", "1")))
    with json_output(json) as writer, _held(output, is_main=is_main):
        run = Run(
            config,
            settings,
            output,
            model=model,
            drafter=start_from,
            target_options={"dtype": dtype, "device": _own_device(device), "threads": threads},
            say=lambda text: console().print(text, highlight=False) if is_main else None,
            is_main=is_main,
            thinking=thinking,
        )
        with progress_bar("extracting", is_shown=is_main) as update:
            run.open(
                data,
                is_online=online,
                limit=limit,
                max_prompt=max_prompt,
                loops=loops or "cut",
                last_turn_only=last_turn_only,
                resume=resume,
                on_progress=lambda done, total, _tokens, _seconds: update(done, total),
            )
        with progress_bar("training", is_shown=is_main) as update:
            done = run.train(
                num_prompts=eval_prompts,
                num_tokens=eval_tokens,
                on_step=lambda record: update(record["step"], steps),
            )
        if json and is_main:
            writer.write(done)
    if not json and is_main:
        console().print(
            f"{done['steps']} steps, {done['tokens']:,} tokens, {done['seconds']:.0f} s, "
            f"held-out tau {done['tau']}: {done['path']}",
            highlight=False,
        )
    if done["kept_old"]:
        console().print(f"{done['kept_old']}; the old drafter is kept", highlight=False)
        raise typer.Exit(1)


@contextmanager
def _held(output: Path, *, is_main: bool) -> Iterator[None]:
    """The run's folder, kept for the one process that writes it; gone if nothing came of it."""
    from slipstream.data.hold import Hold

    if not is_main:
        yield
        return
    output.mkdir(parents=True, exist_ok=True)
    with Hold(output):
        try:
            yield
        finally:
            if not any(output.iterdir()):
                output.rmdir()


def _precision(wish: str, device: str) -> str:
    """What `auto` means here: bf16 where that is faster."""
    if wish != "auto":
        return wish
    from slipstream.target.hardware import pick_device, trains_faster_in_bfloat16

    return "bf16" if trains_faster_in_bfloat16(pick_device(device)) else "no"


def _own_device(wish: str) -> str:
    """The device of this process: of several, each takes the GPU of its number on its machine.

    Raises:
        SettingError: one GPU was named for all of them.
    """
    if os.environ.get("WORLD_SIZE", "1") == "1":
        return wish
    from slipstream.target.hardware import pick_device

    picked = pick_device(wish)
    if picked.type != "cuda":
        return wish
    if picked.index is not None:
        raise SettingError(
            "device", wish, "cuda without a number where several processes train",
            "use --device cuda, and CUDA_VISIBLE_DEVICES to choose among the GPUs",
        )  # fmt: skip
    return f"cuda:{os.environ.get('LOCAL_RANK', '0')}"


def _check_run(folder: Path) -> None:
    """Raises OutputError for a folder with something in it that is not a run's."""
    if not folder.is_dir() or not any(folder.iterdir()):
        return
    if not (folder / "run.json").is_file() and not (folder / "features").is_dir():
        raise OutputError(
            f"output {folder} is not empty and holds no run, expected run.json or features",
            "give the folder of a run with --resume, or choose another --output",
        )


def _check_adapted(rank: int | None, settings: Any) -> None:
    """Raises SettingError for adapters on a network that stays as it is."""
    if rank is not None and getattr(settings, "only_path", False):
        raise SettingError(
            "lora-rank", rank, "nothing beside only_path, which leaves the network as it is",
            "leave one of the two out",
        )  # fmt: skip


def _check_trainable(method: str) -> None:
    from slipstream import methods

    record = methods.get(method)
    if not record.is_trainable:
        names = ", ".join(m.name for m in methods.all() if m.is_trainable)
        raise SettingError("method", method, f"one that is trained: {names}")


def _check_made(**wishes: Any) -> None:
    """Raises SettingError for what is decided when a feature store is made."""
    for name, value in wishes.items():
        if value is not None:
            raise SettingError(
                name.replace("_", "-"),
                "on" if value is True else value,
                "nothing beside a feature store, which was made with it or without",
                "give the JSONL file, or leave it out",
            )


def _check_shared(data: Path) -> None:
    """Raises SettingError when several processes would all take the features of one file."""
    if os.environ.get("WORLD_SIZE", "1") != "1" and not data.is_dir():
        raise SettingError(
            "data", data, "a feature store where several processes train",
            f"make one first: slipstream data extract --data {data} --output features",
        )  # fmt: skip


def _check_tracker(name: str) -> None:
    """Raises SettingError unless the tracker's package is installed."""
    from importlib.util import find_spec

    check_name("tracker", name, ("none", "tensorboard", "wandb"))
    if name != "none" and find_spec(name) is None:
        raise SettingError(
            "tracker", name, "one that is installed", f"pip install {name}, or leave --tracker out"
        )


def _parsed(given: list[str]) -> dict[str, Any]:
    """`--set` pairs by name; values are JSON where they can be, lists may go without brackets.

    Raises:
        SettingError: a pair without a name or an equals sign.
    """
    import json

    found: dict[str, Any] = {}
    for pair in given:
        name, equals, text = pair.partition("=")
        if not name or not equals:
            raise SettingError("set", pair, "NAME=VALUE", "for example --set decay=0.9")
        try:
            value = json.loads(f"[{text}]")
            found[name.replace("-", "_")] = value if "," in text else value[0]
        except (json.JSONDecodeError, IndexError):
            found[name.replace("-", "_")] = text
    return found


def _method_settings(method: str, wishes: dict[str, Any], *, has_drafter: bool) -> Any:
    """The method's own settings; what it would ignore is refused.

    Raises:
        SettingError: a setting that is not the method's, is out of range, or is decided by the
            drafter to start from.
    """
    from slipstream.train import recipes

    recipe = recipes.get(method)
    known = sorted(recipe.settings.model_fields)
    for name, value in wishes.items():
        shown = name.replace("_", "-")
        if name not in known:
            raise SettingError(
                shown, value, f"nothing: {method} does not use it",
                f"{method} can be told {', '.join(known) or 'nothing of its own'}",
            )  # fmt: skip
        if has_drafter and name in recipe.network_settings:
            raise SettingError(
                shown, value, "nothing beside --drafter, which decides it",
                "leave one of the two out",
            )  # fmt: skip
    return _validated(recipe.settings, **wishes)


def _validated(kind: Any, **values: Any) -> Any:
    """A pydantic record; its complaints become ours, naming the option."""
    from pydantic import ValidationError

    try:
        return kind(**values)
    except ValidationError as error:
        first = error.errors()[0]
        name = str(first["loc"][0]).replace("_", "-")
        expected = first["msg"].removeprefix("Input should be ")
        raise SettingError(name, first["input"], expected, f"change --{name}") from error
