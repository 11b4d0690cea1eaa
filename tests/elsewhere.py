"""A second device for machines that have none: tensors are marked, and may not meet unmarked ones.

On a GPU, a tensor that was made without `device=` lies in the processor's memory, and the first
operation that brings the two together fails. Here both lie in the same memory, and a mode that sees
every operation refuses what a GPU would.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any
from weakref import ref

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_iter, tree_map


class Elsewhere(TorchFunctionMode):
    """Refuses operations on marked and unmarked tensors; marks what comes of marked ones.

    As on a GPU, a scalar may come from anywhere, and so may the places of an index.
    """

    def __init__(self) -> None:
        super().__init__()
        self._marked: dict[int, ref[Tensor]] = {}

    def mark(self, value: Any) -> Any:
        """The same tensor, module or dataclass of tensors, lying elsewhere from now on."""
        for tensor in _tensors(value):
            self._marked[id(tensor)] = ref(tensor)
        return value

    def has(self, tensor: Tensor) -> bool:
        """Whether a tensor lies elsewhere."""
        found = self._marked.get(id(tensor))
        return found is not None and found() is tensor

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """One operation."""
        kwargs = kwargs or {}
        given = [x for x in tree_iter((args, kwargs)) if isinstance(x, Tensor)]
        name = getattr(func, "__name__", str(func))
        copies = name in ("to", "copy_") or (
            name == "__setitem__" and not any(isinstance(x, Tensor) for x in tree_iter(args[1]))
        )
        if name in ("__getitem__", "__setitem__"):  # places may lie here, values may not
            values = {id(x) for x in (args[0], *args[2:])}
            given = [x for x in given if self.has(x) or id(x) in values]
        here = [x for x in given if not self.has(x)]
        is_mixed = len(here) < len(given) and any(x.dim() for x in here)
        assert copies or not is_mixed, f"{name} meets another device"
        out = func(*args, **kwargs)
        places = [*args[1:], kwargs.get("device")]
        goes = name == "to" and any(isinstance(place, torch.device) for place in places)
        comes = name == "cpu" or (name == "to" and any(isinstance(place, str) for place in places))
        if goes or comes:
            out = out.view_as(out)  # `to` gives the tensor itself where it lies there already
        is_made_there = not given and kwargs.get("device") is not None
        if not comes and (goes or is_made_there or (len(here) < len(given) and name != "copy_")):
            tree_map(lambda x: self.mark(x) if isinstance(x, Tensor) else x, out)
        return out


def _tensors(value: Any) -> Iterator[Tensor]:
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, nn.Module):
        yield from value.parameters()
        yield from value.buffers()
    else:
        names = getattr(value, "__slots__", None) or vars(value)
        yield from (x for name in names if isinstance(x := getattr(value, name), Tensor))
