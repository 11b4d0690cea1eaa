"""EAGLE-3 drafters narrower than their target, which embed tokens themselves (LLaMA-3.3-70B's)."""

from __future__ import annotations

import json

import pytest
import torch
from safetensors.torch import load_file, save_file

import slipstream
from fakes import tiny_target
from made import D, L, U, V, random, stored, vocabulary
from slipstream.errors import DrafterMismatchError
from slipstream.formats.checkpoint import Eagle3Checkpoint
from slipstream.formats.layouts import EAGLE3
from slipstream.models.eagle3 import Eagle3, Eagle3Config
from slipstream.parity.convert import convert

NARROW = 32
PROMPT = list(range(3, 33))


@pytest.fixture(scope="module")
def target():
    return tiny_target(num_hidden_layers=L)


@pytest.fixture
def folder(tmp_path):
    torch.manual_seed(0)
    config = Eagle3Config(NARROW, 64, 4, 2, 16, V, U, (2, 4, 5), D, has_embedding=True)
    made = Eagle3Checkpoint(random(Eagle3(config)), vocabulary())
    return stored((EAGLE3, made), tmp_path / "ours")


def test_the_embedding_is_kept(folder):
    read, own = EAGLE3.read(folder), load_file(folder / "model.safetensors")["embed_tokens.weight"]
    assert read.model.config.has_embedding and own.shape == (V, NARROW)
    assert torch.equal(read.model.embed_tokens.weight, own)


@pytest.mark.parametrize("to", ["eagle", "angelslim", "specforge", "vllm", "speculators"])
def test_it_travels_with_proof(to, folder, target, tmp_path):
    done = convert(folder, to, target, tmp_path / "out", prompts=[PROMPT])
    assert done.proof.largest_logit > 0.1
    tensors = load_file(tmp_path / "out" / "model.safetensors")
    assert tensors["embed_tokens.weight"].shape == (V, NARROW)
    config = json.loads((tmp_path / "out" / "config.json").read_text())
    assert config["target_hidden_size"] == D


def test_it_drafts_with_its_own(folder, target):
    plain = slipstream.load(target, "none").generate(PROMPT, max_new_tokens=16)
    engine = slipstream.load(target, "eagle3", drafter=folder)
    assert engine.generate(PROMPT, max_new_tokens=16).token_ids == plain.token_ids
    own = load_file(folder / "model.safetensors")["embed_tokens.weight"]
    assert torch.equal(engine.drafter._network._embedding, own.to(target.spec.dtype))


def test_without_one_it_is_refused(folder, target):
    tensors = load_file(folder / "model.safetensors")
    del tensors["embed_tokens.weight"]
    save_file(tensors, folder / "model.safetensors")
    with pytest.raises(DrafterMismatchError, match="it stores none of its own"):
        slipstream.load(target, "eagle3", drafter=folder)
