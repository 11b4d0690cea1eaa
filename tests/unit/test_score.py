"""The score test: silent where tokens have the target's law, loud where a fault is planted."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from fakes import TableTarget, random_language, tiny_target
from slipstream.bench import score
from slipstream.bench.lossless import plain_engine
from slipstream.bench.score import ScoreTest, Witness, worst
from slipstream.engine.engine import Engine
from slipstream.sampling import Sampler
from slipstream.types import DraftTree, Sampling, Verdict
from slipstream.verify.chain import chain, chain_rule
from slipstream.verify.drawn import judge
from slipstream.verify.protocol import GeneratorChance
from slipstream.verify.typical import typical

SAMPLING = Sampling(temperature=0.8, top_p=0.95)
PROMPTS = [[3 + i, 1, 4, 1, 5 + i] for i in range(6)]


@pytest.fixture(scope="module")
def pair():
    """A target whose logits vary, and a drafter of chains that are drawn."""
    target = tiny_target(std=0.15)
    return target, random_language(target, tree="chain", depth=2, budget=2, children="drawn")


def scored(pair, verify, sampling=SAMPLING, *, length=48):
    target, drafter = pair
    test = ScoreTest(target, sampling)
    for index, ids in enumerate(PROMPTS):
        witness = Witness(verify)
        result = Engine(target, drafter, witness).generate(
            ids, max_new_tokens=length, temperature=sampling.temperature,
            top_p=sampling.top_p, seed=index,
        )  # fmt: skip
        test.add(ids, result.token_ids, witness.favours)
    return test.report(is_exact=True)


class Gullible(GeneratorChance):
    """Accepts three of four refusals too."""

    def accepts(self, target, draft):
        return super().accepts(target, draft) or self._uniform() < 0.75


def biased(tree, logits, sampler, root_position):
    probs = sampler.probs(logits)
    q = tree.draft_probs
    return chain_rule(
        tree,
        lambda node: probs[node].double(),
        lambda node: q[node].double(),
        Gullible(sampler.generator("verify")),
    )


def without_temperature(tree, logits, sampler, root_position):
    warm = Sampler(replace(sampler.sampling, temperature=1.0, top_p=1.0), sampler.vocab_size)
    warm._generators = sampler._generators
    return judge("token", chain_rule, tree, logits, warm, root_position, made="drawn")


def unwarped_bonus(tree, logits, sampler, root_position):
    verdict = chain(tree, logits, sampler, root_position)
    if not verdict.is_bonus and len(verdict.path) < len(tree):
        return verdict
    plain = logits[verdict.path[-1]].softmax(-1)
    token = int(torch.multinomial(plain, 1, generator=sampler.generator("verify")))
    return replace(verdict, next_token=token)


def test_the_right_rule_passes_with_power_and_a_failing_control(pair):
    found = scored(pair, chain)
    assert found.verdict == "lossless" and found.p_value > score.LEVEL
    assert found.power > 0.9 and found.control_p_value < score.LEVEL
    assert found.num_tokens == 48 * len(PROMPTS) and found.z_favour is not None


@pytest.mark.parametrize("fault", [biased, without_temperature, unwarped_bonus])
def test_a_planted_fault_is_found(pair, fault):
    found = scored(pair, fault)
    assert found.verdict == "different", found


def test_a_lossy_rule_is_found(pair):
    target, _ = pair
    drafter = random_language(target, tree="chain", depth=2, budget=2)
    hot = Sampling(temperature=1.5)
    assert scored((target, drafter), typical, hot).verdict == "different"


def test_too_few_tokens_are_inconclusive(pair):
    assert scored(pair, chain, length=4).verdict == "inconclusive"


def test_scores_of_right_tokens_are_standard_normal():
    target, scores = TableTarget(scale=1.5), []
    engine = plain_engine(target)
    for seed in range(40):
        test = ScoreTest(target, SAMPLING)
        answer = engine.generate(
            [3, 1, 4], max_new_tokens=40, temperature=0.8, top_p=0.95, seed=seed
        )
        test.add([3, 1, 4], answer.token_ids)
        scores.append(test.report(is_exact=True).z_surprise)
    spread = torch.tensor(scores)
    assert abs(float(spread.mean())) < 0.4 and 0.75 < float(spread.std()) < 1.25


def test_a_token_the_target_never_says_is_a_no():
    target = TableTarget(scale=6.0)
    impossible = int(target.logits_of([3, 1, 4]).argmin())
    test = ScoreTest(target, SAMPLING)
    test.add([3, 1, 4], [impossible])
    assert test.report(is_exact=True).verdict == "different"
    assert test.report(is_exact=True).num_impossible == 1


def test_power_grows_with_the_tokens():
    target, powers = TableTarget(scale=1.5), []
    for length in (20, 200):
        test = ScoreTest(target, SAMPLING)
        test.add([1, 2], target.answer([1, 2], length, temperature=0.8, top_p=0.95))
        powers.append(test.report(is_exact=True).power)
    assert powers[0] < 0.5 < powers[1]


def test_favour_is_of_the_nodes_that_were_judged():
    witness = Witness(lambda *_: Verdict((0, 1), next_token=5))
    tree = DraftTree(torch.tensor([9, 1, 2, 3]), torch.tensor([-1, 0, 0, 1]))
    witness(tree, torch.zeros(4, 9), None, 10)
    assert witness.favours[11].ids.tolist() == [1, 2]
    assert witness.favours[12].ids.tolist() == [3] and not witness.favours[12].is_drawn


def test_two_tests_cost_half_the_level():
    assert worst([3.0, 0.0]) == pytest.approx(2 * worst([3.0]))
