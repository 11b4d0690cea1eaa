"""What a user gets wrong: exit status 2, one error, no traceback, nothing on standard output."""

import json
import os

import pytest
from drafters_on_disk import write_drafter


def refuses(slipstream, *arguments, says):
    code, out, err = slipstream(*arguments)
    assert code == 2, err
    assert out == ""
    errors = [line for line in err.splitlines() if line.startswith("error: ")]
    assert len(errors) == 1, err
    assert "Traceback" not in err
    for text in (says,) if isinstance(says, str) else says:
        assert text in err


@pytest.fixture
def no_model(monkeypatch):
    """Loading a model fails the test: the mistake must be told before."""
    from slipstream.target import hf

    def refuse(*arguments, **options):
        raise AssertionError("a model was loaded before the mistake was told")

    monkeypatch.setattr(hf, "load_target", refuse)


@pytest.mark.usefixtures("no_model")
@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["--method", "eagel3"], ["no method 'eagel3'", "Did you mean: eagle3"]),
        (["--dtype", "bf16"], ["no dtype 'bf16'", "bfloat16"]),
        (["--tree", "dynamc"], ["no tree 'dynamc'", "dynamic"]),
        (["--verifier", "wlak"], ["no verifier 'wlak'", "walk"]),
        (["--budget", "0"], "budget is 0, expected 1 or more"),
        (["--depth", "-1"], "depth is -1, expected 1 or more"),
        (["--topk", "0"], "topk is 0, expected 1 or more"),
        (["--threads", "0"], "threads is 0, expected 1 or more"),
        (["--num-rows", "0"], "num-rows is 0, expected 1 or more"),
        (["--limit", "0"], "limit is 0, expected 1 or more"),
        (["--max-new-tokens", "0"], "max-new-tokens is 0, expected 1 or more"),
        (["--temperature", "-0.1"], "temperature is -0.1, expected 0 or more"),
        (["--temperature", "nan"], "temperature is nan"),
        (["--top-p", "0"], "top-p is 0.0, expected in (0, 1]"),
        (["--top-p", "1.5"], "top-p is 1.5, expected in (0, 1]"),
        (["--top-k", "-1"], "top-k is -1, expected 0 or more"),
        (["--budget", "many"], "budget is 'many', expected a whole number, or auto"),
        (["--model", "./nowhere"], "nowhere"),
        (["--drafter", "./nowhere"], "nowhere"),
        (["--drafter", "zoo:eagel3"], "Did you mean: eagle3"),
        (["--prompts", "nowhere.jsonl"], "prompt is given twice"),
        (["--limit", "3"], "limit is 3, expected nothing with --prompt"),
        (["--all-turns"], "all-turns is on, expected nothing with --prompt"),
        (["--tree", "chain", "--topk", "5"], "topk is 5, expected nothing: a chain tree"),
        (["--tree", "static", "--topk", "5"], "topk is 5, expected nothing: a static tree"),
    ],
)
def test_settings_are_checked_before_a_model_loads(slipstream, drafter, arguments, says):
    given = [] if "--drafter" in arguments else ["--drafter", drafter]
    if "eagel3" in arguments[-1]:
        given = []
    refuses(slipstream, "generate", "--prompt", "hi", *given, *arguments, says=says)


@pytest.mark.usefixtures("no_model")
@pytest.mark.parametrize("option", ["--budget", "--depth", "--topk"])
def test_plain_decoding_takes_no_tree(slipstream, option):
    common = ("generate", "--prompt", "hi", "--method", "none")
    refuses(slipstream, *common, option, "5", says="expected nothing: none drafts nothing")


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["--device", "meta"], "device is meta, expected auto, cpu, or cuda"),
        (["--device", "mps"], "device is mps, expected auto, cpu, or cuda"),
        (["--device", "cuda:99"], "device is cuda:99, expected one this machine has"),
        (["--threads", "1000000"], "threads is 1000000, expected 1 to 1024"),
    ],
)
def test_hardware_that_is_not_there(slipstream, model, arguments, says):
    common = ("generate", "--prompt", "hi", "--model", model, "--method", "none")
    refuses(slipstream, *common, *arguments, says=says)


@pytest.mark.usefixtures("no_model")
@pytest.mark.parametrize(
    ("content", "says"),
    [
        (b"", "is empty"),
        (b"\n\n", "no rows"),
        (b'{"prompt": "a"}\n{"prompt": \n', "line 2"),
        (b'{"prompt": "a"}\n{"promt": "b"}\n', "line 2"),
        (b'{"prompt": ""}\n', "line 1"),
        (b'{"prompt": "a"}\n{"prompt": "\xff"}\n', "line 2"),
    ],
)
def test_prompt_files_are_checked_with_the_line(slipstream, tmp_path, content, says):
    path = tmp_path / "prompts.jsonl"
    path.write_bytes(content)
    refuses(slipstream, "generate", "--method", "none", "--prompts", path, says=says)


