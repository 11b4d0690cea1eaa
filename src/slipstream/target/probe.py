"""Does an architecture that the tests do not hold behave over a slot cache as it does alone?"""

from __future__ import annotations

from typing import Any

import torch

from slipstream.errors import SlipstreamError, UnsupportedTargetError
from slipstream.target.attention import ATTENTION
from slipstream.types import DraftTree


@torch.no_grad()
def probe(target: Any) -> None:
    """Compare a chunked pass and a small tree with the model's own causal passes.

    Args:
        target: an `HFTarget`, not packed yet.

    Raises:
        UnsupportedTargetError: logits differ, or the model cannot be driven this way.
    """
    model, spec = target.model, target.spec
    tokens = [(7 * i + 3) % spec.vocab_size for i in range(12)]
    # The tree: the last tokens as a chain, and a sibling of its first node that must not be seen.
    tree = DraftTree(
        torch.tensor([tokens[8], tokens[0], *tokens[9:]]), torch.tensor([-1, 0, 0, 2, 3])
    )
    kind = type(model).__name__
    try:
        cache = target.new_cache(1, len(tokens) + 1)
        for chunk in (tokens[:5], tokens[5:8]):
            target.forward([DraftTree.chain(chunk)], cache, [0], last_only=True)
            cache.commit(0, range(len(chunk)))
        found = target.forward([tree], cache, [0]).logits[0, [0, 2, 3, 4]]
    except SlipstreamError as error:
        raise UnsupportedTargetError(
            f"{kind} cannot be driven over a slot cache: {error}"
        ) from error
    except (AttributeError, KeyError, IndexError, TypeError, ValueError, RuntimeError) as error:
        raise UnsupportedTargetError(
            f"{kind} does not take our cache or mask: {error!r}"
        ) from error
    model.set_attn_implementation("eager")
    ids = torch.tensor([tokens], device=spec.device)
    expected = model(ids, use_cache=False).logits[0, 8:, : spec.vocab_size].float()
    model.set_attn_implementation(ATTENTION)
    tolerance = 1e-3 if spec.dtype in (torch.float32, torch.float64) else 0.1
    difference = float((found - expected).abs().max() / expected.abs().max().clamp(min=1e-6))
    if not difference <= tolerance:
        raise UnsupportedTargetError(
            f"{kind} over a slot cache differs from its own pass by {difference:.1e} of its "
            "largest logit"
        )
