"""`slipstream verify`: both ways by default, score tests, servers, exit statuses."""

import json

import pytest

from slipstream.bench import servers
from slipstream.data import server as data_server

KEYS = {
    "verdict",
    "mode",
    "num_prompts",
    "num_tokens",
    "num_divergent",
    "divergences",
    "tau",
}


@pytest.fixture
def common(model, tmp_path):
    path = tmp_path / "mine.jsonl"
    path.write_text("\n".join(json.dumps({"prompt": text}) for text in ("ab", "cd")), "utf-8")
    return ("--json", "--dtype", "float32", "--model", model, "--prompts", path)


def test_greedy_and_sampled_by_default(slipstream, common, drafter):
    code, out, err = slipstream("verify", *common, "--drafter", drafter, "--max-new-tokens", 24)
    value = json.loads(out)
    assert code == 0, err
    assert set(value) >= KEYS
    assert (value["verdict"], value["mode"]) == ("lossless", "greedy+keyed")
    assert value["temperatures"] == [0.0, 0.8]


def test_one_way_when_asked(slipstream, common):
    code, out, _ = slipstream("verify", *common, "--method", "ngram", "--temperature", 0,
                              "--max-new-tokens", 12)  # fmt: skip
    assert code == 0 and json.loads(out)["mode"] == "greedy"


def test_a_sampled_rule_is_scored_and_a_small_sample_is_inconclusive(slipstream, common, drafter):
    code, out, _ = slipstream(
        "verify", *common, "--drafter", drafter, "--verifier", "token", "--tree", "chain",
        "--depth", 2, "--temperature", 0.8, "--max-new-tokens", 12,
    )  # fmt: skip
    value = json.loads(out)
    assert code == 1 and value["verdict"] == "inconclusive" and value["mode"] == "score"
    assert 0 <= value["p_value"] <= 1 and value["power"] < 0.9
    assert value["control_p_value"] is not None and "temperature" in value["alternative"]


def test_a_lossy_rule_is_said_to_be(slipstream, common, drafter):
    arguments = [each for each in common if each != "--json"]
    code, out, _ = slipstream(
        "verify", *arguments, "--drafter", drafter, "--verifier", "typical", "--tree", "chain",
        "--depth", 2, "--temperature", 0.8, "--max-new-tokens", 12,
    )  # fmt: skip
    assert code == 1 and "lossy" in out and "score test" in out


def test_a_server_is_compared_with_our_model(slipstream, common, model, monkeypatch):
    """The server is our own model behind a stub of the network."""
    from slipstream.bench.lossless import plain_engine
    from slipstream.target.hf import load_target

    engine = plain_engine(load_target(model, dtype="float32"))

    def call(self, path, request=None):
        if path == "/models":
            return {"data": [{"id": "ours"}]}
        names = ("temperature", "top_p", "seed")
        said = engine.generate(
            request["prompt"], max_new_tokens=request["max_tokens"],
            **{name: request[name] for name in names},
        )  # fmt: skip
        return {"choices": [{"token_ids": list(said.token_ids), "finish_reason": "length"}]}

    monkeypatch.setattr(data_server.ServerAnswerer, "_call", call)
    code, out, err = slipstream(
        "verify", *common, "--server", "http://ours", "--max-new-tokens", 80
    )
    value = json.loads(out)
    assert value["mode"] == "greedy+score" and value["num_divergent"] == 0, err
    assert value["p_value"] > 1e-3 and value["server"] == "http://ours"
    assert code == (0 if value["verdict"] == "lossless" else 1)


@pytest.mark.parametrize("end", ["", "!"])
def test_a_server_that_gives_text_alone_is_judged_by_its_text(
    slipstream, common, model, monkeypatch, end
):
    """Its text is tokenised again, and a random model's bytes that are no text become others."""
    from slipstream.bench.lossless import plain_engine
    from slipstream.target.hf import load_target

    engine = plain_engine(load_target(model, dtype="float32"))

    def call(self, path, request=None):
        if path == "/models":
            return {"data": [{"id": "ours"}]}
        said = engine.generate(request["prompt"], max_new_tokens=request["max_tokens"])
        return {"choices": [{"text": said.text + end, "finish_reason": "length"}]}

    monkeypatch.setattr(data_server.ServerAnswerer, "_call", call)
    arguments = (*common, "--server", "http://ours", "--temperature", 0, "--max-new-tokens", 80)
    code, out, err = slipstream("verify", *arguments)
    value = json.loads(out)
    assert value["num_retokenised"] == 2, err
    if end:
        assert (code, value["verdict"], value["num_divergent"]) == (1, "inconclusive", 2)
    else:
        assert (code, value["verdict"], value["num_divergent"]) == (0, "lossless", 0)


def test_two_servers(slipstream, common, monkeypatch):
    def call(self, path, request=None):
        if path == "/models":
            return {"data": [{"id": "one"}]}
        text = "the same words again " * 4 + ("" if "first" in self.url else "!")
        return {"choices": [{"message": {"content": text}}]}

    monkeypatch.setattr(servers.Server, "_call", call)
    asked = ("--json", *common[-2:])
    pair = ("--server", "http://first", "--against", "http://first")
    code, out, _ = slipstream("verify", *asked, *pair)
    assert code == 0 and json.loads(out)["verdict"] == "lossless"
    code, out, _ = slipstream("verify", *asked, *pair[:3], "http://second")
    assert code == 1 and json.loads(out)["divergences"][0]["target_token"] == "!"
    code, out, err = slipstream("verify", *asked, *pair, "--temperature", 0.8)
    assert code == 2 and "against" in err
    for option in (("--dtype", "float32"), ("--top-p", 0.9), ("--seed", 0)):
        code, out, err = slipstream("verify", *asked, *pair, *option)
        assert code == 2 and f"{option[0][2:]} is" in err and "between two servers" in err


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (("--against", "http://x"), "--server"),
        (("--server", "http://127.0.0.1:9"), "does not answer"),
        (("--server", "http://x", "--method", "eagle3"), "method is eagle3"),
        (("--server", "http://x", "--rows", 4), "rows is 4"),
        (("--server", "http://x", "--lookup"), "lookup is True"),
        (("--verifier", "token", "--tree", "chain", "--rows", 2), "score test"),
        (("--temperature", -1), "temperature"),
    ],
)
def test_mistakes_are_one_readable_error(slipstream, common, drafter, arguments, said):
    own = () if "--server" in arguments else ("--drafter", drafter)
    code, out, err = slipstream("verify", *common, *own, *arguments)
    assert (code, out) == (2, "")
    assert said in err and "Traceback" not in err
