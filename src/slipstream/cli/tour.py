"""What the demo runs: every method on one prompt, judged and timed, then the page about it.

The plain answer streams first, untimed; each method then answers once more without a trace, so
that every line of the table is measured alike. The drawn answer is decoded again with a trace.
"""

from __future__ import annotations

import platform
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from importlib.metadata import version
from typing import TYPE_CHECKING

import torch

from slipstream import assemble, methods
from slipstream.bench.equality import Divergence, judge_for
from slipstream.cli.answering import totals
from slipstream.cli.options import Decoding
from slipstream.report.page import DemoPage, Picture, SpeedRow, picture, spans
from slipstream.report.tree_view import tree_svg
from slipstream.types import Sampling

if TYPE_CHECKING:
    from slipstream.engine.engine import Engine
    from slipstream.engine.request import Result
    from slipstream.target.hf import HFTarget

QUESTION = "Solve 10+2 step by step."
BEGINNINGS = ("First, 10+2", "First, 10+2=")  # of its answer: what follows is settled, or open
WARM_UP = 4  # tokens
DRAWN = "eagle3"  # whose trees the page shows, where it runs


@dataclass(frozen=True, slots=True)
class Run:
    """What one method did.

    Args:
        name: as printed.
        engine: kept for the trees.
        result: its timed answer.
        divergence: from plain decoding, judged; None when every token is the same.
    """

    name: str
    engine: Engine
    result: Result
    divergence: Divergence | None = None

    @property
    def is_different(self) -> bool:
        """True when rounding does not explain the difference."""
        return self.divergence is not None and not self.divergence.is_tie

    @property
    def note(self) -> str:
        """Where it left plain decoding, and by how little."""
        if self.divergence is None:
            return ""
        kind = "a tie" if self.divergence.is_tie else "DIFFERENT"
        place = self.divergence.position + 1
        return f"({kind} at token {place}, margin {self.divergence.margin:.2g})"


@dataclass(slots=True)
class Tour:
    """One prompt through several methods.

    Args:
        target: loaded once, shared by all.
        drafter: folder or zoo name for methods with a network; None takes the zoo's.
        prompt: the question.
        decoding: greedy; how long.
        raw: no chat template.
        missing: lines about methods that cannot run.
        runs: what was measured.
    """

    target: HFTarget
    drafter: str | None
    prompt: str
    decoding: Decoding
    raw: bool = False
    missing: Sequence[str] = ()
    runs: list[Run] = field(default_factory=list)

    def plain_pieces(self) -> Iterator[str]:
        """The plain answer's text as it grows."""
        engine = assemble.load(self.target, "none")
        for piece in engine.stream(self.prompt, raw=self.raw, **self.decoding.arguments()):
            yield piece.text

    def run(self, contenders: Sequence[tuple[str, str, bool]]) -> None:
        """Answer with every (name, method, united with lookup); the first is plain decoding."""
        for name, method, is_united in contenders:
            drafter = self.drafter if methods.get(method).needs_checkpoint else None
            engine = assemble.load(self.target, method, drafter=drafter, lookup=is_united)
            engine.generate(self.prompt, raw=self.raw, max_new_tokens=WARM_UP)
            result = engine.generate(self.prompt, raw=self.raw, **self.decoding.arguments())
            self.runs.append(Run(name, engine, result, self._judge(result)))

    def rows(self) -> list[SpeedRow]:
        """The speed table; tokens per second after prefill."""
        speeds = [totals([run.result])["decode_tokens_per_second"] or 0.0 for run in self.runs]
        return [
            SpeedRow(
                method=run.name,
                tau=run.result.tau,
                tokens_per_second=speed,
                speedup=speed / speeds[0] if speeds[0] else 0.0,
                identical=run.divergence is None,
                note=run.note,
            )
            for run, speed in zip(self.runs, speeds, strict=True)
        ]

    def page(self) -> tuple[DemoPage, str | None]:
        """Everything the page shows, and its best step as a picture of its own."""
        drawn = next((run for run in self.runs if run.name == DRAWN), self.runs[-1])
        traced = drawn.engine.generate(
            self.prompt, raw=self.raw, trace=True, **self.decoding.arguments()
        )
        page = DemoPage(
            prompt=self.prompt,
            spans=spans(traced.token_ids[:1], traced.steps, self.target.tokenizer.decode),
            rows=self.rows(),
            pictures=self._pictures(traced),
            pair=self._pair(drawn.engine),
            method=drawn.name,
            facts=_facts(drawn.engine),
            missing=self.missing,
        )
        best = max(
            traced.steps, key=lambda s: (s.verdict.num_accepted, s.tree.budget), default=None
        )
        if best is None or best.tree.budget == 0:
            return page, None
        return page, tree_svg(best, self._piece, standalone=True)

    def _judge(self, result: Result) -> Divergence | None:
        if not self.runs or result.token_ids == self.runs[0].result.token_ids:
            return None
        plain = self.runs[0].result
        judge = judge_for(
            self.target,
            Sampling(),
            load_twin=self._twin,
            plain=lambda: ([plain.prompt_ids], [plain.token_ids]),
        )
        return judge.judge(0, plain.prompt_ids, plain.token_ids, result.token_ids)

    def _twin(self) -> HFTarget:
        from slipstream.target.hf import load_target

        spec = self.target.spec
        return load_target(spec.name, dtype="float64", device=str(spec.device))

    def _piece(self, token: int) -> str:
        return self.target.tokenizer.decode([token], skip_special=False)

    def _pictures(self, result: Result) -> list[Picture]:
        """Up to three telling steps, in order: the best, a middling one, the poorest."""
        steps = [(i, step) for i, step in enumerate(result.steps) if step.tree.budget]
        steps.sort(key=lambda pair: (-pair[1].verdict.num_accepted, pair[0]))
        if len(steps) > 3:
            steps = [steps[0], steps[len(steps) // 3], steps[-1]]
        return [
            picture(step, self._piece, title=f"Step {i + 1} of {len(result.steps)}")
            for i, step in sorted(steps, key=lambda pair: pair[0])
        ]

    def _pair(self, engine: Engine) -> list[Picture]:
        """The first step after a settled beginning and after an open one, narrowest first."""
        found = []
        for text in BEGINNINGS:
            result = engine.generate(self._begun(text), max_new_tokens=12, trace=True)
            if result.steps and result.steps[0].tree.budget:
                step = result.steps[0]
                title = f"An answer that begins “{text}”"
                width = int((step.tree.depths == 1).sum())
                found.append((width, picture(step, self._piece, title=title)))
        return [drawn for _, drawn in sorted(found, key=lambda pair: pair[0])]

    def _begun(self, text: str) -> list[int]:
        """Ids of the question and the beginning of its answer."""
        tokenizer = self.target.tokenizer
        chat = [{"role": "user", "content": QUESTION}]
        start = tokenizer.encode_chat(chat) if tokenizer.has_template else []
        special = set(tokenizer.special_ids)
        return [*start, *(token for token in tokenizer.encode(text) if token not in special)]


def _facts(engine: Engine) -> list[tuple[str, str]]:
    """The conditions under which the figures were measured."""
    about = engine.describe()
    tree = ", ".join(f"{name} {about[name]}" for name in ("tree", "budget", "depth", "topk"))
    return [
        ("model", f"{about['model']}, {about['dtype']} on {about['device']}"),
        ("threads", str(torch.get_num_threads())),
        ("draft trees", tree),
        ("slipstream", version("slipstream")),
        ("torch, transformers", f"{torch.__version__}, {version('transformers')}"),
        ("python", f"{platform.python_version()}, {platform.system()} {platform.machine()}"),
    ]
