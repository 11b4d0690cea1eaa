"""The choice in the words of other engines: vLLM, SGLang, OpenVINO GenAI, TensorRT-LLM.

Costs were measured here, on this engine; another one has other overheads. What carries over is the
drafter's acceptance on the user's prompts, and the shape that follows from it. Settings that an
engine cannot express are cut to its nearest, and the file says so.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path

from slipstream.errors import OutputError
from slipstream.tune.optimum import PLAIN, Setting

DRAFTER = "DRAFTER_FOLDER"
"""Stands for the checkpoint's folder where none is known."""

_VLLM = {
    "ngram": "ngram",
    "eagle": "eagle",
    "eagle2": "eagle",
    "hass": "eagle",
    "eagle3": "eagle3",
    "peagle": "eagle3",
    "medusa": "medusa",
    "chain": "draft_model",
    "dflash": "dflash",
    "ddtree": "dflash",
    "dspark": "dspark",
}
_SGLANG = {
    "ngram": "NGRAM",
    "eagle": "EAGLE",
    "eagle2": "EAGLE",
    "hass": "EAGLE",
    "eagle3": "EAGLE3",
    "chain": "STANDALONE",
    "dflash": "DFLASH",
    "ddtree": "DFLASH",
    "dspark": "DSPARK",
}
_TENSORRT = {
    "ngram": "NGram",
    "eagle": "Eagle",
    "eagle2": "Eagle",
    "hass": "Eagle",
    "eagle3": "Eagle3",
    "chain": "DraftTarget",
}
NGRAM_SIZES = (1, 3)  # shortest and longest n-gram that our lookup matches
LADDER = (1, 3, 5, 7)


def vllm(
    setting: Setting, lengths: Mapping[int, int], drafter: str = DRAFTER
) -> dict[str, object] | None:
    """`--speculative-config`: a chain, with its length by batch size; None where it has no method.

    Args:
        setting: the choice; vLLM drafts chains, so its depth counts.
        lengths: batch size to the chain's length, 0 for none.
        drafter: checkpoint folder.

    Example:
        >>> vllm(Setting("ngram", "chain", 4, 4, 1), {1: 4, 8: 0})["num_speculative_tokens"]
        4
    """
    if setting.method not in _VLLM:
        return None
    length = max([setting.depth, *lengths.values()])
    value: dict[str, object] = {"method": _VLLM[setting.method], "num_speculative_tokens": length}
    if setting.method == "ngram":
        value |= {"prompt_lookup_min": NGRAM_SIZES[0], "prompt_lookup_max": NGRAM_SIZES[1]}
    else:
        value["model"] = drafter
    if setting.method == "peagle":
        value["parallel_drafting"] = True
    table = ranges(lengths)
    if table:
        value["num_speculative_tokens_per_batch_size"] = table
    return value


def ranges(lengths: Mapping[int, int]) -> list[list[int]]:
    """[first batch size, last batch size, length]: without gaps, equal neighbours joined.

    A batch size that was not looked at gets what the next smaller one got.

    Example:
        >>> ranges({1: 4, 2: 4, 8: 2, 32: 0})
        [[1, 7, 4], [8, 31, 2], [32, 32, 0]]
    """
    sizes = sorted(lengths)
    table: list[list[int]] = []
    for place, size in enumerate(sizes):
        last = sizes[place + 1] - 1 if place + 1 < len(sizes) else size
        if table and table[-1][2] == lengths[size]:
            table[-1][1] = last
        else:
            table.append([size, last, lengths[size]])
    return table


def sglang_flags(setting: Setting, drafter: str = DRAFTER) -> list[str] | None:
    """Command-line flags; None where it has no algorithm for the method."""
    if setting.method not in _SGLANG:
        return None
    flags = ["--speculative-algorithm", _SGLANG[setting.method]]
    if setting.method != "ngram":
        flags += ["--speculative-draft-model-path", drafter]
    if _SGLANG[setting.method] in ("EAGLE", "EAGLE3", "STANDALONE"):
        topk = 1 if setting.tree == "chain" else setting.topk
        # With one child per node the engine wants exactly one token more than steps.
        total = setting.depth + 1 if topk == 1 else setting.budget + 1
        flags += [
            "--speculative-num-steps", str(setting.depth),
            "--speculative-eagle-topk", str(topk),
            "--speculative-num-draft-tokens", str(total),
        ]  # fmt: skip
    else:
        flags += ["--speculative-num-draft-tokens", str(setting.depth + 1)]
    return flags


