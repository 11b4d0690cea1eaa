"""`slipstream data` end to end on a tiny random model, in this process."""

import json

import pytest

from chats import PLAIN, byte_tokenizer
from fakes import tiny_model
from slipstream.cli.main import main
from slipstream.data.store import Store

NUM_IDS = 261  # 256 bytes and 5 special ids


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    folder = tmp_path_factory.mktemp("model")
    tokenizer = byte_tokenizer(PLAIN)
    eos = tokenizer.eos_token_id
    tiny_model(vocab_size=NUM_IDS, eos_token_id=eos, max_position_embeddings=128).save_pretrained(
        folder
    )
    tokenizer.save_pretrained(folder)
    return str(folder)


@pytest.fixture
def slipstream(monkeypatch, capsys):
    """Run a command line; gives (exit status, standard output, standard error)."""

    def run(*arguments):
        monkeypatch.setattr("sys.argv", ["slipstream", *map(str, arguments)])
        with pytest.raises(SystemExit) as stopped:
            main()
        captured = capsys.readouterr()
        return stopped.value.code or 0, captured.out, captured.err

    return run


@pytest.fixture
def prompts(tmp_path):
    path = tmp_path / "prompts.jsonl"
    rows = [
        {"id": "one", "turns": ["hi", "more"]},
        {"id": "two", "prompt": "wide \u00fc"},
        {"id": "big", "prompt": "x" * 200},
    ]
    path.write_text("\n".join(map(json.dumps, rows)))
    return path


def ask(slipstream, *arguments):
    code, out, err = slipstream(*arguments, "--json")
    assert code == 0, err
    return json.loads(out)


@pytest.fixture
def answers(slipstream, model, prompts, tmp_path):
    path = tmp_path / "answers.jsonl"
    common = ("data", "regenerate", "--prompts", prompts, "--output", path, "--model", model)
    result = ask(slipstream, *common, "--max-new-tokens", "12", "--dtype", "float32")
    assert {"rows", "tokens", "tokens_per_second", "bytes", "path"} <= set(result)
    assert result["rows"] == 3 and result["counts"]["long_prompts_skipped"] == 1
    assert result["bytes"] == path.stat().st_size
    return path


def test_regenerate_writes_the_targets_greedy_answers(answers, model):
    """Each answer is what the model alone says, one token after the other."""
    import torch
    from transformers import AutoModelForCausalLM

    plain = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32)
    rows = [json.loads(line) for line in answers.read_text().splitlines()]
    assert {row["id"] for row in rows} == {"one", "one:2", "two"}
    for row in rows:
        whole = torch.tensor([row["prompt_ids"] + row["response_ids"]])
        best = plain(whole).logits[0].argmax(-1).tolist()
        assert best[len(row["prompt_ids"]) - 1 : -1] == row["response_ids"]
        assert row["finish"] == "length" and len(row["response_ids"]) == 12
    assert byte_tokenizer(PLAIN).decode(rows[-1]["prompt_ids"]).endswith("<|assistant|>")


def test_regenerate_with_a_drafter_writes_the_same(slipstream, model, prompts, answers, tmp_path):
    path = tmp_path / "ngram.jsonl"
    common = ("data", "regenerate", "--prompts", prompts, "--output", path, "--model", model)
    ask(slipstream, *common, "--max-new-tokens", 12, "--dtype", "float32", "--method", "ngram",
        "--num-rows", 2)  # fmt: skip
    key = {row["id"]: row for row in map(json.loads, answers.read_text().splitlines())}
    assert {row["id"]: row for row in map(json.loads, path.read_text().splitlines())} == key


def test_an_existing_output_needs_resume(slipstream, model, prompts, answers):
    before = answers.read_bytes()
    common = ("data", "regenerate", "--prompts", prompts, "--output", answers, "--model", model)
    code, out, err = slipstream(*common)
    assert (code, out) == (2, "") and "exists" in err and "--resume" in err
    settings = ("--max-new-tokens", 12, "--dtype", "float32", "--resume")
    assert ask(slipstream, *common, *settings)["rows"] == 0
    assert answers.read_bytes() == before


def test_inspect_shows_what_is_supervised(slipstream, model, answers):
    result = ask(slipstream, "data", "inspect", answers, "--model", model, "--dtype", "float32")
    assert result["rows"] == 3 and result["supervised_tokens"] == 36
    assert result["counts"]["truncated_answers"] == 3 and result["counts"]["empty_masks"] == 0
    assert result["template_modes"] == {"token ids": 3}
    assert result["unmasked_share"] == pytest.approx(36 / result["tokens"])
    assert [s["is_supervised"] for s in result["shown"][0]["spans"]] == [False, True]
    assert result["agreement"] == 1 and result["surprise"] < 0 and not result["is_foreign"]


