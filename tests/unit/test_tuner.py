"""Tuning on tiny targets: predictions from recordings, the choice, the words, the honest no."""

from __future__ import annotations

import pytest

from fakes import TableTarget, random_eagle3, tiny_target
from slipstream import methods
from slipstream.bench.tasks import BenchPrompt
from slipstream.drafters.lookahead import LookaheadDrafter
from slipstream.drafters.ngram import NgramDrafter
from slipstream.drafters.none import NoDrafter
from slipstream.engine.engine import Engine
from slipstream.errors import SettingError
from slipstream.target.passes import CostCurve
from slipstream.tune import advice, cost, optimum, tuner
from slipstream.tune.acceptance import Position, Recorder
from slipstream.tune.cost import DraftCost
from slipstream.tune.optimum import PLAIN, Drafting, Plain, Setting
from slipstream.types import DraftTree, Verdict
from slipstream.verify.walk import walk

PROMPTS = [BenchPrompt("t", str(i), (3 + i, 1, 4, 1, 5 + i)) for i in range(4)]
ARGUMENTS = {"max_new_tokens": 24, "temperature": 0.0, "top_k": 0, "top_p": 1.0, "seed": 0}
FLAT = Plain(lambda n: 1.0 + 0.001 * n, other_seconds=0.1)
STEEP = Plain(lambda n: float(n), other_seconds=0.1)


def loader(target):
    def load(name, **options):
        shape = {key: options[key] for key in ("tree", "budget", "depth", "topk") if key in options}
        if name == "none":
            drafter = NoDrafter()
        elif name == "ngram":
            drafter = NgramDrafter(budget=shape.get("depth", 8), depth=shape.get("depth", 8))
        elif name == "lookahead":
            drafter = LookaheadDrafter()
        else:
            drafter = random_eagle3(target, **{"budget": shape.get("depth", 8), **shape})
        return Engine(target, drafter, walk)

    return load


def drafting(num_right: int, *, draft_seconds: float = 0.1, length: int = 12, method="eagle3"):
    """Chains of 8 whose first `num_right` nodes are always right."""
    tree = DraftTree.chain(range(9))
    verdict = Verdict(tuple(range(num_right + 1)), next_token=99)
    answer = [Position(tree, verdict)] * length
    cost = DraftCost((1, 8), (draft_seconds, 8 * draft_seconds))
    return Drafting(method, "chain", 1, 8, 8, [answer], cost, 0.1)


def test_a_prediction_is_tokens_over_the_seconds_of_a_step():
    setting = Setting("eagle3", "chain", 3, 3, 1)
    found = optimum.predict(setting, drafting(2), FLAT)
    assert found.tau == 3.0 and found.num_nodes == 3.0
    step = 0.3 + (1.0 + 0.001 * 4) + 0.1
    assert found.step_seconds == pytest.approx(step)
    assert found.speedup == pytest.approx(3.0 * 1.101 / step)
    assert found.if_free("draft") == pytest.approx(3.0 * 1.101 / (step - 0.3))


def test_flat_passes_pay_for_drafts_and_steep_ones_do_not():
    assert optimum.best(optimum.predict_all([drafting(3)], FLAT)).setting.depth == 3
    assert optimum.best(optimum.predict_all([drafting(3)], STEEP)).setting == PLAIN
    assert optimum.best(optimum.predict_all([drafting(0)], FLAT)).setting == PLAIN


def test_lookup_is_united_with_every_other_method():
    found = optimum.predict_all([drafting(1), drafting(4, method="ngram")], FLAT)
    names = optimum.best_by_method(found)
    assert set(names) == {"none", "ngram", "eagle3", "eagle3+lookup"}
    assert names["eagle3"].tau == 2.0
    assert names["eagle3+lookup"].tau == names["ngram"].tau == 4.0  # 12 tokens in passes of 5, 5, 2


def test_longer_chains_for_fewer_rows():
    curve = CostCurve((1, 8, 64), (1.0, 1.1, 8.0), context=1)
    made = drafting(4, length=60)
    lengths = optimum.lengths_by_rows(made, Plain(curve, 0.0), (1, 4, 64))
    depths = [lengths[rows][0] for rows in (1, 4, 64)]
    assert depths[0] == 4 and depths[0] >= depths[1] >= depths[2] == 0


def test_tuning_finds_that_lookup_pays_where_text_repeats():
    target = TableTarget(vocab_size=17, order=1)  # a walk over 17 tokens soon repeats
    prompts = [BenchPrompt("t", str(i), (i, 2)) for i in range(4)]
    found = tuner.tune(loader(target), ["ngram"], prompts, ARGUMENTS, repeats=1)
    assert found.draftings[0].method == "ngram"
    value = found.to_dict()
    assert {"cost_curve", "draft_cost", "acceptance", "best", "advice"} <= set(value)
    judged = {row["name"]: row for row in value["judged"]}
    row = next(iter(judged.values()))
    assert row["measured_tau"] == pytest.approx(row["predicted_tau"], rel=0.3)


