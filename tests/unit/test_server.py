"""Answers from an OpenAI-compatible server, stood in for by one in this process."""

import json
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest

from chats import PLAIN, byte_tokenizer
from fakes import tiny_model
from slipstream.data import server as module
from slipstream.data.conversations import read_rows
from slipstream.data.regenerate import regenerate
from slipstream.data.server import ServerAnswerer
from slipstream.errors import DataError
from slipstream.target.tokens import TargetTokenizer


class Stub(BaseHTTPRequestHandler):
    """Says "yes" and ends; fails or leaves out ids when told to."""

    gives_ids, broken, asked, keys = True, 0, [], []

    def do_GET(self):
        self.reply({"data": [{"id": "tiny"}]})

    def do_POST(self):
        request = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        Stub.asked.append(request)
        Stub.keys.append(self.headers["Authorization"])
        if Stub.broken:
            Stub.broken -= 1
            self.send_error(503)
            return
        if len(request["prompt"]) > 60:
            self.send_error(400, "too long")
            return
        choice = {"text": "yes", "finish_reason": "stop"}
        if Stub.gives_ids:
            choice["token_ids"] = [*tokenizer().inner.encode("yes", add_special_tokens=False), 257]
        self.reply({"choices": [choice]})

    def reply(self, value):
        self.send_response(200)
        self.end_headers()
        self.wfile.write(json.dumps(value).encode())

    def log_message(self, *arguments):
        """Quiet."""


def tokenizer():
    inner = byte_tokenizer(PLAIN)
    return TargetTokenizer(inner, (inner.eos_token_id,))


@pytest.fixture
def url(monkeypatch):
    monkeypatch.setattr(module.time, "sleep", lambda _seconds: None)
    monkeypatch.setattr(Stub, "gives_ids", True)
    monkeypatch.setattr(Stub, "broken", 0)
    monkeypatch.setattr(Stub, "asked", [])
    server = ThreadingHTTPServer(("127.0.0.1", 0), Stub)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield f"http://127.0.0.1:{server.server_port}"
    server.shutdown()
    server.server_close()


@pytest.fixture
def prompts(tmp_path):
    path = tmp_path / "prompts.jsonl"
    rows = [{"id": "a", "turns": ["hi", "more"]}, {"id": "b", "prompt": "ho"},
            {"id": "long", "prompt": "x" * 70}]  # fmt: skip
    path.write_text("\n".join(map(json.dumps, rows)))
    return path


def answer(url, prompts, output, **options):
    engine = ServerAnswerer(url, tokenizer(), name="tiny", max_length=128)
    report = regenerate(engine, read_rows(prompts), output, num_rows=2, **options)
    return engine, report, [json.loads(line) for line in output.read_text().splitlines()]


def test_answers_carry_the_ids_that_were_asked_and_said(url, prompts, tmp_path):
    engine, report, rows = answer(url, prompts, tmp_path / "answers.jsonl", max_new_tokens=9)
    assert {row["id"] for row in rows} == {"a", "a:2", "b"} and report.counts["failed"] == 1
    assert engine.num_retokenised == 0 and engine.describe()["method"] == "server"
    for row in rows:
        assert tokenizer().decode(row["response_ids"]) == "yes" and row["finish"] == "stop"
        assert any(asked["prompt"] == row["prompt_ids"] for asked in Stub.asked)
    assert all(a["max_tokens"] == 9 and a["model"] == "tiny" for a in Stub.asked)
    second = next(row for row in rows if row["id"] == "a:2")
    assert second["messages"][1] == {"role": "assistant", "content": "yes"}
    asked = len(Stub.asked)
    _, report, again = answer(url, prompts, tmp_path / "answers.jsonl", max_new_tokens=9)
    assert again == rows and report.rows == 0 and len(Stub.asked) == asked + 1  # the long one


