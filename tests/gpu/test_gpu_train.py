"""Where a GPU exists: features are taken, every method trains there, and decoding agrees with it.

python -m pytest -m gpu -s tests/gpu
"""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from chats import PLAIN, byte_tokenizer
from fakes import tiny_model
from slipstream import methods
from slipstream.cli.training import Run
from slipstream.train import recipes
from slipstream.train.config import TrainConfig

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device here"),
]
TRAINABLE = [method.name for method in methods.all() if method.is_trainable]
LAST = f"cuda:{torch.cuda.device_count() - 1}"


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    folder = tmp_path_factory.mktemp("model")
    tokenizer = byte_tokenizer(PLAIN)
    tiny_model(
        vocab_size=261, eos_token_id=tokenizer.eos_token_id, max_position_embeddings=256
    ).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return str(folder)


@pytest.mark.parametrize("method", TRAINABLE)
@pytest.mark.parametrize("device", ["cuda", LAST])
def test_a_run_from_text_to_decoding(method: str, device: str, model: str, tmp_path: Path) -> None:
    rows = [
        {"messages": [{"role": "user", "content": f"say {n}"},
                      {"role": "assistant", "content": "one two three four five " * 3}]}
        for n in range(6)
    ]  # fmt: skip
    (tmp_path / "rows.jsonl").write_text("\n".join(map(json.dumps, rows)))
    config = TrainConfig(
        method=method, steps=4, evaluate_every=2, save_every=2, max_length=128, accumulate=2,
        held_out=2, precision="bf16",
    )  # fmt: skip
    settings = recipes.get(method).settings(draft_vocab_size=261)
    for is_online in (False, True):
        run = Run(
            config, settings, tmp_path / f"run-{is_online}", model=model, drafter=None,
            target_options={"dtype": "float32", "device": device, "threads": None}, say=print,
        )  # fmt: skip
        run.open(
            tmp_path / "rows.jsonl", is_online=is_online, resume=False, loops="keep",
            on_progress=lambda *_: None,
        )  # fmt: skip
        done = run.train(num_prompts=2, num_tokens=12, on_step=lambda _: None)
        assert done["steps"] == 4 and done["tau"] >= 1
        assert done.get("is_parity_kept", True)
