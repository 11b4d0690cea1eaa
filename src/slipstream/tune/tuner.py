"""Tuning from start to end: measure, record, predict, choose, and judge the choice elsewhere.

Even prompts tune, odd prompts judge: a setting that was picked because it was lucky on one half
is not measured on that half.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from slipstream import methods
from slipstream.bench import calibration, environment, measures, runner
from slipstream.bench.tasks import BenchPrompt
from slipstream.data.loops import ends_in_loop
from slipstream.engine.engine import Engine
from slipstream.errors import SettingError
from slipstream.target import passes
from slipstream.target.passes import CostCurve
from slipstream.tune import advice, cost, optimum
from slipstream.tune.acceptance import Recorder, Recording, is_recordable, positions
from slipstream.tune.optimum import PLAIN, Drafting, Plain, Prediction, Setting
from slipstream.verify.walk import walk

Load = Callable[..., Engine]
"""(method, **options of `slipstream.load`) to an engine, all on one target."""

MEASURED_DEPTHS = (1, 2, 4, 8)
DEEPEST = 8  # that is recorded of a method whose default is no deeper
LOOKUP = "ngram"
RECORDED_ROWS = 8  # prompts that are recorded together: what is recorded does not depend on it
BATCH_SIZES = (1, 2, 4, 8, 16, 32, 64)


@dataclass(slots=True)
class Found:
    """What tuning found.

    Args:
        curve: seconds of a pass by its tokens.
        plain: plain decoding's costs.
        draftings: what was recorded.
        predictions: every setting, the fastest first.
        best: the choice; plain decoding where nothing pays.
        advice: sentences, the verdict first.
        judged: setting's name to predicted and measured tau and speed-up, on the other prompts.
        lengths: batch size to the best chain length and its predicted speed-up.
        lengths_method: whose chains these are; None where no chain was recorded.
        acceptance: by depth and rank, and calibration, per method.
        left_out: method to why it was not tuned.
        environment: what it was measured on.
    """

    curve: CostCurve
    plain: Plain
    draftings: list[Drafting] = field(default_factory=list)
    predictions: list[Prediction] = field(default_factory=list)
    best: Prediction | None = None
    advice: list[str] = field(default_factory=list)
    judged: list[dict[str, object]] = field(default_factory=list)
    lengths: dict[int, tuple[int, float]] = field(default_factory=dict)
    lengths_method: str | None = None
    acceptance: dict[str, dict[str, object]] = field(default_factory=dict)
    left_out: dict[str, str] = field(default_factory=dict)
    environment: dict[str, object] = field(default_factory=dict)

    def to_dict(self) -> dict[str, object]:
        """The JSON value."""
        chosen = self.best or self.plain.prediction()
        mine = [each for each in self.judged if each["name"] == chosen.setting.name]
        drafting = next(
            (
                each
                for each in self.draftings
                if (each.method, each.tree) == (chosen.setting.method, chosen.setting.tree)
            ),
            self.draftings[0] if self.draftings else None,
        )
        best_of = optimum.best_by_method(self.predictions)
        curve = zip(self.curve.sizes, self.curve.seconds, strict=True)
        return {
            "kind": "slipstream tune",
            "environment": self.environment,
            "cost_curve": [{"n": n, "seconds": seconds} for n, seconds in curve],
            "context": self.curve.context,
            "draft_cost": drafting.cost.to_dict() if drafting else {},
            "draft_costs": {f"{d.method}:{d.tree}": d.cost.to_dict() for d in self.draftings},
            "acceptance": self.acceptance,
            "best": {"method": chosen.setting.method, "tree": chosen.setting.tree,
                     "budget": chosen.setting.budget, "depth": chosen.setting.depth,
                     "topk": chosen.setting.topk, "lookup": chosen.setting.lookup,
                     "name": chosen.setting.name},
            "predicted_tau": chosen.tau,
            "predicted_speedup": chosen.speedup,
            "measured_tau": mine[0]["measured_tau"] if mine else 1.0,
            "measured_speedup": mine[0]["measured_speedup"] if mine else 1.0,
            "advice": self.advice,
            "judged": self.judged,
            "best_by_method": [one.to_dict() for one in best_of.values()],
            "lengths_method": self.lengths_method,
            "lengths_by_rows": {
                str(rows): {"depth": depth, "predicted_speedup": gain}
                for rows, (depth, gain) in self.lengths.items()
            },
            "left_out": self.left_out,
        }  # fmt: skip


def tune(
    load: Load,
    names: Sequence[str],
    prompts: Sequence[BenchPrompt],
    arguments: Mapping[str, Any],
    *,
    repeats: int = passes.REPEATS,
    judge_trees: bool = False,
    on_progress: Callable[[int, int], None] = lambda done, total: None,
) -> Found:
    """Measure, predict and choose on every second prompt, judge on the others.

    Args:
        load: makes engines.
        names: methods to consider, besides plain decoding.
        prompts: two or more.
        arguments: of `Engine.generate`: max_new_tokens and sampling.
        repeats: passes per width of the cost curve.
        judge_trees: run the best setting of every kind of tree too, not of every method alone.
        on_progress: told steps done and steps in all.

    Raises:
        SettingError: fewer than two prompts.
    """
    if len(prompts) < 2:
        raise SettingError(
            "prompts", len(prompts), "2 or more: one half tunes, the other judges", "raise --limit"
        )
    total = len(names) + 3
    halves = prompts[0::2], prompts[1::2]
    plain_engine = load(PLAIN.method)
    target, watch = plain_engine.target, environment.Watch()
    ids = [list(prompt.ids) for prompt in halves[0]]
    answers = plain_engine.generate(ids, **arguments)
    kept = [i for i, answer in enumerate(answers) if not ends_in_loop(answer.token_ids)]
    context = statistics.median(len(a.prompt_ids) + len(a.token_ids) // 2 for a in answers)
    on_progress(1, total)
    curve = passes.measure(target, context=int(context), repeats=repeats)
    num_passes = sum(answer.num_target_passes for answer in answers)
    rest = sum(answer.other_seconds for answer in answers) / max(num_passes, 1)
    found = Found(curve, Plain(curve, rest), environment=environment.describe(target))
    on_progress(2, total)
    for number, name in enumerate(names):
        if kept:
            _record(found, load, name, [ids[i] for i in kept], arguments)
        on_progress(3 + number, total)
    found.predictions = optimum.predict_all(found.draftings, found.plain)
    more = optimum.best_by_tree(found.predictions) if judge_trees else []
    _judge(found, load, plain_engine, halves[1], arguments, more)
    _choose(found)
    _by_rows(found)
    found.advice = advice.explain(
        found.best or found.plain.prediction(),
        optimum.best_by_method(found.predictions),
        found.plain,
        judged={str(each["name"]): each for each in found.judged},
        num_loops=len(ids) - len(kept),
    )
    found.environment["busy_share"] = watch.others()
    on_progress(total, total)
    return found


def _record(
    found: Found, load: Load, name: str, ids: list[list[int]], arguments: Mapping[str, Any]
) -> None:
    """Record one method's drafts and take its costs, or note why not."""
    record = methods.get(name)
    reason = _why_not(record, load(name).drafter)
    if reason is not None:
        found.left_out[name] = reason
        return
    together = {**arguments, "num_rows": RECORDED_ROWS}
    for tree in _trees(record):
        options = _largest(record, tree)
        engine = load(name, **options)
        recorder = Recorder(engine.drafter)
        # The engine's own room, or a drafter would leave nodes out that a cut may keep.
        room = engine.request(ids[0]).widest
        Engine(engine.target, recorder, walk, max_nodes=room).generate(ids, **together)
        depths = [depth for depth in MEASURED_DEPTHS if depth <= options["depth"]]
        if options["depth"] > DEEPEST:
            depths.append(options["depth"])
        if tree not in optimum.CUTTABLE:
            depths = [options["depth"]]
        of_depth = lambda d, tree=tree: load(name, **_largest(record, tree, depth=d))  # noqa: E731
        drafting = Drafting(
            method=name,
            tree=tree,
            topk=options.get("topk", 1),
            depth=options["depth"],
            budget=options.get("budget", options["depth"]),
            answers=positions(recorder.recordings),
            cost=cost.draft_costs(of_depth, depths, ids, _sampling(arguments)),
            other_seconds=cost.other_seconds(load(name, tree=tree), ids, arguments),
        )
        found.draftings.append(drafting)
        if name not in found.acceptance:
            found.acceptance[name] = _acceptance(recorder.recordings)


