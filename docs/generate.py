"""Write the generated parts of the README and the docs. `make docs` runs it, a test checks them.

A generated part lies between `<!-- generated: NAME -->` and `<!-- /generated -->`. Its text comes
from the code, from committed results and from nowhere else.
"""

from __future__ import annotations

import ast
import inspect
import json
import re
import sys
from collections import defaultdict
from collections.abc import Callable, Iterator
from pathlib import Path

import torch

import slipstream
from slipstream import methods
from slipstream.bench.results import KIND, dumps
from slipstream.bench.studies import STUDIES, judge, rows_of
from slipstream.cli.main import VERBS, load_verb
from slipstream.engine.engine import Engine
from slipstream.engine.request import Result
from slipstream.report.charts import line_chart
from slipstream.report.drafting_figures import of_confidence
from slipstream.report.figures import accepted_lengths, machine, of_bench, speedups
from slipstream.train import recipes
from slipstream.trees.choices import EAGLE1, MEDUSA
from slipstream.trees.dynamic import DynamicBuilder
from slipstream.trees.mask import ancestors
from slipstream.trees.sequoia import DEFAULT_ACCEPTANCE, best, expected
from slipstream.trees.static import chain, complete
from slipstream.types import DraftTree

ROOT = Path(__file__).resolve().parents[1]
PACKAGE = ROOT / "src" / "slipstream"
BLOCK = re.compile(r"(<!-- generated: ([\w-]+) -->\n).*?(<!-- /generated -->)", re.DOTALL)
MAIN, FAMILY, SAMPLED = "mt_bench_greedy", "family_greedy", "family_sampled"
# What papers report for a setup: tokens a pass and speed-up on MT-bench at temperature 0 (unless
# stated), and where. Table 1 of EAGLE-3's paper (arXiv:2503.01840) has most of them: Vicuna-13B.
REPORTED = {
    "ngram": "1.63, 1.58× ¹",
    "lookahead": "1.69, 1.65× ¹",
    "medusa": "2.59, 2.07× ¹",
    "chain": "2.27, 1.93× ¹",
    "specinfer": "1.5–2.8× (several GPUs)",
    "sequoia": "5.08, 4.04× (Llama 2 7B)",
    "eagle": "3.98, 3.07× ¹",
    "eagle2": "4.83, 4.26× ¹",
    "hass": "5.15, 3.24× (Llama 2 7B)",
    "eagle3": "6.65, 5.58× ¹",
    "dflash": "4.24, 2.75× (Qwen3 8B)",
    "ddtree": "4.10× (Qwen3 8B)",
    "dspark": "3.72 (Qwen3 8B, T = 1)",
}
_PARTS = ("draft", "target", "other")
ACCEPTANCE = "benchmarks/results/acceptance.json"
DRAFT_COST = "benchmarks/results/draft_cost.json"
ARXIV = re.compile(r"arXiv:(\d{4}\.\d{5})")
PAPERS = {
    "1706.04599": "Guo et al., On Calibration of Modern Neural Networks",
    "2106.09685": "Hu et al., LoRA",
    "2211.17192": "Leviathan et al., Fast Inference from Transformers via Speculative Decoding",
    "2302.01318": "Chen et al., Accelerating LLM Decoding with Speculative Sampling",
    "2302.13971": "Touvron et al., LLaMA",
    "2305.09781": "Miao et al., SpecInfer",
    "2309.00071": "Peng et al., YaRN",
    "2309.06180": "Kwon et al., PagedAttention",
    "2310.08461": "Zhou et al., DistillSpec",
    "2310.15141": "Sun et al., SpecTr",
    "2401.07851": "Xia et al., Spec-Bench",
    "2401.10774": "Cai et al., Medusa",
    "2401.15077": "Li et al., EAGLE",
    "2402.02057": "Fu et al., Lookahead decoding",
    "2402.12374": "Chen et al., Sequoia",
    "2403.10444": "Sun et al., Block Verification",
    "2406.14066": "Liu et al., SmartSpec",
    "2406.16858": "Li et al., EAGLE-2",
    "2408.07978": "Daliri et al., Coupling without Communication",
    "2408.15766": "Zhang et al., HASS",
    "2502.18779": "Hu et al., Towards Optimal Multi-draft Speculative Decoding",
    "2503.01840": "Li et al., EAGLE-3",
    "2505.12398": "Weng et al., Traversal Verification",
    "2506.05632": "Rowan et al., List-Level Distribution Coupling",
    "2510.13161": "Bhendawade et al., Mirror Speculative Decoding",
    "2602.01469": "Hui et al., P-EAGLE",
    "2602.06036": "Chen et al., DFlash",
    "2604.12989": "Ringel and Romano, DDTree",
    "2605.18810": "D-PACE: acceptance-aware weights of block positions",
    "2606.01813": "CaDDTree",
    "2607.05147": "DeepSeek, DSpark",
    "2608.02123": "PCTree: path-conditioned draft trees",
    "2609.39972": "UBTree: a bigram selector for draft trees",
}


def main() -> int:
    """Rewrite every figure and every file that has generated parts; 0."""
    for path, text in (pictures() | shipped_studies()).items():
        path.write_text(text, encoding="utf-8")
    for path in pages():
        text = path.read_text(encoding="utf-8")
        path.write_text(render(text), encoding="utf-8")
    return 0


def pages() -> list[Path]:
    """Files that have generated parts."""
    found = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
    return [path for path in found if BLOCK.search(path.read_text(encoding="utf-8"))]


def render(text: str) -> str:
    """The text with every generated part made anew.

    Raises:
        KeyError: a part has a name that nobody makes.
    """
    return BLOCK.sub(lambda found: found[1] + PARTS[found[2]]().rstrip() + "\n" + found[3], text)


def method_table() -> str:
    """One line per method."""
    lines = ["| method | paper | trees | trained here | reads | |", "|---|---|---|---|---|---|"]
    for method in methods.all():
        page = f"[`{method.name}`](docs/methods/{method.name}.md)"
        trained = "yes" if method.is_trainable else ""
        formats = ", ".join(method.formats)
        trees = ", ".join(method.trees) if method.budget else ""
        cells = (page, _linked(method.paper), trees, trained, formats, method.note)
        lines.append("| " + " | ".join(cells) + " |")
    return "\n".join(lines)


