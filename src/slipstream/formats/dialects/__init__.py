"""One file a dialect; `ALL` lists them, the surest claim first."""

from __future__ import annotations

from slipstream.formats.dialect import Dialect
from slipstream.formats.dialects import (
    angelslim,
    dspark,
    fasterdecoding,
    safeailab,
    slipstream,
    specforge,
    speculators,
    speculators_eagle,
    transformers,
    vllm,
    zlab,
)

ALL: tuple[Dialect, ...] = (
    slipstream.EAGLE3,
    slipstream.PEAGLE,
    slipstream.EAGLE,
    slipstream.DFLASH,
    slipstream.DSPARK,
    slipstream.MEDUSA,
    slipstream.CHAIN,
    speculators.EAGLE3,
    speculators.PEAGLE,
    speculators.DFLASH,
    speculators.DSPARK,
    speculators_eagle.EAGLE,
    fasterdecoding.MEDUSA,
    vllm.MEDUSA,
    vllm.PEAGLE,
    vllm.EAGLE3,
    vllm.EAGLE,
    angelslim.EAGLE3,
    specforge.EAGLE3,
    specforge.EAGLE,
    dspark.DEEPSPEC,
    dspark.SPECFORGE,
    zlab.DFLASH,
    safeailab.EAGLE3,
    safeailab.EAGLE,
    transformers.CHAIN,
)
