"""The doctor finds planted faults and names them; a healthy drafter passes every check."""

import json

import pytest
import torch
from safetensors.torch import load_file, save_file

from chats import PLAIN, byte_tokenizer
from fakes import tiny_model
from slipstream import assemble
from slipstream.data.batches import collate
from slipstream.formats.checkpoint import Eagle3Checkpoint
from slipstream.formats.layouts import EAGLE3
from slipstream.models.eagle3 import Eagle3, Eagle3Config
from slipstream.models.readout import Readout
from slipstream.models.vocabulary import DraftVocabulary
from slipstream.parity.checks import NAMES, examine
from slipstream.parity.decoding import compare
from slipstream.parity.texts import look
from slipstream.target.hf import load_target
from slipstream.train.objectives.ttt import TrainingTimeTest

QUESTIONS = ["a cat?", "three seas", "why sleep"]
THINKS = PLAIN.replace(
    "{% if add_generation_prompt %}<|assistant|>{% endif %}",
    "{% if add_generation_prompt %}<|assistant|>"
    "{% if enable_thinking is defined and not enable_thinking %}<think></think>{% endif %}"
    "{% endif %}",
)


@pytest.fixture(scope="module")
def target(tmp_path_factory):
    folder = tmp_path_factory.mktemp("model")
    tokenizer = byte_tokenizer(PLAIN)
    tiny_model(
        vocab_size=261, eos_token_id=tokenizer.eos_token_id, max_position_embeddings=256
    ).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return load_target(str(folder), dtype="float32")


def trained(target, *, is_raw=False, on_prompt=False, steps=90):
    """A drafter that knows the target's answers to the questions by heart."""
    readout = Readout(target.embedding(), target.head())
    tokenizer = target.tokenizer
    prompts = [
        tokenizer.encode(q) if is_raw else tokenizer.encode_chat([{"role": "user", "content": q}])
        for q in QUESTIONS
    ]
    results = assemble.load(target, "none").generate(prompts, max_new_tokens=24, num_rows=3)
    texts = [look(target, readout, r.prompt_ids, r.token_ids) for r in results]
    torch.manual_seed(0)
    model = Eagle3(Eagle3Config(**target.draft_shape(), draft_vocab_size=261, taps=(1, 2, 3),
                                max_length=256))  # fmt: skip
    vocabulary = DraftVocabulary.full(261)
    objective = TrainingTimeTest(vocabulary, num_unrolled=3)
    rows = []
    for text in texts:
        mask = ~text.answer_mask() if on_prompt else text.answer_mask()
        rows.append([text.sample((1, 2, 3), mask)])
    batch = collate(rows, max_length=256, dtype=torch.float32)
    optimizer = torch.optim.AdamW(model.parameters(), lr=8e-3)
    for _ in range(steps):
        loss = objective(model, batch, readout)
        optimizer.zero_grad()
        loss.total.backward()
        optimizer.step()
    return Eagle3Checkpoint(model, vocabulary)


@pytest.fixture(scope="module")
def healthy(target, tmp_path_factory):
    folder = tmp_path_factory.mktemp("drafter") / "eagle3"
    card = {"config": {"num_unrolled": 3}, "template": target.tokenizer.fingerprint}
    EAGLE3.write(trained(target), folder, card=card, dtype=torch.float32)
    return folder


@pytest.fixture
def folder(healthy, tmp_path):
    """A copy to plant a fault in."""
    copy = tmp_path / "drafter"
    copy.mkdir()
    for path in healthy.iterdir():
        (copy / path.name).write_bytes(path.read_bytes())
    return copy


def change(folder, name="config.json", **entries):
    path = folder / name
    path.write_text(json.dumps(json.loads(path.read_text()) | entries))


def change_tensors(folder, edit):
    tensors = load_file(folder / "model.safetensors")
    edit(tensors)
    save_file(tensors, folder / "model.safetensors")


def failures(target, folder):
    checks = examine(target, "eagle3", folder, QUESTIONS, num_tokens=24)
    assert [c.name for c in checks] == [name for name in NAMES if name in {c.name for c in checks}]
    assert all(check.detail for check in checks)
    return {check.name: check.detail for check in checks if not check.ok}


def test_a_healthy_drafter_passes_every_check(target, healthy):
    checks = examine(target, "eagle3", healthy, QUESTIONS, num_tokens=24)
    assert [check.name for check in checks] == list(NAMES)
    assert all(check.ok for check in checks), [c for c in checks if not c.ok]


@pytest.mark.parametrize("shift", [-1, 1])
def test_layer_ids_off_by_one(target, folder, shift):
    change(folder, slipstream={"method": "eagle3", "taps": [1 + shift, 2 + shift, 3 + shift]})
    found = failures(target, folder)
    assert list(found) == ["layer ids"] and "taps 1, 2, 3 in place of" in found["layer ids"]


