"""Low-rank fine-tuning of a draft network, through `peft`.

Paper: Hu et al. 2021, LoRA, arXiv:2106.09685.
Adapters are put into a network's linear layers in place, so that objectives call it as before;
what is written is the plain network with the adapters added to its weights.
"""

from __future__ import annotations

from importlib.util import find_spec

import torch
from torch import nn

from slipstream.errors import SettingError

WHOLE = "path."
"""A path head is small and often fresh: an adapter would hold it to the adapter's rank."""


def check_installed(rank: int | None) -> None:
    """Raises SettingError when adapters are wanted and `peft` is not there."""
    if rank is not None and find_spec("peft") is None:
        raise SettingError(
            "lora-rank", rank, "nothing where peft is not installed", "pip install peft"
        )


def adapt(model: nn.Module, rank: int, *, seed: int) -> None:
    """Freeze a network and give every linear layer an adapter of this rank, in place.

    A path head learns whole.
    """
    from peft import LoraConfig, inject_adapter_in_model

    linear = [
        name
        for name, module in model.named_modules()
        if isinstance(module, nn.Linear) and not name.startswith(WHOLE)
    ]
    torch.manual_seed(seed)  # peft draws from the global generator
    inject_adapter_in_model(LoraConfig(r=rank, lora_alpha=2 * rank, target_modules=linear), model)
    for name, parameter in model.named_parameters():
        if name.startswith(WHOLE):
            parameter.requires_grad_(True)


@torch.no_grad()
def merged(model: nn.Module) -> nn.Module:
    """The plain network: adapters added to the weights they stand beside.

    A network without adapters is returned as it is.
    """
    layers = {n: m for n, m in model.named_modules() if hasattr(m, "get_delta_weight")}
    if not layers:
        return model
    state = {
        name.replace(".base_layer.", "."): tensor.clone()
        for name, tensor in model.state_dict().items()
        if ".lora_" not in name
    }
    for name, layer in layers.items():
        state[f"{name}.weight"] += layer.get_delta_weight("default")
    plain = type(model)(model.config)
    plain.load_state_dict(state)
    return plain.train(model.training)