def _why_not(record: methods.Method, drafter: Any) -> str | None:
    """Why a method's acceptance cannot be read off one recorded run; None where it can."""
    if not is_recordable(drafter):
        return "its drafts depend on what was verified before"
    if methods.CHILDREN[record.verifier] != "chosen":
        return "it draws its drafts: another answer may be accepted with the same trees"
    return None


def _trees(record: methods.Method) -> tuple[str, ...]:
    """Kinds to record: the method's own, one that can be cut to any size, and chains."""
    wanted = [record.tree, *(tree for tree in optimum.CUTTABLE if tree in record.trees)]
    return tuple(dict.fromkeys((*wanted[:2], *(tree for tree in wanted if tree == "chain"))))


def _largest(record: methods.Method, tree: str, *, depth: int | None = None) -> dict[str, Any]:
    """Options of the largest tree that is recorded: every node a cut could keep."""
    depth = depth or max(DEEPEST, record.depth)
    if tree == "chain":
        return {"tree": tree, "depth": depth}
    if tree not in optimum.CUTTABLE:
        return {"tree": tree, "budget": record.budget, "depth": record.depth}
    room = record.topk + max(depth - 1, 0) * record.topk**2
    budget = room if tree == "dynamic" else max(optimum.BUDGETS)
    return {"tree": tree, "depth": depth, "budget": budget, "topk": record.topk}


