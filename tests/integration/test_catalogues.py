"""`methods`, `zoo` and `doctor`: their JSON keys, their exit status."""

import json

from slipstream import methods
from slipstream.cli import doctor
from slipstream.cli.zoo import read_zoo

METHOD_KEYS = {
    *("name", "title", "paper", "drafter", "model", "trees", "verifiers", "objective"),
    *("formats", "trainable", "lossless", "note"),
}


def test_methods(slipstream):
    code, out, _ = slipstream("methods", "--json")
    entries = json.loads(out)
    assert code == 0
    assert [entry["name"] for entry in entries] == [method.name for method in methods.all()]
    for entry in entries:
        assert set(entry) >= METHOD_KEYS
        assert set(entry["lossless"]) <= set(entry["verifiers"])
    code, out, _ = slipstream("methods")
    assert code == 0
    assert all(method.name in out for method in methods.all())


def test_zoo_reads_folders_that_have_weights(tmp_path):
    (tmp_path / "eagle3-tiny").mkdir()
    (tmp_path / "eagle3-tiny" / "model.safetensors").write_bytes(b"12345678")
    card = {"tau": 2.5, "trained_on": "answers", "model": "tiny", "method": "eagle3"}
    (tmp_path / "eagle3-tiny" / "card.json").write_text(json.dumps(card))
    (tmp_path / "half").mkdir()
    (entry,) = read_zoo(tmp_path)
    assert entry["name"] == "eagle3-tiny"
    assert (entry["model"], entry["method"], entry["size_bytes"]) == ("tiny", "eagle3", 8)
    assert (entry["tau"], entry["trained_on"]) == (2.5, "answers")
    assert entry["path"] == str(tmp_path / "eagle3-tiny")
    assert read_zoo(tmp_path / "nowhere") == []


def test_zoo_verb(slipstream):
    code, out, _ = slipstream("zoo", "--json")
    assert code == 0
    assert isinstance(json.loads(out), list)


def test_doctor_tells_a_failed_check(slipstream, monkeypatch):
    code, out, _ = slipstream("doctor", "--json")
    checks = json.loads(out)["checks"]
    assert {"name", "ok", "detail"} == set(checks[0])
    assert code == (0 if all(check["ok"] for check in checks) else 1)
    monkeypatch.setattr(doctor, "LOOKS", (lambda: doctor.Check("torch", False, "not there"),))
    code, out, _ = slipstream("doctor")
    assert code == 1
    assert "FAIL" in out and "not there" in out
