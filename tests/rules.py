"""Every verifier's rule by name, over trees that are made as it needs them, for `verify.law`."""

from __future__ import annotations

import importlib

from slipstream import methods
from slipstream.verify.law import ancestral_law, emitted_law
from slipstream.verify.toy import chosen_step, drawn_step, likeliest, mixed_step


def top(draft, *counts):
    """So many children at each depth, by probability under q, as a dynamic tree chooses them."""

    def children_of(prefix):
        if len(prefix) == len(counts):
            return []
        return likeliest(draft(prefix), counts[len(prefix)])[0]

    return children_of


def rule_of(name):
    """The rule behind a verifier: the function of its module that is called NAME_rule."""
    module, _, function = methods.VERIFIERS[name].partition(":")
    return getattr(importlib.import_module(module), f"{function}_rule")


def step_of(name, target, draft, counts):
    """A step whose children come about as the catalogue says they must for this verifier."""
    rule, kind = rule_of(name), methods.CHILDREN[name]
    if kind == "chosen":
        return chosen_step(rule, target, draft, top(draft, *counts))
    if kind == "mixed":
        return mixed_step(rule, target, draft, counts)
    return drawn_step(rule, target, draft, counts, with_replacement=kind == "drawn")


def shapes_of(name):
    """(children by depth, V): depth 2 and 3 over three tokens, a wide node over four."""
    chains = [((1, 1), 3), ((1, 1, 1), 3)]
    return chains if name in methods.FOR_CHAINS else [*chains, ((2, 1), 3), ((1, 2), 3), ((3,), 4)]


def is_lossless(step, target, vocab_size, horizon=3):
    """Does a step and what follows emit exactly what plain decoding does?"""
    return emitted_law(step, target, horizon=horizon) == ancestral_law(
        target, vocab_size, horizon=horizon
    )