def test_a_random_model_gets_the_advice_not_to_speculate(monkeypatch):
    monkeypatch.setattr(tuner, "MEASURED_DEPTHS", (1, 2))
    monkeypatch.setattr(cost, "NUM_ROUNDS", 1)
    # The clock is a real one, and one prompt judges: what noise can give is not worth it.
    monkeypatch.setattr(tuner.optimum, "WORTH", 1.5)
    target = tiny_target()
    arguments = ARGUMENTS | {"max_new_tokens": 12}
    found = tuner.tune(loader(target), ["ngram", "eagle3"], PROMPTS[:2], arguments, repeats=1)
    assert found.best.setting == PLAIN
    assert "Do not speculate here" in found.advice[0]
    assert found.to_dict()["best"]["method"] == "none"
    assert found.to_dict()["measured_speedup"] == 1.0
    assert {each.method for each in found.draftings} == {"ngram", "eagle3"}
    assert found.acceptance["eagle3"]["calibration"]["1"]["ece"] > 0
    defaults = [each["name"] for each in found.judged if each["is_default"]]
    assert defaults == ["ngram:chain,depth=8", "eagle3:dynamic,budget=8,depth=2,topk=6"]


def test_a_prediction_that_does_not_hold_elsewhere_is_not_followed():
    one = optimum.predict(Setting("eagle3", "chain", 3, 3, 1), drafting(2), FLAT)
    as_predicted = {"measured_tau": one.tau, "measured_speedup": one.speedup}
    assert tuner._holds(one, as_predicted)
    assert not tuner._holds(one, as_predicted | {"measured_speedup": 0.9})
    assert not tuner._holds(one, as_predicted | {"measured_tau": 1.0})  # only the clock was lucky
    judged = {one.setting.name: as_predicted | {"measured_speedup": 0.9}}
    by_method = optimum.best_by_method([one])
    said = advice.explain(FLAT.prediction(), by_method, FLAT, judged=judged)
    assert "Do not speculate here" in said[0] and "0.90" in said[0]


def test_an_interrupted_judgement_is_no_judgement():
    target = TableTarget(vocab_size=17, order=1)
    plain, load = Engine(target, NoDrafter(), walk), loader(target)
    told, answer = [], plain.generate

    def interrupted_later(*prompts, **arguments):
        told.append(prompts)
        if len(told) == 2:  # the first call is recorded, the second one judges
            raise KeyboardInterrupt
        return answer(*prompts, **arguments)

    plain.generate = interrupted_later
    prompts = [BenchPrompt("t", str(i), (i, 2)) for i in range(4)]
    with pytest.raises(KeyboardInterrupt):
        tuner.tune(
            lambda name, **options: plain if name == "none" else load(name, **options),
            ["ngram"], prompts, ARGUMENTS, repeats=1,
        )  # fmt: skip
    assert len(told) == 2


def test_answers_that_loop_do_not_count():
    constant = TableTarget(vocab_size=5, order=1, edit=lambda c, logits: logits.roll(0) * 0 + 1)
    arguments = ARGUMENTS | {"max_new_tokens": 60}
    prompts = [BenchPrompt("t", str(i), (i, 2)) for i in range(2)]
    found = tuner.tune(loader(constant), ["ngram"], prompts, arguments, repeats=1)
    assert found.best.setting == PLAIN and found.draftings == []
    assert any("repetition loop" in sentence for sentence in found.advice)


def test_a_method_that_learns_is_left_out_with_its_reason():
    found = tuner.tune(loader(TableTarget()), ["lookahead"], PROMPTS, ARGUMENTS, repeats=1)
    assert "depend on what was verified" in found.left_out["lookahead"]


def test_a_method_that_draws_its_drafts_is_left_out_with_its_reason():
    found = tuner.tune(loader(tiny_target()), ["specinfer"], PROMPTS, ARGUMENTS, repeats=1)
    assert "draws its drafts" in found.left_out["specinfer"]


def test_a_shape_that_cannot_be_cut_stands_for_itself(monkeypatch):
    monkeypatch.setattr(tuner, "MEASURED_DEPTHS", (1, 2))
    monkeypatch.setattr(cost, "NUM_ROUNDS", 1)
    arguments = ARGUMENTS | {"max_new_tokens": 12}
    found = tuner.tune(
        loader(tiny_target()), ["eagle"], PROMPTS[:2], arguments, repeats=1, judge_trees=True
    )
    assert [each.tree for each in found.draftings] == ["static", "dynamic", "chain"]
    whole = Setting("eagle", "static", 25, 5, 1)
    assert list(found.draftings[0].settings()) == [whole]
    judged = {each["name"]: each for each in found.judged}
    assert judged[whole.name]["is_default"] and len(judged) == 3


