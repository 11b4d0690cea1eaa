"""Logits to probabilities to token: one warp and one keyed noise for everything.

Keyed noise (Gumbel-max with a counter-based generator): g(seed, position, token) is standard
Gumbel noise that depends on nothing else, and the token at a position is the argmax of
log p + g. Plain decoding and `verify.walk` do the same arithmetic, so sampled speculative output
equals sampled plain output token for token, whatever was drafted (Daliri et al. 2024,
arXiv:2408.07978; arXiv:2506.05632).

The warp is temperature, then top-k, then top-p, each on what the one before left, as in
`transformers`. Tokens of equal probability are ranked by id, lowest first, everywhere: in the
greedy argmax, at the edge of top-k (exactly k tokens stay) and at the edge of top-p.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from slipstream import shapes
from slipstream.errors import NumericError, SettingError
from slipstream.types import Sampling

_GOLDEN = 0x9E3779B97F4A7C15
_FIRST, _SECOND = 0xBF58476D1CE4E5B9, 0x94D049BB133111EB
_WORD = (1 << 64) - 1
_NUM_CACHED = 32  # positions whose noise is kept: a few steps of a deep tree
_FIRST_PREFIX = 256  # tokens sorted before top-p looks further
_STREAMS = {"verify": 1, "draft": 2}


def _mix(word: int) -> int:
    """splitmix64's finaliser on one unsigned 64-bit word."""
    word = ((word ^ (word >> 30)) * _FIRST) & _WORD
    word = ((word ^ (word >> 27)) * _SECOND) & _WORD
    return word ^ (word >> 31)


def _signed(word: int) -> int:
    return word - (1 << 64) if word >> 63 else word


def noise_bits(seed: int, position: int, vocab_size: int, device: torch.device) -> Tensor:
    """[V] int64 words of 64 random bits, one per token, a pure function of its key.

    Two rounds of splitmix64's finaliser key a stream by (seed, position); the token counts
    along it. Integers only, so every device gives the same bits (Steele et al. 2014,
    "Fast splittable pseudorandom number generators").

    Example:
        >>> bits = noise_bits(0, 7, 5, torch.device("cpu"))
        >>> torch.equal(bits[:3], noise_bits(0, 7, 3, torch.device("cpu")))
        True
    """
    key = _key(seed, position)
    words = torch.arange(1, vocab_size + 1, dtype=torch.int64, device=device)
    words.mul_(_signed(_GOLDEN)).add_(_signed(key))
    # A shift of int64 drags the sign along; the mask makes it the logical shift.
    words.bitwise_xor_((words >> 30).bitwise_and_((1 << 34) - 1)).mul_(_signed(_FIRST))
    words.bitwise_xor_((words >> 27).bitwise_and_((1 << 37) - 1)).mul_(_signed(_SECOND))
    return words.bitwise_xor_((words >> 31).bitwise_and_((1 << 33) - 1))


def _key(seed: int, position: int) -> int:
    return _mix((_mix((seed + _GOLDEN) & _WORD) + (position + 1) * _GOLDEN) & _WORD)


class Compiled(NamedTuple):
    """What compiled code does on the CPU, with the results of the code here.

    Args:
        noise: (key, V) to [V] float32.
        first_argmax: [N, V] float32 to [N] int64, -1 for a row that holds NaN.
    """

    noise: Callable[[int, int], Tensor]
    first_argmax: Callable[[Tensor], Tensor]


_compiled: Compiled | None = None


def use_compiled(code: Compiled) -> None:
    """Let compiled code make the noise of the CPU and choose greedily there from now on."""
    global _compiled
    _compiled = code


def gumbel_noise(
    seed: int, position: int, vocab_size: int, device: torch.device | str = "cpu"
) -> Tensor:
    """[V] float32 standard Gumbel noise g(seed, position, token).

    The noise of a token does not depend on V. The logarithms are taken in float64 and rounded
    once, so that devices agree, and so does the compiled code, where a process runs any.
    """
    if torch.device(device).type == "cpu" and _compiled is not None:
        return _compiled.noise(_key(seed, position), vocab_size)
    bits = noise_bits(seed, position, vocab_size, torch.device(device))
    uniform = (bits >> 11).bitwise_and_((1 << 53) - 1).to(torch.float64)
    uniform.add_(0.5).mul_(2.0**-53)  # inside (0, 1), never 0 or 1
    return uniform.log_().neg_().log_().neg_().to(torch.float32)


