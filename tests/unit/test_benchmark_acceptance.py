"""The formulas of benchmarks/acceptance.py are what the rules do; its columns are all filled."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path

import pytest
import torch

from rules import rule_of
from slipstream import methods
from slipstream.verify.law import expected_accepted
from slipstream.verify.toy import chosen_step, drawn_step, likeliest, mixed_step, random_table

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture(scope="module")
def acceptance():
    spec = importlib.util.spec_from_file_location(
        "benchmark_acceptance", ROOT / "benchmarks" / "acceptance.py"
    )
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


@pytest.mark.parametrize("seed", range(3))
def test_one_nodes_acceptance_is_the_rules_own(acceptance, seed, monkeypatch):
    monkeypatch.setattr(acceptance, "CHILDREN", 2)
    target, draft = random_table(4, 0, seed), random_table(4, 0, seed + 20)
    p, q = (torch.tensor([float(x) for x in t(())], dtype=torch.float64) for t in (target, draft))
    found = acceptance.acceptance(p, q, torch.Generator().manual_seed(0), draws=2000)
    assert tuple(found) == acceptance.RULES
    for place, count in enumerate((1, 2)):
        top = {(): likeliest(draft(()), count)[0]}
        exact = {
            "likeliest": chosen_step(
                rule_of("walk"), target, draft, lambda prefix, top=top: top.get(prefix, [])
            ),
            "hybrid": mixed_step(rule_of("hybrid"), target, draft, (count,)),
        }
        for name in ("with-replacement", "k-seq", "without-replacement"):
            replaced = methods.CHILDREN[name] == "drawn"
            exact[name] = drawn_step(
                rule_of(name), target, draft, (count,), with_replacement=replaced
            )
        for name, step in exact.items():
            tolerance = 0.02 if name == "without-replacement" else 1e-9
            expected = float(expected_accepted(step))
            assert found[name][place] == pytest.approx(expected, abs=tolerance), name
    # Shared noise: at least sum min / sum max for one child (Daliri et al.), less 4 errors.
    least = float(p.minimum(q).sum() / p.maximum(q).sum())
    assert found["walk"][0] > least - 4 * (0.25 / 2000) ** 0.5


def test_rows_are_made_for_every_temperature_rule_and_number_of_children(acceptance):
    generator = torch.Generator().manual_seed(1)
    pairs = [
        acceptance.Pair(*torch.randn(2, 30, generator=generator).double().log_softmax(-1))
        for _ in range(3)
    ]
    rows = acceptance.measure(pairs, draws=4)
    keys = {(row["temperature"], row["children"], row["rule"]) for row in rows}
    assert len(keys) == len(rows) == len(acceptance.TEMPERATURES) * 4 * len(acceptance.RULES)
    assert all(0 <= row["acceptance"] <= 1 for row in rows)
    by_key = {(r["temperature"], r["children"], r["rule"]): r["acceptance"] for r in rows}
    for temperature in acceptance.TEMPERATURES:
        for m in (1, 2, 3, 4):
            bound = by_key[temperature, m, "bound"] + 1e-4
            assert by_key[temperature, m, "k-seq"] <= bound
            assert by_key[temperature, m, "with-replacement"] <= bound
