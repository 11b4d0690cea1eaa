"""One turn: what is cut, what fails alone, what a trace keeps. Bug report B137."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from fakes import OracleDrafter, RandomDrafter, TableTarget
from slipstream.drafters.none import NoDrafter
from slipstream.engine.engine import Engine
from slipstream.engine.loop import Loop
from slipstream.engine.meter import Meter
from slipstream.engine.shaping import FormError
from slipstream.engine.step import fit
from slipstream.errors import DrafterMismatchError
from slipstream.types import DraftTree
from slipstream.verify.walk import walk


def tree() -> DraftTree:
    """0 -> 1, 2;  1 -> 3;  3 -> 4;  2 -> 5."""
    probs = torch.rand(6, 97)
    return DraftTree(
        torch.tensor([10, 11, 12, 13, 14, 15]),
        torch.tensor([-1, 0, 0, 1, 3, 2]),
        log_probs=-torch.arange(6.0),
        is_drawn=torch.tensor([False, True, True, True, False, True]),
        draft_probs=probs,
    )


@pytest.mark.parametrize(
    ("max_depth", "max_nodes", "kept"),
    [
        (3, 5, [0, 1, 2, 3, 4, 5]),
        (2, 9, [0, 1, 2, 3, 5]),
        (2, 3, [0, 1, 2, 3]),
        (1, 9, [0, 1, 2]),
        (9, 1, [0, 1]),
        (0, 9, [0]),
        (9, 0, [0]),
    ],
)
def test_a_tree_is_cut_by_place(max_depth: int, max_nodes: int, kept: list[int]) -> None:
    whole = tree()
    cut = fit(whole, max_depth, max_nodes)
    assert cut.tokens.tolist() == [10 + node for node in kept]
    new = {node: place for place, node in enumerate(kept)}
    parents = whole.parents.tolist()
    assert cut.parents.tolist() == [new.get(parents[node], -1) for node in kept]
    assert cut.log_probs.tolist() == [-float(node) for node in kept]
    assert torch.equal(cut.draft_probs, whole.draft_probs[kept])
    assert torch.equal(cut.is_drawn, whole.is_drawn[kept])


def nan_after(place: int, prompt_token: int):
    """Logits become NaN `place` tokens into the row whose first token is `prompt_token`."""

    def edit(context: tuple[int, ...], logits: Tensor) -> Tensor:
        is_bad = context[0] == prompt_token and len(context) >= place
        return torch.full_like(logits, float("nan")) if is_bad else logits

    return edit


@pytest.mark.parametrize("place", [3, 9, 10, 14])
@pytest.mark.parametrize("num_rows", [1, 3])
def test_a_nan_fails_its_row_alone(place: int, num_rows: int) -> None:
    """B137: in prefill and in a step; the others say what they would have said."""
    prompts = [[1, 2, 3], [50, 2, 3], [7, 8]]
    healthy = [TableTarget().answer(p, 20) for p in prompts]
    target = TableTarget(edit=nan_after(place, 50))
    drafter = OracleDrafter([p + a for p, a in zip(prompts, healthy, strict=True)], wrong=0.4)
    results = Engine(target, drafter, walk).generate(prompts, max_new_tokens=20, num_rows=num_rows)
    assert [r.finish_reason for r in results] == ["length", "error", "length"]
    assert [list(results[i].token_ids) for i in (0, 2)] == [healthy[0], healthy[2]]
    failed = results[1]
    assert "NaN" in failed.error and results[0].error is None
    assert list(failed.token_ids) == healthy[1][: failed.num_tokens]
    assert failed.num_tokens <= max(0, place - 3)
    assert drafter.rows == set()


def test_a_drafter_with_another_root_is_named() -> None:
    class Lost(NoDrafter):
        name = "lost"

        def propose(self, rows: list) -> list[DraftTree]:
            return [DraftTree.chain([row.tokens[-2]]) for row in rows]

    with pytest.raises(DrafterMismatchError, match="drafter lost rooted its tree"):
        Engine(TableTarget(), Lost(), walk).generate([1, 2])


@pytest.mark.parametrize(("token", "size"), [(97, 97), (-1, 97)])
def test_a_drafter_with_another_vocabulary_is_named(token: int, size: int) -> None:
    class Foreign(NoDrafter):
        def propose(self, rows: list) -> list[DraftTree]:
            return [DraftTree.chain([row.tokens[-1], token]) for row in rows]

    with pytest.raises(DrafterMismatchError, match=f"drafted token {token}"):
        Engine(TableTarget(size), Foreign(), walk).generate([1, 2])


def test_a_drafter_that_forgets_a_row_is_named() -> None:
    class Forgetful(NoDrafter):
        def propose(self, rows: list) -> list[DraftTree]:
            return super().propose(rows[:1])

    with pytest.raises(DrafterMismatchError, match="1 trees for 2 rows"):
        Engine(TableTarget(), Forgetful(), walk).generate([[1], [2]], num_rows=2)


def test_a_trace_keeps_what_the_target_thought() -> None:
    target = TableTarget(scale=1.0)
    result = Engine(target, RandomDrafter(6), walk).generate([1, 2], max_new_tokens=8, trace=True)
    assert len(result.steps) == result.num_target_passes > 0
    tokens = [1, 2, result.token_ids[0]]
    for step in result.steps:
        assert step.tree.tokens[0] == tokens[-1]
        paths = [tokens]
        for node in range(1, len(step.tree)):
            before = paths[int(step.tree.parents[node])]
            expected = target.logits_of(before).log_softmax(-1)[step.tree.tokens[node]]
            assert step.target_log_probs[node] == pytest.approx(float(expected), abs=1e-5)
            paths.append([*before, int(step.tree.tokens[node])])
        for node, path in enumerate(paths):
            probs = target.logits_of(path).softmax(-1)
            best = step.top_tokens[node]
            assert [t for t, _ in best] == probs.topk(3).indices.tolist()
            assert best[0][1] == pytest.approx(float(probs.max()), abs=1e-5)
        tokens = [*tokens, *step.emitted]
    untraced = Engine(target, NoDrafter(), walk).generate([1, 2], max_new_tokens=8)
    assert untraced.steps == ()


class Listener(NoDrafter):
    """Drafts nothing and keeps its features, as a drafter does that rests."""

    taps = (0, 2)

    def __init__(self) -> None:
        self.heard: list[Tensor] = []

    def observe(self, row: object, verdict: object, features: Tensor | None) -> None:
        self.heard.append(features)


@pytest.mark.parametrize("num_rows", [1, 6])
def test_features_that_wait_to_be_read_hold_no_other_rows(num_rows: int) -> None:
    drafter = Listener()
    prompts = [[row, row + 1] for row in range(num_rows)]
    Engine(TableTarget(), drafter, walk).generate(prompts, max_new_tokens=9, num_rows=num_rows)
    assert len(drafter.heard) == 7 * num_rows, "the last step's are not told"
    for features in drafter.heard:
        assert features.shape == (1, 4)
        assert features.untyped_storage().nbytes() == features.nbytes


@pytest.mark.parametrize("place", [2, 5])
def test_a_form_that_cannot_be_followed_fails_its_row_alone(place: int) -> None:
    target = TableTarget()

    def lose(logits: Tensor, _tree: DraftTree, tokens: list[int]) -> Tensor:
        if len(tokens) >= place:
            raise FormError("the parser lost its way")
        return logits

    engine = Engine(target, NoDrafter(), walk)
    loop = Loop(target, NoDrafter(), walk, target.new_cache(2, 64), Meter(), num_rows=2, chunk=8)
    held = engine.request([1, 2], max_new_tokens=6, grammar=lose)
    free = engine.request([1, 2], max_new_tokens=6)
    for request in (held, free):
        loop.submit(request)
    for _ in loop.run():
        pass
    assert (held.finish_reason, str(held.failure)) == ("error", "the parser lost its way")
    assert held.emitted == target.answer([1, 2], 6)[: place - 2]
    assert free.emitted == target.answer([1, 2], 6) and loop.leaks() == ""
