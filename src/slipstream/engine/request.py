"""One request: its tokens, when it stops, and the result it leaves.

Stopping rules look inside an accepted path: the first event in token order wins, whatever the
step brought after it is dropped, and only emitted tokens are counted.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from torch import Tensor

from slipstream.engine.meter import Tally
from slipstream.engine.shaping import Shaper
from slipstream.engine.text import TextStream
from slipstream.errors import SlipstreamError
from slipstream.sampling import Sampler
from slipstream.types import DraftTree, Step, Verdict


@dataclass(frozen=True, slots=True)
class Result:
    """A finished answer.

    Args:
        prompt_index: position of the prompt in the call.
        prompt_ids: the prompt as the target saw it, chat template included.
        token_ids: emitted tokens; the end-of-answer token, if one ended it, is the last.
        text: their text without end-of-answer token, cut before the first stop string.
        finish_reason: "stop", "length", "abort" or "error".
        num_target_passes: after prefill.
        tau: mean accepted length, bonus included, tokens/pass; 1 when no pass was needed.
        seconds: prefill and this row's share of every step.
        prefill_seconds: prompt to first token.
        draft_seconds: drafting, this row's share.
        target_seconds: target passes after prefill, this row's share.
        other_seconds: everything else in the steps, this row's share.
        reach: reach[i] = share of steps that accepted depth i + 1; tau == 1 + sum(reach).
        alpha: alpha[i] = share of depth i + 1 accepted among steps that accepted depth i.
        num_draft_nodes: drafted nodes that were verified.
        num_draft_steps: steps that verified any.
        steps: every step, when a trace was asked for.
        scores: the target's opinion of each emitted token, when asked for.
        error: what went wrong when finish_reason is "error".
    """

    prompt_index: int
    prompt_ids: tuple[int, ...]
    token_ids: tuple[int, ...]
    text: str
    finish_reason: str
    num_target_passes: int
    tau: float
    seconds: float
    prefill_seconds: float
    draft_seconds: float
    target_seconds: float
    other_seconds: float
    reach: tuple[float, ...] = ()
    alpha: tuple[float, ...] = ()
    num_draft_nodes: int = 0
    num_draft_steps: int = 0
    steps: tuple[Step, ...] = ()
    scores: tuple[TokenScore, ...] = ()
    error: str | None = None

    @property
    def num_tokens(self) -> int:
        """Emitted tokens."""
        return len(self.token_ids)

    @property
    def num_accepted(self) -> int:
        """Drafted tokens accepted, counted as tau counts: every pass gave one token besides."""
        return round((self.tau - 1) * self.num_target_passes)

    @property
    def mean_accepted(self) -> float:
        """Drafted tokens accepted per pass, the target's own token not counted: tau - 1."""
        return self.tau - 1.0

    @property
    def decode_seconds(self) -> float:
        """Seconds after prefill; they gave num_tokens - 1 tokens."""
        return self.draft_seconds + self.target_seconds + self.other_seconds


@dataclass(frozen=True, slots=True)
class TokenScore:
    """What the target thought of an emitted token: its own numbers, before any warp or shaper.

    Args:
        log_prob: nats.
        top: the likeliest tokens there and their log-probabilities, the best first.
    """

    log_prob: float
    top: tuple[tuple[int, float], ...]


@dataclass(frozen=True, slots=True)
class Piece:
    """What a stream gives per step.

    Args:
        text: text that became certain; pieces join to the answer's text.
        token_ids: tokens emitted in this step, also those whose text is held back.
        result: the whole answer, on the last piece only.
        drafted: for each of the tokens, whether it was drafted (and accepted).
        scores: for each of the tokens, when asked for.
    """

    text: str
    token_ids: tuple[int, ...]
    result: Result | None = None
    drafted: tuple[bool, ...] = ()
    scores: tuple[TokenScore, ...] = ()


