"""`slipstream generate`: JSON and nothing else, streamed text, batches, interrupts, Unicode."""

import json
import os
import signal
import subprocess
import sys
import time

import pytest

from slipstream.engine.engine import Engine

OUTPUT_KEYS = {
    "prompt_index",
    "text",
    "token_ids",
    "num_tokens",
    "num_target_passes",
    "tau",
    "seconds",
    "prefill_seconds",
    "finish_reason",
}
TOP_KEYS = {
    "model",
    "method",
    "drafter",
    "dtype",
    "temperature",
    "seed",
    "outputs",
    "tau",
    "tokens_per_second",
    "decode_tokens_per_second",
}


def ask(slipstream, *arguments):
    code, out, err = slipstream("generate", "--json", "--dtype", "float32", *arguments)
    assert code == 0, err
    assert out.count("\n") == 1
    return json.loads(out)


@pytest.fixture
def prompts(tmp_path):
    path = tmp_path / "prompts.jsonl"
    rows = [
        {"turns": ["hi", "and then?"]},
        {"messages": [{"role": "system", "content": "be"}, {"role": "user", "content": "who"}]},
        {"conversations": [{"from": "human", "value": "naïve 水 👩‍🚀"}]},
        {"prompt": "last"},
    ]
    path.write_text("\n".join(json.dumps(row, ensure_ascii=False) for row in rows), "utf-8")
    return path


def test_json_has_the_promised_keys_and_nothing_else_is_printed(slipstream, model):
    value = ask(slipstream, "--model", model, "--method", "none", "--prompt", "hi")
    assert set(value) >= TOP_KEYS
    (output,) = value["outputs"]
    assert set(output) >= OUTPUT_KEYS
    assert output["num_tokens"] == len(output["token_ids"]) == 128
    assert output["tau"] == 1.0 and output["num_target_passes"] == 127


def test_methods_say_the_same(slipstream, model, drafter, prompts):
    common = ("--model", model, "--prompts", prompts, "--max-new-tokens", "24")
    for sampling in ((), ("--temperature", "0.9", "--top-p", "0.95", "--seed", "3")):
        plain = ask(slipstream, *common, *sampling, "--method", "none")
        for method in (
            ("--method", "ngram"),
            ("--method", "eagle3", "--drafter", drafter),
            ("--method", "eagle3", "--drafter", drafter, "--lookup", "--num-rows", "3"),
            ("--method", "eagle3", "--drafter", drafter, "--tree", "chain", "--depth", "2"),
        ):
            value = ask(slipstream, *common, *sampling, *method)
            answers = [output["token_ids"] for output in value["outputs"]]
            assert answers == [output["token_ids"] for output in plain["outputs"]]
            assert [output["prompt_index"] for output in value["outputs"]] == [0, 1, 2, 3]


def test_every_turn_sees_the_answers_before_it(slipstream, model, prompts):
    common = ("--model", model, "--method", "none", "--prompts", prompts, "--limit", "1")
    value = ask(slipstream, *common, "--max-new-tokens", "8", "--all-turns")
    assert [output["turn_index"] for output in value["outputs"]] == [0, 1]
    from slipstream import load

    engine = load(model, "none", dtype="float32")
    chat = [
        {"role": "user", "content": "hi"},
        {"role": "assistant", "content": value["outputs"][0]["text"]},
        {"role": "user", "content": "and then?"},
    ]
    again = engine.generate(chat, max_new_tokens=8)
    assert list(again.token_ids) == value["outputs"][1]["token_ids"]


def test_people_get_the_text_alone_on_standard_output(slipstream, model):
    common = ("--model", model, "--method", "none", "--prompt", "hi", "--max-new-tokens", "12")
    text = ask(slipstream, *common)["outputs"][0]["text"]
    code, out, err = slipstream("generate", "--dtype", "float32", *common)
    assert code == 0
    assert out == text + "\n"
    assert "12 tokens" in err and "tokens/pass" in err


def test_an_interrupt_keeps_what_is_done(slipstream, model, prompts, monkeypatch):
    common = ("--model", model, "--method", "none", "--prompts", prompts, "--max-new-tokens", "6")
    whole = ask(slipstream, *common)
    stream = Engine.stream

    def interrupted(self, prompt, **options):
        pieces = stream(self, prompt, **options)
        if prompt[-1]["content"] == "who":
            yield next(pieces)
            raise KeyboardInterrupt
        yield from pieces

    monkeypatch.setattr(Engine, "stream", interrupted)
    code, out, err = slipstream("generate", "--json", "--dtype", "float32", *common)
    assert code == 130
    value = json.loads(out)
    assert value["interrupted"] is True
    done, cut = value["outputs"]
    assert done["token_ids"] == whole["outputs"][0]["token_ids"]
    assert cut["finish_reason"] == "interrupted"
    assert cut["token_ids"] == whole["outputs"][1]["token_ids"][:1]
    assert set(cut) == set(done) and cut["tau"] is None and cut["seconds"] is None
    assert "Traceback" not in err


def test_a_real_interrupt_ends_with_130(model):
    command = [sys.executable, "-m", "slipstream", "generate", "--model", model]
    command += ["--method", "none", "--prompt", "hi", "--max-new-tokens", "230"]
    # A background job ignores the signal, and so would its children.
    slow = "import signal; signal.signal(signal.SIGINT, signal.default_int_handler)\n"
    slow += "import slipstream.engine.loop as e, time; f = e.step\n"
    slow += "def step(*a):\n    time.sleep(0.5)\n    return f(*a)\ne.step = step\n"
    slow += "from slipstream.cli.main import main; main()"
    command[1:3] = ["-c", slow]
    process = subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, env=os.environ
    )
    assert process.stdout.read(1)  # the first text is out
    time.sleep(0.2)
    process.send_signal(signal.SIGINT)
    _, err = process.communicate(timeout=60)
    assert process.returncode == 130
    assert b"interrupted" in err and b"Traceback" not in err


def test_a_reader_that_leaves_causes_no_noise(model):
    command = [sys.executable, "-m", "slipstream", "generate", "--model", model, "--method"]
    command += ["none", "--prompt", "hi", "--max-new-tokens", "200"]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    process.stdout.close()
    err = process.stderr.read()
    process.wait(timeout=60)
    assert b"Traceback" not in err and b"BrokenPipe" not in err


def test_a_budget_that_pays_for_itself_says_the_same(
    slipstream, model, drafter, prompts, tmp_path, monkeypatch
):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    common = ("--model", model, "--prompts", prompts, "--max-new-tokens", "12")
    plain = ask(slipstream, *common, "--method", "none")
    auto = ask(slipstream, *common, "--drafter", drafter, "--budget", "auto")
    assert [o["token_ids"] for o in auto["outputs"]] == [o["token_ids"] for o in plain["outputs"]]
    (remembered,) = (tmp_path / "cache" / "slipstream" / "cost").iterdir()
    assert json.loads(remembered.read_text())["sizes"][0] == 1
