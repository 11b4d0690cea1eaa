"""Is the output the target's? Token ids compared, every difference judged by the target.

A speculative method emits what plain decoding emits, up to rounding: passes of other widths add
numbers in another order. So a first difference is put to the target again, over the same
prefix, and is a *tie* when the two tokens are closer than rounding can part; what follows it is
another text and is not compared.

* float32 and wider: judged in float64, a tie below a margin of 1e-4; more than one in 10,000
  tokens is too many to believe.
* bfloat16 and float16: judged by the target itself, decoding plainly; a tie up to the largest
  margin at which plain decoding changes its own mind between passes of width 1 and 16.

Margins are in logits (greedy) or in log p + keyed noise (sampled): best score minus the lower of
the two contested tokens' scores, which is the top-two margin unless a token is not in the top two.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from slipstream.sampling import Sampler
from slipstream.target.protocol import Target
from slipstream.types import DraftTree, Sampling

TIE_MARGIN = 1e-4
TOKENS_PER_TIE = 10_000
FLIP_WIDTH = 16
PREFILL_WIDTH = 256
EDGE = 1e-5  # relative width of the nucleus' edge, where rounding decides who is inside

Ids = Sequence[int]


@dataclass(frozen=True, slots=True)
class Divergence:
    """The first difference of one answer from plain decoding's.

    Args:
        prompt_index: which prompt.
        position: index in the answer; 0 is the first emitted token.
        margin: logits or nats; infinite when a token was impossible or an answer ended early.
        target_token: plain decoding's token, None where its answer had ended.
        emitted_token: the method's token, None where its answer had ended.
        is_tie: the margin is within what rounding explains.
        without_drafting: plain decoding in passes of 16 tokens leaves its own answer here too, so
            that wide passes alone are the cause; None where it was not tried.
    """

    prompt_index: int
    position: int
    margin: float
    target_token: int | None
    emitted_token: int | None
    is_tie: bool
    without_drafting: bool | None = None


def first_difference(reference: Ids, emitted: Ids) -> int | None:
    """Index of the first token that differs (or is missing on one side); None when equal.

    Example:
        >>> first_difference([1, 2, 3], [1, 2, 3]), first_difference([1, 2], [1, 2, 3])
        (None, 2)
    """
    for position, (mine, other) in enumerate(zip(reference, emitted, strict=False)):
        if mine != other:
            return position
    shorter = min(len(reference), len(emitted))
    return None if len(reference) == len(emitted) else shorter


@dataclass(slots=True)
class Judge:
    """Re-evaluates a contested position; loads its target when first asked.

    Args:
        load: the target that judges: a float64 twin, or the target itself in reduced precision.
        sampling: how the answers were sampled.
        tolerance: largest margin of a tie; a callable is asked once, when first needed.
        width: tokens per pass over the answer.
        dtype: of the target under test.
        tested: the target under test, to try wide passes without drafting; None leaves that out.
    """

    load: Callable[[], Target]
    sampling: Sampling
    tolerance: float | Callable[[], float] = TIE_MARGIN
    width: int = PREFILL_WIDTH
    dtype: torch.dtype = torch.float32
    tested: Target | None = None
    _target: Target | None = None

    def judge(self, prompt_index: int, prompt_ids: Ids, reference: Ids, emitted: Ids):
        """The answer's divergence, or None when the ids are equal.

        Returns:
            Divergence | None.
        """
        position = first_difference(reference, emitted)
        if position is None:
            return None
        tokens = [ids[position] if position < len(ids) else None for ids in (reference, emitted)]
        margin = float("inf")
        if None not in tokens:
            margin = self.margin(prompt_ids, reference[:position], tokens)
        is_tie = margin <= self.limit()
        alone = None
        if self.tested is not None and tokens[0] is not None:
            alone = self._leaves(prompt_ids, reference[: position + 1])
        return Divergence(prompt_index, position, margin, tokens[0], tokens[1], is_tie, alone)

    def _leaves(self, prompt_ids: Ids, reference: Ids) -> bool:
        """True when a plain pass of 16 tokens chooses another token at the answer's end."""
        *_, logits = replay(self.tested, prompt_ids, reference, FLIP_WIDTH)  # [V]
        sampler = Sampler(self.sampling, logits.shape[-1])
        at = len(prompt_ids) + len(reference) - 1
        return int(sampler.choose(logits[None], [at])[0]) != reference[-1]

    def limit(self) -> float:
        """Largest margin of a tie."""
        if callable(self.tolerance):
            self.tolerance = self.tolerance()
        return self.tolerance

    def margin(self, prompt_ids: Ids, before: Ids, tokens: Ids) -> float:
        """Best score minus the lowest of `tokens`, after the prompt and `before`."""
        if self._target is None:
            self._target = self.load()
        *_, logits = replay(self._target, prompt_ids, [*before, tokens[0]], self.width)  # [V]
        position = len(prompt_ids) + len(before)
        return _margin(logits, self.sampling, position, tokens)


def _margin(logits: Tensor, sampling: Sampling, position: int, tokens: Ids) -> float:
    """Contested margin of logits [V]: how far the worse of the tokens is from being chosen.

    What rounding decides at the nucleus' edge is read either way, for each token the kindest: the
    edge a little lower or higher, and whether a token as likely as the last one kept is in.
    """
    if sampling.is_greedy:
        readings = [logits]
    else:
        edges = {1.0, 1 - EDGE, 1 + EDGE} if sampling.top_p < 1 else {1.0}
        settings = [replace(sampling, top_p=min(sampling.top_p * edge, 1.0)) for edge in edges]
        samplers = [Sampler(each, logits.shape[-1]) for each in settings]
        readings = [
            _log_probs(logits, sampler, with_tied=with_tied)
            + sampler.noise(position).to(logits.device)
            for sampler in samplers
            for with_tied in (False, True)
        ]
    return max(min(float(scores.max() - scores[token]) for scores in readings) for token in tokens)


