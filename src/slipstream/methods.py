"""The catalogue: one record per method. Strings only, so that looking at it imports nothing.

A record names what a method is made of (`drafter`, `model`, `objective` are "module:Name"), what
it can be combined with, and its defaults. The defaults live here and nowhere else.
"""

from __future__ import annotations

import importlib
from collections.abc import Iterable
from dataclasses import dataclass

from slipstream.errors import UnknownNameError

TREES = ("chain", "static", "kary", "sequoia", "dynamic", "best-first")
VERIFIERS = {
    "walk": "slipstream.verify.walk:walk",
    "token": "slipstream.verify.chain:chain",
    "block": "slipstream.verify.block:block",
    "with-replacement": "slipstream.verify.tree:with_replacement",
    "without-replacement": "slipstream.verify.tree:without_replacement",
    "k-seq": "slipstream.verify.kseq:kseq",
    "traversal": "slipstream.verify.traversal:traversal",
    "traversal-with-replacement": "slipstream.verify.traversal:traversal_with_replacement",
    "hybrid": "slipstream.verify.hybrid:hybrid",
    "typical": "slipstream.verify.typical:typical",
}
CHILDREN = {
    "walk": "chosen",
    "token": "drawn",
    "block": "drawn",
    "with-replacement": "drawn",
    "without-replacement": "distinct",
    "k-seq": "drawn",
    "traversal": "distinct",
    "traversal-with-replacement": "drawn",
    "hybrid": "mixed",
    "typical": "chosen",
}
"""How a drafter must make children for a rule to judge; see `drafters.candidates`."""

FOR_CHAINS = ("token", "block")
"""Rules that know no siblings."""

LOSSY = ("typical",)
"""Rules that do not keep the target's law above temperature 0."""

FIXED_TREES = ("chain", "static", "kary", "sequoia")
"""Trees whose shape is decided before anything is drafted: what is not chosen needs one."""


@dataclass(frozen=True, slots=True)
class Method:
    """What a method is, what fits it, and how it runs unless told otherwise.

    Args:
        name: as typed.
        title: as printed.
        paper: short name and arXiv id; empty when there is none.
        drafter: "module:Class" that proposes.
        model: "module:Class" of the draft network, or None.
        trees: kinds it can draft.
        verifiers: rules that fit how it drafts.
        objective: "module:Class" it is trained with, or None.
        formats: checkpoint dialects it can be read from.
        note: one line for tables.
        tree: default kind.
        verifier: default rule.
        budget: default drafted nodes, root not counted; 0 for a method that drafts nothing.
        depth: default depth of the deepest drafted node.
        topk: default children scored per node, which is also the beam.
        weights: method whose checkpoints it runs on; its own when empty.
        has_width: it drafts blocks, whose width can be asked for.
    """

    name: str
    title: str
    paper: str
    drafter: str
    model: str | None = None
    trees: tuple[str, ...] = ("chain",)
    verifiers: tuple[str, ...] = ("walk",)
    objective: str | None = None
    formats: tuple[str, ...] = ()
    note: str = ""
    tree: str = "chain"
    verifier: str = "walk"
    budget: int = 0
    depth: int = 0
    topk: int = 1
    weights: str = ""
    has_width: bool = False

    @property
    def needs_checkpoint(self) -> bool:
        """True when its drafter holds a network."""
        return self.model is not None

    @property
    def is_trainable(self) -> bool:
        """True when we have an objective for it."""
        return self.objective is not None

    @property
    def lossless(self) -> tuple[str, ...]:
        """Its verifiers that keep the target's law."""
        return tuple(rule for rule in self.verifiers if rule not in LOSSY)


