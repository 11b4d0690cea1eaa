"""Which method, tree and budget is fastest here: predicted for all, from costs and recordings.

A step takes its drafting, its pass over n tokens and the rest; it emits tau tokens. Plain decoding
takes a pass over one token and its own rest for each token. So

    speed-up = tau * (pass(1) + plain rest) / (drafting + mean pass(n) + rest)

where tau and the distribution of n are replayed from recordings (`tune.acceptance`).

Paper: Chen et al. 2024, Sequoia, arXiv:2402.12374, section 4.3 (hardware-aware choice); Ringel and
Romano 2026, CaDDTree, arXiv:2606.01813. Also: Li et al. 2024, EAGLE-2, arXiv:2406.16858.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace

from slipstream.tune.acceptance import Cut, Position, replay, united
from slipstream.tune.cost import DraftCost

BUDGETS = (1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64)
DEPTHS = (1, 2, 3, 4, 5, 6, 7, 8, 12, 16)
CUTTABLE = ("dynamic", "best-first", "chain")
"""Kinds of trees of which a part is a tree of the same kind."""
WORTH = 1.03  # a predicted speed-up below this is within what a machine varies by
PassCost = Callable[[float], float]


@dataclass(frozen=True, slots=True)
class Setting:
    """What to run.

    Args:
        method: a name of the catalogue.
        tree: kind of tree.
        budget: drafted nodes; a chain's equals its depth.
        depth: of the deepest node.
        topk: children considered per node.
        lookup: united with prompt lookup.
    """

    method: str
    tree: str
    budget: int
    depth: int
    topk: int
    lookup: bool = False

    @property
    def name(self) -> str:
        """As `slipstream bench --methods` takes it."""
        head = self.method + ("+lookup" if self.lookup else "")
        if self.method == "none":
            return head
        if self.tree == "chain":
            return f"{head}:chain,depth={self.depth}"
        return f"{head}:{self.tree},budget={self.budget},depth={self.depth},topk={self.topk}"

    def options(self) -> dict[str, object]:
        """Keyword arguments of `slipstream.load`."""
        if self.method == "none":
            return {}
        found: dict[str, object] = {"tree": self.tree, "depth": self.depth, "lookup": self.lookup}
        return (
            found if self.tree == "chain" else {**found, "budget": self.budget, "topk": self.topk}
        )


PLAIN = Setting("none", "chain", 0, 0, 1)


@dataclass(frozen=True, slots=True)
class Drafting:
    """A way of drafting that was recorded: a method with a kind of tree.

    Args:
        method: a name of the catalogue.
        tree: kind of tree; those of `CUTTABLE` stand for every smaller one, others for themselves.
        topk: children considered per node.
        depth: of the recorded trees.
        budget: of the recorded trees.
        answers: recorded positions.
        cost: seconds of drafting by depth.
        other_seconds: of a step besides drafting and the pass.
    """

    method: str
    tree: str
    topk: int
    depth: int
    budget: int
    answers: Sequence[Sequence[Position]]
    cost: DraftCost
    other_seconds: float

    def settings(self) -> Iterator[Setting]:
        """Everything its recording can be cut to."""
        if self.tree not in CUTTABLE:
            yield Setting(self.method, self.tree, self.budget, self.depth, self.topk)
            return
        for depth in (d for d in DEPTHS if d <= self.depth):
            if self.tree == "chain":
                yield Setting(self.method, self.tree, depth, depth, 1)
                continue
            for budget in (b for b in BUDGETS if depth <= b <= self.budget):
                yield Setting(self.method, self.tree, budget, depth, self.topk)

    def cut(self, setting: Setting) -> Cut:
        """Drafted and accepted nodes at a position, with a setting's trees."""

        def nodes(answer: int, at: int) -> tuple[int, int]:
            position = self.answers[answer][at]
            if self.tree == "chain":
                return position.chain(setting.depth)
            return position.best(setting.budget, setting.depth)

        return nodes


@dataclass(frozen=True, slots=True)
class Prediction:
    """What a setting should do, and where its time should go.

    Args:
        setting: what runs.
        tau: tokens per pass.
        draft_seconds: drafting, per step.
        pass_seconds: the target's pass, mean.
        other_seconds: the rest of a step.
        single_seconds: a pass over one token.
        plain_seconds: plain decoding, per token.
        num_nodes: drafted nodes per step, mean.
    """

    setting: Setting
    tau: float
    draft_seconds: float
    pass_seconds: float
    other_seconds: float
    single_seconds: float
    plain_seconds: float
    num_nodes: float

    @property
    def step_seconds(self) -> float:
        """Of one step."""
        return self.draft_seconds + self.pass_seconds + self.other_seconds

    @property
    def speedup(self) -> float:
        """Over plain decoding."""
        return self.tau * self.plain_seconds / self.step_seconds

    def if_free(self, part: str) -> float:
        """The speed-up if one part cost nothing more than plain decoding has to pay.

        Args:
            part: "draft", "pass" or "other".
        """
        changes = {
            "draft": {"draft_seconds": 0.0},
            "pass": {"pass_seconds": self.single_seconds},
            "other": {"other_seconds": self.plain_seconds - self.single_seconds},
        }
        return replace(self, **changes[part]).speedup

    def to_dict(self) -> dict[str, object]:
        """The JSON value."""
        value = {key: each for key, each in asdict(self).items() if key != "setting"}
        return {"name": self.setting.name, **asdict(self.setting), **value, "speedup": self.speedup}


