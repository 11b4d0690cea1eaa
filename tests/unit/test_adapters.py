"""Low-rank adapters: only they learn, and the written network is the plain one with them in it."""

import pytest
import torch

from slipstream.models.eagle3 import Eagle3, Eagle3Config
from slipstream.train.adapters import adapt, merged
from slipstream.train.config import TrainConfig
from slipstream.train.optimize import make_optimizers


def network():
    torch.manual_seed(0)
    return Eagle3(Eagle3Config(12, 16, 4, 2, 6, 31, 19, (0, 1, 2), 12))


def test_a_network_without_adapters_is_its_own_merger():
    model = network()
    assert merged(model) is model


def test_adapters_alone_learn_and_are_merged():
    pytest.importorskip("peft")
    model, before = network(), network().state_dict()
    adapt(model, 2, seed=1)
    features = torch.randn(5, 36)
    assert torch.allclose(model.fuse(features), network().fuse(features))
    (optimizer,) = make_optimizers(model, TrainConfig(learning_rate=0.1))
    learned = sum(p.numel() for group in optimizer.param_groups for p in group["params"])
    assert 0 < learned < sum(p.numel() for p in network().parameters())
    model.logits(model.fuse(features)).square().mean().backward()
    optimizer.step()
    plain = merged(model)
    assert plain.state_dict().keys() == before.keys()
    assert torch.allclose(plain.fuse(features), model.fuse(features), atol=1e-5)
    assert not torch.equal(plain.fc.weight, before["fc.weight"])
    assert torch.equal(plain.norm.weight, before["norm.weight"])
