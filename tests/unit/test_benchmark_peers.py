"""The comparison with other engines: turns, errors and numbers; the engines run elsewhere."""

from __future__ import annotations

import argparse
import importlib
import json
import sys
import time
from pathlib import Path

import pytest

from slipstream.errors import OutputError

NAMES = ("talk", "catalogue", "turns", "summary", "run")
FOLDER = Path(__file__).resolve().parents[2] / "benchmarks" / "peers"
SIDE = """
import os
import sys
sys.path.insert(0, {folder!r})
from talk import serve

def make(job):
    if job["fault"] == "load":
        raise ValueError("no such model")
    def answer(ids, most):
        if job["fault"] == "answer":
            raise ValueError("out of words")
        print("chatter that is no reply")
        if job["fault"] == "place":
            return {{"place": dict(os.environ)}}
        return {{"tokens": [ids[0] + i for i in range(most)] + [2, 9], "passes": most - 1}}
    return answer

serve(make, "pip")
"""


@pytest.fixture(scope="module")
def peers():
    sys.path.insert(0, str(FOLDER))
    yield {name: importlib.import_module(name) for name in NAMES}
    sys.path.remove(str(FOLDER))
    for name in NAMES:
        del sys.modules[name]


@pytest.fixture
def start(peers, tmp_path):
    script = tmp_path / "side.py"
    script.write_text(SIDE.format(folder=str(FOLDER)))
    sides = []

    def begin(fault=None):
        made = peers["talk"].Side(
            Path(sys.executable), script, {"fault": fault}, threads=1, patience=60
        )
        sides.append(made)
        return made

    yield begin
    for side in sides:
        side.close()


def samples(tokens, seconds=1.0, passes=None):
    return [{"tokens": each, "seconds": seconds, "passes": passes} for each in tokens]


def test_a_side_answers(start):
    side = start()
    said = side.ask([10, 11], 3)
    assert said["tokens"] == [10, 11, 12, 2, 9] and said["passes"] == 2 and said["seconds"] >= 0
    assert side.versions["pip"]


def test_a_side_has_its_own_defaults_and_stands_still_between_turns(start, monkeypatch):
    monkeypatch.setenv("OMP_WAIT_POLICY", "PASSIVE")  # as importing slipstream does
    side = start("place")
    place = side.ask([1], 1)["place"]
    assert "OMP_WAIT_POLICY" not in place and place["OMP_NUM_THREADS"] == "1"
    stat = Path(f"/proc/{side._process.pid}/stat")
    if stat.exists():
        for _ in range(100):
            state = stat.read_text().rpartition(")")[2].split()[0]
            if state == "T":
                break
            time.sleep(0.05)
        assert state == "T"


def test_a_side_that_fails_says_why(peers, start):
    with pytest.raises(peers["talk"].SideError, match="exit status 1: ValueError: no such model"):
        start("load")
    side = start("answer")
    with pytest.raises(peers["talk"].SideError, match="out of words"):
        side.ask([1], 1)
    with pytest.raises(peers["talk"].SideError, match="out of words"):
        side.ask([1], 1)


def test_a_side_that_fails_drops_out(peers, start):
    good, bad = ("ours", "none int4"), ("llama", "plain")
    errors = {}
    sides = {good: start(), bad: start("answer")}
    replies = peers["turns"].take_turns(sides, [([10], 1), ([20], 3)], errors)
    assert list(replies) == [good] and "out of words" in errors[bad]
    assert [each["tokens"] for each in replies[good]] == [[10, 2, 9], [20, 21, 22, 2, 9]]
    cut = peers["summary"].answers(replies[good][1:], [2])
    assert [each["tokens"] for each in cut] == [[20, 21, 22]]


def test_a_side_that_cannot_start_is_noted(peers, tmp_path):
    errors = {}
    peer = peers["catalogue"].Peer("bfloat16", ("plain",))
    sides = peers["turns"].start(
        {("nobody", "plain"): peer}, {}, errors, environments=tmp_path, threads=1
    )
    assert not sides and "exit status 2" in errors["nobody", "plain"]


def test_a_row_beside_our_plain_decoding(peers):
    plain = samples([[1, 2, 3, 4], [5, 6, 7, 8]])
    row = peers["summary"].row("lookup", samples([[1, 2, 3, 4], [5, 6, 0, 8]], 0.5, 2), plain)
    assert row["tokens_per_second"] == 8.0 and row["times_our_plain"] == 2.0
    assert row["times_our_plain_ci"] == (2.0, 2.0)
    assert row["tau"] == 1.5 and row["identical"] == 1 and row["common_share"] == 0.75
    assert peers["summary"].row("plain", plain, plain)["tau"] is None


def test_our_lead_goes_through_the_common_yardstick(peers):
    lead = peers["summary"].lead
    ours = [
        {"variant": "none bfloat16", "tokens_per_second": 50.0},
        {"variant": "ngram bfloat16", "tokens_per_second": 75.0},
        {"variant": "none int4", "tokens_per_second": 80.0},
        {"variant": "eagle3 int8", "tokens_per_second": 120.0},
    ]
    assert lead(ours, "bfloat16", {"times_our_plain": 0.5}) == 3.0
    assert lead(ours, "int4", {"times_our_plain": 1.0}) == 1.5
    assert lead([], "int4", {"times_our_plain": 1.0}) is None


def test_a_file_of_another_run_is_not_mixed_in(peers, tmp_path):
    out = tmp_path / "peers.json"
    asked = argparse.Namespace(model="m", tasks="mt_bench", limit=2, tokens=8, threads=1, out=out)
    report = peers["run"].begin(asked)
    assert report["peers"] == {}
    out.write_text(json.dumps(report))
    assert peers["run"].begin(asked) == report
    asked.limit = 3
    with pytest.raises(OutputError, match="holds a run with"):
        peers["run"].begin(asked)
    out.write_text("{}")
    with pytest.raises(OutputError, match="holds no run"):
        peers["run"].begin(asked)
    asked.out = tmp_path / "nowhere" / "peers.json"
    with pytest.raises(OutputError, match="does not exist"):
        peers["run"].begin(asked)


def test_every_peer_has_its_side(peers):
    catalogue = peers["catalogue"]
    for name, peer in catalogue.PEERS.items():
        assert catalogue.script(name).is_file() and peer.variants
        assert f"none {peer.dtype}" in catalogue.PEERS[catalogue.OURS].variants