def test_inspect_tells_foreign_answers_and_broken_rows(slipstream, model, tmp_path):
    """B94, B108: the share is printed, and answers of another origin are called so."""
    path = tmp_path / "chats.jsonl"
    user, answer = {"role": "user", "content": "hi"}, "the quick brown fox jumps over dogs"
    rows = [
        {"messages": [user, {"role": "assistant", "content": answer}]},
        {"messages": [user, {"role": "assistant", "content": "z" * 200}]},
        {"messages": [user]},
    ]
    path.write_text("\n".join(map(json.dumps, rows)))
    command = ("data", "inspect", path, "--model", model, "--max-length", 60)
    result = ask(slipstream, *command)
    assert result["counts"] == {
        "no_answer": 1, "template_errors": 0, "empty_masks": 0, "over_long": 1,
        "truncated_answers": 0, "loops": 1, "skipped_turns": 0,
    }  # fmt: skip
    assert result["shown"][0]["spans"][1] == {"text": answer + "<|end|>", "is_supervised": True}
    assert result["is_foreign"] and result["surprise"] > 0.5
    code, out, _ = slipstream(*command)
    assert code == 0 and answer in out and "not this model's own" in out
    assert f"({result['unmasked_share']:.1%})" in out


def test_extract_writes_a_store(slipstream, model, answers, tmp_path):
    folder = tmp_path / "features"
    command = ("data", "extract", "--data", answers, "--output", folder, "--model", model)
    result = ask(slipstream, *command, "--dtype", "float32")
    assert {"rows", "tokens", "tokens_per_second", "bytes", "path"} <= set(result)
    store = Store(folder)
    assert len(store) == result["rows"] == 3
    assert sum(store.lengths) == result["tokens"]
    assert result["bytes"] == sum(p.stat().st_size for p in folder.iterdir())
    code, _, err = slipstream(*command)
    assert code == 2 and "--resume" in err
    resumed = ask(slipstream, *command, "--dtype", "float32", "--resume")
    assert resumed["rows"] == 3
    for taps, says in (("0,2", "other taps"), ("0,5", "within 0..4")):
        code, out, err = slipstream(*command, "--resume", "--taps", taps)
        assert (code, out) == (2, "") and says in err
    for change in (("--max-length", "32"), ("--skip", "1"), ("--loops", "keep")):
        code, out, err = slipstream(*command, "--resume", *change)
        assert (code, out) == (2, "") and change[0][2:].replace("-", "_") in err


def test_extract_goes_on_after_a_kill_before_the_first_shard(slipstream, model, answers, tmp_path):
    folder = tmp_path / "features"
    folder.mkdir()
    for name in ("readout.safetensors", "counts.partial"):
        (folder / name).write_bytes(b"half")
    command = ("data", "extract", "--data", answers, "--output", folder, "--model", model)
    assert ask(slipstream, *command, "--resume")["rows"] == 3
    assert Store(folder).readout().embedding.shape[0] == NUM_IDS


def test_an_interrupt_keeps_what_is_done(slipstream, model, prompts, tmp_path, monkeypatch):
    from slipstream.data.answers import AnswersFile

    path = tmp_path / "answers.jsonl"
    common = ("data", "regenerate", "--prompts", prompts, "--output", path, "--model", model)
    append = AnswersFile.append

    def interrupted(self, *arguments, **values):
        append(self, *arguments, **values)
        raise KeyboardInterrupt

    monkeypatch.setattr(AnswersFile, "append", interrupted)
    code, out, err = slipstream(*common, "--max-new-tokens", 4, "--json")
    assert (code, out) == (130, "") and "--resume" in err and "Traceback" not in err
    assert len(path.read_text().splitlines()) == 1
    monkeypatch.undo()
    monkeypatch.setattr("sys.argv", ["slipstream"])
    result = ask(slipstream, *common, "--max-new-tokens", 4, "--resume")
    assert result["rows"] == 2 and len(path.read_text().splitlines()) == 3


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (("inspect", "nowhere.jsonl"), "nowhere.jsonl"),
        (("extract", "--data", "nowhere.jsonl", "--output", "x"), "nowhere.jsonl"),
        (("regenerate", "--prompts", "nowhere.jsonl", "--output", "x"), "nowhere.jsonl"),
        (("regenerate", "--prompts", "bad.jsonl", "--output", "x"), "line 2"),
        (("regenerate", "--prompts", "empty.jsonl", "--output", "x"), "no rows"),
        (("regenerate", "--prompts", "bad.jsonl", "--output", "."), "is a folder"),
        (("regenerate", "--prompts", "b", "--output", "x", "--num-rows", "0"), "num-rows is 0"),
        (("extract", "--data", "bad.jsonl", "--output", "x", "--loops", "kut"), "cut"),
        (("extract", "--data", "bad.jsonl", "--output", "x", "--method", "ngram"), "eagle3"),
        (("extract", "--data", "bad.jsonl", "--output", "x", "--taps", "2;5"), "taps is 2;5"),
        (("inspect", "bad.jsonl", "--max-length", "1"), "max-length is 1"),
        (("frobnicate",), "frobnicate"),
    ],
)
def test_mistakes_are_told_before_a_model_loads(slipstream, tmp_path, monkeypatch, arguments, says):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "bad.jsonl").write_text('{"prompt": "fine"}\n{"prompt": \n')
    (tmp_path / "empty.jsonl").write_text("")
    monkeypatch.setattr("slipstream.target.hf.load_target", None)
    code, out, err = slipstream("data", *arguments)
    assert (code, out) == (2, "")
    assert says in err and "Traceback" not in err
    assert not (tmp_path / "x").exists()