def method_record(name: str) -> str:
    """A method's record as a table."""
    method = methods.get(name)
    rows = [
        ("paper", _linked(method.paper)),
        ("drafter", f"`{method.drafter}`"),
        ("draft network", f"`{method.model}`" if method.model else ""),
        ("objective", f"`{method.objective}`" if method.objective else ""),
        ("trees", ", ".join(method.trees)),
        ("verifiers", ", ".join(methods.marked(method.verifiers))),
        ("checkpoints", ", ".join(method.formats)),
    ]
    if method.budget:
        defaults = f"tree {method.tree}, budget {method.budget}, depth {method.depth}"
        rows.append(("defaults", defaults + (f", topk {method.topk}" if method.topk > 1 else "")))
    return "\n".join(
        ["| | |", "|---|---|", *(f"| {key} | {value} |" for key, value in rows if value)]
    )


def layout() -> str:
    """The package as an annotated tree: every module with the first line of its docstring."""
    lines = ["```text", "src/slipstream/"]
    files = sorted(PACKAGE.rglob("*.py"), key=lambda p: (len(p.relative_to(PACKAGE).parts) > 1, p))
    shown = set()
    for path in files:
        inner = path.relative_to(PACKAGE)
        for depth, folder in enumerate(inner.parts[:-1]):
            place = inner.parts[: depth + 1]
            if place not in shown:
                shown.add(place)
                note = _first_line(PACKAGE.joinpath(*place) / "__init__.py")
                lines.append(f"{'    ' * (depth + 1)}{folder + '/':<22}{note}".rstrip())
        if path.name != "__init__.py" or len(inner.parts) == 1:
            depth = len(inner.parts)
            lines.append(f"{'    ' * depth}{path.name:<22}{_first_line(path)}".rstrip())
    return "\n".join([*lines, "```"])


def commands() -> str:
    """Every verb with its options and defaults."""
    return "\n\n".join(part for verb in VERBS for part in _command(verb, load_verb(verb)))


def papers() -> str:
    """Every paper the code cites, and the files that do."""
    cited = defaultdict(set)
    for path in sorted(PACKAGE.rglob("*.py")):
        if path.name == "methods.py":
            continue
        for number in ARXIV.findall(path.read_text(encoding="utf-8")):
            cited[number].add(path.relative_to(ROOT).as_posix())
    lines = ["| paper | where |", "|---|---|"]
    for number in sorted(cited):
        files = ", ".join(f"`{file}`" for file in sorted(cited[number]))
        name = PAPERS.get(number, "")
        lines.append(f"| {name} [arXiv:{number}](https://arxiv.org/abs/{number}) | {files} |")
    return "\n".join(lines)


def measured() -> str:
    """The main bench result with its conditions; the others are on their own pages."""
    parts = [_result(path, value) for path, value in _benches() if path.stem == MAIN]
    return "\n\n".join(parts) or "No result is committed yet; `slipstream bench` makes one."


def family() -> str:
    """Every method on every task: tokens a pass and speed-up."""
    path, value = _family()
    tasks = list(dict.fromkeys(row["task"] for row in value["rows"]))
    found = {(row["method"], row["task"]): row for row in value["rows"]}
    setups = list(dict.fromkeys(row["method"] for row in value["rows"]))
    lines = [
        f"| setup | {' | '.join(tasks)} | draft / target / other | papers report |",
        "|---" * (len(tasks) + 3) + "|",
    ]
    for setup in setups:
        rows = [found[setup, task] for task in tasks]
        cells = [
            f"{row['tau']:.2f} ({row['tau_ci'][0]:.2f}\u2013{row['tau_ci'][1]:.2f}), "
            f"{row['speedup']:.2f}\u00d7"
            for row in rows
        ]
        parts = [sum(row[f"{part}_seconds"] for row in rows) for part in _PARTS]
        shares = " / ".join(f"{100 * part / sum(parts):.0f}%" for part in parts)
        reported = "" if ":chain" in setup else REPORTED.get(re.split(r"[+:]", setup)[0], "")
        lines.append(f"| `{setup}` | {' | '.join(cells)} | {shares} | {reported} |")
    where, file = value["environment"], path.relative_to(ROOT).as_posix()
    counts = ", ".join(map(str, sorted({row["num_prompts"] for row in value["rows"]})))
    same = sum(row["identical"] + row["ties"] for row in value["rows"])
    total = sum(row["num_prompts"] for row in value["rows"])
    return "\n".join(lines) + (
        f"\n\n[`{file}`](../{file}): tokens per pass with 95% intervals over prompts, speed-up "
        f"over plain decoding in the same run. {where['model']}, {where['dtype']}, "
        f"{machine(where)}, {where['num_threads']} threads, {counts} prompts a task, "
        f"{value['settings']['max_new_tokens']} new tokens, greedy; {same} of {total} answers are "
        "plain decoding's. Last column: tokens per pass and speed-up on MT-bench, greedy, as each "
        "paper gives them, from GPUs and drafters trained on far more; ¹ Vicuna 13B, Table 1 of "
        "EAGLE-3's paper ([arXiv:2503.01840](https://arxiv.org/abs/2503.01840)); SpecInfer, "
        "Sequoia and HASS over several tasks."
    )


