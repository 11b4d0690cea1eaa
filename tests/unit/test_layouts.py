"""Layouts: which one a checkpoint has, and what another target is told."""

import pytest

from fakes import tiny_target
from made import a_dflash, a_dspark, a_language, a_peagle, an_eagle, an_eagle3, heads
from slipstream.errors import DrafterMismatchError
from slipstream.formats import layouts

FITTING = {"vocab_size": 97, "hidden_size": 48, "num_hidden_layers": 8}
MADE_FOR = "the drafter was made for a target with"
VOCABULARY = f"{MADE_FOR} vocabulary 97, tiny-llama has 98"
WIDTH = f"{MADE_FOR} hidden size 48, tiny-llama has 96"


@pytest.mark.parametrize(
    "make", [an_eagle, an_eagle3, a_peagle, a_dflash, a_dspark, heads, a_language]
)
def test_a_checkpoint_has_the_layout_of_its_network(make):
    layout, made = make()
    assert layouts.of(made) is layout
    layout.check_target(made, tiny_target(**FITTING))


@pytest.mark.parametrize(
    ("make", "method", "shallow"),
    [
        (an_eagle, "eagle", None),
        (an_eagle3, "eagle3", "the drafter reads layer 5, tiny-llama has 4"),
        (a_peagle, "eagle3", "the drafter reads layer 5, tiny-llama has 4"),
        (a_dflash, "dflash", f"{MADE_FOR} at least as many layers as 5, tiny-llama has 4"),
        (a_dspark, "dflash", f"{MADE_FOR} at least as many layers as 5, tiny-llama has 4"),
        (heads, "medusa", None),
        (a_language, "chain", None),
    ],
)
def test_another_target_is_told_what_differs(make, method, shallow):
    layout, made = make()
    cases = [({"vocab_size": 98}, VOCABULARY), ({"hidden_size": 96}, WIDTH)]
    if shallow is None:
        layout.check_target(made, tiny_target(**FITTING | {"num_hidden_layers": 1}))
    else:
        cases.append(({"num_hidden_layers": 4}, shallow))
    for changes, told in cases:
        with pytest.raises(DrafterMismatchError) as caught:
            layout.check_target(made, tiny_target(**FITTING | changes))
        assert str(caught.value).splitlines()[0] == told
        train = f"train one with `slipstream train --method {method} --model tiny-llama ...`"
        assert caught.value.hint == train
