"""Conversions: what engines will read, what is proved before anything is kept, faults by name."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch.nn import functional as F
from transformers import AutoModelForCausalLM, AutoTokenizer

import slipstream
from chats import PLAIN, byte_tokenizer
from fakes import tiny_target
from made import (
    D,
    L,
    U,
    V,
    a_dflash,
    a_dspark,
    a_language,
    a_peagle,
    an_eagle,
    an_eagle3,
    heads,
    random,
    stored,
)
from slipstream.drafters.chain import is_whole_model
from slipstream.errors import CheckpointError, DrafterMismatchError, OutputError, UnknownNameError
from slipstream.formats import detect
from slipstream.formats.checkpoint import Files, facts_of
from slipstream.formats.dialects import ALL
from slipstream.models.eagle3 import Eagle3
from slipstream.models.readout import Readout
from slipstream.parity import convert as conversion
from slipstream.parity.convert import convert
from slipstream.parity.drafted import causal, drafted
from slipstream.parity.proof import doubts
from slipstream.parity.texts import look
from tiny_gguf import MERGES

PROMPTS = [list(range(3, 33)), list(range(60, 90, 1))]


@pytest.fixture(scope="module")
def target():
    return tiny_target(num_hidden_layers=L)


@pytest.fixture(scope="module")
def readout(target):
    return Readout(target.embedding().float(), target.head().float())


def config_of(folder):
    return json.loads((folder / "config.json").read_text())


OURS = {
    "eagle3": an_eagle3, "peagle": a_peagle, "eagle": an_eagle, "medusa": heads,
    "dflash": a_dflash, "dspark": a_dspark, "chain": a_language,
}  # fmt: skip
WAYS = [
    (make, dialect.name)
    for method, make in OURS.items()
    for dialect in ALL
    if dialect.method == method
]


@pytest.mark.parametrize(("make", "to"), WAYS, ids=lambda p: getattr(p, "__name__", p))
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.filterwarnings("ignore:.*is a pickle")
def test_our_drafters_go_everywhere_with_proof(make, to, dtype, target, tmp_path):
    """Reduced vocabularies, borrowed heads and path heads included, as wide as they are stored."""
    folder = stored(make(), tmp_path / "ours", dtype=dtype, card={"trained_on": "a little"})
    done = convert(folder, to, target, tmp_path / "out", prompts=PROMPTS)
    assert done.proof.max_logit_difference <= 1e-5 * max(1.0, done.proof.largest_logit)
    assert done.proof.num_ids == U and done.source.dialect.name == "slipstream"
    card = json.loads((tmp_path / "out" / "card.json").read_text())
    assert card["trained_on"] == "a little"
    assert (card["conversion"]["from"], card["conversion"]["to"]) == ("slipstream", to)
    assert sorted(p.name for p in tmp_path.iterdir()) == ["ours", "out"]
    assert set(done.files) == {p.name for p in (tmp_path / "out").iterdir()}


def test_ids_are_written_for_the_engine_that_reads_them(target, tmp_path):
    """Outputs of layers for SGLang, indices into the hidden states for vLLM."""
    folder = stored(an_eagle3(), tmp_path / "ours")
    ids = {}
    for to in ("specforge", "vllm", "speculators"):
        convert(folder, to, target, tmp_path / to, prompts=PROMPTS)
        config = config_of(tmp_path / to)
        places = (config, config.get("eagle_config") or {})
        ids[to] = [place.get("eagle_aux_hidden_state_layer_ids") for place in places]
    assert ids == {  # at the top, in eagle_config; vLLM's two runners read one of them each
        "specforge": [None, [1, 3, 4]],
        "vllm": [[2, 4, 5], [2, 4, 5]],
        "speculators": [[2, 4, 5], None],
    }
    folder = stored(a_dflash(), tmp_path / "blocks")
    convert(folder, "dflash", target, tmp_path / "z-lab", prompts=PROMPTS)
    convert(folder, "speculators", target, tmp_path / "spec", prompts=PROMPTS)
    assert config_of(tmp_path / "z-lab")["dflash_config"]["target_layer_ids"] == [0, 2, 4]
    assert config_of(tmp_path / "spec")["aux_hidden_state_layer_ids"] == [1, 3, 5]


def test_an_eagle3_folder_has_what_engines_ask_for(target, tmp_path):
    layout, made = an_eagle3()
    folder = stored((layout, made), tmp_path / "ours")
    convert(folder, "vllm", target, tmp_path / "vllm", prompts=PROMPTS)
    config, tensors = config_of(tmp_path / "vllm"), load_file(tmp_path / "vllm/model.safetensors")
    assert config["architectures"] == ["Eagle3LlamaForCausalLM"]
    assert config["norm_before_residual"] is False  # engines differ in what a missing one means
    assert (config["rope_theta"], config["rope_scaling"]) == (5e5, None)
    assert config["draft_vocab_size"] == U and config["head_dim"] == 16
    assert tensors["layers.0.self_attn.q_proj.weight"].shape == (96, 2 * D)
    assert torch.equal(tensors["d2t"] + torch.arange(U), made.vocabulary.target_ids)
    assert tensors["t2d"].dtype == torch.bool


def test_the_authors_files_leave_out_a_base_of_ten_thousand(target, tmp_path):
    layout, made = an_eagle3()
    made = replace(made, model=random(Eagle3(replace(made.model.config, rope_theta=1e4))))
    folder = stored((layout, made), tmp_path / "ours")
    convert(folder, "eagle", target, tmp_path / "out", prompts=PROMPTS)
    config = config_of(tmp_path / "out")
    assert "rope_theta" not in config and "eagle_config" not in config
    read = detect.detect(tmp_path / "out").load(facts_of(target))
    assert read.model.config.rope_theta == 1e4


def test_speculators_knows_its_verifier(target, tmp_path):
    folder = stored(an_eagle3(), tmp_path / "ours")
    out = tmp_path / "out"
    convert(folder, "speculators", target, out, prompts=PROMPTS, target_name="org/model")
    verifier = config_of(out)["speculators_config"]["verifier"]
    assert verifier == {"name_or_path": "org/model", "architectures": ["LlamaForCausalLM"]}
    stored_copy = load_file(out / "model.safetensors")["embed_tokens.weight"]
    assert torch.equal(stored_copy, target.embedding())  # else the package makes one up


@pytest.mark.parametrize(
    ("make", "to", "says"),
    [
        (lambda: an_eagle3(norm_output=True), "eagle", "norm_output"),
        (lambda: an_eagle3(fusion_bias=True), "vllm", "bias in the layer that fuses"),
        (lambda: heads(borrows=False), "vllm", "these have their own"),
        (lambda: a_dflash(is_shifted=True), "dflash", "slot j as token j"),
        (lambda: a_dflash(path_rank=4), "dflash", "DSpark needs|has no place"),
        (lambda: an_eagle3(), "medusa", "has no place for an EAGLE-3"),
    ],
)
def test_what_a_dialect_cannot_hold_is_refused(make, to, says, target, tmp_path):
    folder = stored(make(), tmp_path / "ours")
    with pytest.raises(CheckpointError, match=says):
        convert(folder, to, target, tmp_path / "out", prompts=PROMPTS)
    assert not (tmp_path / "out").exists()


def shift_ids(files):
    block = dict(files.config["eagle_config"])
    block["eagle_aux_hidden_state_layer_ids"] = [
        i + 1 for i in block["eagle_aux_hidden_state_layer_ids"]
    ]
    return replace(files, config={**files.config, "eagle_config": block})


def absolute_map(files):
    ids = files.tensors["d2t"] + torch.arange(U)
    return replace(files, tensors={**files.tensors, "d2t": ids})


def other_map(files):
    mask = torch.zeros(V, dtype=torch.bool)
    mask[1 : U + 1] = True
    maps = {"d2t": torch.ones(U, dtype=torch.int64), "t2d": mask}
    return replace(files, tensors={**files.tensors, **maps})


def change(**tensors):
    def plant(files):
        changed = {name: edit(files.tensors[name]) for name, edit in tensors.items()}
        return replace(files, tensors={**files.tensors, **changed})

    return plant


def drop(name):
    def plant(files):
        return replace(files, tensors={k: t for k, t in files.tensors.items() if k != name})

    return plant


def configure(**keys):
    return lambda files: replace(files, config={**files.config, **keys})


@pytest.mark.parametrize(
    ("plant", "says"),
    [
        (shift_ids, r"layer ids: \(3, 5, 6\) in place of \(2, 4, 5\)"),
        (absolute_map, "absolute d2t|ascending"),
        (other_map, "vocabulary map"),
        (drop("midlayer.hidden_norm.weight"), r"missing tensors \['midlayer.hidden_norm.weight"),
        (change(**{"midlayer.hidden_norm.weight": torch.ones_like}),
         "norm midlayer.hidden_norm.weight has other values"),
        (configure(norm_before_residual=True), "norm flags: True in place of False"),
        (configure(norm_output=True), "norm flags"),
        (configure(rope_theta=10000.0), "RoPE base: 10000.0 in place of 500000.0"),
        (configure(rope_scaling={"rope_type": "linear", "factor": 2.0}), "RoPE scaling"),
        (configure(rms_norm_eps=0.1), "epsilon of the norms"),
        (change(**{"fc.weight": lambda t: t.flip(1)}), "tensor fc.weight has other values"),
    ],
)  # fmt: skip
def test_planted_faults_are_caught_and_named(plant, says, target, tmp_path, monkeypatch):
    """The silent traps of exports: no output appears, and the cause is told."""
    folder = stored(an_eagle3(), tmp_path / "ours")
    honest = detect.dialect_for("specforge", "eagle3")

    def dump(checkpoint, facts, dtype) -> Files:
        return plant(honest.dump(checkpoint, facts, dtype))

    faulty = replace(honest, dump=dump)
    monkeypatch.setattr(conversion.detect, "dialect_for", lambda *_: faulty)
    with pytest.raises(CheckpointError, match=says):
        convert(folder, "specforge", target, tmp_path / "out", prompts=PROMPTS)
    assert sorted(p.name for p in tmp_path.iterdir()) == ["ours"]


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"taps": (3, 5, 6)}, "layer ids: taps 2, 4, 5 in place of 3, 5, 6"),
        ({"rope_theta": 1e4}, "RoPE base: RoPE base"),
        ({"norm_before_residual": True}, "norms: the residual of states before their norm"),
    ],
)
def test_a_source_that_says_it_wrong_is_doubted(changes, says, target, readout):
    """The target's choices are those of the true drafter, so the true reading predicts better."""
    _, true = an_eagle3()
    attention = true.model.midlayer.self_attn
    with torch.no_grad():
        attention.q_proj.weight.mul_(2)  # so that places in the text matter
        attention.o_proj.weight.mul_(4)
    texts = [look(target, readout, prompt, []) for prompt in PROMPTS]
    taught = []
    for text in texts:
        said = drafted(true, text, readout)
        best = text.best.clone()
        best[said.places] = said.ids[said.logits.argmax(-1)]
        taught.append(replace(text, best=best))
    assert doubts(true, taught, readout) == []
    misread = Eagle3(replace(true.model.config, **changes))
    misread.load_state_dict(true.model.state_dict())
    assert doubts(replace(true, model=misread.eval()), taught, readout)[0].startswith(says)


