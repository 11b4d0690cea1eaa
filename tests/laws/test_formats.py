"""Every dialect of draft checkpoints: found, read, written again, and the same in any other."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

import slipstream
from fakes import tiny_target
from published import LAYOUTS, D, L, V, publish, write
from slipstream.errors import CheckpointError
from slipstream.formats import detect, folder
from slipstream.formats.checkpoint import TargetFacts
from slipstream.formats.dialects import ALL
from slipstream.methods import all as all_methods
from slipstream.models.readout import Readout
from slipstream.parity.drafted import drafted
from slipstream.parity.proof import prove
from slipstream.parity.texts import Text

pytestmark = pytest.mark.filterwarnings("ignore:.*is a pickle")

FOREIGN = [f"{d.name}/{d.method}" for d in ALL if d.name != "slipstream"]
PAIRS = [
    (name, f"{d.name}/{d.method}") for name in LAYOUTS for d in ALL if name.endswith(f"/{d.method}")
]
CANNOT = {  # what an engine's files have no place for
    ("vllm/eagle3", "eagle/eagle3"): "biases in attention",
    ("vllm/eagle3", "angelslim/eagle3"): "biases in attention",
    ("speculators/eagle3", "eagle/eagle3"): "norm before the taps are fused",
    ("speculators/eagle3", "angelslim/eagle3"): "norm before the taps are fused",
    ("vllm/eagle3", "specforge/eagle3"): "biases in attention",
    ("speculators/eagle3", "specforge/eagle3"): "residual taken after its norm",
    ("specforge/eagle3", "eagle/eagle3"): "this drafter",
    ("specforge/eagle3", "angelslim/eagle3"): "this drafter",
    ("speculators/dspark", "deepspec/dspark"): "rows for 40 of 97",
    ("speculators/dspark", "specforge/dspark"): "rows for 40 of 97",
}


@pytest.fixture
def target():
    torch.manual_seed(7)
    return TargetFacts("tiny", L, torch.randn(V, D), torch.randn(V, D) * 0.3, "LlamaForCausalLM")


@pytest.fixture
def text(target):
    tokens = torch.randint(0, V, (24,))
    hidden = torch.randn(24, L + 1, D)
    return Text(tokens, 4, torch.randint(0, V, (24,)), hidden, hidden[:, -1])


@pytest.fixture
def readout(target):
    return Readout(target.embedding, target.head)


@pytest.fixture
def publishes(target, tmp_path):
    """Writes a published layout and finds it."""

    def make(name):
        torch.manual_seed(1)
        parts = publish(name, target.embedding, target.head)
        return detect.detect(write(tmp_path / name.replace("/", "-"), *parts))

    return make


def way_of(name):
    return detect.dialect_for(*name.split("/"))


def is_same(one, other):
    ours, theirs = one.model.state_dict(), other.model.state_dict()
    assert ours.keys() == theirs.keys()
    for key, tensor in ours.items():
        assert torch.equal(tensor, theirs[key]), key
    return True


def test_every_foreign_dialect_has_a_published_layout():
    assert sorted(LAYOUTS) == sorted(FOREIGN)


def test_the_catalogue_names_the_dialects():
    """`slipstream methods` tells which files a method reads."""
    for method in all_methods():
        names = {"eagle2": "eagle", "hass": "eagle", "ddtree": "dflash"}
        names |= {"specinfer": "chain", "sequoia": "chain"}
        family = names.get(method.name, method.name)
        read = {d.name for d in ALL if d.method == family}
        if read:
            assert set(method.formats) - {"huggingface"} == read, method.name


@pytest.mark.parametrize("name", LAYOUTS)
def test_a_folder_says_what_it_is(name, publishes):
    found = publishes(name)
    assert f"{found.dialect.name}/{found.dialect.method}" == name
    assert found.because in str(found) and len(found.because) > 10


@pytest.mark.parametrize("name", LAYOUTS)
def test_round_trip_is_the_identity(name, publishes, target, tmp_path):
    """Read, write, read: the same network; write again: the same files."""
    found = publishes(name)
    once = found.load(target)
    first = found.dialect.dump(once, target, torch.float32)
    folder.write(tmp_path / "again", first.tensors, first.config, weights=first.weights)
    again = detect.detect(tmp_path / "again")
    assert (again.dialect.name, again.dialect.method) == tuple(name.split("/"))
    twice = again.load(target)
    assert is_same(once, twice)
    assert torch.equal(once.vocabulary.target_ids, twice.vocabulary.target_ids)
    assert once.model.config == twice.model.config
    second = found.dialect.dump(twice, target, torch.float32)
    assert first.config == second.config
    assert first.tensors.keys() == second.tensors.keys()
    assert all(torch.equal(t, second.tensors[k]) for k, t in first.tensors.items())


@pytest.mark.parametrize("name", LAYOUTS)
def test_no_weight_is_lost(name, publishes, target):
    """What was published is written again, number by number, under its official name."""
    found = publishes(name)
    written = found.dialect.dump(found.load(target), target, torch.float32)
    for key, tensor in found.files.tensors.items():
        short = key.removeprefix("model.").removeprefix("logit_head.")
        if short.startswith("confidence_head."):
            continue  # says how far to draft, which is not what is drafted
        if short in ("embed_tokens.weight", "lm_head.weight") and short not in written.tensors:
            original = target.embedding if "embed" in short else target.head
            assert torch.equal(tensor, original)
            continue
        if short == "token_map":  # vLLM fails on its own map: the head is written whole
            assert torch.equal(written.tensors["draft_ids"], tensor)
            continue
        if short == "lm_heads.0.weight":
            of_map = written.tensors[short][found.files.tensors["token_map"]]
            assert torch.equal(of_map, tensor)
            continue
        again = written.tensors[short if short in written.tensors else key]
        assert torch.equal(again, tensor), short


@pytest.mark.parametrize(("name", "to"), PAIRS)
def test_any_dialect_to_any_other_keeps_the_logits(
    name, to, publishes, target, text, readout, tmp_path
):
    found, way = publishes(name), way_of(to)
    before = found.load(target)
    if (name, to) in CANNOT:
        with pytest.raises(CheckpointError, match=CANNOT[name, to]):
            way.dump(before, target, torch.float32)
        return
    made = way.dump(before, target, torch.float32)
    folder.write(tmp_path / "out", made.tensors, made.config, weights=made.weights)
    again = detect.detect(tmp_path / "out")
    assert again.dialect is way
    proof = prove(before, again.load(target), [text], readout)
    assert proof.max_logit_difference <= 1e-5 * max(1.0, proof.largest_logit)
    assert proof.largest_logit > 0.1 and proof.num_positions >= 20


@pytest.mark.parametrize("name", LAYOUTS)
def test_every_part_of_a_drafter_moves_its_logits(name, publishes, target, text, readout):
    """Otherwise the proof could not see it: each tensor of the network is felt."""
    checkpoint = publishes(name).load(target)
    before = drafted(checkpoint, text, readout).logits
    for key, tensor in checkpoint.model.state_dict().items():
        kept = tensor.clone()
        tensor.add_(torch.randn_like(tensor))
        moved = (drafted(checkpoint, text, readout).logits - before).abs().max()
        tensor.copy_(kept)
        assert moved > 1e-4, key


@pytest.mark.parametrize("name", LAYOUTS)
def test_unknown_and_missing_tensors_are_named(name, publishes, target, tmp_path):
    found = publishes(name)
    tensors = dict(found.files.tensors)
    weights = found.files.weights
    extra = write(
        tmp_path / "extra", found.files.config, tensors | {"odd.one": torch.ones(2)}, weights
    )
    with pytest.raises(CheckpointError, match=r"odd\.one"):
        detect.detect(extra).load(target)
    gone = next(k for k in tensors if "up_proj" in k or "linear.bias" in k or "layers.0.bias" in k)
    del tensors[gone]
    lacking = write(tmp_path / "lacking", found.files.config, tensors, weights)
    with pytest.raises(CheckpointError, match="missing tensors"):
        detect.detect(lacking).load(target)


def test_a_dialect_without_a_place_names_those_that_have_one():
    with pytest.raises(CheckpointError, match="medusa has no place for an EAGLE-3") as caught:
        detect.dialect_for("medusa", "eagle3")
    assert "slipstream, speculators, vllm, angelslim, specforge, eagle" in caught.value.hint


def test_the_docs_name_every_dialect_and_its_methods():
    page = Path(__file__).resolve().parents[2] / "docs" / "formats.md"
    rows = {
        line.split("|")[1].strip(" `"): line.split("|")[2]
        for line in page.read_text(encoding="utf-8").splitlines()
        if line.startswith("| `")
    }
    assert set(rows) == set(detect.names())
    for dialect in ALL:
        assert dialect.method in rows[dialect.name], dialect


@pytest.mark.parametrize(
    "name",
    ["deepspec/dspark", "speculators/dspark", "vllm/eagle3", "vllm/peagle", "speculators/peagle"],
)
def test_a_foreign_folder_drafts_losslessly(name, tmp_path):
    """Read as it is; what comes out is plain decoding's."""
    target = tiny_target(num_hidden_layers=L)
    torch.manual_seed(1)
    made = write(tmp_path / "drafter", *publish(name, target.embedding(), target.head()))
    engine = slipstream.load(target, name.partition("/")[2], drafter=made)
    plain = slipstream.load(target, "none")
    prompt = [5, 6, 7, 8, 9, 10]
    assert (
        engine.generate(prompt, max_new_tokens=16).token_ids
        == plain.generate(prompt, max_new_tokens=16).token_ids
    )
