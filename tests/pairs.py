"""A tiny network of pairs and texts for it, for the tests of EAGLE-1's and HASS's objectives."""

from __future__ import annotations

import torch

from slipstream.data.batches import collate
from slipstream.data.store import Sample
from slipstream.models.eagle import Eagle, EagleConfig
from slipstream.models.readout import Readout
from slipstream.models.vocabulary import DraftVocabulary

V, D, U = 31, 12, 19


def network(seed=0, scale=0.3):
    torch.manual_seed(seed)
    model = Eagle(EagleConfig(D, 16, 4, 2, 6, V, U)).double().eval()
    for parameter in model.parameters():
        if parameter.dim() == 2:
            torch.nn.init.normal_(parameter, 0, scale)
    vocabulary = DraftVocabulary(torch.randperm(V)[:U].sort().values, V)
    embedding = torch.randn(V, D, dtype=torch.float64)
    return model, vocabulary, Readout(embedding, torch.randn(V, D, dtype=torch.float64))


def sample(length, seed=0, supervised_from=2):
    generator = torch.Generator().manual_seed(seed)
    tokens = torch.randint(0, V, (length,), generator=generator)
    return Sample(
        tokens,
        torch.arange(length) >= supervised_from,
        torch.cat([tokens[1:], tokens[:1]]),
        torch.zeros(length, 0, dtype=torch.float64),
        torch.randn(length, D, generator=generator, dtype=torch.float64),
    )


def batch_of(*rows, number=0):
    return collate(rows, max_length=64, dtype=torch.float64, number=number)
