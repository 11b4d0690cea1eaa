"""Small honest stand-ins: a target that is a table, a byte tokenizer, drafters of known quality.

`TableTarget` reads its context back from its own cache, so a wrong commit, a wrong path or a
wrong position changes what it says.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from slipstream.errors import CacheFullError, NumericError
from slipstream.sampling import Sampler
from slipstream.target.protocol import TargetSpec
from slipstream.types import DraftTree, Sampling, TargetOutput, Verdict


class TableCache:
    """Rows of token ids with the verbs of the slot cache; checks that a path is a path."""

    def __init__(self, num_rows: int, max_length: int) -> None:
        self.num_rows, self.max_length = num_rows, max_length
        self.rows: list[list[int]] = [[] for _ in range(num_rows)]
        self.pending: list[DraftTree | None] = [None] * num_rows

    @property
    def lengths(self) -> list[int]:
        return [len(row) for row in self.rows]

    def room(self, slot: int) -> int:
        return self.max_length - len(self.rows[slot])

    def write(self, slot: int, tree: DraftTree) -> None:
        if len(tree) > self.room(slot):
            raise CacheFullError(f"row {slot} needs {len(tree)} slots, {self.room(slot)} are free")
        self.pending[slot] = tree

    def commit(self, slot: int, path: Sequence[int]) -> None:
        tree = self.pending[slot]
        assert tree is not None, "commit without a pass"
        parents = tree.parents.tolist()
        for above, node in zip([-1, *path], path, strict=False):
            assert parents[node] == above, f"{path} is no path of {parents}"
        self.rows[slot] += tree.tokens[list(path)].tolist()
        self.pending[slot] = None

    def rollback(self, slot: int) -> None:
        self.pending[slot] = None

    def truncate(self, slot: int, length: int) -> None:
        assert 0 <= length <= len(self.rows[slot])
        self.rows[slot], self.pending[slot] = self.rows[slot][:length], None

    def reset(self, slot: int) -> None:
        self.rows[slot], self.pending[slot] = [], None


class TableTarget:
    """Logits from a random table, addressed by the last `order` tokens.

    Args:
        vocab_size: V.
        order: tokens of context that matter.
        eos_ids: ids that end an answer.
        max_length: context, tokens.
        tokenizer: for prompts in text.
        scale: standard deviation of the logits; large is peaked.
        seed: of the table.
        edit: changes the logits of a context, e.g. to NaN; takes (context, logits [V]).

    Features at each tap are (token, position), so D is 2 and a drafter's context can be read off.
    """

    num_contexts = 4099

    def __init__(
        self,
        vocab_size: int = 97,
        *,
        order: int = 2,
        eos_ids: tuple[int, ...] = (),
        max_length: int = 512,
        tokenizer: object | None = None,
        scale: float = 3.0,
        seed: int = 0,
        edit: Callable[[tuple[int, ...], Tensor], Tensor] | None = None,
    ) -> None:
        generator = torch.Generator().manual_seed(seed)
        self.table = scale * torch.randn(self.num_contexts, vocab_size, generator=generator)
        self.order, self.edit, self.tokenizer = order, edit, tokenizer
        self.calls: list[list[tuple[int, list[int], list[int]]]] = []  # slot, tokens, positions
        self.caches: list[TableCache] = []
        self.spec = TargetSpec(
            name="table",
            vocab_size=vocab_size,
            hidden_size=2,
            num_layers=4,
            max_length=max_length,
            eos_ids=eos_ids,
            dtype=torch.float32,
            device=torch.device("cpu"),
            architecture="TableTarget",
        )

    def new_cache(self, num_rows: int, max_length: int) -> TableCache:
        self.caches.append(TableCache(num_rows, max_length))
        return self.caches[-1]

    def logits_of(self, context: Sequence[int]) -> Tensor:
        """[V] logits of the token after these."""
        recent = tuple(context[-self.order :])
        code = 0
        for token in recent:
            code = code * 1009 + token + 1
        logits = self.table[code % self.num_contexts]
        return logits if self.edit is None else self.edit(tuple(context), logits)

    def forward(
        self,
        trees: Sequence[DraftTree],
        cache: TableCache,
        slots: Sequence[int],
        *,
        taps: tuple[int, ...] = (),
        last_only: bool = False,
    ) -> TargetOutput:
        widest = max(len(tree) for tree in trees)
        logits = torch.zeros(len(trees), widest, self.spec.vocab_size)
        features = torch.zeros(len(trees), widest, 2 * len(taps)) if taps else None
        call = []
        for i, (tree, slot) in enumerate(zip(trees, slots, strict=True)):
            committed = cache.rows[slot]
            cache.write(slot, tree)
            tokens, parents = tree.tokens.tolist(), tree.parents.tolist()
            paths: list[list[int]] = []
            for token, parent in zip(tokens, parents, strict=True):
                paths.append([*(committed if parent < 0 else paths[parent]), token])
            for node, path in enumerate(paths):
                if not last_only or node == len(paths) - 1:
                    logits[i, node] = self.logits_of(path)
                if features is not None:
                    features[i, node] = torch.tensor([path[-1], len(path) - 1.0] * len(taps))
            call.append((slot, tokens, [len(path) - 1 for path in paths]))
            if bool(logits[i].isnan().any()):
                raise NumericError(f"logits of row {slot} are NaN")
        self.calls.append(call)
        if last_only:
            last = torch.tensor([len(tree) - 1 for tree in trees])
            logits = logits[torch.arange(len(trees)), last].unsqueeze(1)
        return TargetOutput(logits, features)

    def answer(self, prompt: Sequence[int], num_tokens: int, **sampling: float) -> list[int]:
        """The plain twin: `num_tokens` tokens, one by one, without engine, cache or trees."""
        sampler = Sampler(Sampling(**sampling), self.spec.vocab_size)
        tokens = list(prompt)
        for _ in range(num_tokens):
            logits = self.logits_of(tokens).unsqueeze(0)
            tokens.append(int(sampler.choose(logits, [len(tokens)])[0]))
        return tokens[len(prompt) :]


class ByteTokenizer:
    """One id per byte (0..255), then an end id 256: a character may span four ids."""

    end_id = 256
    vocab_size = 257

    def encode(self, text: str) -> list[int]:
        return list(text.encode("utf-8"))

    def encode_chat(self, messages: Sequence[dict[str, str]]) -> list[int]:
        body = "".join(f"<{m['role']}>{m['content']}\n" for m in messages)
        return self.encode(body + "<assistant>")

    def decode(self, ids: Sequence[int]) -> str:
        return bytes(i for i in ids if i < 256).decode("utf-8", errors="replace")


class ScriptTarget(TableTarget):
    """Says a fixed text after any prompt of a fixed length, by absolute position."""

    def __init__(self, script: Sequence[int], num_prompt: int, **options: object) -> None:
        super().__init__(**options)  # type: ignore[arg-type]
        self.script, self.num_prompt = list(script), num_prompt

    def logits_of(self, context: Sequence[int]) -> Tensor:
        at = len(context) - self.num_prompt
        logits = torch.zeros(self.spec.vocab_size)
        logits[self.script[at % len(self.script)]] = 40.0
        return logits


class OracleDrafter:
    """Knows the answers, and is wrong where told to be.

    Args:
        answers: whole token sequences, prompt included; a row follows the one it agrees with.
        depth: drafted tokens per chain.
        wrong: share of positions that are drafted wrong, chosen by position and seed.
        wrong_positions: absolute positions that are drafted wrong.
        siblings: extra wrong children per node (a tree), placed before and after the right one.
        vocab_size: V.
        seed: of the choices.
        taps: features to ask for; they are checked against the row's tokens (TableTarget's).
    """

    name = "oracle"

    def __init__(
        self,
        answers: Sequence[Sequence[int]],
        *,
        depth: int = 4,
        wrong: float = 0.0,
        wrong_positions: Sequence[int] = (),
        siblings: int = 0,
        vocab_size: int = 97,
        seed: int = 0,
        taps: tuple[int, ...] = (),
    ) -> None:
        self.answers = [list(answer) for answer in answers]
        self.depth, self.wrong, self.siblings = depth, wrong, siblings
        self.wrong_positions, self.vocab_size = frozenset(wrong_positions), vocab_size
        self.seed, self.taps = seed, taps
        self.contexts: dict[int, Tensor] = {}  # row key -> features so far, [S, K*D]
        self.rows: set[int] = set()
        self.verdicts: list[Verdict] = []

    def open(self, row: object, features: Tensor | None) -> None:
        assert row.key not in self.rows
        self.rows.add(row.key)
        if self.taps:
            self.contexts[row.key] = features.clone()
            self._check_context(row)

    def propose(self, rows: Sequence[object]) -> list[DraftTree]:
        assert all(row.key in self.rows for row in rows), "a row was never opened"
        return [self._tree(row) for row in rows]

    def observe(self, row: object, verdict: Verdict, features: Tensor | None) -> None:
        self.verdicts.append(verdict)
        if self.taps:
            assert features.shape[0] == len(verdict.path)
            self.contexts[row.key] = torch.cat([self.contexts[row.key], features])
            self._check_context(row)

    def close(self, row: object) -> None:
        self.rows.discard(row.key)
        self.contexts.pop(row.key, None)

    def continuation(self, row: object) -> list[int]:
        """What the row's answer goes on with."""
        size = len(row.tokens)
        for answer in self.answers:
            is_near = len(answer) > size and answer[size - 1] == row.tokens[-1]
            if is_near and answer[:size] == row.tokens:
                return answer[size:]
        return []

    def is_wrong(self, position: int) -> bool:
        chance = random.Random(self.seed * 1_000_003 + position).random()
        return position in self.wrong_positions or chance < self.wrong

    def _tree(self, row: object) -> DraftTree:
        depth = min(self.depth, row.max_depth, row.max_nodes)
        right = self.continuation(row)[:depth]
        chooser = random.Random(self.seed * 7919 + len(row.tokens))
        tokens, parents, spine = [row.tokens[-1]], [-1], 0
        for offset, token in enumerate(right):
            said = self._other(token) if self.is_wrong(len(row.tokens) + offset) else token
            left = row.max_nodes - (len(tokens) - 1) - (len(right) - offset)
            extra = max(0, min(self.siblings, left))
            level = [said, *chooser.sample(range(self.vocab_size), extra)]
            chooser.shuffle(level)
            place = level.index(said)
            tokens += level
            parents += [spine] * len(level)
            spine = len(tokens) - len(level) + place
        return DraftTree(torch.tensor(tokens), torch.tensor(parents))

    def _other(self, token: int) -> int:
        return (token + 1) % self.vocab_size

    def _check_context(self, row: object) -> None:
        """One feature row per committed token but the root, each made at its own place."""
        expected = [[float(t), float(i)] for i, t in enumerate(row.tokens[:-1])]
        assert self.contexts[row.key][:, :2].tolist() == expected


