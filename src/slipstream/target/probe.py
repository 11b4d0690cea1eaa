"""Checks made at load time: stock models driven over a slot cache, and their fast twins."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from slipstream.errors import SlipstreamError, UnsupportedTargetError
from slipstream.target.attention import ATTENTION
from slipstream.types import DraftTree

NUM_TOKENS = 12


@dataclass(frozen=True, slots=True)
class Sample:
    """What a target says of a small tree below a prompt taken in two chunks.

    Args:
        logits: [1, N, V].
        features: [1, N, (L+1)*D] at every tap.
        last_hidden: [1, N, D].
        keys: [L, 1, H, S, C] of the cache.
        values: [L, 1, H, S, C].
    """

    logits: Tensor
    features: Tensor
    last_hidden: Tensor
    keys: Tensor
    values: Tensor


def tokens_of(target: Any) -> list[int]:
    """The token ids that the checks run."""
    return [(7 * i + 3) % target.spec.vocab_size for i in range(NUM_TOKENS)]


def sample(target: Any) -> Sample:
    """Run the prompt and the tree.

    The tree is the last tokens as a chain, and a sibling of its first node that must not be seen.

    Args:
        target: an `HFTarget`.
    """
    tokens = tokens_of(target)
    tree = DraftTree(
        torch.tensor([tokens[8], tokens[0], *tokens[9:]]), torch.tensor([-1, 0, 0, 2, 3])
    )
    cache = target.new_cache(1, 2 * NUM_TOKENS)  # with room for the padding of a replayed pass
    for chunk in (tokens[:5], tokens[5:8]):
        target.forward([DraftTree.chain(chunk)], cache, [0], last_only=True)
        cache.commit(0, range(len(chunk)))
    found = target.forward([tree], cache, [0], taps=tuple(range(target.spec.num_layers + 1)))
    keys, values = (store[..., : NUM_TOKENS + 1, :] for store in (cache.keys, cache.values))
    return Sample(found.logits, found.features, found.last_hidden, keys, values)


def check_same(target: Any, expected: Sample, *, rounds_inputs: bool = False) -> None:
    """Hold a fast twin against what its stock model said.

    Args:
        target: the twin.
        expected: the stock model's sample.
        rounds_inputs: the twin rounds activations to 8 bits, the stock model does not.

    Raises:
        UnsupportedTargetError: they differ by more than rounding.
    """
    found = sample(target)
    exact = target.spec.dtype in (torch.float32, torch.float64)
    limit = 0.15 if rounds_inputs else 1e-4 if exact else 0.05
    for name in Sample.__slots__:
        one, other = getattr(found, name).float(), getattr(expected, name).float()
        difference = float((one - other).abs().mean() / other.abs().mean().clamp(min=1e-6))
        if not difference <= limit:
            raise UnsupportedTargetError(
                f"the fused pass of {target.spec.name} differs from the stock model's by "
                f"{difference:.1e} in its {name.replace('_', ' ')}"
            )


@torch.no_grad()
def probe(target: Any) -> None:
    """Compare a stock model over a slot cache with its own causal pass.

    For architectures that the tests do not hold.

    Args:
        target: an `HFTarget`, not packed yet.

    Raises:
        UnsupportedTargetError: logits differ, or the model cannot be driven this way.
    """
    model, spec = target.model, target.spec
    kind = type(model).__name__
    try:
        found = sample(target).logits[0, [0, 2, 3, 4]]
    except SlipstreamError as error:
        raise UnsupportedTargetError(
            f"{kind} cannot be driven over a slot cache: {error}"
        ) from error
    except (AttributeError, KeyError, IndexError, TypeError, ValueError, RuntimeError) as error:
        raise UnsupportedTargetError(
            f"{kind} does not take our cache or mask: {error!r}"
        ) from error
    model.set_attn_implementation("eager")
    ids = torch.tensor([tokens_of(target)], device=spec.device)
    expected = model(ids, use_cache=False).logits[0, 8:, : spec.vocab_size].float()
    model.set_attn_implementation(ATTENTION)
    tolerance = 1e-3 if spec.dtype in (torch.float32, torch.float64) else 0.1
    difference = float((found - expected).abs().max() / expected.abs().max().clamp(min=1e-6))
    if not difference <= tolerance:
        raise UnsupportedTargetError(
            f"{kind} over a slot cache differs from its own pass by {difference:.1e} of its "
            "largest logit"
        )
