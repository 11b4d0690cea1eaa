"""Speculative decoding that never changes what the model says.

Example:
    >>> import slipstream
    >>> engine = slipstream.load("smollm2-135m", method="eagle3")  # doctest: +SKIP
    >>> engine.generate("What is a slipstream?").text  # doctest: +SKIP

The public names are loaded on first use, so that `import slipstream` costs nothing. The threads of
torch's products are told to sleep while they wait, unless OMP_WAIT_POLICY says otherwise: spinning
ones make a product tens of times slower as soon as another program takes a core.
"""

from __future__ import annotations

import importlib
import os
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from slipstream import methods
    from slipstream.assemble import load
    from slipstream.custom_generate import speculate
    from slipstream.drafters.protocol import Drafter
    from slipstream.engine.engine import Engine
    from slipstream.formats.pretrained import PretrainedDrafter
    from slipstream.types import DraftTree, Sampling

    __version__: str

os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")  # read when torch is imported, later

__all__ = [
    "DraftTree",
    "Drafter",
    "Engine",
    "PretrainedDrafter",
    "Sampling",
    "__version__",
    "load",
    "methods",
    "speculate",
]

_HOMES = {
    "load": "slipstream.assemble",
    "speculate": "slipstream.custom_generate",
    "PretrainedDrafter": "slipstream.formats.pretrained",
    "Engine": "slipstream.engine.engine",
    "Sampling": "slipstream.types",
    "DraftTree": "slipstream.types",
    "Drafter": "slipstream.drafters.protocol",
}


def __getattr__(name: str) -> object:
    if name == "methods":
        return importlib.import_module("slipstream.methods")
    if name == "__version__":
        return importlib.import_module("importlib.metadata").version("slipstream")
    if name in _HOMES:
        return getattr(importlib.import_module(_HOMES[name]), name)
    raise AttributeError(f"module 'slipstream' has no attribute '{name}'")


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