class RandomDrafter:
    """Draws trees of random shape with random tokens: slow, never wrong.

    Args:
        max_nodes: drafted nodes at most.
        vocab_size: V.
        seed: of shapes and tokens.
        overdraw: ignore what the row has room for (a careless drafter).
    """

    name = "random"
    taps: tuple[int, ...] = ()

    def __init__(
        self, max_nodes: int = 12, *, vocab_size: int = 97, seed: int = 0, overdraw: bool = False
    ) -> None:
        self.max_nodes, self.vocab_size, self.overdraw = max_nodes, vocab_size, overdraw
        self._random = random.Random(seed)

    def open(self, row: object, features: Tensor | None) -> None: ...

    def propose(self, rows: Sequence[object]) -> list[DraftTree]:
        return [self._tree(row) for row in rows]

    def _tree(self, row: object) -> DraftTree:
        room = self.max_nodes if self.overdraw else min(self.max_nodes, row.max_nodes)
        deepest = self.max_nodes if self.overdraw else row.max_depth
        tokens, parents, depths = [row.tokens[-1]], [-1], [0]
        for _ in range(self._random.randint(0, room)):
            parent = self._random.randrange(len(tokens))
            if depths[parent] < deepest:
                tokens.append(self._random.randrange(self.vocab_size))
                parents.append(parent)
                depths.append(depths[parent] + 1)
        return DraftTree(torch.tensor(tokens), torch.tensor(parents))

    def observe(self, row: object, verdict: Verdict, features: Tensor | None) -> None: ...

    def close(self, row: object) -> None: ...


