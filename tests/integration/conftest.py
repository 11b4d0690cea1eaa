"""A tiny random model and its EAGLE-3 drafter on disk, and the command line in this process."""

from __future__ import annotations

import pytest
from drafters_on_disk import NUM_IDS, write_drafter

from chats import PLAIN, byte_tokenizer
from fakes import tiny_model
from slipstream.cli.main import main


@pytest.fixture(scope="session")
def model(tmp_path_factory):
    """Folder of a tiny Llama with a byte tokenizer and a context of 256."""
    folder = tmp_path_factory.mktemp("model") / "tiny"
    tokenizer = byte_tokenizer(PLAIN)
    made = tiny_model(
        vocab_size=NUM_IDS, eos_token_id=tokenizer.eos_token_id, max_position_embeddings=256
    )
    made.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return str(folder)


@pytest.fixture(scope="session")
def drafter(tmp_path_factory):
    """Folder of a random EAGLE-3 drafter for `model`."""
    return write_drafter(tmp_path_factory.mktemp("drafter") / "eagle3")


@pytest.fixture
def slipstream(monkeypatch, capsys):
    """Run a command line; gives (exit status, standard output, standard error)."""

    monkeypatch.setenv("OMP_NUM_THREADS", "1")  # a tiny model is fastest on one thread

    def run(*arguments):
        monkeypatch.setattr("sys.argv", ["slipstream", *map(str, arguments)])
        with pytest.raises(SystemExit) as stopped:
            main()
        captured = capsys.readouterr()
        return stopped.value.code or 0, captured.out, captured.err

    return run
