"""EAGLE-1's bias carried by the embedding, for vLLM."""

from __future__ import annotations

import pytest
import torch

from slipstream.errors import CheckpointError
from slipstream.formats.checkpoint import EagleCheckpoint, TargetFacts
from slipstream.formats.detect import dialect_for
from slipstream.formats.dialects.folded_bias import fold, unfold
from slipstream.models.eagle import Eagle, EagleConfig
from slipstream.models.vocabulary import DraftVocabulary

V, D = 97, 48


@pytest.fixture
def parts():
    generator = torch.Generator().manual_seed(3)
    weight, bias = (torch.randn(*s, generator=generator) * 0.3 for s in ((D, 2 * D), (D,)))
    return weight, bias, torch.randn(V, D, generator=generator)


def test_the_layer_says_the_same_without_its_bias(parts):
    weight, bias, embedding = parts
    features = torch.randn(V, D)
    with_bias = torch.cat([embedding, features], 1) @ weight.T + bias
    folded = torch.cat([fold(weight, bias, embedding), features], 1) @ weight.T
    assert (with_bias - folded).abs().max() < 1e-5 and bias.abs().max() > 0.1


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_bias_comes_back(dtype, parts):
    """Also from a target whose rows are rounded more coarsely than the folded ones."""
    weight, bias, embedding = parts
    folded = fold(weight, bias, embedding)
    found = unfold(weight, folded, embedding.to(dtype), "it")
    assert (found - bias).abs().max() < (1e-5 if dtype == torch.float32 else 5e-3)


def test_another_targets_embedding_is_refused(parts):
    weight, bias, embedding = parts
    for other in (embedding.flip(0), embedding[:-1]):
        with pytest.raises(CheckpointError, match="moved by one vector"):
            unfold(weight, fold(weight, bias, embedding), other, "it")


def test_files_say_so_and_need_the_target():
    model = Eagle(EagleConfig(D, 64, 6, 2, 16, V, V))
    torch.nn.init.normal_(model.fc.bias)
    target = TargetFacts("tiny", 4, torch.randn(V, D))
    way = dialect_for("vllm", "eagle")
    made = way.dump(EagleCheckpoint(model, DraftVocabulary.full(V)), target, torch.bfloat16)
    assert made.config["bias_in_embedding"] is True and made.config["bias"] is False
    assert "fc.bias" not in made.tensors
    assert made.tensors["embed_tokens.weight"].dtype == torch.float32
    assert way.load(made, target).model.config.bias
    with pytest.raises(CheckpointError, match="to tell its bias"):
        way.load(made, None)
    with pytest.raises(CheckpointError, match="was not given"):
        checkpoint = EagleCheckpoint(model, DraftVocabulary.full(V))
        way.dump(checkpoint, TargetFacts("tiny", 4), torch.bfloat16)
