"""The choice as other engines take it."""

from __future__ import annotations

import json
from itertools import pairwise

import pytest

from slipstream.errors import OutputError
from slipstream.tune import exports
from slipstream.tune.optimum import PLAIN, Setting

TREE = Setting("eagle3", "dynamic", 24, 5, 4)
CHAIN = Setting("eagle3", "chain", 4, 4, 1)
LENGTHS = {1: 5, 2: 4, 4: 4, 8: 2, 16: 0, 32: 0}


def test_vllm_gets_a_chain_and_a_table_without_gaps():
    value = exports.vllm(TREE, LENGTHS, "folder")
    assert value["method"] == "eagle3" and value["model"] == "folder"
    assert value["num_speculative_tokens"] == 5
    table = value["num_speculative_tokens_per_batch_size"]
    assert table == [[1, 1, 5], [2, 7, 4], [8, 15, 2], [16, 32, 0]]
    assert all(one[1] + 1 == two[0] for one, two in pairwise(table))


def test_vllm_lookup_needs_no_model():
    value = exports.vllm(Setting("ngram", "chain", 6, 6, 1), {})
    assert value == {
        "method": "ngram",
        "num_speculative_tokens": 6,
        "prompt_lookup_min": 1,
        "prompt_lookup_max": 3,
    }


def test_sglang_flags_count_the_root():
    flags = exports.sglang_flags(TREE, "folder")
    pairs = dict(zip(flags[::2], flags[1::2], strict=True))
    assert pairs["--speculative-algorithm"] == "EAGLE3"
    assert pairs["--speculative-num-steps"] == "5"
    assert pairs["--speculative-num-draft-tokens"] == "25"
    chain = exports.sglang_flags(CHAIN)
    pairs = dict(zip(chain[::2], chain[1::2], strict=True))
    assert pairs["--speculative-eagle-topk"] == "1"
    assert pairs["--speculative-num-draft-tokens"] == "5"


def test_sglang_adaptive_may_always_stop_drafting():
    value = exports.sglang_adaptive(CHAIN, LENGTHS)
    assert value["1"]["candidate_steps"] == [0, 1, 3, 5]
    assert value["8"]["candidate_steps"] == [0, 1, 2]
    assert value["32"]["candidate_steps"] == [0]
    assert exports.sglang_adaptive(Setting("ngram", "chain", 4, 4, 1), LENGTHS) is None


@pytest.mark.parametrize("setting", [TREE, Setting("eagle3", "dynamic", 64, 2, 3)])
def test_openvino_trees_obey_its_rule(setting):
    config = exports.openvino(setting)["generation_config"]
    branches, depth = config["branching_factor"], config["tree_depth"]
    most = branches * branches * (depth - 1) + branches
    assert depth <= config["num_assistant_tokens"] <= most


def test_openvino_lookup_and_what_it_cannot_do():
    lookup = exports.openvino(Setting("ngram", "chain", 6, 6, 1))
    assert lookup["pipeline"] == {"prompt_lookup": True}
    assert exports.openvino(Setting("medusa", "best-first", 8, 4, 4)) is None


def test_tensorrt_stops_where_it_does_not_pay():
    value = exports.tensorrt(TREE, LENGTHS)["speculative_config"]
    assert value["decoding_type"] == "Eagle3" and value["max_draft_len"] == 5
    assert value["max_total_draft_tokens"] == 24 and value["max_concurrency"] == 8
    assert exports.tensorrt(Setting("medusa", "best-first", 8, 4, 4), LENGTHS) is None


def test_files_are_written_and_named(tmp_path):
    names = exports.write(tmp_path / "new", TREE, LENGTHS)
    assert names == sorted(path.name for path in (tmp_path / "new").iterdir())
    for name in names:
        if name.endswith(".json"):
            json.loads((tmp_path / "new" / name).read_text())
    assert "DRAFTER_FOLDER" in (tmp_path / "new" / "sglang_flags.txt").read_text()


def test_plain_decoding_exports_a_note_alone(tmp_path):
    assert exports.write(tmp_path, PLAIN, LENGTHS) == ["README.txt"]
    assert "Do not speculate" in (tmp_path / "README.txt").read_text()


def test_a_folder_that_cannot_be_written_is_one_error(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(OutputError):
        exports.write(tmp_path / "file", TREE, LENGTHS)