def tiny_model(
    kind: str = "llama", *, seed: int = 0, std: float = 0.2, **changes: object
) -> object:
    """A random Hugging Face model of the shapes that catch mistakes.

    Grouped-query heads, and head_dim 16 with 6 heads: 96, not the hidden size. With std 0.2 greedy
    text does not loop as it does with the customary 0.02.

    Args:
        kind: "llama", "qwen2", "qwen3", "mistral" or "phi3".
        seed: of the weights.
        std: of the weights.
        **changes: entries of the configuration to replace.
    """
    import transformers

    families = {
        "llama": "Llama", "qwen2": "Qwen2", "qwen3": "Qwen3", "mistral": "Mistral", "phi3": "Phi3",
    }  # fmt: skip
    settings = {
        "vocab_size": 97,
        "hidden_size": 48,
        "intermediate_size": 64,
        "num_attention_heads": 6,
        "num_key_value_heads": 2,
        "head_dim": 16,
        "num_hidden_layers": 4,
        "max_position_embeddings": 512,
        "initializer_range": std,
        "bos_token_id": None,
        "eos_token_id": None,
        "pad_token_id": None,
    } | changes
    family = families[kind]
    config = getattr(transformers, f"{family}Config")(**settings)
    torch.manual_seed(seed)
    return getattr(transformers, f"{family}ForCausalLM")(config).eval()


