"""Draft language models: what they remember of a row, and whole models of the target's family."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

import slipstream
from chats import PLAIN, byte_tokenizer
from fakes import growth, random_language, tiny_model, tiny_target
from slipstream.assemble import locate
from slipstream.drafters.chain import ChainDrafter, check_same_tokens
from slipstream.drafters.none import NoDrafter
from slipstream.engine.engine import Engine
from slipstream.errors import CheckpointError, DrafterMismatchError, SettingError, UnknownNameError
from slipstream.types import DraftTree
from slipstream.verify.walk import walk

PROMPTS = [[1, 2, 3, 4, 5], [9, 8], [30, 31, 32, 33, 34, 35, 36], [50]]
TREES = ["chain", "kary", "dynamic"]


def recording(drafter):
    """Tokens, room and tree of every row at every proposal."""
    seen, propose = [], drafter.propose

    def spy(rows):
        trees = propose(rows)
        for row, tree in zip(rows, trees, strict=True):
            seen.append((list(row.tokens), row.max_depth, tree))
        return trees

    drafter.propose = spy
    return seen


def fresh(make, tokens, max_depth, sampler):
    """What a drafter that reads the whole text at once drafts of it."""

    row = SimpleNamespace(key=0, tokens=tokens, max_depth=max_depth, max_nodes=64, sampler=sampler)
    drafter = make()
    drafter.open(row, None)
    return drafter.propose([row])[0]


@pytest.mark.parametrize("kind", ["small", "whole"])
@pytest.mark.parametrize("tree", TREES)
def test_what_is_drafted_depends_on_the_text_alone(kind, tree):
    """Rows that come and go, trees accepted in part or whole: as if read anew (exact rollback)."""
    target = tiny_target()
    shape = {"tree": tree, "budget": 6, "depth": 3, "topk": 2}

    def make():
        if kind == "small":
            return random_language(target, **shape)
        draft = tiny_target(num_hidden_layers=2)
        return ChainDrafter.from_target(draft, target, growth(**shape))

    drafter = make()
    seen = recording(drafter)
    engine = Engine(target, drafter, walk)
    sampler = engine.request([1]).sampler
    engine.generate(PROMPTS, max_new_tokens=14, num_rows=3)
    assert len(seen) > 20
    for tokens, max_depth, drafted in seen[::4]:
        again = fresh(make, tokens, max_depth, sampler)
        assert torch.equal(drafted.tokens, again.tokens) and torch.equal(
            drafted.parents, again.parents
        )
        if max_depth:
            assert torch.allclose(drafted.log_probs, again.log_probs, atol=1e-4)


@pytest.mark.parametrize("tree", TREES)
def test_a_twin_of_the_target_is_always_right(tree):
    """Full acceptance each turn, whose last token the draft has never read."""
    target, twin = tiny_target(), tiny_target()
    drafter = ChainDrafter.from_target(twin, target, growth(tree=tree, budget=6, depth=3, topk=2))
    results = Engine(target, drafter, walk).generate(PROMPTS, max_new_tokens=21, num_rows=2)
    plain = Engine(target, NoDrafter(), walk).generate(PROMPTS, max_new_tokens=21)
    assert [r.token_ids for r in results] == [r.token_ids for r in plain]
    if tree == "chain":
        assert all(r.num_target_passes == 5 for r in results)
    assert all(r.tau > 2 for r in results)


def test_long_texts_and_many_rows_enlarge_the_cache():
    target = tiny_target()
    long = [[(3 * i + j) % 97 for j in range(300)] for i in range(3)]
    for drafter in (
        random_language(target),
        ChainDrafter.from_target(tiny_target(), target, growth()),
    ):
        results = Engine(target, drafter, walk).generate(long, max_new_tokens=6, num_rows=3)
        plain = Engine(target, NoDrafter(), walk).generate(long, max_new_tokens=6)
        assert [r.token_ids for r in results] == [r.token_ids for r in plain]


@pytest.fixture(scope="module")
def families(tmp_path_factory):
    """Folders of two models with one tokenizer, and of one with another."""
    places = {}
    for name, tokenizer, settings in (
        ("target", byte_tokenizer(PLAIN), {}),
        ("draft", byte_tokenizer(PLAIN), {"num_hidden_layers": 2}),
        ("stranger", byte_tokenizer(PLAIN), {}),
    ):
        places[name] = tmp_path_factory.mktemp(name)
        if name == "stranger":
            tokenizer.add_tokens(["<extra>"])
        tiny_model(vocab_size=272, max_position_embeddings=256, **settings).save_pretrained(
            places[name]
        )
        tokenizer.save_pretrained(places[name])
    return places


def test_the_token_reaches_a_gated_draft_model(monkeypatch):
    from slipstream.target import hf

    asked = {}

    def load_target(name, **options):
        asked[name] = options["token"]
        return tiny_target(num_hidden_layers=2)

    monkeypatch.setattr(hf, "load_target", load_target)
    slipstream.load(tiny_target(), "chain", drafter="org/gated@v1", token="secret")
    assert asked == {"org/gated@v1": "secret"}


def test_any_model_of_the_same_tokenizer_drafts(families):
    target = slipstream.load(str(families["target"]), "none", dtype="float32")
    plain = target.generate("go", max_new_tokens=12, raw=True)
    for method in ("chain", "specinfer", "sequoia"):
        engine = slipstream.load(target.target, method, drafter=families["draft"])
        assert engine.generate("go", max_new_tokens=12, raw=True).token_ids == plain.token_ids


class Named:
    """A model as its tokenizer shows it."""

    def __init__(self, name, tokens, vocab_size=100):
        self.spec = type("Spec", (), {"name": name, "vocab_size": vocab_size})()
        self.tokenizer = None if tokens is None else type("Tokens", (), {"tokens": tokens})()


LETTERS = dict(enumerate("abcdefghij"))


@pytest.mark.parametrize(
    ("draft", "target", "says"),
    [
        (
            LETTERS | {3: "x", 7: "y"},
            LETTERS,
            "2 of 10 ids differ, first 3, which is 'x'.*'d' here",
        ),
        (dict(enumerate("abc")), LETTERS, "knows 3 of the target's 10"),
    ],
)
def test_another_tokenizer_is_refused_with_the_reason(draft, target, says):
    with pytest.raises(DrafterMismatchError, match=says):
        check_same_tokens(Named("small", draft), Named("large", target))


def test_padded_vocabularies_and_further_tokens_are_no_reason():
    check_same_tokens(Named("s", LETTERS | {10: "<pad>"}, 128), Named("l", LETTERS, 160))
    check_same_tokens(Named("s", None), Named("l", None))
    with pytest.raises(DrafterMismatchError, match="vocabularies of 128 and 100"):
        check_same_tokens(Named("s", None, 128), Named("l", None))


def test_a_name_that_is_no_folder_is_a_model_where_whole_models_draft(tmp_path):
    assert str(locate("org/model", "chain", "tiny")) == "org/model"
    with pytest.raises(CheckpointError, match="is no folder"):
        locate("org/model", "medusa", "tiny")
    with pytest.raises(UnknownNameError, match="no model 'smolm2-135m'"):
        ChainDrafter.from_checkpoint("smolm2-135m", tiny_target(), growth())


def test_more_children_than_draft_tokens_are_refused():
    with pytest.raises(SettingError, match="topk is 62, expected at most the draft vocabulary, 61"):
        random_language(tiny_target(), tree="dynamic", topk=62)


def test_a_row_without_room_gets_its_root():
    target = tiny_target()
    result = Engine(target, random_language(target), walk, max_nodes=1).generate(
        [1, 2], max_new_tokens=2, trace=True
    )
    assert [step.tree.budget for step in result.steps] == [0]
    assert isinstance(result.steps[0].tree, DraftTree)