def test_copies_of_another_target_are_refused(target, tmp_path):
    """A stored embedding that is not the target's would change what is drafted."""
    folder = stored(an_eagle(), tmp_path / "ours")
    convert(folder, "eagle", target, tmp_path / "official", prompts=PROMPTS)
    path = tmp_path / "official" / "model.safetensors"
    tensors = load_file(path)
    assert torch.equal(tensors["embed_tokens.weight"], target.embedding())
    tensors["embed_tokens.weight"] = tensors["embed_tokens.weight"].flip(0).contiguous()
    save_file(tensors, path)
    with pytest.raises(
        CheckpointError, match=r"embed_tokens\.weight is not the target's embedding"
    ):
        convert(tmp_path / "official", "slipstream", target, tmp_path / "out", prompts=PROMPTS)
    with pytest.raises(CheckpointError, match=r"embed_tokens\.weight is not"):
        slipstream.load(target, "eagle", drafter=tmp_path / "official")


def test_a_widened_vocabulary_is_told(target, tmp_path):
    folder = stored(a_dflash(), tmp_path / "ours")
    done = convert(folder, "dflash", target, tmp_path / "out", prompts=PROMPTS)
    assert any("all 97 rows" in note for note in done.notes)


def test_vllm_gets_a_whole_head_and_we_our_own_ids_back(target, tmp_path):
    """vLLM 0.32 refuses its own map of a reduced vocabulary."""
    folder = stored(heads(), tmp_path / "ours")
    done = convert(folder, "vllm", target, tmp_path / "out", prompts=PROMPTS)
    tensors, config = load_file(tmp_path / "out/model.safetensors"), config_of(tmp_path / "out")
    assert "token_map" not in tensors and tensors["lm_heads.0.weight"].shape[0] == 97
    assert config["truncated_vocab_size"] == config["vocab_size"] == 97
    assert any("all 97 rows" in note for note in done.notes)
    convert(tmp_path / "out", "slipstream", target, tmp_path / "back", prompts=PROMPTS)
    ours, back = (load_file(tmp_path / f"{name}/model.safetensors") for name in ("ours", "back"))
    assert ours.keys() == back.keys() and all(torch.equal(ours[k], back[k]) for k in ours)