def tiny_target(
    kind: str = "llama",
    dtype: torch.dtype = torch.float32,
    *,
    tokenizer: object | None = None,
    **changes: object,
) -> object:
    """`tiny_model` as a target."""
    from slipstream.target.hf import HFTarget

    return HFTarget(tiny_model(kind, **changes).to(dtype), tokenizer, name=f"tiny-{kind}")


def growth(**changes: object) -> object:
    """How a test's drafter grows trees: dynamic ones of 8 nodes, unless told otherwise."""
    from slipstream.trees.kinds import Growth

    return Growth(**{"tree": "dynamic", "budget": 8, "depth": 4, "topk": 4} | changes)


def random_eagle3(target: object, *, seed: int = 0, size: int = 61, **shape: object) -> object:
    """An EAGLE-3 drafter with random weights and a reduced vocabulary for a tiny target.

    Args:
        target: a `tiny_target`.
        seed: of the weights.
        size: U, draft vocabulary.
        **shape: tree, budget, depth, topk.
    """
    from slipstream.drafters.eagle import EagleDrafter
    from slipstream.formats.checkpoint import Eagle3Checkpoint
    from slipstream.models.eagle3 import Eagle3, Eagle3Config
    from slipstream.models.vocabulary import DraftVocabulary

    model = Eagle3(Eagle3Config(**target.draft_shape(), draft_vocab_size=size, taps=(1, 2, 3)))
    generator = torch.Generator().manual_seed(seed)
    for parameter in model.parameters():
        if parameter.dim() == 2:
            torch.nn.init.normal_(parameter, 0.0, 0.2, generator=generator)
    ids = torch.randperm(target.spec.vocab_size, generator=generator)[:size].sort().values
    vocabulary = DraftVocabulary(ids, target.spec.vocab_size)
    made = Eagle3Checkpoint(model.eval(), vocabulary)
    return EagleDrafter.from_model(made, target, growth(**shape))