def sglang_adaptive(setting: Setting, lengths: Mapping[int, int]) -> dict[str, object] | None:
    """`--speculative-adaptive-config`: steps to choose from, by batch size; EAGLE chains alone.

    Each batch size may choose among the shorter rungs of a ladder and its own best length; where
    the best is none, drafting is off.
    """
    if _SGLANG.get(setting.method) not in ("EAGLE", "EAGLE3") or not lengths:
        return None
    return {
        str(size): {
            "candidate_steps": _steps(length),
            "up_hysteresis": 0.0,
            "down_hysteresis": -0.25 if size == 1 else 0.0,
            "ceiling_coeff": 0,
        }
        for size, length in sorted(lengths.items())
    }


def _steps(length: int) -> list[int]:
    if length == 0:
        return [0]
    return sorted({0, length, *(rung for rung in LADDER if rung < length)})


def openvino(setting: Setting, drafter: str = DRAFTER) -> dict[str, object] | None:
    """Pipeline and generation settings of OpenVINO GenAI; None where it has none.

    Its trees obey b * b * (d - 1) + b >= n >= d for b branches, depth d and n drafted tokens.
    """
    if setting.method == "ngram":
        config = {"num_assistant_tokens": setting.depth, "max_ngram_size": NGRAM_SIZES[1]}
        return {"pipeline": {"prompt_lookup": True}, "generation_config": config}
    if setting.method == "chain" or (setting.method == "eagle3" and setting.tree == "chain"):
        config = {"num_assistant_tokens": setting.depth}
        return {"pipeline": {"draft_model": drafter}, "generation_config": config}
    if setting.method != "eagle3":
        return None
    depth, branches = setting.depth, setting.topk
    most = branches * branches * (depth - 1) + branches
    config = {
        "branching_factor": branches,
        "tree_depth": depth,
        "num_assistant_tokens": max(depth, min(setting.budget, most)),
    }
    return {"pipeline": {"draft_model": drafter}, "generation_config": config}


def tensorrt(
    setting: Setting, lengths: Mapping[int, int], drafter: str = DRAFTER
) -> dict[str, object] | None:
    """`speculative_config` of TensorRT-LLM; None where it has no decoding type."""
    if setting.method not in _TENSORRT:
        return None
    value: dict[str, object] = {
        "decoding_type": _TENSORRT[setting.method],
        "max_draft_len": setting.depth,
    }
    if setting.method != "ngram":
        value["speculative_model"] = drafter
    if setting.method == "eagle3" and setting.tree != "chain":
        value |= {
            "use_dynamic_tree": True,
            "dynamic_tree_max_topK": setting.topk,
            "max_total_draft_tokens": setting.budget,
        }
    pays = [size for size, length in lengths.items() if length > 0]
    if pays and len(pays) < len(lengths):
        value["max_concurrency"] = max(pays)
    return {"speculative_config": value}


def write(
    folder: Path, setting: Setting, lengths: Mapping[int, int], drafter: str | None = None
) -> list[str]:
    """Write what each engine takes into a folder that is empty or not there yet.

    Args:
        folder: for the files.
        setting: the choice; for plain decoding a note is written and no settings.
        lengths: batch size to the best chain's length.
        drafter: checkpoint folder.

    Returns:
        Names of the files.

    Raises:
        OutputError: the folder cannot be written.
    """
    place = drafter or DRAFTER
    values = {} if setting == PLAIN else {
        "vllm_speculative_config.json": vllm(setting, lengths, place),
        "sglang_adaptive.json": sglang_adaptive(setting, lengths),
        "openvino_genai.json": openvino(setting, place),
        "tensorrt_llm.json": tensorrt(setting, lengths, place),
    }  # fmt: skip
    files = {
        name: json.dumps(value, indent=2) + "\n"
        for name, value in values.items()
        if value is not None
    }
    flags = None if setting == PLAIN else sglang_flags(setting, place)
    if flags is not None:
        files["sglang_flags.txt"] = " ".join(flags) + "\n"
    files["README.txt"] = _note(setting, sorted(files))
    try:
        folder.mkdir(parents=True, exist_ok=True)
        for name, text in files.items():
            (folder / name).write_text(text, encoding="utf-8")
    except OSError as error:
        raise OutputError(
            f"cannot write the exports to {folder}: {error.strerror}", "choose another --export"
        ) from error
    return sorted(files)


def _note(setting: Setting, names: list[str]) -> str:
    if setting == PLAIN:
        return "Do not speculate here: plain decoding is as fast as anything that was measured.\n"
    lookup = (
        "The choice unites the drafter with prompt lookup, which these engines cannot; the "
        "drafter alone is exported.\n"
        if setting.lookup
        else ""
    )
    return (
        f"The choice: {setting.name}. Files: {', '.join(names) or 'none'}.\n{lookup}"
        "vLLM drafts chains: its length is the tree's depth, and by batch size what was predicted\n"
        "from this machine's pass times. Measure there before you rely on it.\n"
    )
