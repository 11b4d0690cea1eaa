"""From names to an engine: what is decided, what is refused, and in which words."""

from __future__ import annotations

from pathlib import Path

import pytest

import slipstream
from fakes import OracleDrafter, TableTarget
from slipstream import assemble, methods
from slipstream.assemble import decide, locate
from slipstream.errors import CheckpointError, SettingError, UnknownNameError


def test_the_catalogues_defaults_are_taken() -> None:
    for method in methods.all():
        shape = decide(method)
        assert (shape.tree, shape.verifier) == (method.tree, method.verifier)
        assert shape.budget == method.budget and shape.depth == method.depth


@pytest.mark.parametrize(
    ("wishes", "length"),
    [({"budget": 3}, 3), ({"depth": 5}, 5), ({"budget": 6, "depth": 2}, 2), ({}, 2)],
)
def test_a_chain_has_one_length(wishes: dict[str, int], length: int) -> None:
    shape = decide(methods.get("eagle3"), tree="chain", **wishes)
    assert (shape.budget, shape.depth, shape.topk) == (length, length, 1)


@pytest.mark.parametrize("name", ["budget", "depth", "topk"])
@pytest.mark.parametrize("value", [0, -3])
def test_numbers_below_one_are_refused(name: str, value: int) -> None:
    with pytest.raises(SettingError, match=f"{name} is {value}, expected 1 or more"):
        slipstream.load(TableTarget(), "ngram", **{name: value})


@pytest.mark.parametrize(
    ("options", "error", "words"),
    [
        ({"method": "eagel3"}, UnknownNameError, "Did you mean: eagle3"),
        ({"tree": "dinamic"}, UnknownNameError, "no tree 'dinamic'. Did you mean: dynamic"),
        ({"verifier": "wlak"}, UnknownNameError, "no verifier 'wlak'. Did you mean: walk"),
        ({"tree": "dynamic"}, SettingError, "tree is dynamic, expected one of chain for ngram"),
        ({"verifier": "token"}, SettingError, "verifier is token, expected one of walk for ngram"),
        ({"drafter": "zoo:eagle3"}, SettingError, "method ngram has no draft network"),
        ({"method": "eagle3", "drafter": "nowhere"}, CheckpointError, "'nowhere' is no folder"),
        ({"method": "eagle3"}, CheckpointError, "the zoo has no eagle3 drafter for 'table'"),
        ({"method": "eagle3", "drafter": "zoo:egle3"}, UnknownNameError, "no method 'egle3'"),
    ],
)
def test_mistakes_are_told(options: dict, error: type, words: str) -> None:
    with pytest.raises(error, match=words):
        slipstream.load(TableTarget(), **{"method": "ngram", **options})


EVERYTHING = methods.Method(
    "any", "", "", "", trees=methods.TREES, verifiers=tuple(methods.VERIFIERS), budget=8, depth=4
)


@pytest.mark.parametrize("verifier", methods.VERIFIERS)
@pytest.mark.parametrize("tree", methods.TREES)
def test_a_rule_that_cannot_judge_a_tree_is_refused_by_name(verifier: str, tree: str) -> None:
    if methods.CHILDREN[verifier] == "chosen":
        fits = True
    elif verifier in methods.FOR_CHAINS:
        fits = tree == "chain"
    else:
        fits = tree in methods.FIXED_TREES
    if fits:
        assert decide(EVERYTHING, tree=tree, verifier=verifier).verifier == verifier
        return
    with pytest.raises(SettingError, match=f"verifier is {verifier} with a {tree} tree") as found:
        decide(EVERYTHING, tree=tree, verifier=verifier)
    assert found.value.hint is not None and "--tree chain" in found.value.hint


def test_the_hint_names_a_tree_that_the_method_has() -> None:
    narrow = methods.Method(
        "any", "", "", "", trees=("dynamic", "static"), verifiers=("hybrid",), tree="dynamic",
        verifier="hybrid", budget=8, depth=4,
    )  # fmt: skip
    with pytest.raises(SettingError, match="hybrid judges mixed nodes") as found:
        decide(narrow)
    assert found.value.hint is not None and "--tree static" in found.value.hint


def test_lookup_is_refused_with_a_rule_for_drawn_nodes() -> None:
    own = OracleDrafter([[1, 2]])
    with pytest.raises(SettingError, match="lookup is on with verifier token"):
        slipstream.load(TableTarget(), drafter=own, verifier="token", lookup=True)
    assert slipstream.load(TableTarget(), drafter=own, verifier="typical", lookup=True)


def test_an_engine_says_whether_its_rule_is_lossless() -> None:
    for verifier in methods.VERIFIERS:
        engine = slipstream.load(TableTarget(), drafter=OracleDrafter([[1]]), verifier=verifier)
        assert engine.describe()["lossless"] is (verifier not in methods.LOSSY)


def test_mistakes_are_told_before_a_model_is_loaded() -> None:
    with pytest.raises(UnknownNameError):
        slipstream.load("no such model", "egle")
    with pytest.raises(CheckpointError):
        slipstream.load("no such model", "eagle3")


def test_the_zoo_is_found_by_method_and_model(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(assemble, "zoo_folder", lambda: tmp_path)
    (tmp_path / "eagle3-table").mkdir()
    assert locate(None, "eagle3", "table") == tmp_path / "eagle3-table"
    assert locate("zoo:eagle3", "eagle3", TableTarget()) == tmp_path / "eagle3-table"
    (tmp_path / "eagle-table").mkdir()  # EAGLE-2 runs on EAGLE-1's weights
    assert locate(None, "eagle2", "table") == locate("zoo:eagle", "eagle2", "table")
    assert locate(tmp_path, "eagle3", "other") == tmp_path
    with pytest.raises(CheckpointError, match="eagle3-other"):
        locate(None, "eagle3", "other")


@pytest.mark.parametrize(("method", "lookup"), [("none", True), ("ngram", False), ("ngram", True)])
def test_engines_are_built_and_described(method: str, lookup: bool) -> None:
    target = TableTarget(order=1, seed=3)
    engine = slipstream.load(target, method, lookup=lookup, max_length=200)
    assert engine.target is target and engine.method == method
    seen = engine.describe()
    assert seen["method"] == method and seen["lookup"] is lookup
    assert seen["max_length"] == 200 and seen["verifier"] == "walk"
    result = engine.generate([1], max_new_tokens=60)
    assert list(result.token_ids) == target.answer([1], 60) and result.tau > 1.5


def test_a_drafter_of_your_own_is_taken() -> None:
    target = TableTarget()
    own = OracleDrafter([[1, 2, *target.answer([1, 2], 30)]], depth=3)
    engine = slipstream.load(target, drafter=own)
    assert engine.drafter is own and engine.method == "oracle"
    assert engine.generate([1, 2], max_new_tokens=21).tau == 4.0
    assert slipstream.load(target, drafter=own, lookup=True).drafter.name == "oracle+ngram"
