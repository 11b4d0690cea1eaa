"""Prompts in, answers out: `generate` for many at once, `stream` for one as it grows.

Both run the same loop over `step`, and so does `serve`, to which requests come at any time. A
request's output depends on its prompt, its sampling and its seed alone: every prompt of a call gets
the call's seed, and the keyed noise depends on nothing else, so neither the batch nor the drafter
changes what is said.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import closing
from typing import Any

import torch

from slipstream.cache import SlotCache
from slipstream.drafters.protocol import Drafter
from slipstream.engine.blocks import BLOCK, Blocks
from slipstream.engine.loop import Loop
from slipstream.engine.meter import Lap, Meter
from slipstream.engine.prompts import Prompt, encode, is_single
from slipstream.engine.request import Piece, Request, Result
from slipstream.engine.service import Service
from slipstream.engine.shaping import Penalties, Shaper, shapers
from slipstream.engine.text import TextStream, Verbatim
from slipstream.engine.throttle import Throttle
from slipstream.errors import PromptTooLongError, SettingError
from slipstream.sampling import Sampler
from slipstream.target.protocol import Target
from slipstream.types import Sampling
from slipstream.verify.protocol import Verify


class Engine:
    """A target and a drafter, ready to answer.

    Args:
        target: the model whose output is preserved.
        drafter: proposes trees; `none` decodes plainly.
        verify: judges the trees.
        method: name for tables.
        max_length: context in tokens, at most the target's; None takes the target's.
        max_nodes: widest tree a row gets room for, drafted nodes.
        chunk: prompt tokens per prefill pass.
        settings: further entries for `describe`.
        meter: times the steps; None makes one for the target's device.

    Raises:
        SettingError: max_length, max_nodes or chunk is outside its range.
    """

    def __init__(
        self,
        target: Target,
        drafter: Drafter,
        verify: Verify,
        *,
        method: str | None = None,
        max_length: int | None = None,
        max_nodes: int = 64,
        chunk: int = 256,
        settings: Mapping[str, object] | None = None,
        meter: Meter | None = None,
    ) -> None:
        context = target.spec.max_length
        for name, value in (("max-length", max_length), ("chunk", chunk), ("nodes", max_nodes)):
            if value is not None and value < 1:
                raise SettingError(name, value, "1 or more")
        if max_length is not None and max_length > context:
            raise SettingError("max-length", max_length, f"at most the target's {context}")
        self.target = target
        self.drafter = drafter
        self.method = method or drafter.name
        self.max_length = max_length or context
        self._verify = verify
        self._max_nodes = max_nodes
        self._chunk = chunk
        self._settings = dict(settings or {})
        self._meter = meter or meter_for(target)
        self._keys = itertools.count()
        self._spare: tuple[SlotCache, int, int] | None = None  # a cache, its rows, its slots

    @property
    def tokenizer(self) -> object | None:
        """The target's tokenizer, if it has one."""
        return getattr(self.target, "tokenizer", None)

    def describe(self) -> dict[str, object]:
        """What runs here, for reports: model, method, drafter, dtype, device and settings."""
        spec = self.target.spec
        return {
            "model": spec.name,
            "method": self.method,
            "drafter": self.drafter.name,
            "dtype": str(spec.dtype).removeprefix("torch."),
            "device": str(spec.device),
            "decoder": spec.decoder,
            "weights": spec.weights or str(spec.dtype).removeprefix("torch."),
            "max_length": self.max_length,
            **self._settings,
        }

    def generate(
        self,
        prompts: Prompt | Sequence[Prompt],
        *,
        num_rows: int = 1,
        on_result: Callable[[Result], None] | None = None,
        **options: object,
    ) -> Result | list[Result]:
        """Answer one prompt, or many in a rolling batch.

        Args:
            prompts: a user turn (str), a chat (list of {"role", "content"}), token ids (list of
                int), or a list of any of these.
            num_rows: prompts that decode together; a finished one makes room for the next.
            on_result: called with each answer as it finishes, so that an interrupt loses only
                what was unfinished.
            **options: see `request`.

        Returns:
            The answer, or the answers in the order of the prompts.

        Raises:
            PromptTooLongError: a prompt leaves no room for an answer; nothing has run.
            SettingError: a setting is outside its range.
        """
        if num_rows < 1:
            raise SettingError("num-rows", num_rows, "1 or more")
        is_one = is_single(prompts)
        many = [prompts] if is_one else list(prompts)
        requests = [self.request(prompt, index, **options) for index, prompt in enumerate(many)]
        results: list[Result | None] = [None] * len(requests)
        with closing(self._run(requests, num_rows)) as rows:
            for row in rows:
                if row.is_finished:
                    result = results[row.prompt_index] = row.result()
                    if on_result is not None:
                        on_result(result)
        return results[0] if is_one else results

    def stream(self, prompt: Prompt, **options: object) -> Iterator[Piece]:
        """Answer one prompt piece by piece; the last piece carries the result.

        Args:
            prompt: as for `generate`.
            **options: see `request`.

        Raises:
            PromptTooLongError: the prompt leaves no room for an answer.
            SettingError: a setting is outside its range.
        """
        return self._pieces(self.request(prompt, 0, **options))

    def request(
        self,
        prompt: Prompt,
        prompt_index: int = 0,
        *,
        max_new_tokens: int = 128,
        temperature: float = 0.0,
        top_k: int = 0,
        top_p: float = 1.0,
        seed: int = 0,
        stop: str | int | Sequence[str | int] = (),
        raw: bool = False,
        trace: bool = False,
        budget: int | None = None,
        penalties: Penalties | None = None,
        grammar: Shaper | None = None,
        num_top: int | None = None,
        skip_special: bool = True,
        is_over: Callable[[str], bool] | None = None,
    ) -> Request:
        """Check a prompt and its settings; nothing runs yet.

        Args:
            prompt: as for `generate`.
            prompt_index: for errors and the result.
            max_new_tokens: tokens to emit at most.
            temperature: 0 is greedy.
            top_k: keep this many most likely tokens; 0 keeps all.
            top_p: keep the most likely tokens up to this mass.
            seed: key of the noise, the same for every prompt of a call.
            stop: strings or token ids that end the answer, besides the target's own.
            raw: a str prompt is plain text, not a user turn.
            trace: keep every step, with the target's opinion of each node.
            budget: drafted nodes a step may have, at most the engine's; 0 decodes plainly.
            penalties: changes of the logits by what came before; see `shaping`.
            grammar: a shaper of this request alone that forbids tokens.
            num_top: keep each token's log-probability and those of so many likeliest.
            skip_special: leave special tokens out of the text.
            is_over: of this request alone: told the text piece by piece, in the loop's thread; True
                ends the answer with the token that completed the piece.

        Raises:
            PromptTooLongError: the prompt leaves no room for an answer.
            SettingError: a setting is outside its range.
        """
        spec = self.target.spec
        if max_new_tokens < 1:
            raise SettingError("max-new-tokens", max_new_tokens, "1 or more")
        if budget is not None and budget < 0:
            raise SettingError("budget", budget, "0 or more", "0 decodes plainly")
        penalties = penalties or Penalties()
        foreign = [token for token in penalties.bias if token >= spec.vocab_size]
        if foreign:
            raise SettingError("biased token", foreign[0], f"0..{spec.vocab_size - 1}")
        sampling = Sampling(temperature=temperature, top_k=top_k, top_p=top_p, seed=seed)
        tokens = encode(prompt, self.tokenizer, spec.vocab_size, raw=raw)
        room = self.max_length - len(tokens)
        if room < 1:
            raise PromptTooLongError(
                f"prompt {prompt_index} has {len(tokens)} tokens, expected at most "
                f"{self.max_length - 1} (context {self.max_length}, one token for the answer)",
                hint="shorten the prompt"
                + (", or raise --max-length" if self.max_length < spec.max_length else ""),
            )
        stops = (stop,) if isinstance(stop, str | int) else tuple(stop)
        strings = [one for one in stops if isinstance(one, str)]
        if strings and self.tokenizer is None:
            raise SettingError("stop", strings, "token ids: this target has no tokenizer")
        limit = min(max_new_tokens, room)
        return Request(
            key=next(self._keys),
            prompt_index=prompt_index,
            tokens=tokens,
            sampler=Sampler(sampling, spec.vocab_size),
            limit=limit,
            stop_ids=frozenset(spec.eos_ids) | {one for one in stops if isinstance(one, int)},
            text=self._text(strings, is_over, skip_special=skip_special),
            checks_text=bool(strings) or is_over is not None,
            trace=trace,
            widest=self._max_nodes if budget is None else min(budget, self._max_nodes),
            shapers=shapers(penalties, len(tokens), temperature, grammar),
            num_top=num_top,
        )

    def serve(
        self,
        *,
        num_rows: int = 8,
        max_waiting: int = 64,
        prefill_tokens: int | None = None,
        pass_tokens: int | None = None,
        cache_tokens: int | None = None,
        keeps_prefixes: bool = True,
    ) -> Service:
        """Start answering requests that come at any time, in a thread; close it when done.

        Args:
            num_rows: requests that decode together.
            max_waiting: requests that may wait for a row.
            prefill_tokens: prompt tokens between two steps of the running rows; None takes one
                chunk.
            pass_tokens: tokens of one decoding pass at most, shared by the rows; None sets no
                bound besides what pays, see `throttle`.
            cache_tokens: tokens that all rows may hold together, drafts included; when they run
                out the youngest request waits again. None has room for the whole context in
                every row.
            keeps_prefixes: a prompt that starts like an earlier one is prefilled from there on.

        Raises:
            SettingError: a number is outside its range.
        """
        for name, value, least in (
            ("num-rows", num_rows, 1),
            ("max-waiting", max_waiting, 0),
            ("prefill-tokens", prefill_tokens, 1),
            ("pass-tokens", pass_tokens, 1),
        ):
            if value is not None and value < least:
                raise SettingError(name, value, f"{least} or more")
        num_slots = self.max_length + self._max_nodes
        least = BLOCK * -(-num_slots // BLOCK)
        if cache_tokens is not None and cache_tokens < least:
            raise SettingError(
                "cache-tokens", cache_tokens, f"{least} or more", "or lower --max-length"
            )
        blocks = None if cache_tokens is None else Blocks(cache_tokens // BLOCK)
        widest = min(self._max_nodes, int(self._settings.get("budget") or self._max_nodes))
        loop = self._loop(
            self.target.new_cache(num_rows, num_slots),
            num_rows,
            blocks=blocks,
            prefill_tokens=prefill_tokens or self._chunk,
            throttle=Throttle(widest, pass_tokens),
            keeps_prefixes=keeps_prefixes,
        )
        return Service(loop, max_requests=num_rows + max_waiting)

    def _text(
        self,
        stop_strings: Sequence[str],
        is_over: Callable[[str], bool] | None,
        *,
        skip_special: bool,
    ) -> TextStream | None:
        if self.tokenizer is None:
            return None
        decoder = self.tokenizer if skip_special else Verbatim(self.tokenizer)
        return TextStream(decoder, stop_strings, is_over)

    def _loop(self, cache: SlotCache, num_rows: int, **options: Any) -> Loop:
        return Loop(
            self.target,
            self.drafter,
            self._verify,
            cache,
            self._meter,
            num_rows=num_rows,
            chunk=self._chunk,
            **options,
        )

    def _pieces(self, request: Request) -> Iterator[Piece]:
        with closing(self._run([request], 1)) as rows:
            for row in rows:
                yield row.take()

    def _run(self, requests: Sequence[Request], num_rows: int) -> Iterator[Request]:
        """Yield each row after its prefill and after each of its steps, until all are finished."""
        if not requests:
            return
        num_rows = min(num_rows, len(requests))
        num_slots = self._max_nodes + max(len(r.tokens) + r.limit for r in requests)
        cache, num_slots = self._take_cache(num_rows, num_slots)
        loop = self._loop(cache, num_rows)
        for request in requests:
            loop.submit(request)
        try:
            yield from loop.run()
        finally:
            loop.close()
            self._spare = (cache, num_rows, num_slots)

    def _take_cache(self, num_rows: int, num_slots: int) -> tuple[SlotCache, int]:
        """The spare cache if it fits without being far too long, else a new one.

        It is taken out while in use, so that two streams at once do not share rows.
        """
        spare, self._spare = self._spare, None
        if spare is not None and spare[1] == num_rows and num_slots <= spare[2] <= 2 * num_slots:
            return spare[0], spare[2]
        return self.target.new_cache(num_rows, num_slots), num_slots


def meter_for(target: Target, on_lap: Callable[[Lap], None] | None = None) -> Meter:
    """The stopwatch that fits a target's device.

    Args:
        target: whose passes are timed.
        on_lap: told what every turn took.
    """
    is_queued = target.spec.device.type == "cuda"
    return Meter(synchronise=torch.cuda.synchronize if is_queued else None, on_lap=on_lap)