@dataclass(frozen=True, slots=True)
class Plain:
    """Plain decoding's costs.

    Args:
        cost: seconds of a target pass by its tokens.
        other_seconds: of a step besides the pass.
    """

    cost: PassCost
    other_seconds: float

    @property
    def seconds(self) -> float:
        """Per token."""
        return self.cost(1) + self.other_seconds

    def prediction(self) -> Prediction:
        """Plain decoding as one of the choices."""
        one = self.cost(1)
        return Prediction(PLAIN, 1.0, 0.0, one, self.other_seconds, one, self.seconds, 0.0)


def predict(
    setting: Setting, drafting: Drafting, plain: Plain, lookup: Drafting | None = None
) -> Prediction:
    """What a setting should do.

    Args:
        setting: cut from the recording.
        drafting: its recording.
        plain: plain decoding's costs.
        lookup: prompt lookup's recording of the same answers, to be united with.
    """
    cut = drafting.cut(setting)
    draft_seconds, other = drafting.cost(setting.depth), drafting.other_seconds
    if lookup is not None:
        reach = Setting(lookup.method, "chain", lookup.depth, lookup.depth, 1)
        cut, setting = united(cut, lookup.cut(reach)), replace(setting, lookup=True)
        draft_seconds += lookup.cost(lookup.depth)
    found = replay([len(answer) for answer in drafting.answers], cut)
    return Prediction(
        setting,
        found.tau,
        draft_seconds,
        found.mean(plain.cost),
        other,
        plain.cost(1),
        plain.seconds,
        found.mean(lambda width: width - 1),
    )


def predict_all(draftings: Sequence[Drafting], plain: Plain) -> list[Prediction]:
    """Every setting of every recording, united with lookup too where lookup was recorded.

    Returns:
        The fastest first; plain decoding is one of them.
    """
    lookup = next((each for each in draftings if each.method == "ngram"), None)
    found = [plain.prediction()]
    for drafting in draftings:
        for setting in drafting.settings():
            found.append(predict(setting, drafting, plain))
            if lookup is not None and drafting is not lookup:
                found.append(predict(setting, drafting, plain, lookup))
    return sorted(found, key=lambda one: -one.speedup)


def best(predictions: Sequence[Prediction]) -> Prediction:
    """The fastest; plain decoding unless something beats it by more than a machine varies."""
    fastest = max(predictions, key=lambda one: one.speedup)
    if fastest.speedup >= WORTH:
        return fastest
    return next(one for one in predictions if one.setting == PLAIN)


def best_by_method(predictions: Sequence[Prediction]) -> Mapping[str, Prediction]:
    """The fastest setting of every method, with and without lookup."""
    found: dict[str, Prediction] = {}
    for one in sorted(predictions, key=lambda each: -each.speedup):
        name = one.setting.method + ("+lookup" if one.setting.lookup else "")
        found.setdefault(name, one)
    return found


def best_by_tree(predictions: Sequence[Prediction]) -> list[Prediction]:
    """The fastest setting of every method with every kind of tree, without lookup."""
    found: dict[tuple[str, str], Prediction] = {}
    for one in sorted(predictions, key=lambda each: -each.speedup):
        if not one.setting.lookup and one.setting != PLAIN:
            found.setdefault((one.setting.method, one.setting.tree), one)
    return list(found.values())


def lengths_by_rows(
    drafting: Drafting, plain: Plain, batch_sizes: Sequence[int]
) -> dict[int, tuple[int, float]]:
    """The best chain for every batch size, and its predicted speed-up; 0 is plain decoding.

    A pass over r rows of n tokens is taken to cost what a pass over r * n tokens does, and a draft
    pass over r rows what one does: right for matrix products, silent about attention.

    Args:
        drafting: a recording, cut to chains.
        plain: plain decoding's costs.
        batch_sizes: rows decoded together.
    """
    lengths = [len(answer) for answer in drafting.answers]
    chains = {
        depth: replay(lengths, lambda answer, at, d=depth: drafting.answers[answer][at].chain(d))
        for depth in DEPTHS
        if depth <= drafting.depth
    }
    found = {}
    for rows in batch_sizes:
        one = plain.cost(rows) + plain.other_seconds
        speedups = {0: 1.0}
        for depth, replayed in chains.items():
            step = replayed.mean(lambda width, rows=rows: plain.cost(rows * width))
            step += drafting.cost(depth) + drafting.other_seconds
            speedups[depth] = replayed.tau * one / step
        depth = max(speedups, key=lambda each: speedups[each])
        depth = depth if speedups[depth] >= WORTH else 0
        found[rows] = depth, speedups[depth]
    return found