def random_peagle(
    target: object, *, seed: int = 0, size: int = 61, num_layers: int = 3, **shape: object
) -> object:
    """A P-EAGLE drafter with random weights and a reduced vocabulary for a tiny target.

    Args:
        target: a `tiny_target`.
        seed: of the weights.
        size: U, draft vocabulary; it holds the mask token, which may still never be drafted.
        num_layers: decoder layers.
        **shape: tree, budget, depth, topk, children.
    """
    from slipstream.drafters.peagle import PEagleDrafter
    from slipstream.formats.checkpoint import PEagleCheckpoint
    from slipstream.models.peagle import PEagle, PEagleConfig
    from slipstream.models.vocabulary import DraftVocabulary

    generator = torch.Generator().manual_seed(seed)
    vocab_size = target.spec.vocab_size
    ids = torch.randperm(vocab_size, generator=generator)[:size].sort().values
    config = PEagleConfig(
        **target.draft_shape(),
        draft_vocab_size=size,
        taps=(1, 2, 3),
        has_embedding=True,
        num_layers=num_layers,
        mask_token=int(ids[-1]),
    )
    model = PEagle(config)
    for parameter in model.parameters():
        if parameter.dim() > 1:
            torch.nn.init.normal_(parameter, 0.0, 0.2, generator=generator)
    made = PEagleCheckpoint(model.eval().to(target.spec.dtype), DraftVocabulary(ids, vocab_size))
    how = growth(**{"tree": "chain", "budget": 5, "depth": 5} | shape)
    drafter = PEagleDrafter.from_model(made, target, how)
    drafter.checkpoint = made
    return drafter


def random_dflash(
    target: object,
    *,
    seed: int = 0,
    size: int = 61,
    is_shifted: bool = False,
    num_layers: int = 2,
    path_rank: int = 0,
    rope_scaling: dict | None = None,
    **shape: object,
) -> object:
    """A DFlash drafter with random weights, blocks of 5 and a reduced vocabulary.

    Args:
        target: a `tiny_target`.
        seed: of the weights.
        size: U, draft vocabulary; it holds the mask token, which may still never be drafted.
        is_shifted: the read-out.
        num_layers: draft layers.
        path_rank: of a path head, which is then drafted with (DSpark).
        rope_scaling: None for the target's.
        **shape: tree, budget, depth, topk, width, children.
    """
    from slipstream.drafters.dflash import DFlashDrafter, PathDrafter
    from slipstream.formats.checkpoint import DFlashCheckpoint
    from slipstream.models.dflash import DFlash, DFlashConfig
    from slipstream.models.vocabulary import DraftVocabulary

    generator = torch.Generator().manual_seed(seed)
    vocab_size = target.spec.vocab_size
    ids = torch.randperm(vocab_size, generator=generator)[:size].sort().values
    config = DFlashConfig(
        **target.draft_shape() | ({} if rope_scaling is None else {"rope_scaling": rope_scaling}),
        num_layers=num_layers,
        draft_vocab_size=size,
        taps=(1, 2, 3),
        width=5,
        mask_token=int(ids[-1]),
        is_shifted=is_shifted,
        path_rank=path_rank,
    )
    model = DFlash(config)
    for parameter in model.parameters():
        if parameter.dim() == 2:
            torch.nn.init.normal_(parameter, 0.0, 0.2, generator=generator)
    made = DFlashCheckpoint(model.eval().to(target.spec.dtype), DraftVocabulary(ids, vocab_size))
    width = shape.pop("width", None)
    how = growth(**{"tree": "chain", "budget": 16, "depth": 16} | shape)
    drafter = (PathDrafter if path_rank else DFlashDrafter).from_model(
        made, target, how, width=width
    )
    drafter.checkpoint = made
    return drafter