def test_text_without_ids_is_tokenised_and_counted(url, prompts, tmp_path, monkeypatch):
    _, _, with_ids = answer(url, prompts, tmp_path / "with.jsonl")
    monkeypatch.setattr(Stub, "gives_ids", False)
    engine, report, without = answer(url, prompts, tmp_path / "without.jsonl")
    assert all(row.pop("retokenised") for row in without)
    assert sorted(map(str, with_ids)) == sorted(map(str, without)) and engine.num_retokenised == 3
    assert report.counts["retokenised"] == 3
    assert all(row.is_retokenised for row in read_rows(tmp_path / "without.jsonl"))


def test_a_busy_server_is_asked_again(url, prompts, tmp_path):
    Stub.broken = 2
    _, report, _ = answer(url, prompts, tmp_path / "answers.jsonl")
    assert report.rows == 3


def test_a_reply_that_breaks_off_is_asked_for_again(url, prompts, tmp_path, monkeypatch):
    """`IncompleteRead` is neither an OSError nor a ValueError."""
    whole, left = Stub.reply, [2]

    def cut(self, value):
        if self.command == "GET" or not left[0]:
            return whole(self, value)
        left[0] -= 1
        self.send_response(200)
        self.send_header("Content-Length", "999")
        self.end_headers()
        return self.wfile.write(b"{")

    monkeypatch.setattr(Stub, "reply", cut)
    _, report, _ = answer(url, prompts, tmp_path / "answers.jsonl")
    assert report.rows == 3 and not left[0]


def test_the_key_of_the_environment_goes_along(url, prompts, tmp_path, monkeypatch):
    monkeypatch.delenv("SLIPSTREAM_API_KEY", raising=False)
    answer(url, prompts, tmp_path / "a.jsonl")
    assert set(Stub.keys) == {None}
    monkeypatch.setattr(Stub, "keys", [])
    monkeypatch.setenv("SLIPSTREAM_API_KEY", "secret")
    answer(url, prompts, tmp_path / "b.jsonl")
    assert set(Stub.keys) == {"Bearer secret"}


def test_an_address_that_is_none_is_told():
    with pytest.raises(DataError, match="does not answer"):
        ServerAnswerer("http://127.0.0.1:80 80", tokenizer(), name="tiny", max_length=64)


def test_no_server_is_told_at_once(url, monkeypatch):
    with pytest.raises(DataError, match=r"says 404|does not answer|names no model"):
        ServerAnswerer("http://127.0.0.1:9", tokenizer(), name="tiny", max_length=64)
    monkeypatch.setattr(Stub, "do_GET", lambda self: self.reply({"data": []}))
    with pytest.raises(DataError, match="names no model"):
        ServerAnswerer(url, tokenizer(), name="tiny", max_length=64)


def test_the_command_asks_the_server_shard_by_shard(url, prompts, tmp_path, monkeypatch, capsys):
    from slipstream.cli.main import main

    model = tmp_path / "model"
    tiny_model(vocab_size=261, eos_token_id=257).save_pretrained(model)
    tokenizer().inner.save_pretrained(model)
    monkeypatch.setattr("slipstream.target.hf.load_target", None)
    common = ["slipstream", "data", "regenerate", "--prompts", prompts, "--model", model]
    found = []
    for shard in ("0/2", "1/2"):
        output = tmp_path / f"answers-{shard[0]}.jsonl"
        more = ["--server", url, "--shard", shard, "--output", output, "--json"]
        monkeypatch.setattr("sys.argv", [str(x) for x in common + more])
        with pytest.raises(SystemExit) as stopped:
            main()
        assert not stopped.value.code
        assert json.loads(capsys.readouterr().out)["server"] == f"{url}/v1"
        found.append({json.loads(line)["id"] for line in output.read_text().splitlines()})
    assert found == [{"a", "a:2"}, {"b"}]
    for more, says in (
        (["--shard", "2/2", "--output", tmp_path / "x"], "shard is 2/2"),
        (["--server-model", "m", "--output", tmp_path / "x"], "server-model"),
        (["--server", url, "--method", "ngram", "--output", tmp_path / "x"], "method is ngram"),
    ):
        monkeypatch.setattr("sys.argv", [str(x) for x in common + more])
        with pytest.raises(SystemExit) as stopped:
            main()
        assert stopped.value.code == 2 and says in capsys.readouterr().err