def _log_probs(logits: Tensor, sampler: Sampler, *, with_tied: bool) -> Tensor:
    """[V] log p of logits [V], up to a constant; -inf outside what is kept.

    Args:
        logits: [V].
        sampler: its warp.
        with_tied: keep what is as likely as the least likely of what is kept.
    """
    kept = sampler.probs(logits[None])[0] > 0
    scaled = (logits - logits.max()) / sampler.sampling.temperature
    if with_tied:
        kept = kept | ((scaled - scaled[kept].min()).abs() <= TIE_MARGIN)
    return scaled.masked_fill(~kept, float("-inf"))


def _chunks(ids: Ids, width: int) -> Iterable[list[int]]:
    return (list(ids[i : i + width]) for i in range(0, len(ids), width))


def replay(
    target: Target, prompt_ids: Ids, answer: Ids, width: int = PREFILL_WIDTH
) -> Iterator[Tensor]:
    """The logits [V] that each token of the answer was chosen from, in passes of `width`."""
    cache = target.new_cache(1, len(prompt_ids) + len(answer))
    for chunk in _chunks(prompt_ids, PREFILL_WIDTH):
        output = target.forward([DraftTree.chain(chunk)], cache, [0], last_only=True)
        cache.commit(0, tuple(range(len(chunk))))
    yield output.logits[0, -1]
    for chunk in _chunks(answer[:-1], width):
        logits = target.forward([DraftTree.chain(chunk)], cache, [0]).logits[0]  # [N, V]
        cache.commit(0, tuple(range(len(chunk))))
        yield from logits


def width_flips(
    target: Target, prompt_ids: Ids, answer: Ids, sampling: Sampling, *, width: int = FLIP_WIDTH
) -> list[float]:
    """Plain decoding's margins where passes of `width` over its answer choose another token.

    Args:
        target: the model that gave the answer, in passes of one token.
        prompt_ids: what it answered.
        answer: plain decoding's tokens.
        sampling: how they were chosen.
        width: tokens per pass.
    """
    if not answer:
        return []
    sampler = Sampler(sampling, target.spec.vocab_size)
    flips: dict[int, int] = {}  # index in the answer -> the token that a wide pass chooses
    for index, logits in enumerate(replay(target, prompt_ids, answer, width)):
        chosen = int(sampler.choose(logits[None], [len(prompt_ids) + index])[0])
        if chosen != answer[index]:
            flips[index] = chosen
    if not flips:
        return []
    narrow = replay(target, prompt_ids, answer[: max(flips) + 1], 1)
    return [
        _margin(logits, sampling, len(prompt_ids) + index, (answer[index], flips[index]))
        for index, logits in enumerate(narrow)
        if index in flips
    ]


def width_flip_margin(
    target: Target, prompts: Sequence[Ids], answers: Sequence[Ids], sampling: Sampling
) -> float:
    """Largest margin at which plain decoding flips between passes of width 1 and 16; else 0."""
    flips = (
        margin
        for prompt_ids, answer in zip(prompts, answers, strict=True)
        for margin in width_flips(target, prompt_ids, answer, sampling)
        if margin != float("inf")
    )
    return max(flips, default=0.0)


def is_reduced(dtype: torch.dtype) -> bool:
    """True for bfloat16 and float16, where ties are common."""
    return dtype in (torch.bfloat16, torch.float16)


def judge_for(
    target: Target,
    sampling: Sampling,
    *,
    load_twin: Callable[[], Target],
    plain: Callable[[], tuple[Sequence[Ids], Sequence[Ids]]],
) -> Judge:
    """The judge that fits the target's precision.

    Args:
        target: the model under test.
        sampling: how answers are sampled.
        load_twin: gives the same model in float64.
        plain: gives prompts and plain decoding's answers, for the flips of reduced precision.
    """
    if is_reduced(target.spec.dtype):
        return Judge(
            load=lambda: target,
            sampling=sampling,
            tolerance=lambda: width_flip_margin(target, *plain(), sampling),
            width=1,
            dtype=target.spec.dtype,
            tested=target,
        )
    same = target.spec.dtype == torch.float64
    load = (lambda: target) if same else load_twin
    return Judge(load=load, sampling=sampling, dtype=target.spec.dtype, tested=target)


def verdict(divergences: Sequence[Divergence], num_tokens: int, *, is_exact: bool) -> str:
    """One word for a comparison.

    Args:
        divergences: what differed.
        num_tokens: tokens compared.
        is_exact: float32 or wider, where ties must be rare.

    Returns:
        "lossless": all equal. "ties": only true ties, and few enough. "different": something
        rounding does not explain. "inconclusive": nothing compared, or too many ties.
    """
    if any(not divergence.is_tie for divergence in divergences):
        return "different"
    if num_tokens == 0:
        return "inconclusive"
    if not divergences:
        return "lossless"
    allowed = max(1, num_tokens // TOKENS_PER_TIE)
    return "inconclusive" if is_exact and len(divergences) > allowed else "ties"