def random_language(
    target: object, *, seed: int = 0, size: int = 61, num_layers: int = 2, **shape: object
) -> object:
    """A draft language model with random weights and a reduced vocabulary for a tiny target.

    Args:
        target: a `tiny_target`.
        seed: of the weights.
        size: U, draft vocabulary.
        num_layers: draft layers.
        **shape: tree, budget, depth, topk, children.
    """
    from slipstream.drafters.chain import ChainDrafter
    from slipstream.formats.checkpoint import LanguageCheckpoint
    from slipstream.models.language import Language, LanguageConfig

    sizes = target.draft_shape()
    del sizes["target_hidden_size"]
    model = Language(LanguageConfig(**sizes, num_layers=num_layers, draft_vocab_size=size))
    vocabulary = _randomise(model, target, seed=seed, size=size)
    made = LanguageCheckpoint(model.eval(), vocabulary)
    how = growth(**{"tree": "chain", "budget": 4, "topk": 1} | shape)
    return ChainDrafter.from_model(made, target, how)


def random_medusa(
    target: object, *, seed: int = 0, size: int = 61, borrows: bool = True, **shape: object
) -> object:
    """Four Medusa heads with random weights and a reduced vocabulary for a tiny target.

    Args:
        target: a `tiny_target`.
        seed: of the weights.
        size: U, draft vocabulary.
        borrows: under the target's head, or heads of their own.
        **shape: tree, budget, depth, topk.
    """
    from slipstream.drafters.medusa import MedusaDrafter
    from slipstream.formats.checkpoint import MedusaCheckpoint
    from slipstream.models.medusa import Medusa, MedusaConfig

    rows, hidden = target.head().shape
    model = Medusa(MedusaConfig(hidden, 4, 1, rows, size, borrows))
    vocabulary = _randomise(model, target, seed=seed, size=size)
    made = MedusaCheckpoint(model.eval(), vocabulary)
    return MedusaDrafter.from_model(made, target, growth(**{"tree": "best-first"} | shape))


def random_eagle(target: object, *, seed: int = 0, size: int = 61, **shape: object) -> object:
    """An EAGLE-1 drafter with random weights over a reduced vocabulary for a tiny target.

    Args:
        target: a `tiny_target`.
        seed: of the weights.
        size: U, draft vocabulary.
        **shape: tree, budget, depth, topk, children.
    """
    from slipstream.drafters.eagle import FeatureEagleDrafter
    from slipstream.formats.checkpoint import EagleCheckpoint
    from slipstream.models.eagle import Eagle, EagleConfig

    sizes = target.draft_shape()
    del sizes["target_hidden_size"]
    model = Eagle(EagleConfig(**sizes, draft_vocab_size=size))
    vocabulary = _randomise(model, target, seed=seed, size=size)
    made = EagleCheckpoint(model.eval(), vocabulary)
    return FeatureEagleDrafter.from_model(made, target, growth(**shape))


def _randomise(model: torch.nn.Module, target: object, *, seed: int, size: int) -> object:
    """Random matrices, and a random draft vocabulary to go with them."""
    from slipstream.models.vocabulary import DraftVocabulary

    generator = torch.Generator().manual_seed(seed)
    for parameter in model.parameters():
        if parameter.dim() == 2:
            torch.nn.init.normal_(parameter, 0.0, 0.2, generator=generator)
    vocab_size = target.spec.vocab_size
    ids = torch.randperm(vocab_size, generator=generator)[:size].sort().values
    return DraftVocabulary(ids, vocab_size)
