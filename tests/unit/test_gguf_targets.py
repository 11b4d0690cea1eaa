"""Any GGUF file of a supported architecture is a target: it says what the model itself says."""

from __future__ import annotations

import pytest
import torch

from chats import PLAIN, byte_tokenizer
from fakes import tiny_model
from slipstream.errors import CheckpointError
from slipstream.target.hf import load_target
from slipstream.types import DraftTree
from tiny_gguf import ARCHITECTURES, MERGES, write_gguf

pytest.importorskip("gguf")
SIZES = {"vocab_size": 264, "hidden_size": 96, "max_position_embeddings": 128}
PROMPT = list(range(40, 60))


@pytest.mark.parametrize("kind", ARCHITECTURES)
def test_a_file_is_a_target(kind, tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    tokenizer = byte_tokenizer(PLAIN, MERGES)
    # transformers takes 128, which every published Qwen3 has, whatever the file says
    sizes = SIZES | ({"head_dim": 128} if kind == "qwen3" else {})
    model = tiny_model(kind, **sizes)
    path = write_gguf(model, tokenizer, tmp_path / f"{kind}.gguf")
    target = load_target(str(path), dtype="float32", device="cpu")
    assert target.spec.architecture == type(model).__name__
    assert target.tokenizer.encode("a cab") == tokenizer.encode("a cab", add_special_tokens=False)
    said = target.forward([DraftTree.chain(PROMPT)], target.new_cache(1, 32), [0]).logits[0]
    with torch.no_grad():
        expected = model(torch.tensor([PROMPT])).logits[0]
    assert (said - expected[:, : said.shape[1]]).abs().max() < 1e-3 * expected.abs().max()


def test_an_architecture_that_cannot_be_read_is_told(tmp_path, monkeypatch):
    import gguf

    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    path = tmp_path / "odd.gguf"
    writer = gguf.GGUFWriter(path, "oddity")
    writer.add_block_count(1)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.close()
    with pytest.raises(CheckpointError, match=r"cannot read model .*oddity"):
        load_target(str(path))
