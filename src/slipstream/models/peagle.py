"""P-EAGLE's draft network: EAGLE-3's layer and ordinary ones above it, all depths in one pass.

Paper: Hui et al. 2026, P-EAGLE, arXiv:2602.01469.
Differs: attention is the caller's (`attend`); the number of taps is free.
Also: vllm-project/speculators fixes the parameter names used here; its `layers.0` is our
`midlayer`, so that EAGLE-3's files and P-EAGLE's are read by the same code.

For a text of n tokens (the root is x[n-1]) one pass reads

    pair i = 0..n-2        (features of position i, token x[i+1])    position i       says x[i+2]
    slot d = 1, 2, ...     (`mask_hidden`, the mask token)           position n-2+d   says x[n+d]

`mask_hidden` stands for the features of a position that nobody has verified: it is normed and
fused as features are. A pair sees the pairs up to itself; a slot sees all pairs, the slots before
it and itself. So what a pair says never depends on slots, and more slots change no earlier one.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn

from slipstream.errors import CheckpointError
from slipstream.models.blocks import Attend
from slipstream.models.eagle3 import Eagle3, Eagle3Config
from slipstream.models.language import LanguageLayer


@dataclass(frozen=True, slots=True, kw_only=True)
class PEagleConfig(Eagle3Config):
    """Shape of the network: `Eagle3Config`'s fields and two more.

    `norm_output` is kept and changes nothing: no state is handed on.

    Args:
        num_layers: decoder layers, the one that reads pairs included.
        mask_token: target id that stands for a token to be drafted.

    Raises:
        CheckpointError: sizes that cannot belong together.
    """

    num_layers: int
    mask_token: int

    def __post_init__(self) -> None:
        Eagle3Config.__post_init__(self)  # `super()` does not know a class that has slots
        if self.num_layers < 1:
            raise CheckpointError(f"{self.num_layers} layers, expected 1 or more")
        if not 0 <= self.mask_token < self.vocab_size:
            raise CheckpointError(
                f"mask token {self.mask_token} has no row in an embedding of {self.vocab_size}"
            )


class PEagle(Eagle3):
    """The network. `fuse` features and `mask_hidden`, `step` once, then `logits`."""

    config: PEagleConfig

    def __init__(self, config: PEagleConfig) -> None:
        super().__init__(config)
        biases = {"bias": config.attention_bias, "output_bias": config.output_bias}
        self.layers = nn.ModuleDict(  # by their number in files, where the first is 0
            {str(i): LanguageLayer(config, **biases) for i in range(1, config.num_layers)}
        )
        width = len(config.taps) * config.target_hidden_size
        self.mask_hidden = nn.Parameter(torch.zeros(1, 1, width))  # [1, 1, K*D]

    def through(
        self, states: Tensor, embedded: Tensor, positions: Tensor, attend: Attend
    ) -> Tensor:
        """[B, N, D] what leaves the last layer; `attend` is called once a layer, in order."""
        states = super().through(states, embedded, positions, attend)
        for layer in self.layers.values():
            states = layer(states, positions, self.frequencies, attend)
        return states
