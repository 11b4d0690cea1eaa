"""The loop's one turn. Start reading here.

Every method runs through `step`: rows of different lengths with trees of different shapes, one
target pass, one verdict per row. Plain decoding is the drafter `none`, whose trees are the root
alone; batch one is a list of one row.

Invariant, before and after: a row's cache holds all of its tokens but the last one, the root.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from slipstream.cache import SlotCache
from slipstream.drafters.protocol import Drafter
from slipstream.engine.meter import Meter
from slipstream.engine.request import Request
from slipstream.engine.shaping import FormError
from slipstream.errors import DrafterMismatchError, NumericError
from slipstream.target.protocol import Target
from slipstream.types import DraftTree, Step, Verdict
from slipstream.verify.protocol import Verify

Score = tuple[Tensor, Tensor | None]  # logits [N, V], features [N, K*D]


@torch.no_grad()
def step(
    rows: Sequence[Request],
    target: Target,
    cache: SlotCache,
    drafter: Drafter,
    verify: Verify,
    meter: Meter,
) -> list[Step]:
    """Draft, score, judge and keep, once for every row.

    Args:
        rows: prefilled, unfinished requests.
        target: scores the trees.
        cache: holds the rows' committed keys.
        drafter: proposes the trees.
        verify: judges one row's tree.
        meter: times the turn.

    Returns:
        One step per row, in order; a row whose logits were NaN, or whose form could not be
        followed, has failed and gives none.

    Raises:
        DrafterMismatchError: the drafter's trees do not belong to these rows.
    """
    meter.start()
    with meter.span("draft"):
        trees = _draft(rows, drafter, target.spec.vocab_size)
    with meter.span("target"):
        scores = _score(trees, rows, target, cache, drafter.taps)
    turns = []
    for row, tree, score in zip(rows, trees, scores, strict=True):
        try:
            if isinstance(score, NumericError):
                raise score
            logits, features = score
            verdict = verify(tree, row.shape(logits, tree), row.sampler, len(row.tokens) - 1)
            verdict = row.cut(tree, verdict)
        except (NumericError, FormError) as error:
            row.fail(error)
            cache.rollback(row.slot)
            drafter.close(row)
            continue
        emitted = row.accept(_tokens(tree, verdict), verdict.num_accepted)
        row.score(logits, verdict.path)
        cache.commit(row.slot, verdict.path[: len(emitted)])
        of_path = None if features is None else _along(features, verdict.path)
        if row.keeps_features and of_path is not None:
            row.features.append(of_path[: len(emitted)])
        if row.is_finished:
            drafter.close(row)
        else:
            if getattr(drafter, "wants_choices", False):
                drafter.read_choices(row, logits.argmax(-1))
            drafter.observe(row, verdict, of_path)
        turns.append((row, tree, verdict, emitted, _opinion(tree, logits) if row.trace else {}))
    lap = meter.lap().share(len(rows))
    steps = []
    for row, tree, verdict, emitted, opinion in turns:
        taken = Step(tree, verdict, emitted, lap.draft, lap.target, lap.other, **opinion)
        row.record(taken)
        steps.append(taken)
    return steps


@torch.no_grad()
def prefill(
    row: Request,
    target: Target,
    cache: SlotCache,
    drafter: Drafter,
    meter: Meter,
    chunk: int,
) -> None:
    """Run the prompt's next chunk; after the last one emit a token and open the row in the drafter.

    A chunk is a chain tree that is accepted whole. The features of all chunks are joined, so
    nothing depends on the chunk size.
    """
    begun = meter.now()
    start = cache.lengths[row.slot]
    tree = DraftTree.chain(row.tokens[start : start + chunk])
    try:
        output = target.forward([tree], cache, [row.slot], taps=drafter.taps, last_only=True)
        cache.commit(row.slot, tuple(range(len(tree))))
        if output.features is not None:
            row.features.append(output.features[0, : len(tree)])
        if start + len(tree) == len(row.tokens):
            logits = output.logits[0]  # [1, V]
            root = DraftTree.chain(row.tokens[-1:])
            first = row.sampler.choose(row.shape(logits, root), [len(row.tokens)])
            row.accept([int(first[0])])
            row.score(logits, (0,))
    except (NumericError, FormError) as error:
        row.fail(error)
    if row.is_finished:
        drafter.close(row)
    elif row.is_prefilled:
        drafter.open(row, torch.cat(row.features) if row.features else None)
        if not row.keeps_features:
            row.features.clear()
    row.prefill_seconds += meter.now() - begun


def _draft(rows: Sequence[Request], drafter: Drafter, vocab_size: int) -> list[DraftTree]:
    wants_choices = getattr(drafter, "wants_choices", False)
    if not wants_choices and all(row.share == 0 for row in rows):  # under load, step after step
        return [DraftTree.chain(row.tokens[-1:]) for row in rows]
    trees = drafter.propose(rows)
    if len(trees) != len(rows):
        raise DrafterMismatchError(
            f"drafter {drafter.name} proposed {len(trees)} trees for {len(rows)} rows"
        )
    for row, tree in zip(rows, trees, strict=True):
        root = int(tree.tokens[0])
        if root != row.tokens[-1]:
            raise DrafterMismatchError(
                f"drafter {drafter.name} rooted its tree at token {root}, expected the row's "
                f"last token {row.tokens[-1]}"
            )
        largest, smallest = int(tree.tokens.max()), int(tree.tokens.min())
        if smallest < 0 or largest >= vocab_size:
            raise DrafterMismatchError(
                f"drafter {drafter.name} drafted token {largest if smallest >= 0 else smallest}, "
                f"the target's ids are 0..{vocab_size - 1}",
                hint="was the drafter made for another tokenizer?",
            )
    return [fit(tree, row.max_depth, row.max_nodes) for row, tree in zip(rows, trees, strict=True)]


def fit(tree: DraftTree, max_depth: int, max_nodes: int) -> DraftTree:
    """Cut a tree that is deeper or larger than its row has room for.

    Which nodes go depends on their place alone, never on their tokens, so that cutting is safe
    for drawn nodes too: those below `max_depth`, then the last ones.
    """
    if tree.num_drafted <= max_depth and tree.budget <= max_nodes:
        return tree
    kept = (tree.depths <= max_depth).nonzero().flatten()[: max_nodes + 1]  # [M] int64
    place = torch.full((len(tree) + 1,), -1, dtype=torch.int64)  # the last entry serves parent -1
    place[kept] = torch.arange(len(kept))
    pick = lambda values: None if values is None else values[kept.to(values.device)]  # noqa: E731
    return DraftTree(
        tree.tokens[kept.to(tree.tokens.device)],
        place[tree.parents.cpu()[kept]],
        log_probs=pick(tree.log_probs),
        is_drawn=pick(tree.is_drawn),
        draft_probs=pick(tree.draft_probs),
    )


def _score(
    trees: Sequence[DraftTree],
    rows: Sequence[Request],
    target: Target,
    cache: SlotCache,
    taps: tuple[int, ...],
) -> list[Score | NumericError]:
    """One pass over all trees; after a NaN one pass per row, to spare the healthy rows."""
    slots = [row.slot for row in rows]
    try:
        output = target.forward(trees, cache, slots, taps=taps)
    except NumericError as error:
        if len(rows) == 1:
            return [error]
        for slot in slots:
            cache.rollback(slot)
        return [
            score
            for row, tree in zip(rows, trees, strict=True)
            for score in _score([tree], [row], target, cache, taps)
        ]
    features = output.features
    return [
        (output.logits[i, : len(tree)], None if features is None else features[i, : len(tree)])
        for i, tree in enumerate(trees)
    ]


def _along(features: Tensor, path: Sequence[int]) -> Tensor:
    """[P, K*D] of a path's nodes, in a storage of their own size.

    A view would hold the whole batch's features for as long as the row keeps its own. One that is
    all there is, as a single row's lone root, is left uncopied.
    """
    if len(path) < len(features):
        return features[[*path]]
    is_all = features.untyped_storage().nbytes() == features.nbytes
    return features if is_all else features.clone()


def _tokens(tree: DraftTree, verdict: Verdict) -> list[int]:
    """Accepted drafts, then the target's own token."""
    tokens = tree.tokens.tolist()
    return [*(tokens[node] for node in verdict.path[1:]), verdict.next_token]


def _opinion(tree: DraftTree, logits: Tensor) -> dict[str, object]:
    """What the target thought of each node, for the trace."""
    log_probs = torch.log_softmax(logits.float(), dim=-1)  # [N, V]
    of_nodes = torch.zeros(len(tree))
    if tree.budget:
        of_nodes[1:] = log_probs[tree.parents[1:], tree.tokens[1:]].cpu()
    top = log_probs.topk(min(3, log_probs.shape[-1]), dim=-1)
    pairs = zip(top.indices.tolist(), top.values.exp().tolist(), strict=True)
    return {
        "target_log_probs": of_nodes,
        "top_tokens": tuple(tuple(zip(ids, probs, strict=True)) for ids, probs in pairs),
    }