@pytest.mark.usefixtures("no_model")
def test_prompts_that_are_not_there(slipstream, tmp_path):
    refuses(slipstream, "generate", "--method", "none", "--prompts", tmp_path, says="is a folder")
    missing = tmp_path / "missing.jsonl"
    refuses(slipstream, "generate", "--method", "none", "--prompts", missing, says="does not exist")
    refuses(slipstream, "generate", "--method", "none", says="prompt is missing")
    refuses(slipstream, "generate", "--method", "none", "--prompt", "", says="empty")


def test_a_prompt_longer_than_the_context_is_told_before_any_work(slipstream, model, tmp_path):
    path = tmp_path / "prompts.jsonl"
    rows = [{"prompt": "short"}, {"prompt": "x" * 400}]
    path.write_text("\n".join(json.dumps(row) for row in rows))
    refuses(
        slipstream,
        *("generate", "--json", "--model", model, "--method", "none", "--prompts", path),
        says=["prompt 1", "256"],
    )


def test_a_drafter_for_another_target(slipstream, model, tmp_path):
    common = ("generate", "--model", model, "--prompt", "hi", "--drafter")
    other = write_drafter(tmp_path / "vocabulary", vocab_size=300)
    refuses(slipstream, *common, other, says=["300", "261"])
    other = write_drafter(tmp_path / "hidden", hidden_size=64)
    refuses(slipstream, *common, other, says=["64", "48"])


def test_broken_checkpoints(slipstream, model, drafter, tmp_path):
    common = ("generate", "--model", model, "--prompt", "hi", "--drafter")
    empty = tmp_path / "empty"
    empty.mkdir()
    refuses(slipstream, *common, empty, says="config.json")
    cut = write_drafter(tmp_path / "cut")
    weights = tmp_path / "cut" / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-1000])
    refuses(slipstream, *common, cut, says="model.safetensors")
    listed = write_drafter(tmp_path / "listed")
    (tmp_path / "listed" / "config.json").write_text("[]")
    refuses(slipstream, *common, listed, says=["config.json", "hint: take the drafter"])
    odd = write_drafter(tmp_path / "odd")
    config = tmp_path / "odd" / "config.json"
    config.write_text(json.dumps(json.loads(config.read_text()) | {"intermediate_size": 80}))
    refuses(slipstream, *common, odd, says="80")


@pytest.mark.usefixtures("no_model")
def test_the_zoo_has_nothing_for_a_folder(slipstream, model):
    refuses(slipstream, "generate", "--model", model, "--prompt", "a", says="expected eagle3-tiny/")


def test_topk_above_the_draft_vocabulary(slipstream, model, drafter):
    common = ("generate", "--model", model, "--prompt", "hi", "--drafter", drafter)
    refuses(slipstream, *common, "--topk", "201", says=["topk", "200"])


@pytest.mark.usefixtures("no_model")
def test_demo_outputs_are_not_overwritten(slipstream, tmp_path):
    page = tmp_path / "mine.html"
    page.write_text("<p>mine</p>")
    refuses(slipstream, "demo", "--output", page, says="exists")
    assert page.read_text() == "<p>mine</p>"
    refuses(slipstream, "demo", "--output", tmp_path, says="is a folder")
    refuses(slipstream, "demo", "--output", tmp_path / "no" / "page.html", says="does not exist")


@pytest.mark.usefixtures("no_model")
@pytest.mark.skipif(os.geteuid() == 0, reason="root may write anywhere")
def test_demo_output_folder_must_be_writable(slipstream, tmp_path):
    tmp_path.chmod(0o500)
    refuses(slipstream, "demo", "--output", tmp_path / "page.html", says="writable")


@pytest.mark.parametrize("verb", ["bench", "verify"])
def test_tasks_and_prompts_together_are_refused(slipstream, model, tmp_path, verb):
    file = tmp_path / "prompts.jsonl"
    file.write_text('{"prompt": "hello"}\n')
    code, out, err = slipstream(
        verb, "--model", model, "--tasks", "mt_bench", "--prompts", file,
        *(["--methods", "ngram"] if verb == "bench" else ["--method", "ngram"]),
    )  # fmt: skip
    assert code == 2 and not out and "--prompts" in err and "Traceback" not in err


def test_a_drafter_that_no_method_takes_is_refused(slipstream, model, drafter, tmp_path):
    code, _, err = slipstream("bench", "--model", model, "--methods", "ngram", "--drafter", drafter)
    assert code == 2 and "no method here takes it" in err
