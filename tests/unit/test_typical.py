"""Typical acceptance: what is plausible, how long, and which of equals."""

from __future__ import annotations

import math

import pytest
import torch

from slipstream.sampling import Sampler
from slipstream.types import DraftTree, Sampling
from slipstream.verify.typical import DELTA, EPSILON, threshold, typical


def test_the_threshold_falls_with_the_targets_entropy():
    assert threshold(torch.tensor([1.0, 0.0])) == EPSILON
    for size in (2, 8, 100):
        uniform = torch.full((size,), 1 / size)
        assert threshold(uniform) == pytest.approx(min(EPSILON, DELTA / size), rel=1e-6)
    p = torch.tensor([0.6, 0.2, 0.1, 0.1])
    entropy = -float((p * p.log()).sum())
    assert threshold(p) == pytest.approx(min(EPSILON, DELTA * math.exp(-entropy)), rel=1e-6)


def kept(tree, rows):
    sampler = Sampler(Sampling(temperature=1.0), 4)
    return typical(tree, torch.tensor(rows).log(), sampler, 0)


def test_the_longest_plausible_path_is_kept():
    """Node 1 is likelier, but below it nothing is plausible; node 2's child is."""
    tree = DraftTree(torch.tensor([0, 1, 2, 3, 3]), torch.tensor([-1, 0, 0, 1, 2]))
    root, dull, good = [0.1, 0.6, 0.2, 0.1], [0.97, 0.01, 0.01, 0.01], [0.2, 0.1, 0.1, 0.6]
    assert kept(tree, [root, dull, good, root, root]).path == (0, 2, 4)
    assert kept(tree, [root, good, dull, root, root]).path == (0, 1, 3)
    assert kept(tree, [root, good, good, root, root]).path == (0, 1, 3)  # the likelier of equals
    assert kept(tree, [root, dull, dull, root, root]).path == (0, 1)


def test_an_implausible_token_is_refused_and_the_target_goes_on():
    tree = DraftTree.chain([0, 3])
    found = kept(tree, [[0.0, 1.0, 0.0, 0.0], [0.25] * 4])
    assert found.path == (0,) and found.next_token == 1 and not found.is_bonus
