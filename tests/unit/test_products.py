"""Networks as they draft: frozen, in the number type that runs, and nobody else's."""

from __future__ import annotations

import torch

from made import a_dflash, an_eagle3
from slipstream.drafters.products import frozen_copy, narrow


def test_a_frozen_copy_is_its_own_and_keeps_its_frequencies():
    _, checkpoint = an_eagle3()
    model = checkpoint.model
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    copied = frozen_copy(model, torch.bfloat16, "cpu")
    assert not copied.training and copied.frequencies.dtype == torch.float32
    for name, parameter in copied.named_parameters():
        assert parameter.dtype == torch.bfloat16 and not parameter.requires_grad
        assert torch.equal(parameter, before[name].bfloat16())
    same = frozen_copy(model, torch.float32, "cpu")
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(1)
    assert all(torch.equal(p, before[name]) for name, p in same.named_parameters())


def test_a_narrowed_network_keeps_its_frequencies():
    _, checkpoint = a_dflash()
    model = checkpoint.model
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    narrow(model, torch.bfloat16)
    assert model.frequencies.dtype == torch.float32
    for name, parameter in model.named_parameters():
        assert torch.equal(parameter, before[name].bfloat16()) and not parameter.requires_grad


def test_a_narrowed_network_is_not_copied_again():
    """Nobody else holds it; what a drafter takes out of its copy stays in the network."""
    _, checkpoint = a_dflash()
    narrow(checkpoint.model, torch.bfloat16)
    copied = frozen_copy(checkpoint.model, torch.bfloat16, "cpu")
    pairs = zip(copied.parameters(), checkpoint.model.parameters(), strict=True)
    assert all(own.data_ptr() == other.data_ptr() for own, other in pairs)
    del copied.layers
    assert len(checkpoint.model.layers) == 2