def test_a_default_deeper_than_the_others_is_recorded_timed_and_judged(monkeypatch):
    monkeypatch.setattr(tuner, "MEASURED_DEPTHS", (1, 2))
    monkeypatch.setattr(cost, "NUM_ROUNDS", 1)
    arguments = ARGUMENTS | {"max_new_tokens": 20}
    found = tuner.tune(loader(tiny_target()), ["dflash"], PROMPTS[:2], arguments, repeats=1)
    chain = next(each for each in found.draftings if each.tree == "chain")
    assert chain.depth == 16 and chain.cost.depths == (1, 2, 16)
    assert {setting.depth for setting in chain.settings()} >= {8, 12, 16}
    defaults = [each["name"] for each in found.judged if each["is_default"]]
    assert defaults == ["dflash:chain,depth=16"]
    assert found.to_dict()["lengths_method"] == "dflash"


def test_a_recording_has_room_for_every_node_that_a_cut_may_keep(monkeypatch):
    """Six children of the root and six of each of those: more than an engine's usual room."""
    monkeypatch.setattr(tuner, "MEASURED_DEPTHS", (1,))
    monkeypatch.setattr(cost, "NUM_ROUNDS", 1)
    target = tiny_target()

    def load(name, **options):
        made = loader(target)(name, **options)
        room = max(64, options.get("budget", 0))
        return Engine(target, made.drafter, walk, max_nodes=room)

    found = tuner.tune(load, ["eagle3"], PROMPTS[:2], ARGUMENTS | {"max_new_tokens": 20}, repeats=1)
    tree = found.draftings[0]
    assert tree.tree == "dynamic" and tree.budget > 64
    assert max(position.best(999, 8)[0] for position in tree.answers[0]) > 64


def test_lengths_by_rows_are_of_the_method_that_is_best_with_a_chain():
    """`eagle3` comes last and is worse."""
    made = [drafting(6, method="ngram", length=60), drafting(1, method="eagle3", length=60)]
    found = tuner.Found(CostCurve((1, 8, 64), (1.0, 1.1, 8.0), context=1), FLAT, draftings=made)
    found.predictions = optimum.predict_all(made, FLAT)
    tuner._by_rows(found)
    assert found.lengths_method == found.to_dict()["lengths_method"] == "ngram"
    assert found.lengths[1][0] == 6
    found.best = next(one for one in found.predictions if one.setting.method == "eagle3")
    tuner._by_rows(found)
    assert found.lengths_method == "eagle3"


def stopping(prompts):
    """A target whose answers to some prompts end at once."""
    ended = {tuple(ids) for ids in prompts}

    def edit(context, logits):
        if any(tuple(context[: len(ids)]) == ids for ids in ended):
            logits = logits.clone()
            logits[0] = 1e9
        return logits

    return TableTarget(vocab_size=17, edit=edit, eos_ids=(0,))


def test_drafting_is_timed_in_an_answer_that_is_long_enough():
    target, short, long = stopping([(3, 1)]), [3, 1], [4, 2]
    load = lambda depth: Engine(target, NgramDrafter(budget=depth, depth=depth), walk)  # noqa: E731
    assert len(load(1).generate(short, max_new_tokens=9).token_ids) == 1
    found = cost.draft_costs(load, (1, 2), [short, long], {"temperature": 0.0})
    assert all(seconds > 0 for seconds in found.seconds)
    arguments = ARGUMENTS | {"max_new_tokens": 9}
    assert cost.other_seconds(load(1), [short, long], arguments) > 0
    with pytest.raises(SettingError, match="prompts is 2 whose answers end within two steps"):
        cost.draft_costs(load, (1, 2), [short, short], {"temperature": 0.0})


def test_a_recorder_rests_threads_where_its_drafter_does():
    assert Recorder(NgramDrafter(budget=2, depth=2)).rests_threads
    assert not Recorder(random_eagle3(tiny_target())).rests_threads


def test_one_prompt_cannot_tune_and_judge():
    with pytest.raises(SettingError, match="prompts"):
        tuner.tune(loader(TableTarget()), ["ngram"], PROMPTS[:1], ARGUMENTS)


def test_the_largest_tree_holds_every_cut():
    record = methods.get("eagle3")
    options = tuner._largest(record, "dynamic", depth=3)
    assert options["budget"] == 6 + 2 * 36  # 6 children of the root, then 6 of each of 6


@pytest.mark.parametrize(
    ("made", "plain", "expected"),
    [
        (drafting(1, draft_seconds=0.4), FLAT, "drafting"),
        (drafting(5, draft_seconds=0.0), Plain(lambda n: 1 + 0.3 * n, 0.0), "verification"),
    ],
)
def test_the_limit_is_named(made, plain, expected):
    predictions = optimum.predict_all([made], plain)
    said = advice.explain(optimum.best(predictions), optimum.best_by_method(predictions), plain)
    assert any(expected in sentence for sentence in said), said


def test_lookup_that_gives_most_of_it_is_said_with_what_training_would_cost():
    predictions = optimum.predict_all([drafting(6, method="ngram", draft_seconds=0.0)], FLAT)
    said = advice.explain(optimum.best(predictions), optimum.best_by_method(predictions), FLAT)
    assert any("already gives most of it" in each and "hours" in each for each in said)
    hours, gain = advice.training(FLAT)
    assert hours > 0 and gain > 1