def family_sampled() -> str:
    """The same at temperature 1, on fewer prompts: tokens a pass and speed-up."""
    found = [(path, value) for path, value in _benches() if path.stem == SAMPLED]
    if not found:
        return "No result is committed yet."
    ((path, value),) = found
    tasks = list(dict.fromkeys(row["task"] for row in value["rows"]))
    lines = [f"| setup | {' | '.join(tasks)} |", "|---" * (len(tasks) + 1) + "|"]
    for setup in dict.fromkeys(row["method"] for row in value["rows"]):
        rows = {row["task"]: row for row in value["rows"] if row["method"] == setup}
        cells = [f"{rows[task]['tau']:.2f}, {rows[task]['speedup']:.2f}\u00d7" for task in tasks]
        lines.append(f"| `{setup}` | {' | '.join(cells)} |")
    where, file = value["environment"], path.relative_to(ROOT).as_posix()
    counts = ", ".join(map(str, sorted({row["num_prompts"] for row in value["rows"]})))
    exact = [row for row in value["rows"] if row["identical"] is not None]
    same = sum(row["identical"] + row["ties"] for row in exact)
    return "\n".join(lines) + (
        f"\n\n[`{file}`](../{file}): {counts} prompts a task, else as above; the drawn rules of "
        "`specinfer` and `sequoia` keep the law and say other tokens, of the rest "
        f"{same} of {sum(row['num_prompts'] for row in exact)} answers are plain decoding's with "
        f"the same noise. {where['model']}, {where['dtype']}, {machine(where)}."
    )


def claims() -> str:
    """What the family's papers claim of each other, by a paired bootstrap over prompts."""
    _, value = _family()
    lines = ["| claim | tokens a pass, ratio | | `slipstream study` |", "|---|---|---|---|"]
    for study in STUDIES.values():
        found = judge(study, value)
        low, high = found["result"]["interval"]
        what = (
            f"{study.claim}: `{study.methods[0]}` over `{study.methods[1]}`"
            if study.best_task is None
            else f"{study.claim}: `{study.methods[0]}` there over its best other task"
        )
        ratio = f"{found['result']['ratio']:.3f} ({low:.3f}\u2013{high:.3f})"
        lines.append(f"| {what} | {ratio} | {found['verdict']} | `{study.name}` |")
    return "\n".join(lines)


def _family() -> tuple[Path, dict]:
    """The committed comparison of all methods."""
    return next((path, value) for path, value in _benches() if path.stem == FAMILY)


def method_measured(name: str) -> str:
    """A method's lines of the committed bench results, its settings and unions included."""
    parts = []
    for path, value in _benches():
        rows = [row for row in value["rows"] if re.split(r"[+:]", row["method"])[0] == name]
        if not rows:
            continue
        lines = [
            "| task | setup | T | rows | tokens/pass | speed-up |",
            "|---|---|---|---|---|---|",
        ]
        for row in rows:
            tau, speedup = (
                f"{row[key]:.2f} ({row[f'{key}_ci'][0]:.2f}\u2013{row[f'{key}_ci'][1]:.2f})"
                for key in ("tau", "speedup")
            )
            setup = f"`{row['method']}`" + _nodes_of(value, row["method"])
            lines.append(
                f"| {row['task']} | {setup} | {row['temperature']:g} | {row['num_rows']} | {tau} "
                f"| {speedup} |"
            )
        where, file = value["environment"], path.relative_to(ROOT).as_posix()
        place = f"{where['dtype']}, {machine(where)}, {where['num_threads']} threads"
        counts = "/".join(map(str, sorted({row["num_prompts"] for row in rows})))
        length = value["settings"]["max_new_tokens"]
        asked = f"{counts} prompts a task, {length} new tokens"
        source = f"[`{file}`](../../{file}): {where['model']}, {place}, {asked}."
        lines += ["", f"{source} 95% intervals over prompts."]
        parts.append("\n".join(lines))
    return "\n\n".join(parts) or "No committed result holds this method yet."


def _nodes_of(value: dict, method: str) -> str:
    """How many nodes a setup drafted, where its name does not say: defaults change."""
    found = value["settings"]["methods"].get(method, {})
    record = methods.get(found["method"]) if found else None
    is_block = record is not None and record.has_width and found["tree"] == "chain"
    if "budget" in method or not found.get("budget") or found.get("auto") or is_block:
        return ""
    return f" ({found['budget']} nodes)"


def pictures() -> dict[Path, str]:
    """Every figure of the committed bench results, by the file it belongs in."""
    drawn = {}
    for path, value in _benches():
        drawn[path.with_suffix(".svg")] = speedups(value)
        for figure in of_bench(value):
            drawn[ROOT / "docs" / "images" / f"{path.stem}-{figure.name}.svg"] = figure.svg
    for name, found in _committed("confidence")[1]["methods"].items():
        for figure in of_confidence(found, name):
            drawn[ROOT / "docs" / "images" / f"{figure.name}-{name}.svg"] = figure.svg
    if (ROOT / DRAFT_COST).is_file():
        drawn[ROOT / "docs" / "images" / "draft-latency.svg"] = draft_latency()
    return drawn


def shipped_studies() -> dict[Path, str]:
    """What `slipstream study --show` tells: the family's result, claim by claim."""
    _, value = _family()
    folder, written = PACKAGE / "assets" / "studies", {}
    for study in STUDIES.values():
        written[folder / f"{study.name}.json"] = dumps(judge(study, value))
        written[folder / f"{study.name}.svg"] = accepted_lengths(rows_of(study, value))
    return written


def result_figures() -> str:
    """The figures of every committed bench result, for a page in `docs/`."""
    parts = []
    for path, value in _benches():
        parts.append(f"### [`{path.stem}`](../{path.relative_to(ROOT).as_posix()})")
        for figure in of_bench(value):
            image = f"images/{path.stem}-{figure.name}.svg"
            parts.append(f"![{path.stem}, {figure.name}]({image})\n\n{figure.caption}")
    return "\n\n".join(parts)


def _benches() -> Iterator[tuple[Path, dict]]:
    """The committed bench results."""
    for path in sorted((ROOT / "benchmarks" / "results").glob("*.json")):
        value = json.loads(path.read_text(encoding="utf-8"))
        if isinstance(value, dict) and value.get("kind") == KIND:
            yield path, value


def verifiers() -> str:
    """Every rule: what it judges and where it is."""
    lines = [
        "| `--verifier` | children | trees | lossless | where | |",
        "|---|---|---|---|---|---|",
    ]
    for name, reference in methods.VERIFIERS.items():
        children, path = methods.CHILDREN[name], _module_file(reference)
        trees = ", ".join(methods.FIXED_TREES)
        if children == "chosen":
            trees = "any"
        elif name in methods.FOR_CHAINS:
            trees = "chain"
        lossless = "no" if name in methods.LOSSY else "yes"
        link = f"[`{path.name}`](../{path.relative_to(ROOT).as_posix()})"
        cells = (f"`{name}`", children, trees, lossless, link, _first_line(path))
        lines.append("| " + " | ".join(cells) + " |")
    return "\n".join(lines)


