"""From a network's logits to the children that a tree is offered: chosen, drawn, or both.

How children come about follows from the rule that will judge them (`methods.CHILDREN`):

    chosen     the likeliest tokens; above temperature 0 the largest log q/T + g, g being the
               noise the target itself will choose with, so that they are probably its choice
    drawn      independent draws from q, equal ones included
    distinct   draws without replacement, in draw order
    mixed      the likeliest tokens, then one draw from what they leave

At temperature 0 there is nothing to draw, and every kind is the likeliest tokens.

q is the softmax of logits / T at the request's temperature. Top-k and top-p of the request stay
the target's affair: a draft that is cut to fewer tokens than the tree has places wastes them.

Paper: Daliri et al. 2024, arXiv:2408.07978 (drafting with the target's noise); Chen et al. 2024,
Sequoia, arXiv:2402.12374 (without replacement).
Differs: where q has fewer tokens than a node has places, the node gets fewer children; Sequoia
goes on with uniform draws. How many depends on q alone, so it is as exact.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from slipstream import shapes
from slipstream.errors import UnknownNameError
from slipstream.sampling import Sampler
from slipstream.target.library import is_loaded
from slipstream.target.stack import rank
from slipstream.types import Drawn

KINDS = ("chosen", "drawn", "distinct", "mixed")


@dataclass(frozen=True, slots=True)
class Candidates:
    """The children offered to each node of a frontier, as `TreeBuilder.grow` takes them.

    Args:
        log_probs: [F, M] nats, in rank or draw order; -inf where a node has fewer children.
        tokens: [F, M] int64, target ids.
        drawn: how they were drawn; None when all were chosen.
    """

    log_probs: Tensor
    tokens: Tensor
    drawn: Drawn | None = None


def pick(
    logits: Tensor,
    *,
    children: str,
    counts: Sequence[int],
    sampler: Sampler,
    position: int,
    target_ids: Tensor | None,
    vocab_size: int,
) -> Candidates:
    """Choose or draw the children of one row's frontier.

    Above temperature 0 the log_probs of chosen children are log softmax(log q/T + g): how likely
    each is to be the target's choice, given the noise, for trees to sort and cut by. Of all other
    candidates they are log q.

    Args:
        logits: [F, U], the network's; -inf is never offered.
        children: one of `KINDS`.
        counts: children wanted of each of the F nodes.
        sampler: the request's temperature, noise and "draft" generator.
        position: index in the row's tokens of the token that is being proposed.
        target_ids: [U] int64, the target id of each draft id; None when they are the same.
        vocab_size: V; draft ids beyond it are never offered.

    Raises:
        UnknownNameError: no such kind of children.
        ShapeError: logits, counts and target_ids do not agree.

    Example:
        >>> from slipstream.types import Sampling
        >>> picked = pick(
        ...     torch.tensor([[0.0, 2.0, 1.0]]),
        ...     children="chosen",
        ...     counts=(2,),
        ...     sampler=Sampler(Sampling(), 3),
        ...     position=7,
        ...     target_ids=None,
        ...     vocab_size=3,
        ... )
        >>> picked.tokens
        tensor([[1, 2]])
    """
    if children not in KINDS:
        raise UnknownNameError("kind of children", children, KINDS)
    if target_ids is None:
        target_ids = torch.arange(logits.shape[-1], device=logits.device)
    shapes.check("pick", logits=(logits, f"{len(counts)} U"), target_ids=(target_ids, "U"))
    scores = logits.float()
    beyond = target_ids >= vocab_size  # [U] bool
    if bool(beyond.any()):
        scores = scores.masked_fill(beyond, float("-inf"))
    if sampler.is_greedy:
        return _best(scores, counts, target_ids)
    scores = scores / sampler.sampling.temperature
    if children == "chosen":
        noise = sampler.noise(position, scores.device)  # [V]
        noisy = scores + noise[target_ids.clamp(max=vocab_size - 1)]
        return _best(noisy, counts, target_ids)
    return _drawn(scores.cpu().softmax(-1), children, counts, sampler, target_ids.cpu(), vocab_size)


def _best(scores: Tensor, counts: Sequence[int], target_ids: Tensor) -> Candidates:
    """The likeliest of each row of scores [F, U], with their log softmax."""
    count = min(max(counts, default=0), scores.shape[-1])
    if scores.device.type == "cpu" and is_loaded():
        values, indices = rank(scores, count)
    else:
        values, indices = scores.log_softmax(-1).topk(count, dim=-1)
    if len(set(counts)) > 1:
        values = values.masked_fill(~_wanted(counts, values), float("-inf"))
    return Candidates(values, target_ids[indices])


def _drawn(
    probs: Tensor,
    children: str,
    counts: Sequence[int],
    sampler: Sampler,
    target_ids: Tensor,
    vocab_size: int,
) -> Candidates:
    """Candidates of which some are samples from `probs` [F, U], the float32 numbers kept."""
    probs = probs.nan_to_num(0.0)  # a network's NaN: nothing to draw
    width = max(counts, default=0)
    ids = torch.zeros(len(counts), width, dtype=torch.int64)  # [F, M] draft ids
    is_offered = torch.zeros(len(counts), width, dtype=torch.bool)
    is_drawn = is_offered.clone()
    draws = probs.clone()  # what the draws are made from
    if children == "mixed":
        for node, count in enumerate(counts):
            best = probs[node].topk(min(max(count - 1, 0), probs.shape[-1]))
            ids[node, : len(best.indices)] = best.indices
            is_offered[node, : len(best.indices)] = best.values > 0
            draws[node, best.indices] = 0
        draws /= draws.sum(-1, keepdim=True).clamp(min=torch.finfo(draws.dtype).tiny)
        places = [(max(count - 1, 0),) if count else () for count in counts]
    else:
        places = [tuple(range(count)) for count in counts]
    generator = sampler.generator("draft")
    left = draws.double()
    for turn in range(max((len(of_node) for of_node in places), default=0)):
        cumulated = left.cumsum(-1)  # [F, U]
        total = cumulated[:, -1:].contiguous()
        at = torch.rand(total.shape, generator=generator, dtype=torch.float64) * total
        found = torch.searchsorted(cumulated, at, right=True)
        found = found.minimum(torch.searchsorted(cumulated, total))  # rounding up to the total
        for node, of_node in enumerate(places):
            if turn < len(of_node) and total[node, 0] > 0:
                place = of_node[turn]
                ids[node, place] = found[node, 0]
                is_offered[node, place] = is_drawn[node, place] = True
        if children == "distinct":
            left.scatter_(1, found, 0.0)
    log_probs = probs.gather(1, ids).log().masked_fill(~is_offered, float("-inf"))
    known = target_ids < vocab_size
    draft_probs = torch.zeros(len(counts), vocab_size)
    draft_probs[:, target_ids[known]] = draws[:, known]
    return Candidates(log_probs, target_ids[ids], Drawn(is_drawn, draft_probs))


def _wanted(counts: Sequence[int], values: Tensor) -> Tensor:
    """[F, M] bool, True where a place is within its node's count."""
    wanted = torch.tensor(counts, device=values.device)
    return torch.arange(values.shape[-1], device=values.device) < wanted[:, None]