def test_number_types_and_the_card_travel(target, tmp_path):
    folder = stored(an_eagle3(), tmp_path / "ours", dtype=torch.bfloat16, card={"tau": 2.0})
    (folder / "README.md").write_text("# A drafter\n")
    done = convert(folder, "eagle", target, tmp_path / "out", prompts=PROMPTS)
    assert done.dtype == "bfloat16" and done.proof.max_logit_difference == 0.0
    assert load_file(tmp_path / "out/model.safetensors")["fc.weight"].dtype == torch.bfloat16
    readme = (tmp_path / "out" / "README.md").read_text()
    assert readme.startswith("---\n") and readme.endswith("---\n# A drafter\n")
    convert(tmp_path / "out", "slipstream", target, tmp_path / "back", prompts=PROMPTS)
    card = json.loads((tmp_path / "back" / "card.json").read_text())
    assert card["tau"] == 2.0 and card["conversion"]["earlier"]["to"] == "eagle"


def test_an_output_that_exists_is_kept(target, tmp_path):
    folder = stored(an_eagle3(), tmp_path / "ours")
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "mine").write_text("kept")
    with pytest.raises(OutputError, match="exists"):
        convert(folder, "eagle", target, tmp_path / "out", prompts=PROMPTS)
    assert (tmp_path / "out" / "mine").read_text() == "kept"
    convert(folder, "eagle", target, tmp_path / "out", prompts=PROMPTS, overwrite=True)
    assert not (tmp_path / "out" / "mine").exists()