def draft_latency() -> str:
    """Milliseconds to draft so many tokens, a line for each network, as an SVG chart."""
    value = json.loads((ROOT / DRAFT_COST).read_text(encoding="utf-8"))
    series: dict[str, list[tuple[float, float]]] = {}
    for row in value["rows"]:
        points = series.setdefault(f"{row['method']}, {_layers(row['layers'])}", [])
        points.append((row["tokens"], 1000 * row["seconds"]))
    return line_chart(
        series, title="Draft latency", x_label="drafted tokens", y_label="milliseconds"
    )


def _layers(count: int) -> str:
    return f"{count} layer{'s' if count > 1 else ''}"


def draft_cost() -> str:
    """The committed cost of drafting: milliseconds by network and length, counts beside them."""
    if not (ROOT / DRAFT_COST).is_file():
        return f"No result is committed yet; `python benchmarks/draft_cost.py --out {DRAFT_COST}`."
    value = json.loads((ROOT / DRAFT_COST).read_text(encoding="utf-8"))
    lines = [
        "![Draft latency](images/draft-latency.svg)",
        "",
        "| network | tokens | ms | passes | products with the head | operations |",
        "|---|---|---|---|---|---|",
    ]
    for row in value["rows"]:
        name = f"{row['method']}, {_layers(row['layers'])}"
        counts = f"{row['passes']} | {row['head_calls']} | {row['dispatches']}"
        lines.append(f"| {name} | {row['tokens']} | {1000 * row['seconds']:.2f} | {counts} |")
    where = value["environment"]
    lines += [
        "",
        f"[`{DRAFT_COST}`](../{DRAFT_COST}): the shape of {where['model']}, {where['dtype']}, "
        f"{machine(where)}, {where['num_threads']} threads, draft vocabulary of "
        f"{value['draft_vocab_size']}, {value['context']} tokens of context; medians of "
        f"{value['rounds']} drafts.",
    ]
    return "\n".join(lines)


def block_sampling() -> str:
    """Tokens a pass of a block drafter above temperature 0, by how its children come about."""
    name = "benchmarks/results/block_sampling.json"
    if not (ROOT / name).is_file():
        return "No result is committed yet."
    value = json.loads((ROOT / name).read_text(encoding="utf-8"))
    lines = ["| children, rule | tokens/pass (95%) |", "|---|---|"]
    for row in value["rows"]:
        low, high = row["interval"]
        lines.append(f"| {row['way']} | {row['tau']:.2f} ({low:.2f}\u2013{high:.2f}) |")
    how, where = value["settings"], value["environment"]
    return "\n".join(lines) + (
        f"\n\n[`{name}`](../{name}): `python benchmarks/block_sampling.py`, {where['model']}, "
        f"{where['dtype']}, {how['prompts']} prompts of {how['task']}, {how['tokens']} tokens an "
        f"answer, temperature {how['temperature']:g}, at most {how['budget']} drafted nodes."
    )


def mirror() -> str:
    """What drafting beside the target's last layers would give, exit by exit."""
    name = "benchmarks/results/mirror.json"
    if not (ROOT / name).is_file():
        return "No result is committed yet."
    value = json.loads((ROOT / name).read_text(encoding="utf-8"))
    serial, parts, how = value["serial"], value["parts"], value["settings"]
    counts = list(dict.fromkeys(row["candidates"] for row in value["rows"]))
    head = " | ".join(f"{n} candidate{'s' if n > 1 else ''}" for n in counts)
    lines = [f"| exit behind layer | {head} |", "|---" * (len(counts) + 1) + "|"]
    for layer in dict.fromkeys(row["layer"] for row in value["rows"]):
        cells = [
            f"{row['hits']:.0%}, {row['over_serial']:.2f}×, {row['speedup']:.2f}×"
            for row in value["rows"]
            if row["layer"] == layer
        ]
        lines.append(f"| {layer} of {parts['num_layers']} | {' | '.join(cells)} |")
    where = value["environment"]
    hidden = max(parts["target_seconds"], parts["draft_seconds"]) + parts["other_seconds"]
    return "\n".join(lines) + (
        f"\n\nIn each cell: steps whose token the exit named, speed over the same drafter on one "
        f"device, speed over plain decoding. On one device a step takes "
        f"{1000 * serial['seconds']:.1f} ms, {1000 * parts['draft_seconds']:.1f} of them to draft, "
        f"gives {parts['tau']:.2f} tokens and is {serial['speedup']:.2f} times plain decoding; "
        f"with every draft hidden it would be {serial['seconds'] / hidden:.2f} times as fast. "
        f"[`{name}`](../{name}): `python benchmarks/mirror.py`, {where['model']}, "
        f"{where['dtype']}, {machine(where)}, {where['num_threads']} threads, chains of "
        f"{how['depth']}, "
        f"{how['prompts']} prompts of {how['task']}, {how['tokens']} tokens an answer, greedy."
    )


def ablations(stem: str) -> str:
    """What changing one setting of a short training does."""
    name = f"benchmarks/results/ablations_{stem}.json"
    if not (ROOT / name).is_file():
        return "No result is committed yet."
    value = json.loads((ROOT / name).read_text(encoding="utf-8"))
    lines = [
        "| changed | tau of a chain | prefix accuracy | million own tokens | seconds |",
        "|---|---|---|---|---|",
    ]
    for row in value["rows"]:
        accuracy = " / ".join(f"{each:.3f}" for each in row["held_out_prefix_accuracy"][:3])
        lines.append(
            f"| {row['name']} | {row['chain_tau']:.3f} | {accuracy} | {row['tokens'] / 1e6:.2f} | "
            f"{row['seconds']:.0f} |"
        )
    how, where = value["settings"], value["environment"]
    start = f" from `{how['drafter']}` on" if how.get("drafter") else ""
    return "\n".join(lines) + (
        f"\n\n[`{name}`](../{name}): `python benchmarks/ablations.py --method {how['method']}`, "
        f"{how['model']}, {how['steps']:,} steps of {how['rows']} packed rows{start}, "
        f"{how['precision']}, "
        f"{where['cpu']}, {where['num_cores']} threads; other work took at most "
        f"{max(row['others_share'] or 0 for row in value['rows']):.0%} of the processors."
    )