def test_norm_weights_stored_less_one(target, folder):
    def lower(tensors):
        for name in tensors:
            if name.endswith("norm.weight"):
                tensors[name] = tensors[name] - 1

    change_tensors(folder, lower)
    assert "stored less one" in failures(target, folder)["norms"]


def test_rope_base(target, folder):
    base = json.loads((folder / "config.json").read_text())["rope_theta"]
    change(folder, rope_theta=20.0)
    found = failures(target, folder)
    assert f"RoPE base {base:g} in place of 20" in found["RoPE base"]


def test_an_absolute_vocabulary_map(target, folder):
    ids = torch.arange(0, 261, 2)
    change(folder, draft_vocab_size=len(ids))

    def shrink(tensors):
        tensors["lm_head.weight"] = tensors["lm_head.weight"][ids].clone()
        tensors["d2t"] = ids  # absolute, where files hold offsets
        tensors["t2d"] = torch.zeros(261, dtype=torch.bool).index_fill(0, ids, True)

    change_tensors(folder, shrink)
    found = failures(target, folder)
    assert list(found) == ["vocabulary map"] and "offsets" in found["vocabulary map"]


def test_a_map_to_other_ids(target, folder):
    """Neighbouring ids, whatever the training's were; and a map that nobody filled."""
    change(folder, draft_vocab_size=40)

    def shrink(tensors):
        tensors["lm_head.weight"] = tensors["lm_head.weight"][:40].clone()
        tensors["d2t"] = torch.ones(40, dtype=torch.int64)

    change_tensors(folder, shrink)
    assert "not the one of the training" in failures(target, folder)["vocabulary map"]
    change_tensors(folder, lambda tensors: tensors["d2t"].zero_())
    assert "d2t is all zero" in failures(target, folder)["vocabulary map"]


def test_overflowed_weights(target, folder):
    change_tensors(folder, lambda t: t["fc.weight"].view(-1)[:3].fill_(float("inf")))
    assert "overflowed" in failures(target, folder)["dtype"]


def test_a_context_that_is_too_short(target, folder):
    change(folder, max_position_embeddings=32)
    assert "made for 32 positions" in failures(target, folder)["context length"]


def test_another_template_and_thinking_mode(target, folder):
    change(folder, "card.json", template="0123456789ab")
    assert "restore" in failures(target, folder)["template"]


def test_trained_without_the_template(target, tmp_path):
    EAGLE3.write(trained(target, is_raw=True), tmp_path / "raw", dtype=torch.float32)
    assert "without the chat template" in failures(target, tmp_path / "raw")["template"]


def test_trained_on_the_users_words(target, tmp_path):
    EAGLE3.write(trained(target, on_prompt=True), tmp_path / "mask", dtype=torch.float32)
    assert "wrong side" in failures(target, tmp_path / "mask")["mask"]


def test_thinking_turned_over(target, tmp_path, monkeypatch):
    monkeypatch.setattr(target.tokenizer.inner, "chat_template", THINKS)
    monkeypatch.setattr(target.tokenizer, "template_mode", {"enable_thinking": False})
    checkpoint = trained(target)
    EAGLE3.write(checkpoint, tmp_path / "off", dtype=torch.float32)
    monkeypatch.setattr(target.tokenizer, "template_mode", {})
    found = failures(target, tmp_path / "off")
    assert "trained in the other mode" in found["thinking mode"]
    card = {"template_mode": {"enable_thinking": False}}
    EAGLE3.write(checkpoint, tmp_path / "card", card=card, dtype=torch.float32)
    assert "trained with thinking off" in failures(target, tmp_path / "card")["thinking mode"]


def test_decoding_equals_teacher_forcing_at_the_same_positions(target, healthy):
    checkpoint = EAGLE3.read(healthy)
    readout = Readout(target.embedding(), target.head())
    prompts = [target.tokenizer.encode_chat([{"role": "user", "content": q}]) for q in QUESTIONS]
    objective = TrainingTimeTest(checkpoint.vocabulary, num_unrolled=3)
    found = compare(target, "eagle3", healthy, checkpoint, objective, readout, prompts,
                    num_tokens=24)  # fmt: skip
    assert found.decoded == pytest.approx(found.text, abs=1e-3) and found.num_starts >= 6
    assert 0 < found.decoded[0] <= 1 and found.is_kept
    change = checkpoint.model.state_dict()
    change["fc.weight"] = change["fc.weight"] * 0
    checkpoint.model.load_state_dict(change)
    broken = compare(target, "eagle3", healthy, checkpoint, objective, readout, prompts,
                     num_tokens=24)  # fmt: skip
    assert not broken.is_kept and broken.gap > broken.tolerance
