"""Low-rank adapters: only they learn, and the written network is the plain one with them in it."""

import pytest
import torch

from slipstream.models.dflash import DFlash, DFlashConfig
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


def test_a_path_head_learns_whole():
    """A fresh one would be held to the adapters' rank; twice adapted, the names are the same."""
    pytest.importorskip("peft")
    model = DFlash(DFlashConfig(12, 16, 4, 2, 6, 1, 31, 19, (0, 1, 2), 12, 4, 30))
    model.add_path(6)
    adapt(model, 2, seed=1)
    learning = {name for name, p in model.named_parameters() if p.requires_grad}
    assert {"path.read.weight", "path.down.weight", "path.up.weight"} < learning
    assert all(".lora_" in name or name.startswith("path.") for name in learning)
    again = merged(model)
    adapt(again, 2, seed=1)
    assert again.state_dict().keys() == model.state_dict().keys()


def test_muon_takes_adapters_that_are_matrices_alone():
    pytest.importorskip("peft")
    model = network()
    model.lm_head = torch.nn.Identity()
    adapt(model, 2, seed=1)
    (optimizer,) = make_optimizers(model, TrainConfig(optimizer="muon"))
    assert isinstance(optimizer, torch.optim.Muon)


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