def confidence(name: str) -> str:
    """A method's figures of confidence and of acceptance by place, for its page."""
    file, value = _committed("confidence")
    parts = [
        f"![{figure.name}](../images/{figure.name}-{name}.svg)\n\n{figure.caption}"
        for figure in of_confidence(value["methods"][name], name)
    ]
    where, how = value["environment"], value["settings"]
    parts.append(
        f"[`{file}`](../../{file}): `python benchmarks/confidence.py`, "
        f"{where['model']}, {where['dtype']}, {how['limit']} prompts each of {how['tasks']}, "
        f"{how['tokens']} tokens an answer at temperature {how['temperature']:g}; a tree of fixed "
        f"shape, {how['topk']} children a node, {how['depth']} deep."
    )
    return "\n\n".join(parts)


def zoo() -> str:
    """What ships, from the cards."""
    lines = [
        "| drafter | MB | steps | million tokens | minutes | tau of a chain | tau while decoding |",
        "|---|---|---|---|---|---|---|",
    ]
    cards = [
        json.loads(path.read_text(encoding="utf-8"))
        for path in sorted((ROOT / "zoo").glob("*/card.json"))
    ]
    for card in sorted(cards, key=lambda card: card["held_out"]["chain_tau"]):
        folder = f"{card['method']}-{card['model']}"
        weights = ROOT / "zoo" / folder / "model.safetensors"
        held, before = card["held_out"], card.get("started_from")
        shown = {
            "steps": lambda of: f"{of['steps']:,}",
            "tokens": lambda of: f"{of['tokens'] / 1e6:.2f}",
            "seconds": lambda of: f"{of['seconds'] / 60:.0f}",
        }
        cells = [say(card) + (f" after {say(before)}" if before else "") for say in shown.values()]
        lines.append(
            f"| [`{card['method']}`](../zoo/{folder}/README.md) "
            f"| {weights.stat().st_size / 1e6:.0f} | {' | '.join(cells)} "
            f"| {held['chain_tau']:.2f} | {held['tau']:.2f} |"
        )
    return "\n".join(lines)


def acceptance() -> str:
    """The committed comparison of rules: a table per number of children, the most in bold."""
    if not (ROOT / ACCEPTANCE).is_file():
        return f"No result is committed yet; `python benchmarks/acceptance.py --out {ACCEPTANCE}`."
    value = json.loads((ROOT / ACCEPTANCE).read_text(encoding="utf-8"))
    found = {(r["children"], r["temperature"], r["rule"]): r["acceptance"] for r in value["rows"]}
    rules = list(dict.fromkeys(row["rule"] for row in value["rows"]))
    parts = []
    for count in sorted({row["children"] for row in value["rows"]}):
        head = f"{count} {'child' if count == 1 else 'children'}"
        lines = [f"| {head}, temperature | {' | '.join(rules)} |", "|---" * (len(rules) + 1) + "|"]
        for temperature in sorted({row["temperature"] for row in value["rows"]}):
            cells = [f"{found[count, temperature, rule]:.3f}" for rule in rules]
            most = max(cell for rule, cell in zip(rules, cells, strict=True) if rule != "bound")
            shown = [
                f"**{cell}**" if cell == most and rule != "bound" else cell
                for rule, cell in zip(rules, cells, strict=True)
            ]
            lines.append(f"| {temperature:g} | {' | '.join(shown)} |")
        parts.append("\n".join(lines))
    where, how = value["environment"], value["settings"]
    error = max(row["standard_error"] for row in value["rows"])
    parts.append(
        f"[`{ACCEPTANCE}`](../{ACCEPTANCE}): probability that a child of one node is kept, mean of "
        f"{value['num_positions']} recorded positions ({where['model']} in {where['dtype']} with "
        f"the zoo's EAGLE-3, {how['prompts']} prompts of {how['task']}, answers of {how['tokens']} "
        f"tokens at temperature {how['temperature']:g}); standard error at most {error:.3f}, the "
        "same positions in every cell."
    )
    return "\n\n".join(parts)


def engines() -> str:
    """The committed comparisons with other engines, a line each."""
    lines = [
        "| engine | method | draft | ours | theirs | difference (95%) | same answers |",
        "|---|---|---|---|---|---|---|",
    ]
    for path in sorted((ROOT / "benchmarks" / "results").glob("engines_*.json")):
        value = json.loads(path.read_text(encoding="utf-8"))
        shape, (low, high) = value["shape"], value["difference_ci"]
        draft = f"chain of {shape['budget']}"
        if shape["tree"] != "chain":
            draft = f"tree of {shape['budget']}, {shape['topk']} wide, {shape['depth']} deep"
        named = {n: v for n, v in value["versions"].items() if not n.startswith("ours")}
        name, version = next(iter(named.items()))
        cells = (
            f"[{name} {version}](../{path.relative_to(ROOT).as_posix()})",
            value["method"],
            draft,
            f"{value['ours']:.3f}",
            f"{value['theirs']:.3f}",
            f"{value['difference']:+.3f} ({low:+.3f} to {high:+.3f})",
            f"{value['same_answers']} of {value['num_prompts']}",
        )
        lines.append("| " + " | ".join(cells) + " |")
    return "\n".join(lines)


def _committed(name: str) -> tuple[str, dict]:
    """A committed result file, from the project's folder, and what is in it."""
    path = ROOT / "benchmarks" / "results" / f"{name}.json"
    return path.relative_to(ROOT).as_posix(), json.loads(path.read_text(encoding="utf-8"))