@dataclass(slots=True, eq=False)
class Request:
    """A row of the loop. Drafters see it as a `drafters.protocol.Row`.

    Args:
        key: identifies the row; never reused within an engine.
        prompt_index: position of the prompt in the call.
        tokens: the prompt; emitted tokens are appended.
        sampler: the request's warp and keyed noise.
        limit: tokens it may emit, at least 1.
        stop_ids: ids that end the answer.
        text: the answer's text, or None for a target without tokenizer.
        checks_text: its text may end it, so every token is decoded on its own.
        trace: keep every step.
        capacity: slots it may fill of its cache row.
        widest: drafted nodes a tree may have; 0 decodes plainly.
        share: drafted nodes it may have in this pass; the loop sets it by load.
        is_behind: its drafter, when it drafts next, first reads more than the last step gave.
        shapers: change its logits, in this order.
        num_top: keep a `TokenScore` of every token, with this many likeliest; None keeps none.
        features: of the prompt's chunks so far, [S, K*D] each, until the drafter gets them.
        keeps_features: keep them, and those of the answer, for a request that starts alike.
        failure: what went wrong, when finish_reason is "error".
        drafted: for each emitted token, whether it was drafted (and accepted).
        scores: for each emitted token, when asked for.
    """

    key: int
    prompt_index: int
    tokens: list[int]
    sampler: Sampler
    limit: int
    stop_ids: frozenset[int] = frozenset()
    text: TextStream | None = None
    checks_text: bool = False
    trace: bool = False
    capacity: int = 0
    widest: int = 0
    share: int | None = None
    is_behind: bool = True
    shapers: tuple[Shaper, ...] = ()
    num_top: int | None = None
    keeps_features: bool = False
    slot: int = -1
    finish_reason: str | None = None
    failure: SlipstreamError | None = None
    prefill_seconds: float = 0.0
    tally: Tally = field(default_factory=Tally)
    steps: list[Step] = field(default_factory=list)
    features: list[Tensor] = field(default_factory=list)
    drafted: list[bool] = field(default_factory=list)
    scores: list[TokenScore] = field(default_factory=list)
    num_prompt: int = field(init=False)
    num_prefill: int = field(init=False)  # tokens to run before the first step
    _num_taken: int = 0

    def __post_init__(self) -> None:
        self.num_prompt = self.num_prefill = len(self.tokens)

    @property
    def is_finished(self) -> bool:
        """True once a stopping rule, the limit or an error ended it."""
        return self.finish_reason is not None

    @property
    def is_prefilled(self) -> bool:
        """True once prefill is over: it gave a token."""
        return len(self.tokens) > self.num_prefill

    @property
    def emitted(self) -> list[int]:
        """Tokens after the prompt."""
        return self.tokens[self.num_prompt :]

    @property
    def may_draft(self) -> bool:
        """True where this pass has a use and room for a drafted node."""
        return self.max_depth > 0 and self.max_nodes > 0

    @property
    def max_depth(self) -> int:
        """Deepest node worth drafting: the last token it may emit is the target's own."""
        if self.max_nodes == 0:
            return 0
        return max(0, self.limit - (len(self.tokens) - self.num_prompt) - 1)

    @property
    def max_nodes(self) -> int:
        """Drafted nodes that fit its cache row now; len(tokens) slots hold history and root."""
        return max(0, min(self.widest_now, self.capacity - len(self.tokens)))

    @property
    def widest_now(self) -> int:
        """Drafted nodes it may have in this pass, if there is room."""
        return self.widest if self.share is None else min(self.widest, self.share)

    def shape(self, logits: Tensor, tree: DraftTree) -> Tensor:
        """The logits [N, V] after the request's shapers."""
        for shaper in self.shapers:
            logits = shaper(logits, tree, self.tokens)
        return logits

    def cut(self, tree: DraftTree, verdict: Verdict) -> Verdict:
        """A verdict whose path ends before any node at which a shaper was lost.

        Such a node was accepted, so its token is the target's own; what follows it is not.
        """
        lost = {node for shaper in self.shapers for node in getattr(shaper, "lost", ())}
        for place, node in enumerate(verdict.path):
            if node in lost:
                return Verdict(verdict.path[:place], int(tree.tokens[node]), is_bonus=False)
        return verdict

    def accept(self, tokens: Sequence[int], num_drafted: int = 0) -> tuple[int, ...]:
        """Append tokens until one of them ends the answer.

        Args:
            tokens: of an accepted path and the target's own, or the first token alone.
            num_drafted: how many of them, from the first, were drafted.

        Returns:
            The tokens that reached the output, at least one.
        """
        taken: list[int] = []
        for token in tokens:
            taken.append(token)
            self.tokens.append(token)
            if token in self.stop_ids or self._ends_text(token):
                self.finish_reason = "stop"
            elif len(self.tokens) - self.num_prompt >= self.limit:
                self.finish_reason = "length"
            if self.is_finished:
                break
        self.drafted += [place < num_drafted for place in range(len(taken))]
        self._write(taken)
        return tuple(taken)

    def score(self, logits: Tensor, path: Sequence[int]) -> None:
        """Keep what the target thought of the tokens just accepted, if that was asked for.

        Args:
            logits: [N, V], the target's own.
            path: the node before each of the tokens; nodes after a stop are not looked at.
        """
        if self.num_top is None:
            return
        tokens = self.emitted[len(self.scores) :]
        log_probs = logits[[*path[: len(tokens)]]].float().log_softmax(-1)  # [M, V]
        top = log_probs.topk(min(self.num_top, log_probs.shape[-1]), dim=-1)
        for token, own, ids, values in zip(
            tokens, log_probs, top.indices.tolist(), top.values.tolist(), strict=True
        ):
            pairs = tuple(zip(ids, values, strict=True))
            self.scores.append(TokenScore(float(own[token]), pairs))

    def put_off(self) -> None:
        """Lose the cache row; when it gets one again, prefill runs all tokens and gives the next.

        That token is the one a step would have given: noise is keyed by position.
        """
        self.slot, self.num_prefill, self.is_behind = -1, len(self.tokens), True
        self.features.clear()

    def abort(self) -> None:
        """End it because nobody wants it any more; the tokens so far stay."""
        self.finish_reason = "abort"
        if self.text is not None:
            self.text.finish()

    def fail(self, error: SlipstreamError) -> None:
        """End it with an error; the tokens so far stay."""
        self.finish_reason, self.failure = "error", error
        if self.text is not None:
            self.text.finish()

    def record(self, step: Step) -> None:
        """Count a step, and keep it when a trace was asked for."""
        self.tally.add(step)
        if self.trace:
            self.steps.append(step)

    def take(self) -> Piece:
        """What is new since the last call; with the result once it is finished."""
        new = slice(self._num_taken, len(self.tokens) - self.num_prompt)
        self._num_taken = new.stop
        return Piece(
            text="" if self.text is None else self.text.take(),
            token_ids=tuple(self.emitted[new]),
            result=self.result() if self.is_finished else None,
            drafted=tuple(self.drafted[new]),
            scores=tuple(self.scores[new]),
        )

    def result(self) -> Result:
        """The answer so far."""
        tally = self.tally
        decode = tally.draft_seconds + tally.target_seconds + tally.other_seconds
        return Result(
            prompt_index=self.prompt_index,
            prompt_ids=tuple(self.tokens[: self.num_prompt]),
            token_ids=tuple(self.emitted),
            text="" if self.text is None else self.text.text,
            finish_reason=self.finish_reason or "length",
            num_target_passes=tally.num_passes,
            tau=tally.tau,
            seconds=self.prefill_seconds + decode,
            prefill_seconds=self.prefill_seconds,
            draft_seconds=tally.draft_seconds,
            target_seconds=tally.target_seconds,
            other_seconds=tally.other_seconds,
            reach=tally.reach,
            alpha=tally.alpha,
            num_draft_nodes=tally.num_nodes,
            num_draft_steps=tally.num_draft_steps,
            steps=tuple(self.steps),
            scores=tuple(self.scores),
            error=None if self.failure is None else str(self.failure),
        )

    def _ends_text(self, token: int) -> bool:
        if not self.checks_text or self.text is None:
            return False
        self.text.push((token,))
        return self.text.is_stopped

    def _write(self, taken: list[int]) -> None:
        if self.text is None:
            return
        if not self.checks_text:
            self.text.push([token for token in taken if token not in self.stop_ids])
        if self.is_finished:
            self.text.finish()
