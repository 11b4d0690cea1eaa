"""EAGLE-3's variants against plain formulas: norms of taps, of the residual, of what goes on."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch.nn import functional as F

from slipstream.errors import CheckpointError
from slipstream.models.eagle3 import Eagle3, Eagle3Config
from slipstream.parity.drafted import causal

D, N, K = 12, 5, 3
BASE = Eagle3Config(D, 16, 4, 2, 6, 31, 19, (1, 2, 3), D)


def network(**changes):
    model = Eagle3(replace(BASE, **changes)).double()
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter, 0.5, 0.3)
    return model.eval()


def norm(x, weight):
    return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + BASE.rms_norm_eps) * weight


def expected(model, features, embedded, positions):
    """Two steps written out; attention alone is the network's own."""
    config, layer = model.config, model.midlayer
    if config.norm_features:
        features = norm(features, model.input_norm.weight)
    if config.norm_each_tap:
        parts = features.split(D, -1)
        features = torch.cat(
            [norm(x, n.weight) for x, n in zip(parts, model.fc_norm, strict=True)], -1
        )
    states = F.linear(features, model.fc.weight, model.fc.bias)
    logits = []
    for step in range(2):
        hidden = norm(states, layer.hidden_norm.weight)
        residual = hidden if config.norm_before_residual else states
        both = torch.cat([norm(embedded[step], layer.input_layernorm.weight), hidden], -1)
        summed = residual + layer.self_attn(both, positions + step, model.frequencies, causal)
        inner = norm(summed, layer.post_attention_layernorm.weight)
        gated = F.silu(inner @ layer.mlp.gate_proj.weight.T) * (inner @ layer.mlp.up_proj.weight.T)
        states = summed + gated @ layer.mlp.down_proj.weight.T
        normed = norm(states, model.norm.weight)
        logits.append(normed @ model.lm_head.weight.T)
        states = normed if config.norm_output else states
    return logits


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"norm_before_residual": True},
        {"norm_output": True},
        {"norm_each_tap": True},
        {"norm_features": True},
        {"fusion_bias": True, "attention_bias": True, "output_bias": True},
        {"norm_each_tap": True, "norm_output": True, "norm_before_residual": True},
    ],
    ids=lambda changes: "+".join(changes) or "plain",
)
@torch.no_grad()
def test_variants_compute_what_they_say(changes):
    model = network(**changes)
    features = torch.randn(1, N, K * D, dtype=torch.float64)
    embedded = torch.randn(2, 1, N, D, dtype=torch.float64)
    positions = torch.arange(N)[None]
    states, ours = model.fuse(features), []
    for step in range(2):
        states = model.step(states, embedded[step], positions + step, causal)
        ours.append(model.logits(states))
    for one, two in zip(ours, expected(model, features, embedded, positions), strict=True):
        assert torch.allclose(one, two, atol=1e-10)
    plain = Eagle3(BASE).double().eval()
    if not {"norm_each_tap", "norm_features", "fusion_bias"} & changes.keys() and changes:
        plain.load_state_dict(model.state_dict())
        other = plain.logits(
            plain.step(
                plain.step(plain.fuse(features), embedded[0], positions, causal),
                embedded[1],
                positions + 1,
                causal,
            )
        )
        assert not torch.allclose(other, ours[1], atol=1e-3)  # a flag is felt


def test_taps_are_normed_in_one_way():
    with pytest.raises(CheckpointError, match="not both"):
        replace(BASE, norm_features=True, norm_each_tap=True)