_METHODS = (
    Method(
        name="none",
        title="Plain decoding",
        paper="",
        drafter="slipstream.drafters.none:NoDrafter",
        note="drafts nothing: the baseline, through the same loop",
    ),
    Method(
        name="ngram",
        title="Prompt lookup",
        paper="Prompt lookup decoding, as in Spec-Bench, arXiv:2401.07851",
        drafter="slipstream.drafters.ngram:NgramDrafter",
        note="copies what followed the last few tokens before; no network",
        budget=8,
        depth=8,
    ),
    Method(
        name="lookahead",
        title="Lookahead",
        paper="Lookahead decoding, arXiv:2402.02057",
        drafter="slipstream.drafters.lookahead:LookaheadDrafter",
        trees=("static",),
        note="n-grams that the model's own passes turn up; no network",
        tree="static",
        budget=17,
        depth=3,
    ),
    Method(
        name="chain",
        title="Draft language model",
        paper="Leviathan et al. 2023, arXiv:2211.17192",
        drafter="slipstream.drafters.chain:ChainDrafter",
        model="slipstream.models.language:Language",
        trees=("chain", "kary", "sequoia", "static", "dynamic", "best-first"),
        verifiers=tuple(VERIFIERS),
        objective="slipstream.train.objectives.distil:Distil",
        formats=("slipstream", "transformers", "huggingface"),
        note="a smaller model that reads the same tokens",
        budget=4,
        depth=4,
        topk=4,
    ),
    Method(
        name="specinfer",
        title="SpecInfer",
        paper="SpecInfer, arXiv:2305.09781",
        drafter="slipstream.drafters.chain:ChainDrafter",
        model="slipstream.models.language:Language",
        trees=("kary", "static"),
        verifiers=("with-replacement", "k-seq", "traversal-with-replacement", "walk"),
        formats=("slipstream", "transformers", "huggingface"),
        note="a draft model's independent draws as a tree, each tried in turn",
        tree="kary",
        verifier="with-replacement",
        budget=8,
        depth=3,
        topk=2,
        weights="chain",
    ),
    Method(
        name="sequoia",
        title="Sequoia",
        paper="Sequoia, arXiv:2402.12374",
        drafter="slipstream.drafters.chain:ChainDrafter",
        model="slipstream.models.language:Language",
        trees=("sequoia", "kary", "static"),
        verifiers=("without-replacement", "traversal", "walk"),
        formats=("slipstream", "transformers", "huggingface"),
        note="a draft model's different draws in the tree that pays best",
        tree="sequoia",
        verifier="without-replacement",
        budget=8,
        depth=4,
        topk=4,
        weights="chain",
    ),
    Method(
        name="medusa",
        title="Medusa",
        paper="Medusa, arXiv:2401.10774",
        drafter="slipstream.drafters.medusa:MedusaDrafter",
        model="slipstream.models.medusa:Medusa",
        trees=("best-first", "static", "chain"),
        verifiers=("walk", "typical"),
        objective="slipstream.train.objectives.medusa:MedusaHeads",
        formats=("slipstream", "medusa", "vllm"),
        note="heads that guess several tokens ahead from one hidden state",
        tree="best-first",
        budget=8,
        depth=4,
        topk=4,
    ),
    Method(
        name="eagle",
        title="EAGLE-1",
        paper="EAGLE, arXiv:2401.15077",
        drafter="slipstream.drafters.eagle:FeatureEagleDrafter",
        model="slipstream.models.eagle:Eagle",
        trees=("static", "dynamic", "best-first", "sequoia", "kary", "chain"),
        verifiers=tuple(VERIFIERS),
        objective="slipstream.train.objectives.feature:FeatureRegression",
        formats=("slipstream", "eagle", "specforge", "vllm", "speculators"),
        note="predicts the next feature, which the target's own head reads",
        tree="static",
        budget=25,
        depth=5,
        topk=4,
    ),
    Method(
        name="eagle2",
        title="EAGLE-2",
        paper="EAGLE-2, arXiv:2406.16858",
        drafter="slipstream.drafters.eagle:FeatureEagleDrafter",
        model="slipstream.models.eagle:Eagle",
        trees=("dynamic", "best-first", "sequoia", "kary", "static", "chain"),
        verifiers=tuple(VERIFIERS),
        formats=("slipstream", "eagle", "specforge", "vllm", "speculators"),
        note="EAGLE-1's weights, a tree that grows where the drafter is sure",
        tree="dynamic",
        budget=8,
        depth=4,
        topk=4,
        weights="eagle",
    ),
    Method(
        name="hass",
        title="HASS",
        paper="HASS, arXiv:2408.15766",
        drafter="slipstream.drafters.eagle:FeatureEagleDrafter",
        model="slipstream.models.eagle:Eagle",
        trees=("dynamic", "best-first", "sequoia", "kary", "static", "chain"),
        verifiers=tuple(VERIFIERS),
        objective="slipstream.train.objectives.hass:HarmonisedAlignment",
        formats=("slipstream", "eagle", "specforge", "vllm", "speculators"),
        note="EAGLE-2, trained on the stale features that drafting meets",
        tree="dynamic",
        budget=8,
        depth=4,
        topk=4,
    ),
    Method(
        name="eagle3",
        title="EAGLE-3",
        paper="EAGLE-3, arXiv:2503.01840",
        drafter="slipstream.drafters.eagle:EagleDrafter",
        model="slipstream.models.eagle3:Eagle3",
        trees=("dynamic", "best-first", "sequoia", "kary", "static", "chain"),
        verifiers=tuple(VERIFIERS),
        objective="slipstream.train.objectives.ttt:TrainingTimeTest",
        formats=("slipstream", "eagle", "specforge", "angelslim", "vllm", "speculators"),
        note="features from three taps, reduced vocabulary",
        tree="dynamic",
        budget=8,
        depth=2,
        topk=6,
    ),
    Method(
        name="peagle",
        title="P-EAGLE",
        paper="P-EAGLE, arXiv:2602.01469",
        drafter="slipstream.drafters.peagle:PEagleDrafter",
        model="slipstream.models.peagle:PEagle",
        trees=("chain", "best-first"),
        verifiers=tuple(VERIFIERS),
        formats=("slipstream", "vllm", "speculators"),
        note="EAGLE-3 with more layers, all depths in one pass; trained elsewhere",
        tree="chain",
        budget=5,
        depth=5,
        topk=4,
    ),
    Method(
        name="dflash",
        title="DFlash",
        paper="DFlash, arXiv:2602.06036",
        drafter="slipstream.drafters.dflash:DFlashDrafter",
        model="slipstream.models.dflash:DFlash",
        trees=("chain", "best-first", "sequoia", "kary", "static"),
        verifiers=tuple(VERIFIERS),
        objective="slipstream.train.objectives.dflash:BlockDiffusion",
        formats=("slipstream", "dflash", "speculators"),
        note="a whole block in one pass, whatever its length",
        tree="chain",
        budget=16,
        depth=16,
        topk=4,
        has_width=True,
    ),
    Method(
        name="ddtree",
        title="DDTree",
        paper="DDTree, arXiv:2604.12989",
        drafter="slipstream.drafters.dflash:DFlashDrafter",
        model="slipstream.models.dflash:DFlash",
        trees=("best-first", "sequoia", "kary", "static", "chain"),
        verifiers=tuple(VERIFIERS),
        formats=("slipstream", "dflash", "speculators"),
        note="DFlash's weights, the likeliest prefixes of its block as a tree",
        tree="best-first",
        budget=8,
        depth=16,
        topk=4,
        weights="dflash",
        has_width=True,
    ),
    Method(
        name="dspark",
        title="DSpark",
        paper="DSpark, arXiv:2607.05147",
        drafter="slipstream.drafters.dflash:PathDrafter",
        model="slipstream.models.dflash:DFlash",
        trees=("best-first", "sequoia", "kary", "static", "chain"),
        verifiers=tuple(VERIFIERS),
        objective="slipstream.train.objectives.dflash:BlockDiffusion",
        formats=("slipstream", "deepspec", "specforge", "speculators"),
        note="DFlash and a head that scores a token by the one before it",
        tree="best-first",
        budget=8,
        depth=16,
        topk=4,
        has_width=True,
    ),
)


def all() -> tuple[Method, ...]:
    """Every method, in the order of the catalogue."""
    return _METHODS


def get(name: str) -> Method:
    """The record of a method.

    Raises:
        UnknownNameError: there is none; neighbours are suggested.

    Example:
        >>> get("eagle3").title
        'EAGLE-3'
    """
    for method in _METHODS:
        if method.name == name:
            return method
    raise UnknownNameError("method", name, [method.name for method in _METHODS])


def marked(verifiers: Iterable[str]) -> list[str]:
    """Names of verifiers for people, the lossy ones marked.

    Example:
        >>> marked(("walk", "typical"))
        ['walk', 'typical (lossy)']
    """
    return [f"{name} (lossy)" if name in LOSSY else name for name in verifiers]


def resolve(reference: str) -> object:
    """Import what "module:Name" points to.

    Example:
        >>> resolve("slipstream.drafters.none:NoDrafter").name
        'none'
    """
    module, _, name = reference.partition(":")
    return getattr(importlib.import_module(module), name)
