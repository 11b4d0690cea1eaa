"""Answers of a given form: JSON, a schema, an expression, tool calls; masks come from llguidance.

A copy of the parser is moved along each path of a draft tree, so that every node gets the mask of
its own prefix. Drafted tokens that break the form are never reached: their parent's mask forbids
them. The parser has limits; where it gives up, the answer ends with an error, and drafts on which a
copy gave up change nothing. Rules that cannot be compiled in bounded time are refused; see `trial`.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from copy import copy
from functools import lru_cache
from typing import Any, Self

import torch
from llguidance import LLMatcher, LLTokenizer
from llguidance.torch import allocate_token_bitmask, fill_next_token_bitmask
from torch import Tensor

from slipstream.engine.shaping import FormError
from slipstream.errors import SettingError
from slipstream.serve.trial import Trial, reason
from slipstream.target.protocol import Target
from slipstream.types import DraftTree
from slipstream.verify.protocol import children

ANY_OBJECT = '{"type": "object"}'
COMPILE_SECONDS = 5.0  # for rules; usual ones take milliseconds


def make(wish: Any, target: Target) -> GrammarShaper | None:
    """A shaper for one request, compiled; None for free text.

    Args:
        wish: a `response_format`, checked.
        target: with a tokenizer of the fast kind.

    Raises:
        SettingError: the form is not one, or this model cannot be held to it.
    """
    if wish.type == "text":
        return None
    try:
        if wish.type == "regex":
            rules = LLMatcher.grammar_from_regex(wish.regex)
        elif wish.type == "json_object":
            rules = LLMatcher.grammar_from_json_schema(ANY_OBJECT)
        else:
            rules = LLMatcher.grammar_from_json_schema(json.dumps(wish.json_schema.schema_))
    except ValueError as error:
        raise SettingError(
            "response_format", wish.type, f"a form that can be read ({error})"
        ) from None
    return hold("response_format", wish.type, rules, target)


def calls(rules: str, target: Target) -> GrammarShaper:
    """A shaper for answers that call tools, from a Lark grammar.

    Raises:
        SettingError: a tool's schema cannot be read, or this model cannot be held to it.
    """
    return hold("tools", "given", LLMatcher.grammar_from_lark(rules), target)


def hold(name: str, found: str, rules: str, target: Target) -> GrammarShaper:
    """A shaper that holds answers to llguidance's rules.

    Args:
        name: the field that asked for it, for errors.
        found: what stands there.
        rules: as llguidance takes them.
        target: with a tokenizer of the fast kind.

    Raises:
        SettingError: the rules cannot be read or compiled, no answer can follow them, or the model
            has no end token.
    """
    spec = target.spec
    if not spec.eos_ids:
        raise SettingError(name, found, "none: this model has no end token")
    words, trial = _compiler(target.tokenizer.inner, spec.vocab_size, spec.eos_ids)
    if (fault := trial.fault(rules)) is not None:
        raise SettingError(name, found, f"a form that can be read ({fault})")
    return GrammarShaper(LLMatcher(words, rules, log_level=0), spec.vocab_size, spec.eos_ids)


@lru_cache(maxsize=4)
def _compiler(inner: Any, vocab_size: int, eos_ids: tuple[int, ...]) -> tuple[LLTokenizer, Trial]:
    """What compiles rules for a tokenizer; reading a vocabulary takes about a second."""
    backend = copy(inner.backend_tokenizer)
    backend.no_padding()
    backend.no_truncation()
    text = backend.to_str()
    words = LLTokenizer(text, n_vocab=vocab_size, eos_token=list(eos_ids))
    return words, Trial(text, vocab_size, eos_ids, COMPILE_SECONDS)


class GrammarShaper:
    """Forbids what the form forbids, node by node.

    Args:
        matcher: at the answer's start.
        vocab_size: V.
        eos_ids: what may follow a complete answer.

    Attributes:
        lost: nodes of the last tree at which a copy of the parser gave up.
    """

    def __init__(self, matcher: LLMatcher, vocab_size: int, eos_ids: Sequence[int]) -> None:
        self._matcher, self._eos = matcher, torch.tensor(list(eos_ids))
        self._vocab_size = vocab_size
        self._bits = allocate_token_bitmask(1, vocab_size)  # [1, V/32] int32
        self._num_read = -1  # tokens of the row that the parser has seen; the prompt is not parsed
        self.lost: set[int] = set()

    def fresh(self) -> Self:
        """Another one for another request, without compiling again; this one has read nothing."""
        return type(self)(self._matcher.deep_copy(), self._vocab_size, self._eos.tolist())

    def __call__(self, logits: Tensor, tree: DraftTree, tokens: Sequence[int]) -> Tensor:
        """Mask each node's row; a node that breaks the form keeps its own, it is never reached.

        Raises:
            FormError: the parser gave up on the answer so far.
        """
        if self._num_read < 0:
            self._num_read = len(tokens)
        self._matcher.consume_tokens(list(tokens[self._num_read :]))
        self._num_read, self.lost = len(tokens), set()
        shaped = logits.clone()
        self._mask(self._matcher, 0, shaped, children(tree), tree.tokens.tolist())
        if self._matcher.is_error():
            raise FormError(
                f"the answer cannot be held to its form any further ({reason(self._matcher)})",
                "simplify the schema or the expression",
            )
        return shaped

    def _mask(
        self,
        matcher: LLMatcher,
        node: int,
        shaped: Tensor,
        below: list[list[int]],
        ids: list[int],
    ) -> None:
        """Mask a node and what is below it; this copy of the parser stands at the node."""
        allowed = self._allowed(matcher, shaped.shape[-1])
        if matcher.is_error():
            self.lost.add(node)
            return
        shaped[node].masked_fill_(~allowed.to(shaped.device), float("-inf"))
        for child in below[node]:
            if allowed[ids[child]]:
                branch = matcher.deep_copy()  # one that gives up stays useless
                branch.consume_token(ids[child])
                self._mask(branch, child, shaped, below, ids)

    def _allowed(self, matcher: LLMatcher, vocab_size: int) -> Tensor:
        """[V] bool, the tokens that may come where a parser stands."""
        if matcher.is_stopped():
            allowed = torch.zeros(vocab_size, dtype=torch.bool)
            allowed[self._eos] = True
            return allowed
        fill_next_token_bitmask(matcher, self._bits)
        places = torch.arange(32, dtype=torch.int32)
        return ((self._bits[0][:, None] >> places) & 1).bool().flatten()[:vocab_size]
