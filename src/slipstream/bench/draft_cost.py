"""What it costs to draft: seconds for a few tokens more, drafted one by one or as one block.

EAGLE-3 runs its network once a token, DFlash once a draft. With random weights of a target's shape
both draft as slowly as trained ones, so this needs no checkpoints; nothing is verified.

Beside the seconds stand what they are made of: passes of the draft network, products with the head,
and operations that PyTorch dispatches (on small models most of the time).
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from slipstream.drafters.compiled import CompiledNetwork, can_compile
from slipstream.drafters.dflash import DFlashDrafter
from slipstream.drafters.eagle import EagleDrafter, PairNetwork
from slipstream.drafters.protocol import Drafter
from slipstream.drafters.rollout import Rollout
from slipstream.formats.checkpoint import DFlashCheckpoint
from slipstream.models import dflash, eagle3
from slipstream.models.blocks import Attend
from slipstream.models.dflash import DFlash, DFlashConfig
from slipstream.models.eagle3 import Eagle3, Eagle3Config
from slipstream.models.language import LanguageConfig, LanguageLayer
from slipstream.models.vocabulary import DraftVocabulary
from slipstream.sampling import Sampler
from slipstream.trees.kinds import Growth
from slipstream.types import Sampling, Verdict

KEPT = 2  # positions verified between two drafts


@dataclass(slots=True)
class DraftRow:
    """A row that is only drafted for."""

    sampler: Sampler
    tokens: list[int] = field(default_factory=list)
    key: int = 0
    max_depth: int = 1 << 20
    max_nodes: int = 1 << 20


class DeepEagle3(nn.Module):
    """EAGLE-3's layer and ordinary decoder layers above it, for the measurement alone."""

    frequencies: Tensor

    def __init__(self, config: Eagle3Config, num_layers: int) -> None:
        super().__init__()
        self.config, self.first = config, Eagle3(config)
        sizes = ("hidden_size", "intermediate_size", "num_heads", "num_kv_heads", "head_size")
        shape = {name: getattr(config, name) for name in (*sizes, "vocab_size", "draft_vocab_size")}
        above = LanguageConfig(**shape, num_layers=max(1, num_layers - 1))
        self.more = nn.ModuleList(LanguageLayer(above) for _ in range(num_layers - 1))
        self.register_buffer("frequencies", self.first.frequencies, persistent=False)

    def fuse(self, features: Tensor) -> Tensor:
        """[P, D] of the features [P, K*D]."""
        return self.first.fuse(features)

    def step(self, states: Tensor, embedded: Tensor, positions: Tensor, attend: Attend) -> Tensor:
        """[B, N, D] states after all layers."""
        states = self.first.step(states, embedded, positions, attend)
        for layer in self.more:
            states = layer(states, positions, self.frequencies, attend)
        return states

    def logits(self, states: Tensor) -> Tensor:
        """[..., U] logits."""
        return self.first.logits(states)


class Counted:
    """A draft network whose passes and products with the head are counted."""

    def __init__(self, network: Any) -> None:
        self.inner, self.passes, self.head_calls = network, 0, 0

    def __getattr__(self, name: str) -> Any:
        return getattr(self.inner, name)

    def step(self, *arguments: Any) -> Tensor:
        """A pass over some tokens."""
        self.passes += 1
        return self.inner.step(*arguments)

    def logits(self, states: Tensor) -> Tensor:
        """One product with the head."""
        self.head_calls += 1
        return self.inner.logits(states)

    def __call__(self, *arguments: Any) -> Tensor:
        """A pass over blocks and one product with the head."""
        self.passes += 1
        self.head_calls += 1
        return self.inner(*arguments)


class Dispatches(TorchDispatchMode):
    """Counts the operations that reach PyTorch's dispatcher."""

    def __init__(self) -> None:
        super().__init__()
        self.count = 0

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple = (), kwargs: dict | None = None
    ) -> Any:
        self.count += 1
        return func(*args, **(kwargs or {}))


@dataclass(slots=True)
class Case:
    """A drafter that drafts chains of so many tokens.

    Args:
        method: eagle3 or dflash.
        layers: of its network.
        tokens: drafted a turn.
        drafter: the drafter.
        counted: its network.
        num_features: values of the target's features of a position.
        seconds: of each measured turn.
    """

    method: str
    layers: int
    tokens: int
    drafter: Drafter
    counted: Counted
    num_features: int
    seconds: list[float] = field(default_factory=list)


