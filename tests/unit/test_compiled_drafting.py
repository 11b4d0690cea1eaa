"""Compiled draft networks say what the plain ones say, but for rounding."""

import copy
from dataclasses import replace

import pytest
import torch

from fakes import (
    random_dflash,
    random_eagle,
    random_eagle3,
    random_language,
    random_medusa,
    tiny_model,
)
from slipstream.drafters.block_network import BlockNetwork, CompiledBlocks
from slipstream.drafters.chain import TokenNetwork
from slipstream.drafters.compiled import CompiledNetwork, can_compile
from slipstream.drafters.eagle import PairNetwork
from slipstream.drafters.none import NoDrafter
from slipstream.drafters.products import CompiledLinear
from slipstream.drafters.rollout import Entries, Rollout
from slipstream.engine.engine import Engine
from slipstream.models.eagle import Eagle, EagleConfig
from slipstream.models.eagle3 import Eagle3, Eagle3Config
from slipstream.models.language import Language, LanguageConfig
from slipstream.sampling import Sampler
from slipstream.target.hf import HFTarget
from slipstream.target.library import library
from slipstream.target.protocol import TargetSpec
from slipstream.trees import kinds
from slipstream.types import DraftTree, Sampling
from slipstream.verify.walk import walk

V, U, D = 96, 64, 32
SHAPE = {
    "hidden_size": D, "intermediate_size": 48, "num_heads": 4, "num_kv_heads": 2, "head_size": 16,
    "vocab_size": V, "draft_vocab_size": U,
}  # fmt: skip
EAGLE3 = {**SHAPE, "target_hidden_size": D, "taps": (1, 2, 3)}
YARN = {  # a factor that bfloat16 does not hide
    "rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64,
    "attention_factor": 1.5,
}  # fmt: skip
NETWORKS = {
    "eagle3": lambda: Eagle3(Eagle3Config(**EAGLE3)),
    "eagle3 with biases": lambda: Eagle3(
        Eagle3Config(**EAGLE3, fusion_bias=True, attention_bias=True, output_bias=True)
    ),
    "eagle3 with norms": lambda: Eagle3(
        Eagle3Config(**EAGLE3, norm_each_tap=True, norm_before_residual=True, norm_output=True)
    ),
    "eagle3 with yarn": lambda: Eagle3(Eagle3Config(**EAGLE3, rope_scaling=YARN)),
    "eagle": lambda: Eagle(EagleConfig(**SHAPE)),
    "eagle with biases": lambda: Eagle(EagleConfig(**SHAPE, qkv_bias=True)),
    "language": lambda: Language(LanguageConfig(**SHAPE, num_layers=2)),
}

needs_code = pytest.mark.skipif(library().code is None, reason=library().detail)


def spec(**changes):
    facts = {
        "name": "a", "vocab_size": V, "hidden_size": D, "num_layers": 4, "max_length": 64,
        "eos_ids": (), "dtype": torch.bfloat16, "device": torch.device("cpu"),
        "architecture": "LlamaForCausalLM", "decoder": "compiled",
    }  # fmt: skip
    return TargetSpec(**{**facts, **changes})


class OneRow:
    def __init__(self, key, tokens):
        self.key, self.tokens, self.max_depth, self.max_nodes = key, tokens, 3, 12
        self.sampler = Sampler(Sampling(), V)


def networks(name):
    """The plain network in float32 and the compiled one, of the same weights."""
    torch.manual_seed(0)
    model = NETWORKS[name]()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(torch.randn_like(parameter) * 0.3)
            if parameter.dim() == 1:
                parameter.add_(1)
            parameter.copy_(parameter.bfloat16())
    embedding, head = torch.randn(V, D).bfloat16(), torch.randn(U, D).bfloat16()
    head = head if isinstance(model, Eagle) else None
    if isinstance(model, Language):
        plain = TokenNetwork(model, embedding, dtype=torch.float32, device="cpu")
    else:
        plain = PairNetwork(model, embedding, head=head, dtype=torch.float32, device="cpu")
    return plain, CompiledNetwork(model, embedding, head)


class Recorded:
    """A network whose logits are kept."""

    def __init__(self, network):
        self.network, self.kept = network, []

    def __getattr__(self, name):
        return getattr(self.network, name)

    def logits(self, states):
        self.kept.append(self.network.logits(states).float())
        return self.kept[-1]


def drafted(network, texts, tree, num_features):
    """Trees and all logits of drafting once for each text, the texts together."""
    recorded = Recorded(network)
    kind = kinds.make(tree, budget=8, depth=3, topk=3)
    rollout = Rollout(recorded, kind.build, target_ids=None, vocab_size=U)
    rows, entries = [], []
    for key, tokens in enumerate(texts):
        rollout.open(key)
        inputs = (None, None)
        if num_features:
            draw = torch.Generator().manual_seed(len(tokens))
            features = torch.randn(len(tokens) - 1, num_features, generator=draw).bfloat16()
            inputs = network.fuse(features).split([3, len(tokens) - 4])
        rollout.commit(key, Entries(tokens[1:4], inputs[0]))
        entries.append(Entries(tokens[4:], inputs[1]))
        rows.append(OneRow(key, tokens))
    return rollout.draft(rows, entries), recorded.kept


