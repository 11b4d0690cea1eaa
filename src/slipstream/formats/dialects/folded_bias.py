"""A bias carried by the embedding, for an engine whose joining layer has none.

The layer that joins embedding and feature is linear, so a bias b is what one vector v added to all
rows of the embedding does: W v = b, where W is the part of the layer that reads the embedding. The
rows are kept in float32 whatever the weights are: v can be long, because W needs not be well
conditioned.
"""

from __future__ import annotations

import torch
from torch import Tensor

from slipstream.errors import CheckpointError
from slipstream.formats.checkpoint import is_copy

KEY = "bias_in_embedding"
"""Says so in config.json."""


def fold(weight: Tensor, bias: Tensor, embedding: Tensor) -> Tensor:
    """The embedding whose rows do what the bias did.

    Args:
        weight: [D, 2D] of the joining layer, the embedding's columns first.
        bias: [D].
        embedding: [V', D] the target's.

    Returns:
        [V', D] float32.
    """
    reads = _reads(weight)
    shift = torch.linalg.lstsq(reads, bias.double()[:, None].cpu()).solution[:, 0]  # [D]
    return (embedding.cpu().double() + shift).float()


def unfold(weight: Tensor, folded: Tensor, embedding: Tensor, place: str) -> Tensor:
    """The bias back.

    Args:
        weight: [D, 2D] of the joining layer.
        folded: [V', D] as `fold` gives it.
        embedding: [V', D] the target's.
        place: where it was read, for the message.

    Returns:
        [D] float32.

    Raises:
        CheckpointError: the rows are not the target's moved by one vector.
    """
    ours = embedding.cpu().double()
    if folded.shape == ours.shape:
        shift = (folded.double() - ours).mean(0)  # [D]
        if is_copy(folded.double() - shift, ours):
            return (_reads(weight) @ shift).float()
    raise CheckpointError(
        f"{place}: embed_tokens.weight is not the target's embedding moved by one vector, which "
        f"{KEY} says",
        "give --model the target that the drafter was trained for",
    )


def _reads(weight: Tensor) -> Tensor:
    """[D, D] double: the columns that read the embedding."""
    return weight[:, : weight.shape[0]].double().cpu()