def peers() -> str:
    """The committed comparison with other engines on the same prompts."""
    file, value = _committed("peers")
    lines = [
        "| engine | decodes | tokens/s | of our plain decoding, same weights | our best over it |",
        "|---|---|---|---|---|",
    ]
    for name, found in value["peers"].items():
        versions = found["versions"]
        version = next(iter(versions.values())) if versions and name != "ours" else ""
        for row in found["rows"]:
            times = f"{row['times_our_plain']:.2f}"
            if name != "ours":
                low, high = row["times_our_plain_ci"]
                times += f" ({low:.2f}\u2013{high:.2f})"
            lead = row.get("our_best_over_it")
            cells = (
                f"{name} {version}".strip(),
                row["variant"],
                f"{row['tokens_per_second']:.1f}",
                times,
                f"{lead:.1f}\u00d7" if lead else "",
            )
            lines.append("| " + " | ".join(cells) + " |")
        lines += [
            f"| {name} | {variant} | {text[:200]} | | |"
            for variant, text in found["errors"].items()
        ]
    where, asked = value["environment"], value["settings"]
    return "\n".join(lines) + (
        f"\n\n[`{file}`](../{file}): {asked['model']}, {machine(where)}, {asked['threads']} "
        f"threads, {asked['limit']} prompts of {asked['tasks']}, {asked['tokens']} new tokens, "
        "greedy, prefill included. Ours are beside our plain decoding in bfloat16."
    )


def leads() -> str:
    """How much faster than other engines' plain decoding, in a sentence."""
    _, value = _committed("peers")
    names = {
        "transformers": "`transformers` generate",
        "vllm": "vLLM's CPU build",
        "llama": "llama.cpp",
        "openvino": "OpenVINO GenAI",
    }
    mine = value["peers"]["ours"]["rows"]
    found = []
    for name, peer in value["peers"].items():
        if name in names:
            over = [row["our_best_over_it"] for row in peer["rows"]]
            alike = [row for row in mine if peer["dtype"] in row["variant"]]
            best = max(alike, key=lambda row: row["tokens_per_second"])["variant"].split()[0]
            times = f"{over[0]:.1f} and {min(over):.1f}"
            found.append(f"{names[name]} {times} ({peer['dtype']}, ours `{best}`)")
    place = f"{machine(value['environment'])}, {value['settings']['threads']} cores"
    place += f", commit {value['environment']['revision'][:10]}"
    return (
        f"Beside other engines ({place}), our fastest "
        "decoding is so many times as fast as their plain decoding and as their fastest, with "
        f"weights of the same kind: {'; '.join(found)} "
        "([the table](docs/benchmarks.md#beside-other-engines))."
    )


def load(name: str = "load") -> str:
    """A committed run with many clients."""
    if not (ROOT / "benchmarks" / "results" / f"{name}.json").is_file():
        return "No result is committed yet."
    file, value = _committed(name)
    lines = [
        "| clients | method | tokens/s | over plain batching "
        "| first token, ms | between tokens, ms |",
        "|---|---|---|---|---|---|",
    ]
    for row in value["rows"]:
        first, between = (
            " / ".join(f"{1000 * each:.0f}" for each in row[name])
            for name in ("first_token", "between_tokens")
        )
        over = "" if row["method"] == "none" else f"{row['over_plain']:.2f}"
        lines.append(
            f"| {row['clients']} | `{row['method']}` | {row['tokens_per_second']:.1f} | {over} "
            f"| {first} | {between} |"
        )
    where, asked = value["environment"], value["settings"]
    errors = sum(row["errors"] for row in value["rows"])
    commits = "".join(
        f"; {what}: commit {commit}" for what, commit in value.get("revisions", {}).items()
    )
    return "\n".join(lines) + (
        f"\n\n[`{file}`](../{file}): {where['model']}, {where['dtype']}, {machine(where)}, "
        f"{where['num_threads']} threads, {asked['seconds']:g} s a line, {asked['num_rows']} rows, "
        f"answers of {asked['max_new_tokens']} tokens; p50 / p95 / p99; {errors} "
        f"errors{commits}."
    )


def predictions() -> str:
    """What `tune` predicted beside what was measured, setting by setting."""
    file, value = _committed("predictions")
    lines = ["| task | setting | τ: predicted, measured | speed-up: predicted, measured |"]
    lines.append("|---|---|---|---|")
    for row in value["rows"]:
        cells = [
            f"{row[f'predicted_{name}']:.2f}, {row[f'measured_{name}']:.2f} "
            f"({row[f'{name}_error']:+.0%})"
            for name in ("tau", "speedup")
        ]
        lines.append(f"| {row['task']} | `{row['name']}` | {cells[0]} | {cells[1]} |")
    where, asked = value["environment"], value["settings"]
    return "\n".join(lines) + (
        f"\n\n[`{file}`](../{file}): median error of τ "
        f"{value['median_tau_error']:.1%}, of the speed-up {value['median_speedup_error']:.1%}, "
        f"over {len(value['rows'])} settings. {where['model']}, {where['dtype']}, "
        f"{machine(where)}, {where['num_threads']} threads, {asked['limit']} prompts a task, half "
        f"of them recorded and the others decoded, {asked['max_new_tokens']} new tokens, greedy."
    )


def rows() -> str:
    """Every method by the rows that share a pass: what speculation is worth under load."""
    file, value = _committed("rows_greedy")
    found = {(row["method"], row["num_rows"]): row for row in value["rows"]}
    sizes = sorted({size for _, size in found})
    heads = [f"{n} row{'s' * (n > 1)}" for n in sizes]
    lines = [
        f"| setup | {' | '.join(heads)} |",
        "|---" * (len(sizes) + 1) + "|",
    ]
    for setup in dict.fromkeys(row["method"] for row in value["rows"]):
        cells = [
            f"{found[setup, n]['tau']:.2f}, {found[setup, n]['speedup']:.2f}\u00d7, "
            f"{found[setup, n]['decode_tokens_per_second']:.0f}/s"
            for n in sizes
        ]
        lines.append(f"| `{setup}` | {' | '.join(cells)} |")
    where, asked = value["environment"], value["settings"]
    counts = ", ".join(map(str, sorted({row["num_prompts"] for row in value["rows"]})))
    return "\n".join(lines) + (
        f"\n\n[`{file}`](../{file}): tokens per pass and row, speed-up over plain decoding with "
        f"as many rows, and tokens per second of all rows together. {where['model']}, "
        f"{where['dtype']}, {machine(where)}, {where['num_threads']} threads, {counts} prompts, "
        f"{asked['max_new_tokens']} new tokens, greedy."
    )


