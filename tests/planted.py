"""Faults to plant where a setup should be lossless; `verify` must find each of them."""

from __future__ import annotations

from dataclasses import replace

from slipstream.sampling import Sampler
from slipstream.verify.walk import follow, walk


def with_sampler(sampler, **changes):
    return Sampler(replace(sampler.sampling, **changes), sampler.vocab_size)


def biased_verifier(tree, logits, sampler, root_position):
    """Takes a drafted token that is among the target's best four for the target's own."""

    def choose(node):
        at = root_position + int(tree.depths[node]) + 1
        own = int(sampler.choose(logits[node : node + 1], [at])[0])
        good = logits[node].topk(4).indices.tolist()
        children = tree.tokens[tree.parents == node].tolist()
        return next((token for token in children if token in good), own)

    return follow(tree, choose)


def off_by_one_position(tree, logits, sampler, root_position):
    return walk(tree, logits, sampler, root_position + 1)


def unwarped_bonus(tree, logits, sampler, root_position):
    verdict = walk(tree, logits, sampler, root_position)
    if not verdict.is_bonus or sampler.is_greedy:
        return verdict
    last = verdict.path[-1]
    plain = with_sampler(sampler, temperature=1.0, top_p=1.0)
    at = root_position + int(tree.depths[last]) + 1
    return replace(verdict, next_token=int(plain.choose(logits[last : last + 1], [at])[0]))


def dropped_temperature(tree, logits, sampler, root_position):
    if sampler.is_greedy:
        return walk(tree, logits, sampler, root_position)
    return walk(tree, logits, with_sampler(sampler, temperature=1.0), root_position)


class StaleCacheRow:
    """A target whose cache keeps the keys of the first nodes, not of the accepted ones."""

    def __init__(self, target):
        self._target, self.spec, self.tokenizer = target, target.spec, target.tokenizer

    def new_cache(self, num_rows, max_length):
        cache = self._target.new_cache(num_rows, max_length)
        right = cache.commit
        cache.commit = lambda slot, path: right(slot, tuple(range(len(path))))
        return cache

    def forward(self, trees, cache, slots, **options):
        return self._target.forward(trees, cache, slots, **options)


VERIFIERS = (biased_verifier, off_by_one_position, unwarped_bonus, dropped_temperature)
"""Faults of the rule; `StaleCacheRow` is one of the target."""
