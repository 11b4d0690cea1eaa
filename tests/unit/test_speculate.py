"""`model.generate(custom_generate=slipstream.speculate(...))`: same tokens, model left as found."""

from __future__ import annotations

import pytest
import torch

import slipstream
from fakes import tiny_model, tiny_target
from slipstream.errors import SettingError
from slipstream.formats.checkpoint import Eagle3Checkpoint
from slipstream.formats.layouts import EAGLE3
from slipstream.models.eagle3 import Eagle3, Eagle3Config
from slipstream.models.vocabulary import DraftVocabulary

PROMPT = torch.tensor([[5, 6, 7, 5, 6, 7, 5, 6]])
GREEDY = {"max_new_tokens": 24, "do_sample": False, "pad_token_id": 0}


@pytest.fixture
def model():
    return tiny_model()


@pytest.fixture
def drafter(tmp_path):
    shape = tiny_target().draft_shape()
    made = Eagle3(Eagle3Config(**shape, draft_vocab_size=97, taps=(1, 2, 3))).eval()
    EAGLE3.write(Eagle3Checkpoint(made, DraftVocabulary.full(97)), tmp_path / "drafter")
    return tmp_path / "drafter"


def ones(tokens):
    return {"attention_mask": torch.ones_like(tokens)}


@pytest.mark.parametrize("method", ["ngram", "eagle3"])
def test_greedy_tokens_are_generates_own(method, model, drafter):
    expected = model.generate(PROMPT, **ones(PROMPT), **GREEDY)
    way = slipstream.speculate(method, drafter=drafter if method == "eagle3" else None)
    said = model.generate(PROMPT, **ones(PROMPT), **GREEDY, custom_generate=way)
    assert torch.equal(said, expected)
    assert way.results[0].num_tokens == 24


def test_the_model_is_left_as_it_was(model, drafter):
    attention = model.config._attn_implementation
    before = model.generate(PROMPT, **ones(PROMPT), **GREEDY)
    way = slipstream.speculate("eagle3", drafter=drafter)
    for _ in range(2):  # the second call reuses the engine
        model.generate(PROMPT, **ones(PROMPT), **GREEDY, custom_generate=way)
    assert model.config._attn_implementation == attention
    assert all(parameter.requires_grad for parameter in model.parameters())
    assert not any(layer._forward_pre_hooks for layer in model.model.layers)
    assert torch.equal(model.generate(PROMPT, **ones(PROMPT), **GREEDY), before)


def test_padded_batches_and_ends_of_text(model):
    """Rows of two lengths, padded on the left; each stops at its own end and is padded."""
    rows = torch.tensor([[0, 0, 0, 9, 8], [1, 2, 3, 4, 5]])
    mask = (rows > 0).long()
    plain = model.generate(rows, attention_mask=mask, **GREEDY)
    end = int(plain[1, 9])
    settings = GREEDY | {"eos_token_id": end}
    expected = model.generate(rows, attention_mask=mask, **settings)
    said = model.generate(
        rows, attention_mask=mask, **settings, custom_generate=slipstream.speculate()
    )
    assert torch.equal(said, expected)


def test_sampling_follows_torchs_seed(model):
    settings = {"max_new_tokens": 12, "do_sample": True, "temperature": 0.8, "top_k": 20}
    way, said = slipstream.speculate(), []
    for seed in (1, 1, 2):
        torch.manual_seed(seed)
        said.append(model.generate(PROMPT, **ones(PROMPT), **settings, custom_generate=way))
    assert torch.equal(said[0], said[1]) and not torch.equal(said[0], said[2])


@pytest.mark.parametrize(
    ("settings", "says"),
    [
        ({"repetition_penalty": 1.3}, "RepetitionPenaltyLogitsProcessor"),
        ({"max_time": 3.0}, "MaxTimeCriteria"),
        ({"return_dict_in_generate": True}, "return_dict_in_generate"),
    ],
)
def test_settings_it_does_not_know_are_refused(settings, says, model):
    with pytest.raises(SettingError, match=says):
        model.generate(
            PROMPT, **ones(PROMPT), **GREEDY, **settings, custom_generate=slipstream.speculate()
        )
    assert model.generate(PROMPT, **ones(PROMPT), **GREEDY).shape[1] == 32
