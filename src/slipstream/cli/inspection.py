"""How `slipstream data inspect` shows a data file: for people in colour, for programs as JSON."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from slipstream.data.coverage import Coverage
    from slipstream.data.extract import Estimate
    from slipstream.data.likelihood import Likelihood
    from slipstream.data.supervise import Supervised
    from slipstream.target.tokens import TargetTokenizer


def as_json(
    file: Path,
    tokenizer: TargetTokenizer,
    coverage: Coverage,
    judged: Likelihood | None,
    seconds: float,
) -> dict[str, Any]:
    """The value `--json` prints."""
    return {
        "path": str(file),
        "bytes": file.stat().st_size,
        "rows": coverage.rows,
        "tokens": coverage.tokens,
        "tokens_per_second": coverage.tokens / seconds if seconds else None,
        "supervised_tokens": coverage.supervised_tokens,
        "unmasked_share": coverage.unmasked_share,
        "template_modes": dict(coverage.template_modes),
        "template_settings": tokenizer.template_mode,
        "counts": dict(coverage.counts),
        "first_error": coverage.first_error,
        "nll": judged.nll if judged else None,
        "surprise": judged.surprise if judged else None,
        "agreement": judged.agreement if judged else None,
        "is_foreign": judged.is_foreign if judged else None,
        "shown": [
            {
                "id": row.id,
                "spans": [{"text": t, "is_supervised": s} for t, s in _spans(tokenizer, m)],
            }
            for row, m in coverage.shown
        ],
    }


def tell_estimate(plan: Estimate, folder: Path) -> str:
    """What an extraction will take, for people, before it begins."""
    free = shutil.disk_usage(folder).free
    minutes = plan.seconds / 60
    return (
        f"{plan.rows:,} texts, {plan.tokens:,} tokens: {plan.bytes / 1e9:.2f} GB "
        f"({free / 1e9:.0f} GB free), about "
        + (f"{plan.seconds:.0f} s" if plan.seconds < 90 else f"{minutes:.0f} min")
    )


def _spans(tokenizer: TargetTokenizer, made: Supervised) -> list[tuple[str, bool]]:
    """The row's text in runs of equal mask."""
    runs: list[tuple[list[int], bool]] = []
    for token, is_on in zip(made.tokens, made.mask, strict=True):
        if not runs or runs[-1][1] != is_on:
            runs.append(([], is_on))
        runs[-1][0].append(token)
    return [(tokenizer.decode(ids, skip_special=False), is_on) for ids, is_on in runs]


def show(tokenizer: TargetTokenizer, coverage: Coverage, judged: Likelihood | None) -> None:
    """A few rows with the supervised text in colour, then shares and counts."""
    from rich.console import Console
    from rich.text import Text

    screen = Console(highlight=False)
    for row, made in coverage.shown:
        screen.rule(Text(f"{row.id}: {made.num_supervised} of {len(made.tokens)} tokens"))
        text = Text()
        for part, is_on in _spans(tokenizer, made):
            text.append(part.replace("\x1b", "\u241b"), style="bold green" if is_on else "dim")
        screen.print(text)
    if coverage.shown:
        screen.rule()
        screen.print("green: to be predicted; dim: context only\n")
    modes = ", ".join(f"{mode} ({n})" for mode, n in coverage.template_modes.items()) or "none"
    settings = tokenizer.template_mode
    screen.print(f"rows                {coverage.rows:,}")
    screen.print(f"tokens              {coverage.tokens:,}")
    screen.print(
        f"supervised          {coverage.supervised_tokens:,} ({coverage.unmasked_share:.1%})"
    )
    screen.print(f"mask made by        {modes}")
    if settings:
        screen.print(f"template settings   {json.dumps(settings)}", markup=False)
    for reason, count in coverage.counts.items():
        screen.print(f"{reason.replace('_', ' '):<20}{count:,}", style="yellow" if count else "dim")
    if coverage.first_error:
        screen.print(Text(f"first error: {coverage.first_error}", style="red"))
    if judged is not None:
        _show_likelihood(screen, judged)
    if coverage.counts["no_answer"] == coverage.rows:
        screen.print("no row has an answer: `slipstream data regenerate` writes them")


def _show_likelihood(screen: Any, judged: Likelihood) -> None:
    screen.print(
        f"{'nll':<20}{judged.nll:.2f} nats/token over {judged.num_tokens:,} shown tokens, "
        f"{judged.surprise:+.2f} against the model's own sampling"
    )
    screen.print(f"{'agreement':<20}{judged.agreement:.1%} are the model's most likely token")
    if judged.is_foreign:
        screen.print(
            "warning: these answers are not this model's own; a drafter learns more from "
            "`slipstream data regenerate`",
            style="bold yellow",
        )
