"""Confidence against acceptance: counted by hand on small trees."""

from __future__ import annotations

import pytest
import torch

from slipstream.bench import calibration
from slipstream.report.calibration import reliability_chart, scatter
from slipstream.trees.sequoia import acceptance_by_rank
from slipstream.types import DraftTree, Step, Verdict

# 0 -> 1, 2; 1 -> 3, 4
TREE = DraftTree(
    torch.tensor([9, 1, 2, 3, 4]),
    torch.tensor([-1, 0, 0, 1, 1]),
    log_probs=torch.tensor([0.0, 0.6, 0.3, 0.5, 0.25]).clamp(min=1e-9).log(),
)
SECOND_CHILD = Verdict((0, 1, 4), next_token=7, is_bonus=True)
REFUSED = Verdict((0,), next_token=8)


def test_a_node_is_tried_only_below_a_kept_parent():
    kept = calibration.nodes([(TREE, SECOND_CHILD)])
    assert [node.place for node in kept] == [(0,), (1,), (0, 0), (0, 1)]
    assert [node.is_tried for node in kept] == [True] * 4
    assert [node.is_accepted for node in kept] == [True, False, False, True]
    assert kept[3].joint == pytest.approx(0.6 * 0.25)
    refused = calibration.nodes([(TREE, REFUSED)])
    assert [node.is_tried for node in refused] == [True, True, False, False]


def test_depth_and_rank_are_conditional_and_pool_to_sequoias_vector():
    trees = [(TREE, SECOND_CHILD), (TREE, REFUSED)]
    rates = calibration.by_depth_and_rank(calibration.nodes(trees))
    assert rates.rates() == [[0.5, 0.0], [0.0, 1.0]]
    assert tuple(rates.pooled()) == pytest.approx(acceptance_by_rank(trees, topk=2))
    assert sum(rates.pooled()) <= 1


def test_ece_of_a_calibrated_and_of_a_boastful_drafter():
    generator = torch.Generator().manual_seed(0)
    sure = torch.rand(20_000, generator=generator)
    hit = torch.rand(20_000, generator=generator) < sure
    assert calibration.reliability(sure.tolist(), hit.tolist()).ece < 0.02
    squared = torch.rand(20_000, generator=generator) < sure**2  # mean gap 1/2 - 1/3
    boastful = calibration.reliability(sure.tolist(), squared.tolist())
    assert boastful.ece == pytest.approx(1 / 6, abs=0.01)
    assert sum(each.count for each in boastful.bins) == 20_000


def test_confidence_of_exactly_one_has_a_bin():
    found = calibration.reliability([1.0], [True])
    assert (found.bins[0].low, found.bins[0].high, found.ece) == (0.9, 1.0, 0.0)


def test_by_depth_takes_tried_nodes_and_joint_takes_all():
    found = calibration.nodes([(TREE, REFUSED)])
    assert sum(each.count for each in calibration.by_depth(found)[1].bins) == 2
    assert 2 not in calibration.by_depth(found)
    assert sum(each.count for each in calibration.joint(found).bins) == 4


def test_a_drafter_without_probabilities_has_rates_but_no_reliability():
    found = calibration.nodes([(DraftTree.chain([1, 2]), Verdict((0, 1), next_token=3))])
    assert calibration.by_depth(found) == {} and calibration.joint(found).bins == ()
    assert calibration.by_depth_and_rank(found).rates() == [[1.0]]


def test_what_nobody_gave_a_probability_is_not_counted_as_unsure():
    """A copied node beside a drafted one, and a drafted one below it."""
    log_probs = torch.tensor([0.0, -0.5, float("nan"), -0.25])
    tree = DraftTree(torch.tensor([9, 1, 2, 3]), torch.tensor([-1, 0, 0, 2]), log_probs=log_probs)
    found = calibration.nodes([(tree, Verdict((0, 2, 3), next_token=7))])
    assert [node.confidence for node in found][1] is None
    assert [node.joint for node in found][1:] == [None, None]
    assert calibration.by_depth(found)[1].bins[0].count == 1
    assert calibration.by_depth(found)[2].bins[0].confidence == pytest.approx(0.7788, abs=1e-4)
    assert sum(each.count for each in calibration.joint(found).bins) == 1
    assert calibration.by_depth_and_rank(found).rates() == [[0.0, 1.0], [1.0, None]]


def test_places_over_contexts_keep_contexts_apart():
    found = calibration.by_place({"easy": [(TREE, SECOND_CHILD)], "hard": [(TREE, REFUSED)]})
    assert found[(0,)] == {"easy": 1.0, "hard": 0.0}
    assert list(found) == [(0,), (1,), (0, 0), (0, 1)]
    assert list(calibration.by_place({"x": [(TREE, REFUSED)]}, max_places=1)) == [(0,)]


def test_steps_become_judged_trees():
    step = Step(TREE, REFUSED, (8,))
    assert calibration.judged([step]) == [(TREE, REFUSED)]


def test_charts_show_every_bin_and_every_context():
    found = calibration.nodes([(TREE, SECOND_CHILD), (TREE, REFUSED)])
    svg = reliability_chart({"depth 1": calibration.by_depth(found)[1]}, title="calibration")
    assert svg.count("<polyline") == 2 and "ECE" in svg  # the curve and the diagonal
    places = calibration.by_place({"easy": [(TREE, SECOND_CHILD)], "hard": [(TREE, REFUSED)]})
    drawn = scatter(places, title="acceptance by place")
    assert drawn.count("<circle") == 8 and "0.1" in drawn