def python_api() -> str:
    """What a Python user calls and gets: signatures and docstrings of the public names."""
    parts = []
    for name, value in (
        ("slipstream.load", slipstream.load),
        ("Engine.generate", Engine.generate),
        ("Engine.request", Engine.request),
        ("Engine.stream", Engine.stream),
        ("Engine.serve", Engine.serve),
        ("Result", Result),
        ("slipstream.speculate", slipstream.speculate),
        ("PretrainedDrafter", slipstream.PretrainedDrafter),
    ):
        lines = [f"## {name}", "", "```text"]
        if not inspect.isclass(value):
            shown, is_bare = [], False  # a bare star: what follows is given by name
            for each in inspect.signature(value).parameters.values():
                if each.name == "self":
                    continue
                if each.kind is each.KEYWORD_ONLY and not is_bare:
                    shown.append("    *")
                is_bare = is_bare or each.kind in (each.KEYWORD_ONLY, each.VAR_POSITIONAL)
                stars = {each.VAR_POSITIONAL: "*", each.VAR_KEYWORD: "**"}.get(each.kind, "")
                default = "" if each.default is each.empty else f" = {each.default!r}"
                shown.append(f"    {stars}{each.name}{default}")
            lines += [f"{name}(", *(f"{line}," for line in shown), ")", ""]
        lines += [inspect.cleandoc(value.__doc__ or ""), "```"]
        parts.append("\n".join(lines))
    return "\n\n".join(parts)


def training_settings() -> str:
    """What each trainable method alone can be told, with defaults."""
    lines = ["| method | `--set` | default | |", "|---|---|---|---|"]
    for method in recipes.RECIPES:
        for name, field in recipes.get(method).settings.model_fields.items():
            words = field.description or ""
            lines.append(f"| `{method}` | `{name}` | `{field.default}` | {words} |")
            method = ""  # named once
    return "\n".join(lines).replace("| `` |", "| |")


def picture() -> str:
    """The draft tree at the top of the README, when it is there."""
    path = ROOT / "docs" / "images" / "draft-tree.svg"
    words = "A draft tree: what was drafted, what was accepted, what the model said itself"
    return f"![{words}]({path.relative_to(ROOT).as_posix()})" if path.is_file() else ""


def example() -> str:
    """The README's first lines of Python, and what they printed."""
    code = (ROOT / "examples" / "first_answer.py").read_text(encoding="utf-8")
    code = code.partition('"""\n\n')[2] if code.startswith('"""') else code
    printed = ROOT / "examples" / "first_answer.txt"
    parts = [f"```python\n{code.rstrip()}\n```"]
    if printed.is_file():
        parts.append(f"```text\n{printed.read_text(encoding='utf-8').rstrip()}\n```")
    return "\n\n".join(parts)


def tree_mask() -> str:
    """A tree of seven nodes and who sees whom in the pass over it."""
    shape = complete(2, 2)
    tree = DraftTree(torch.arange(7), torch.tensor(shape.parents))
    sees = ancestors(tree.parents)
    lines = ["```text", *_drawn(tree, lambda node: str(node)), ""]
    lines.append("node  position    sees    " + " ".join(str(node) for node in range(7)))
    for node in range(7):
        marks = " ".join("x" if seen else "." for seen in sees[node].tolist())
        lines.append(f"{node:<6}n + {int(tree.depths[node]):<8}prefix  {marks}")
    return "\n".join([*lines, "```"])


def tree_expansion() -> str:
    """One level of a dynamic tree: the two best of four nodes are expanded, two children each."""
    builder = DynamicBuilder(budget=5, depth=2, topk=4, beam=2)
    builder.start(0)
    builder.grow(torch.tensor([[0.95, 0.6, 0.3, 0.05]]).log(), torch.tensor([[1, 2, 3, 4]]))
    confidences = torch.tensor([[0.9, 0.4], [0.7, 0.2]])
    builder.grow(confidences.log(), torch.tensor([[5, 6], [7, 8]]))
    kept = set(builder.finish().tokens.tolist())
    builder.budget = 8
    tree = builder.finish()
    joint = [1.0]
    for own, parent in zip(tree.log_probs.exp()[1:], tree.parents[1:], strict=True):
        joint.append(joint[int(parent)] * float(own))

    def label(node: int) -> str:
        if not node:
            return "root"
        own = f"{float(tree.log_probs[node].exp()):.2g}"
        stays = "kept" if int(tree.tokens[node]) in kept else "left out"
        return f"{own:<6}joint {joint[node]:<7.3g}{stays}"

    return "\n".join(["```text", *_drawn(tree, label), "```"])


def tree_worth() -> str:
    """Tokens per step of the fixed shapes, were each rank accepted as Sequoia's default says."""
    lines = [
        "| nodes | chain | complete binary | EAGLE-1, Medusa | Sequoia |",
        "|---|---|---|---|---|",
    ]
    known = {25: EAGLE1, 63: MEDUSA}
    for nodes in (4, 8, 16, 25, 63):
        cells = [
            expected(shape, DEFAULT_ACCEPTANCE) if shape else None
            for shape in (
                chain(nodes),
                complete(2, nodes, nodes),
                known.get(nodes),
                best(DEFAULT_ACCEPTANCE, nodes),
            )
        ]
        lines.append(f"| {nodes} | " + " | ".join(f"{c:.2f}" if c else "" for c in cells) + " |")
    return "\n".join(lines)


def tree_sequoia() -> str:
    """Sequoia's shape of eight nodes; a label is the child's rank."""
    shape = best(DEFAULT_ACCEPTANCE, 8)
    tree = DraftTree(torch.tensor(shape.ranks), torch.tensor(shape.parents))
    drawn = _drawn(tree, lambda node: f"child {shape.ranks[node] + 1}" if node else "root")
    return "\n".join(["```text", *drawn, "```"])