def far(found, expected):
    """How far apart, relative to the size."""
    return float((found - expected).norm() / expected.norm())


@needs_code
@pytest.mark.parametrize("name", NETWORKS)
@pytest.mark.parametrize("tree", ["chain", "static", "dynamic"])
def test_drafting_is_the_plain_networks_but_for_rounding(name, tree):
    num_features = 3 * D if "eagle3" in name else D if "eagle" in name else 0
    texts = [[(7 * place + length) % U for place in range(length)] for length in (6, 11, 7)]
    plain, compiled = networks(name)
    exact, truth = drafted(plain, texts, tree, num_features)
    together, ours = drafted(compiled, texts, tree, num_features)
    assert far(ours[0], truth[0]) < 0.05  # a bfloat16 number is exact to 0.004
    same = [torch.equal(a.tokens, b.tokens) for a, b in zip(together, exact, strict=True)]
    assert any(same)  # where two tokens are close, another may follow
    for text, of_row in zip(texts, together, strict=True):
        (alone,), _ = drafted(compiled, [text], tree, num_features)
        assert torch.equal(alone.tokens, of_row.tokens)
        assert torch.equal(alone.log_probs, of_row.log_probs)


@needs_code
def test_a_linear_layer_is_the_product():
    torch.manual_seed(0)
    weight, bias, x = torch.randn(70, 48), torch.randn(70), torch.randn(2, 3, 48).bfloat16()
    found = CompiledLinear(weight, bias, torch.float32)(x)
    expected = x.float() @ weight.bfloat16().float().T + bias
    torch.testing.assert_close(found, expected, atol=1e-4, rtol=1e-4)


def test_networks_run_compiled_where_their_target_does():
    config = EagleConfig(**SHAPE)
    assert can_compile(spec(), config)
    assert not can_compile(spec(decoder="fused"), config)
    assert not can_compile(spec(), replace(config, head_size=24))


@needs_code
@pytest.mark.parametrize(
    "options", [{"path_rank": 0}, {"path_rank": 8}, {"is_shifted": True}, {"rope_scaling": YARN}]
)
def test_blocks_are_the_plain_networks_but_for_rounding(options):
    model = tiny_model().bfloat16()
    targets = [HFTarget(copy.deepcopy(model), decoder=how) for how in ("compiled", "fused")]
    drafters = [random_dflash(target, **options) for target in targets]
    assert type(drafters[0].network) is CompiledBlocks and type(drafters[1].network) is BlockNetwork
    texts = [[5, 17, 3, 88, 41, 9, 60], [4, 7], [30] * 12]
    logits = []
    for target, drafter in zip(targets, drafters, strict=True):
        rows = [OneRow(key, tokens) for key, tokens in enumerate(texts)]
        for row in rows:
            cache = target.new_cache(1, 20)
            tree = DraftTree.chain(row.tokens[:-1])
            features = target.forward([tree], cache, [0], taps=drafter.taps).features[0]
            drafter.open(row, features)
        logits.append(drafter._denoise(rows))
    assert logits[0].shape == logits[1].shape
    known = logits[1] > float("-inf")
    assert torch.equal(known, logits[0] > float("-inf"))
    assert far(logits[0][known], logits[1][known]) < 0.05


@needs_code
@pytest.mark.parametrize("borrows", [True, False])
def test_medusas_heads_are_the_plain_ones_but_for_rounding(borrows):
    model = tiny_model().bfloat16()
    hidden = torch.randn(3, model.config.hidden_size).bfloat16()
    found = [
        random_medusa(HFTarget(copy.deepcopy(model), decoder=how), borrows=borrows)
        for how in ("compiled", "fused")
    ]
    compiled, plain = (drafter._heads.logits(hidden).float() for drafter in found)
    assert far(compiled, plain) < 0.03


@needs_code
@pytest.mark.parametrize(
    "make", [random_eagle3, random_eagle, random_language, random_medusa, random_dflash]
)
def test_answers_stay_the_targets_own(make):
    """In one batch of mixed lengths, bit for bit."""
    target = HFTarget(tiny_model().bfloat16(), decoder="compiled")
    prompts = [[1, 2, 3, 4, 5], [9, 8], [30, 31, 32, 33, 34, 35, 36], [50]]
    for sampling in ({}, {"temperature": 1.0, "seed": 3}):
        told = {"max_new_tokens": 24, "num_rows": 3, **sampling}
        drafted = Engine(target, make(target, budget=6), walk).generate(prompts, **told)
        plain = Engine(target, NoDrafter(), walk).generate(prompts, **told)
        assert [r.token_ids for r in drafted] == [r.token_ids for r in plain]