def test_mistakes_are_told(target, tmp_path):
    folder = stored(an_eagle3(), tmp_path / "ours")
    out = tmp_path / "out"
    with pytest.raises(UnknownNameError, match="speculators"):
        convert(folder, "speculator", target, out, prompts=PROMPTS)
    with pytest.raises(CheckpointError, match="does not exist"):
        convert(Path("nowhere"), "eagle", target, out, prompts=PROMPTS)
    other = tiny_target(vocab_size=99, num_hidden_layers=L)
    with pytest.raises(DrafterMismatchError, match="vocabulary 97"):
        convert(folder, "specforge", other, out, prompts=PROMPTS)
    assert not out.exists()


def test_a_draft_language_model_is_a_model_for_others_and_small_for_us(tmp_path):
    """Any engine loads it, tokenizer included; it says what ours says, no other ids."""
    target = tiny_target(num_hidden_layers=L, tokenizer=byte_tokenizer(PLAIN, MERGES))
    _, checkpoint = made = a_language()
    folder, out = stored(made, tmp_path / "ours"), tmp_path / "out"
    convert(folder, "transformers", target, out, prompts=PROMPTS)
    model = AutoModelForCausalLM.from_pretrained(out, dtype=torch.float32).eval()
    assert AutoTokenizer.from_pretrained(out).encode("a cab") == target.tokenizer.encode("a cab")
    ids, known = torch.tensor([PROMPTS[0]]), checkpoint.vocabulary.target_ids
    with torch.no_grad():
        said = model(ids).logits[0]
        network = checkpoint.model
        states = network(F.embedding(ids, target.embedding()), torch.arange(30)[None], causal)
        ours = network.logits(states)[0]
    assert (said[:, known] - ours).abs().max() < 1e-4
    assert checkpoint.vocabulary.mask()[said.argmax(-1)].all()
    assert detect.is_own_language_model(out) and not is_whole_model(out)
    answers = [
        slipstream.load(target, "chain", drafter=place).generate(PROMPTS[0], max_new_tokens=12)
        for place in (folder, out)
    ]
    steps = [(answer.token_ids, answer.num_target_passes) for answer in answers]
    assert steps[0] == steps[1]