def _drawn(tree: DraftTree, label: Callable[[int], str]) -> list[str]:
    """A tree as lines of text, children below their parents."""
    children = defaultdict(list)
    for node, parent in enumerate(tree.parents.tolist()):
        children[parent].append(node)

    def lines(node: int, indent: str) -> Iterator[str]:
        for place, child in enumerate(children[node], start=1):
            is_last = place == len(children[node])
            yield f"{indent}{'`' if is_last else '|'}-- {label(child)}"
            yield from lines(child, indent + ("    " if is_last else "|   "))

    return [label(0), *lines(0, "")]


def _result(path: Path, value: dict) -> str:
    """One bench file: table, conditions, chart."""
    lines = [
        "| task | method | temperature | τ, tokens/pass | tokens/s after prefill | speed-up |"
        " same / tie / different |",
        "|---|---|---|---|---|---|---|",
    ]
    for row in value["rows"]:
        same = " / ".join("-" if row[k] is None else str(row[k]) for k in _EQUALITY)
        cells = (
            row["task"],
            row["method"] + _nodes_of(value, row["method"]),
            f"{row['temperature']:g}",
            _with_interval(row["tau"], row["tau_ci"]),
            _rate(row["decode_tokens_per_second"]),
            _with_interval(row["speedup"], row["speedup_ci"]),
            same,
        )
        lines.append("| " + " | ".join(cells) + " |")
    where, settings = value["environment"], value["settings"]
    versions = ", ".join(f"{name} {number}" for name, number in where["versions"].items())
    count = sum(row["num_prompts"] for row in value["rows"][:1])
    conditions = (
        f"{where['model']}, {where['dtype']}, {machine(where)}, "
        f"{where['num_threads']} threads, {count} prompts a task, "
        f"{settings.get('max_new_tokens', '?')} new tokens, {versions}, "
        f"commit {str(where['revision'])[:10]}. 95% intervals over prompts."
    )
    file = path.relative_to(ROOT).as_posix()
    chart = path.with_suffix(".svg")
    shown = f"\n\n![{path.stem}]({chart.relative_to(ROOT).as_posix()})" if chart.is_file() else ""
    notes = "".join(f"\n{note}" for note in value.get("notes", []))
    return "\n".join(lines) + f"\n\n[`{file}`]({file}): {conditions}{notes}{shown}"


_EQUALITY = ("identical", "ties", "different")


def _rate(value: float | None) -> str:
    return "" if value is None else f"{value:.1f}"


def _with_interval(value: float | None, interval: list[float] | None) -> str:
    if value is None:
        return ""
    return f"{value:.2f}" + (f" ({interval[0]:.2f}–{interval[1]:.2f})" if interval else "")


def _command(path: str, command: object) -> Iterator[str]:
    """The section of a command, then those of its subcommands."""
    inner = getattr(command, "commands", None)
    words = re.sub(r"(?<!\n)\n(?!\n)", " ", (command.help or "").strip())
    lines = [f"## {path}", "", words]
    options = [p for p in command.params if p.name != "help"]
    if options:
        lines += ["", "| option | default | |", "|---|---|---|"]
        lines += [_option(option) for option in options]
    yield "\n".join(lines)
    for name, sub in (inner or {}).items():
        yield from _command(f"{path} {name}", sub)


def _option(option: object) -> str:
    spelled = [*option.opts, *option.secondary_opts]
    names = ", ".join(f"`{name}`" for name in spelled) if spelled[0].startswith("-") else ""
    if names and not getattr(option, "is_flag", False):
        metavar = option.metavar or _taken(option.type_descriptor.annotation)
        names = names[:-1] + f" {metavar}`"
    names = names or f"`{option.name.upper()}`"
    default = option.default
    is_plain = default is not None and default is not False and not callable(default)
    shown = f"`{default}`" if is_plain and str(default) else ""
    words = " ".join((getattr(option, "help", None) or "").split()).replace("|", "\\|")
    names = names.replace("|", "\\|")
    return f"| {names} | {shown or ('required' if option.required else '')} | {words} |"


def _taken(kind: object) -> str:
    """What an option takes, for one that does not say: `N` for numbers, `TEXT` otherwise."""
    return "N" if re.search(r"\b(int|float)\b", str(kind)) else "TEXT"


def _first_line(path: Path) -> str:
    if not path.is_file():
        return ""
    words = ast.get_docstring(ast.parse(path.read_text(encoding="utf-8"))) or ""
    return words.partition("\n")[0]


def _module_file(reference: str) -> Path:
    """The file of "module:name"."""
    return PACKAGE.parent / (reference.partition(":")[0].replace(".", "/") + ".py")


def _linked(text: str) -> str:
    return ARXIV.sub(lambda found: f"[{found[0]}](https://arxiv.org/abs/{found[1]})", text)


PARTS: dict[str, Callable[[], str]] = {
    "picture": picture,
    "example": example,
    "methods": method_table,
    "measured": measured,
    "result-figures": result_figures,
    "verifiers": verifiers,
    "acceptance": acceptance,
    "draft-cost": draft_cost,
    "block-sampling": block_sampling,
    "mirror": mirror,
    **{
        f"ablations-{stem}": (lambda stem=stem: ablations(stem))
        for stem in ("eagle3", "dflash", "dflash_on")
    },
    "zoo": zoo,
    "family": family,
    "family-sampled": family_sampled,
    "claims": claims,
    "engines": engines,
    "peers": peers,
    "leads": leads,
    "load": load,
    "load-http": lambda: load("load_http"),
    "rows": rows,
    "python-api": python_api,
    "training-settings": training_settings,
    "predictions": predictions,
    "layout": layout,
    "commands": commands,
    "papers": papers,
    "tree-mask": tree_mask,
    "tree-expansion": tree_expansion,
    "tree-worth": tree_worth,
    "tree-sequoia": tree_sequoia,
    **{f"method-{m.name}": (lambda name=m.name: method_record(name)) for m in methods.all()},
    **{f"confidence-{name}": (lambda name=name: confidence(name)) for name in ("eagle2", "eagle3")},
    **{f"measured-{m.name}": (lambda name=m.name: method_measured(name)) for m in methods.all()},
}

if __name__ == "__main__":
    sys.exit(main())