def _sampling(arguments: Mapping[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in arguments.items() if name != "max_new_tokens"}


def _acceptance(recordings: Sequence[Recording]) -> dict[str, object]:
    """By depth and rank, Sequoia's vector, and calibration per depth and of the joint."""
    nodes = calibration.nodes([pair for each in recordings for pair in each.judged()])
    rates = calibration.by_depth_and_rank(nodes)
    by_depth = calibration.by_depth(nodes)
    return {
        "by_depth_and_rank": rates.rates(),
        "by_rank": rates.pooled(),
        "calibration": {str(depth): one.to_dict() for depth, one in by_depth.items()},
        "joint": calibration.joint(nodes).to_dict(),
    }


def _choose(found: Found) -> None:
    """The fastest prediction that holds on the other prompts; plain decoding where none does."""
    found.best = found.plain.prediction()
    judged = {each["name"]: each for each in found.judged}
    for one in optimum.best_by_method(found.predictions).values():
        if one.speedup < optimum.WORTH or one.setting == PLAIN:
            break  # the rest is slower still
        if _holds(one, judged[one.setting.name]):
            found.best = one
            return


def _holds(one: Prediction, judged: Mapping[str, Any]) -> bool:
    """The other prompts confirm a gain: by the clock, and by the tokens a pass gave there.

    Tokens do not depend on how busy the machine was, so that a lucky clock is no gain.
    """
    if judged["measured_tau"] is None or judged["measured_speedup"] is None:
        return False
    by_tokens = one.speedup * judged["measured_tau"] / one.tau
    return min(by_tokens, judged["measured_speedup"]) >= optimum.WORTH


def _by_rows(found: Found) -> None:
    """Chain lengths by batch size, for the chosen method, or the one that is best with a chain."""
    chains = {each.method: each for each in found.draftings if each.tree == "chain"}
    if not chains:
        return
    chosen = found.best.setting.method if found.best else PLAIN.method
    if chosen not in chains:
        alone = (one.setting for one in found.predictions if not one.setting.lookup)
        chosen = next(each.method for each in alone if each.tree == "chain" and each != PLAIN)
    found.lengths_method = chosen
    found.lengths = optimum.lengths_by_rows(chains[chosen], found.plain, BATCH_SIZES)


def _judge(
    found: Found,
    load: Load,
    plain: Engine,
    prompts: Sequence[BenchPrompt],
    arguments: Mapping[str, Any],
    more: Sequence[Prediction],
) -> None:
    """Measure every method's best, and its default, beside their predictions on other prompts.

    Raises:
        KeyboardInterrupt: before every prompt was answered by every setting.
    """
    defaults = _defaults(found)
    predicted = {
        one.setting.name: one
        for one in (*optimum.best_by_method(found.predictions).values(), *defaults, *more)
        if one.setting != PLAIN
    }
    if not predicted:
        return
    engines = {PLAIN.name: plain}
    for name, one in predicted.items():
        engines[name] = load(one.setting.method, **one.setting.options())
    measured = runner.measure(engines, prompts, {**arguments, "num_rows": 1})
    if measured.is_partial:
        raise KeyboardInterrupt  # a few prompts are no judgement
    reference = measured.samples[PLAIN.name]
    for name, one in predicted.items():
        samples = measured.samples[name]
        found.judged.append(
            {
                "name": name,
                "is_default": one in defaults,
                "predicted_tau": one.tau,
                "measured_tau": measures.tau(samples),
                "predicted_speedup": one.speedup,
                "measured_speedup": measures.speedup(samples, reference),
                "measured_speedup_ci": measures.speedup_interval(samples, reference),
                "num_prompts": len(samples),
            }
        )


def _defaults(found: Found) -> list[Prediction]:
    """What each method's settings in the catalogue should do."""
    made = []
    for drafting in found.draftings:
        record = methods.get(drafting.method)
        if drafting.tree == record.tree:
            topk = 1 if drafting.topk == 1 else record.topk
            budget = record.depth if record.tree == "chain" else record.budget
            setting = Setting(record.name, record.tree, budget, record.depth, topk)
            made.append(optimum.predict(setting, drafting, found.plain))
    return made