class Sampler:
    """A request's warp and its noise.

    Args:
        sampling: temperature, top-k, top-p and seed.
        vocab_size: V.

    Raises:
        SettingError: vocab_size is below 1.

    Example:
        >>> sampler = Sampler(Sampling(temperature=0.0), vocab_size=3)
        >>> sampler.choose(torch.tensor([[1.0, 2.0, 2.0]]), [5])
        tensor([1])
    """

    def __init__(self, sampling: Sampling, vocab_size: int) -> None:
        if vocab_size < 1:
            raise SettingError("vocabulary size", vocab_size, "1 or more")
        self.sampling = sampling
        self.vocab_size = vocab_size
        self._noise: dict[tuple[int, torch.device], Tensor] = {}
        self._generators: dict[str, torch.Generator] = {}

    @property
    def is_greedy(self) -> bool:
        """True at temperature 0."""
        return self.sampling.is_greedy

    def probs(self, logits: Tensor) -> Tensor:
        """The distribution tokens are drawn from.

        Args:
            logits: [N, V], the target's.

        Returns:
            [N, V] float32, after temperature, top-k and top-p; one-hot of the argmax when
            greedy, ties to the lowest id.

        Raises:
            ShapeError: logits are not [N, V].
            NumericError: a row holds NaN, or nothing finite.
        """
        self._check("probs", logits)
        if self.is_greedy:
            return torch.nn.functional.one_hot(_first_argmax(logits), self.vocab_size).float()
        scores = self._scores(logits)
        if self._truncates:
            kept = [self._kept(row) for row in scores]
            full, scores = scores, torch.full_like(scores, float("-inf"))
            for row, ids in enumerate(kept):
                scores[row, ids] = full[row, ids]
        return scores.softmax(dim=-1)

    def choose(self, logits: Tensor, positions: list[int]) -> Tensor:
        """The token at each position: argmax of log p + g(seed, position, token).

        Args:
            logits: [N, V], the target's.
            positions: N absolute positions, each the index in the row's token list of the
                token that is being chosen.

        Returns:
            [N] int64; the argmax itself when greedy, ties to the lowest id.

        Raises:
            ShapeError: logits are not [N, V], or positions are not N.
            NumericError: a row holds NaN, or nothing finite.
        """
        num_rows = self._check("choose", logits)
        if len(positions) != num_rows:
            raise shapes.ShapeError(f"choose: {len(positions)} positions for {num_rows} rows")
        if self.is_greedy:
            return _first_argmax(logits)
        scores = self._scores(logits)
        chosen = [self._choose_one(row, at) for row, at in zip(scores, positions, strict=True)]
        return torch.stack(chosen) if chosen else torch.empty(0, dtype=torch.int64)

    def noise(self, position: int, device: torch.device | str = "cpu") -> Tensor:
        """[V] float32 Gumbel noise of an absolute position; recent ones are kept."""
        key = (position, torch.device(device))
        found = self._noise.get(key)
        if found is None:
            found = gumbel_noise(self.sampling.seed, position, self.vocab_size, device)
            while len(self._noise) >= _NUM_CACHED:
                del self._noise[next(iter(self._noise))]
            self._noise[key] = found
        return found

    def generator(self, stream: str = "verify") -> torch.Generator:
        """The request's own stream of random numbers for the classical rules (CPU).

        Args:
            stream: "verify" or "draft"; separate, so that another drafter does not shift the
                verifier's draws.
        """
        if stream not in self._generators:
            key = _mix((self.sampling.seed + _STREAMS[stream] * _FIRST) & _WORD)
            self._generators[stream] = torch.Generator().manual_seed(_signed(key))
        return self._generators[stream]

    @property
    def _truncates(self) -> bool:
        return 0 < self.sampling.top_k < self.vocab_size or self.sampling.top_p < 1

    def _check(self, operation: str, logits: Tensor) -> int:
        return shapes.check(operation, logits=(logits, f"N {self.vocab_size}"))["N"]

    def _scores(self, logits: Tensor) -> Tensor:
        """[N, V] log p up to a constant per row, the best token at 0."""
        logits = logits.to(torch.float32)
        best = logits.amax(dim=-1, keepdim=True)
        if not bool(best.isfinite().all()):
            raise _not_a_distribution()
        return (logits - best).div_(max(self.sampling.temperature, 1e-30))

    def _choose_one(self, scores: Tensor, position: int) -> Tensor:
        noise = self.noise(position, scores.device)
        if not self._truncates:
            return (scores + noise).argmax()
        ids = self._kept(scores)
        return ids[(scores[ids] + noise[ids]).argmax()]

    def _kept(self, scores: Tensor) -> Tensor:
        """Ids, ascending, that survive top-k and then top-p of one row [V]."""
        top_k, top_p = self.sampling.top_k, self.sampling.top_p
        count = min(top_k, self.vocab_size) if top_k else self.vocab_size
        if top_p == 1:
            return _highest(scores, count, scores.topk(count).values[-1])
        total = scores.exp().sum(dtype=torch.float64) if count == self.vocab_size else None
        size = count if total is None else min(_FIRST_PREFIX, count)
        while True:
            best = scores.topk(size).values
            mass = best.exp().cumsum(0, dtype=torch.float64)
            inside = int((mass < top_p * (mass[-1] if total is None else total)).sum())
            if inside < size or size == count:
                kept = min(inside + 1, size)  # the token that crosses the mass stays
                return _highest(scores, kept, best[kept - 1])
            size = min(size * 8, count)


def _highest(scores: Tensor, count: int, edge: Tensor) -> Tensor:
    """Ids of the `count` highest scores, `edge` being the last of them, equals by id."""
    kept = scores > edge
    equal = (scores == edge).nonzero().squeeze(-1)
    kept[equal[: count - int(kept.sum())]] = True
    return kept.nonzero().squeeze(-1)


def _first_argmax(logits: Tensor) -> Tensor:
    """[N] int64, the lowest id of the maximum."""
    if logits.device.type == "cpu" and logits.dtype == torch.float32 and _compiled is not None:
        best = _compiled.first_argmax(logits)
        if bool((best < 0).any()):
            raise _not_a_distribution()
        return best
    best = logits.argmax(dim=-1)
    if bool(logits.gather(-1, best.unsqueeze(-1)).isnan().any()):  # argmax stops at a NaN
        raise _not_a_distribution()
    return best


def _not_a_distribution() -> NumericError:
    return NumericError(
        "the target's logits hold NaN or no finite maximum, expected numbers",
        "use --dtype float32; if it persists, check the target's weights",
    )
