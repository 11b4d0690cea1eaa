"""Is this setup lossless on this machine? One method's tokens against plain decoding's.

Greedy and keyed sampling alike: the tokens must be equal. Plain decoding runs one row at a time,
in passes of one token; the method runs in batches as asked. Rules that draw random numbers of
their own are put to a score test instead (`bench.score`).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from torch import Tensor

from slipstream import methods
from slipstream.bench.equality import Divergence, Judge, is_reduced, judge_for, verdict
from slipstream.bench.runner import Generates, promises_equality
from slipstream.bench.score import ScoreReport, ScoreTest, Witness
from slipstream.drafters.none import NoDrafter
from slipstream.engine.engine import Engine
from slipstream.sampling import Sampler
from slipstream.target.protocol import Target
from slipstream.types import DraftTree, Sampling, Verdict

Ids = Sequence[int]
VERDICTS = ("lossless", "ties", "inconclusive", "different")
"""From the best to the worst."""
GROUPS_OF_ROWS = 2  # prompts per call, in batches, so that rows are refilled within a call


@dataclass(frozen=True, slots=True)
class LosslessReport:
    """What `verify` found.

    Args:
        verdict: lossless, ties, different or inconclusive; see `equality.verdict`.
        mode: greedy, keyed or score; several joined by "+".
        num_prompts: answered.
        num_tokens: compared: up to an answer's first difference, that token included.
        num_divergent: answers that differ somewhere.
        divergences: their first differences.
        tau: of the method, emitted tokens per pass.
        tie_margin: largest margin of a tie; None when nothing had to be judged.
        num_errors: answers of either side that ended in an error.
        score: of a score test, else None.
        is_lossy: the rule does not promise the target's law.
    """

    verdict: str
    mode: str
    num_prompts: int
    num_tokens: int
    num_divergent: int
    divergences: tuple[Divergence, ...]
    tau: float | None
    tie_margin: float | None
    num_errors: int = 0
    score: ScoreReport | None = None
    is_lossy: bool = False

    @property
    def is_lossless(self) -> bool:
        """True for the verdicts that exit with 0."""
        return self.verdict in ("lossless", "ties")

    def to_dict(self) -> dict[str, object]:
        """The JSON value; an infinite margin is null."""
        value = asdict(self)
        score = value.pop("score") or {}
        value |= {key: each for key, each in score.items() if key not in value}
        for each in value["divergences"]:
            each["margin"] = each["margin"] if each["margin"] != float("inf") else None
        return value


def answers(
    engine: Generates,
    prompts: Sequence[Ids],
    arguments: Mapping[str, Any],
    *,
    on_done: Callable[[int], None] = lambda count: None,
) -> list[Any]:
    """The engine's results for all prompts, a few batches per call.

    Args:
        engine: plain or speculative.
        prompts: token ids.
        arguments: of `Engine.generate`, `num_rows` included.
        on_done: told how many prompts were finished by a call.
    """
    size = arguments["num_rows"] * GROUPS_OF_ROWS
    results: list[Any] = []
    for start in range(0, len(prompts), size):
        group = [list(ids) for ids in prompts[start : start + size]]
        results += engine.generate(group, **arguments)
        on_done(len(group))
    return results


def compare_answers(
    prompts: Sequence[Ids], plain: Sequence[Any], results: Sequence[Any], judge: Judge
) -> LosslessReport:
    """Compare a method's results with plain decoding's.

    Args:
        prompts: token ids.
        plain: plain decoding's results, or anything with token_ids and finish_reason.
        results: the method's.
        judge: of the target's precision.
    """
    found, num_tokens, num_errors = [], 0, 0
    for index, (ids, one, other) in enumerate(zip(prompts, plain, results, strict=True)):
        if "error" in (one.finish_reason, other.finish_reason):
            num_errors += 1
            continue
        divergence = judge.judge(index, ids, one.token_ids, other.token_ids)
        if divergence is None:
            num_tokens += len(one.token_ids)
        else:
            num_tokens += divergence.position + 1
            found.append(divergence)
    passes = sum(result.num_target_passes for result in results)
    emitted = sum(max(len(result.token_ids) - 1, 0) for result in results)
    word = verdict(found, num_tokens, is_exact=not is_reduced(judge.dtype))
    if num_errors and word != "different":
        word = "inconclusive"
    return LosslessReport(
        verdict=word,
        mode="greedy" if judge.sampling.is_greedy else "keyed",
        num_prompts=len(prompts),
        num_tokens=num_tokens,
        num_divergent=len(found),
        divergences=tuple(found),
        tau=emitted / passes if passes else None,
        tie_margin=judge.limit() if found else None,
        num_errors=num_errors,
    )


def sampled_plainly(
    tree: DraftTree, logits: Tensor, sampler: Sampler, root_position: int
) -> Verdict:
    """Plain decoding's verifier: the target's token after the root, and no other code.

    The reference must not share what is under test, or a fault in it would agree with itself.
    """
    token = sampler.choose(logits[:1], [root_position + 1])
    return Verdict((0,), int(token[0]))


def plain_engine(target: Target) -> Engine:
    """Decodes plainly, as the reference."""
    return Engine(target, NoDrafter(), sampled_plainly, method="none")


def examine(
    engine: Engine,
    prompts: Sequence[Ids],
    arguments: Sequence[Mapping[str, Any]],
    *,
    load_twin: Callable[[], Target],
    num_rows: int = 1,
    on_done: Callable[[int], None] = lambda count: None,
) -> LosslessReport:
    """Compare a method with plain decoding in every way of sampling that is asked for.

    Args:
        engine: under test.
        prompts: token ids.
        arguments: of `Engine.generate`, one entry per way of sampling.
        load_twin: gives the target in float64, asked only when tokens differ.
        num_rows: batch size of the method where tokens are compared.
        on_done: told how many answers were finished; two per prompt and way.
    """
    plain, reports = plain_engine(engine.target), []
    for each in arguments:
        sampling = _sampling(each)
        if not promises_equality(engine, sampling):
            reports.append(score_answers(engine, prompts, each, on_done=on_done))
            continue
        reference = answers(plain, prompts, {**each, "num_rows": 1}, on_done=on_done)
        results = answers(engine, prompts, {**each, "num_rows": num_rows}, on_done=on_done)
        judge = judge_for(
            engine.target,
            sampling,
            load_twin=load_twin,
            plain=lambda said=reference: (prompts, [one.token_ids for one in said]),
        )
        reports.append(compare_answers(prompts, reference, results, judge))
    return joined(reports)


def _sampling(arguments: Mapping[str, Any]) -> Sampling:
    names = ("temperature", "top_k", "top_p", "seed")
    return Sampling(**{name: arguments[name] for name in names if name in arguments})


def score_answers(
    engine: Engine,
    prompts: Sequence[Ids],
    arguments: Mapping[str, Any],
    *,
    on_done: Callable[[int], None] = lambda count: None,
) -> LosslessReport:
    """Answer every prompt with a seed of its own and put the tokens to a score test.

    Args:
        engine: whose rule draws random numbers of its own.
        prompts: token ids.
        arguments: of `Engine.generate`, above temperature 0; prompts are answered one by one.
        on_done: told how many answers a comparison would have finished by now: two per prompt.
    """
    rule = str(engine.describe()["verifier"])
    judge: Any = methods.resolve(methods.VERIFIERS[rule])
    sampling = _sampling(arguments)
    test, passes, emitted, num_errors = ScoreTest(engine.target, sampling), 0, 0, 0
    for index, ids in enumerate(prompts):
        witness = Witness(judge)
        own = {**arguments, "seed": sampling.seed + index, "num_rows": 1}
        watched = Engine(
            engine.target,
            engine.drafter,
            witness,
            max_length=engine.max_length,
            max_nodes=engine.request(list(ids)).widest,  # as wide as the engine under test
        )
        result = watched.generate(list(ids), **own)
        num_errors += result.finish_reason == "error"
        test.add(ids, result.token_ids, witness.favours)
        passes += result.num_target_passes
        emitted += max(len(result.token_ids) - 1, 0)
        on_done(2)
    score = test.report(is_exact=not is_reduced(engine.target.spec.dtype))
    is_lossy, word = rule in methods.LOSSY, score.verdict
    if word == "lossless" and (num_errors or is_lossy):
        word = "inconclusive"  # a lossy rule that was not caught is still a lossy rule
    return LosslessReport(
        verdict=word,
        mode="score",
        num_prompts=len(prompts),
        num_tokens=score.num_tokens,
        num_divergent=0,
        divergences=(),
        tau=emitted / passes if passes else None,
        tie_margin=None,
        num_errors=num_errors,
        score=score,
        is_lossy=is_lossy,
    )


def joined(reports: Sequence[LosslessReport]) -> LosslessReport:
    """Several modes as one report: the worst verdict, everything else added up.

    Args:
        reports: one or more, over the same prompts.
    """
    if len(reports) == 1:
        return reports[0]
    margins = [each.tie_margin for each in reports if each.tie_margin is not None]
    return LosslessReport(
        verdict=max((each.verdict for each in reports), key=VERDICTS.index),
        mode="+".join(each.mode for each in reports),
        num_prompts=reports[0].num_prompts,
        num_tokens=sum(each.num_tokens for each in reports),
        num_divergent=sum(each.num_divergent for each in reports),
        divergences=tuple(found for each in reports for found in each.divergences),
        tau=reports[0].tau,
        tie_margin=max(margins, default=None),
        num_errors=sum(each.num_errors for each in reports),
        score=next((each.score for each in reports if each.score), None),
        is_lossy=any(each.is_lossy for each in reports),
    )
