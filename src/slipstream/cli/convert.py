"""`slipstream convert`: a drafter from one project's files to another's, proved on the way."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

from slipstream.cli import options as o
from slipstream.cli.checks import DEFAULT_MODEL, check_at_least_one, check_model, check_name
from slipstream.cli.output import json_output, quiet_libraries
from slipstream.errors import SettingError

DIALECTS = (
    "slipstream", "eagle", "specforge", "speculators", "vllm", "medusa", "dflash", "angelslim",
    "deepspec", "transformers",
)  # fmt: skip
MAX_TOKENS = 256  # of a text that the proof reads


def convert(
    source: Annotated[
        str, typer.Option("--from", metavar="FOLDER|zoo:METHOD", help="A drafter, any dialect.")
    ],
    output: Annotated[Path, typer.Option("--output", metavar="DIR", help="The folder to write.")],
    to: Annotated[
        str, typer.Option("--to", metavar="DIALECT", help=f"One of {', '.join(DIALECTS)}.")
    ] = "slipstream",
    model: o.ModelOption = DEFAULT_MODEL,
    target_name: Annotated[
        str | None,
        typer.Option("--target-name", metavar="ID", help="What files call the target; else M."),
    ] = None,
    prompts: o.PromptsOption = None,
    limit: Annotated[int, typer.Option("--limit", help="Texts of the proof.")] = 2,
    overwrite: Annotated[bool, typer.Option("--overwrite", help="Replace the output.")] = False,
    dtype: o.DtypeOption = "auto",
    device: o.DeviceOption = "auto",
    threads: o.ThreadsOption = None,
    json: o.JsonOption = False,
) -> None:
    """Convert a drafter's checkpoint, and prove that it still says the same.

    The dialect of the source is detected. Before the output appears, the drafter's logits on real
    features of the target are compared before and after; a difference is refused and its cause
    named. Layer ids, vocabulary maps, RoPE and norms are written as the dialect's engines read
    them.
    """
    check_name("dialect", to, DIALECTS)
    check_name("dtype", dtype, o.DTYPES)
    check_at_least_one("limit", limit)
    check_model(model)
    with json_output(json) as writer:
        quiet_libraries()
        from slipstream import assemble
        from slipstream.formats.folder import refuse_existing

        method = source.removeprefix("zoo:") if source.startswith("zoo:") else "eagle3"
        folder = assemble.locate(source, method, model)
        refuse_existing(output, overwrite=overwrite)
        texts = _texts(prompts, limit)
        from slipstream.parity.convert import convert as run
        from slipstream.target.hf import load_target

        target = load_target(model, dtype=dtype, device=device, threads=threads)
        done = run(
            folder,
            to,
            target,
            output,
            prompts=_ids(target, texts),
            target_name=target_name,
            overwrite=overwrite,
        )
        if json:
            writer.write(_value(done, output))
        else:
            _tell(done, output)


def _texts(file: Path | None, limit: int) -> list[str]:
    """User texts of a file, or of a prompt set that ships."""
    if file is not None:
        from slipstream.cli.prompts import read_prompts

        return [prompt.turns[0] for prompt in read_prompts(None, file, limit=limit)]
    from slipstream.bench.tasks import read_task

    return [row.text for row in read_task("mt_bench")][:limit]


def _ids(target: Any, texts: list[str]) -> list[list[int]]:
    """Tokens of the texts that are long enough to prove something.

    Raises:
        SettingError: none is.
    """
    tokenizer = target.tokenizer
    found = []
    for text in texts:
        chat = [{"role": "user", "content": text}]
        ids = tokenizer.encode_chat(chat) if tokenizer.has_template else tokenizer.encode(text)
        if len(ids) >= 8:
            found.append(ids[: min(MAX_TOKENS, target.spec.max_length)])
    if not found:
        raise SettingError(
            "prompts", len(texts), "a text of at least 8 tokens", "give longer ones with --prompts"
        )
    return found


def _value(done: Any, output: Path) -> dict[str, Any]:
    return {
        "from": done.source.dialect.name,
        "because": done.source.because,
        "to": done.dialect,
        "method": done.method,
        "dtype": done.dtype,
        "max_logit_difference": done.proof.max_logit_difference,
        "largest_logit": done.proof.largest_logit,
        "positions": done.proof.num_positions,
        "notes": list(done.notes),
        "doubts": list(done.doubts),
        "files": [str(output / name) for name in done.files],
    }


def _tell(done: Any, output: Path) -> None:
    from rich.console import Console

    screen, proof = Console(highlight=False, soft_wrap=True), done.proof
    screen.print(f"from {done.source}", markup=False)
    screen.print(f"to {done.dialect}, {done.dtype}: {output}", markup=False)
    screen.print(
        f"the same logits within {proof.max_logit_difference:.1e} (the largest is "
        f"{proof.largest_logit:.1f}) at {proof.num_positions} positions of real features"
    )
    for note in done.notes:
        screen.print(f"note: {note}", markup=False)
    for doubt in done.doubts:
        screen.print(f"doubt about the source: {doubt}", markup=False)