def eagle3_case(target: Any, layers: int, tokens: int, draft_vocab_size: int) -> Case:
    """EAGLE-3 with this many layers."""
    spec = target.spec
    taps = eagle3.default_taps(spec.num_layers)
    config = Eagle3Config(**target.draft_shape(), draft_vocab_size=draft_vocab_size, taps=taps)
    deep = DeepEagle3(config, layers)
    pairs: PairNetwork | CompiledNetwork
    if can_compile(spec, config):
        pairs = CompiledNetwork(deep.first, target.embedding(), above=deep.more)
    else:
        where = {"dtype": spec.dtype, "device": spec.device}
        pairs = PairNetwork(deep, target.embedding(), head=None, **where)
        pairs.num_layers = layers
    counted = Counted(pairs)
    build = Growth("chain", budget=tokens, depth=tokens, topk=1).kind().build
    ids = torch.arange(draft_vocab_size)
    rollout = Rollout(counted, build, target_ids=ids, vocab_size=spec.vocab_size)
    drafter = EagleDrafter(pairs, rollout, taps)
    return Case("eagle3", layers, tokens, drafter, counted, len(taps) * spec.hidden_size)


def dflash_case(target: Any, layers: int, tokens: int, draft_vocab_size: int) -> Case:
    """DFlash with this many layers and blocks that draft so many tokens."""
    rows = target.embedding().shape[0]
    config = DFlashConfig(
        **target.draft_shape(),
        num_layers=layers,
        draft_vocab_size=draft_vocab_size,
        taps=dflash.default_taps(target.spec.num_layers),
        width=tokens,
        mask_token=rows - 1,
        is_shifted=True,  # as trained here: a block of W slots drafts W tokens
    )
    vocabulary = DraftVocabulary(torch.arange(draft_vocab_size), rows)
    checkpoint = DFlashCheckpoint(DFlash(config), vocabulary)
    drafter = DFlashDrafter.from_model(
        checkpoint, target, Growth("chain", budget=tokens, depth=tokens, topk=1)
    )
    drafter.network = counted = Counted(drafter.network)  # type: ignore[assignment]
    num_features = len(config.taps) * config.target_hidden_size
    return Case("dflash", layers, tokens, drafter, counted, num_features)


@torch.no_grad()
def measure(
    target: Any,
    *,
    tokens: Sequence[int] = (4, 8, 16),
    eagle3_layers: Sequence[int] = (1, 2, 3),
    dflash_layers: Sequence[int] = (1, 3, 5),
    draft_vocab_size: int = 12_288,
    context: int = 256,
    rounds: int = 20,
) -> dict[str, Any]:
    """Median seconds of a draft for every depth and number of layers, all in turn.

    Args:
        target: whose shape, embedding and head are used; it never runs.
        tokens: lengths of the drafted chains.
        eagle3_layers: layers of the networks that draft one token a pass.
        dflash_layers: layers of the networks that draft a block a pass.
        draft_vocab_size: U of all heads, at most V.
        context: positions before the first draft.
        rounds: measured turns of each, after two that are not.

    Returns:
        "rows": method, layers, tokens, seconds, passes, head_calls and dispatches of a draft;
        beside it the conditions.
    """
    size = min(draft_vocab_size, target.spec.vocab_size)
    cases = [eagle3_case(target, layers, n, size) for layers in eagle3_layers for n in tokens]
    cases += [dflash_case(target, layers, n, size) for layers in dflash_layers for n in tokens]
    generator = torch.Generator().manual_seed(0)
    vocab_size = target.spec.vocab_size
    ids = torch.randint(0, vocab_size, (context + KEPT * (rounds + 4),), generator=generator)
    rows = []
    for case in cases:
        row = DraftRow(Sampler(Sampling(), vocab_size), ids[:context].tolist())
        features = torch.randn(context - 1, case.num_features, generator=generator)
        case.drafter.open(row, features.to(target.spec.dtype))
        rows.append(row)
    counts = [_turn(case, row, ids, is_counted=True) for case, row in zip(cases, rows, strict=True)]
    for turn in range(rounds + 2):
        for case, row in zip(cases, rows, strict=True):
            seconds = _turn(case, row, ids)["seconds"]
            if turn > 1:
                case.seconds.append(seconds)
    return {
        "context": context,
        "draft_vocab_size": size,
        "rounds": rounds,
        "rows": [
            {"method": case.method, "layers": case.layers, "tokens": case.tokens,
             "seconds": statistics.median(case.seconds)}
            | {name: count[name] for name in ("passes", "head_calls", "dispatches")}
            for case, count in zip(cases, counts, strict=True)
        ],
    }  # fmt: skip


def _turn(case: Case, row: DraftRow, ids: Tensor, *, is_counted: bool = False) -> dict[str, Any]:
    """Verify a few positions, as it were, and draft."""
    done = len(row.tokens)
    row.tokens = ids[: done + KEPT].tolist()
    verified = torch.ones(KEPT, case.num_features, dtype=case.counted.dtype)
    case.drafter.observe(row, Verdict(tuple(range(KEPT)), row.tokens[-1]), verified)
    case.counted.passes = case.counted.head_calls = 0
    if not is_counted:
        begun = time.perf_counter()
        case.drafter.propose([row])
        return {"seconds": time.perf_counter() - begun}
    with Dispatches() as dispatches:
        case.drafter.propose([row])
    return {
        "passes": case.counted.passes,
        "head_calls": case.counted.head_calls,
        "dispatches": dispatches.count,
    }
