"""The warp against transformers, the noise against its definition and its statistics."""

from __future__ import annotations

import math

import pytest
import torch

from slipstream.errors import NumericError, SettingError, ShapeError
from slipstream.sampling import Sampler, gumbel_noise, noise_bits
from slipstream.types import Sampling

CPU = torch.device("cpu")


def sampler(vocab_size, **settings):
    return Sampler(Sampling(**settings), vocab_size)


def chi_square(counts, probs):
    expected = probs.double() * counts.sum()
    kept = expected > 0
    assert int(counts[~kept].sum()) == 0, "a token of probability 0 was chosen"
    return float(((counts[kept] - expected[kept]) ** 2 / expected[kept]).sum()), int(kept.sum()) - 1


def critical(df, z=3.09):
    """The 0.1% value of chi-square (Wilson and Hilferty)."""
    return df * (1 - 2 / (9 * df) + z * math.sqrt(2 / (9 * df))) ** 3


def draw(s, logits, num_draws):
    """Choices at positions 0..num_draws-1, counted."""
    chosen = s.choose(logits.expand(num_draws, -1), list(range(num_draws)))
    return torch.bincount(chosen, minlength=s.vocab_size)


# --- noise ------------------------------------------------------------------------------------


def test_bits_are_splitmix64_of_the_key():
    word = (1 << 64) - 1

    def mix(x):
        x = ((x ^ (x >> 30)) * 0xBF58476D1CE4E5B9) & word
        x = ((x ^ (x >> 27)) * 0x94D049BB133111EB) & word
        return x ^ (x >> 31)

    golden = 0x9E3779B97F4A7C15
    for seed in (0, 1, -1, 2**63, 12345678901234567890):
        for position in (0, 5, 10**6):
            key = mix((mix((seed + golden) & word) + (position + 1) * golden) & word)
            want = [mix((key + (token + 1) * golden) & word) for token in range(50)]
            got = [x & word for x in noise_bits(seed, position, 50, CPU).tolist()]
            assert got == want


def test_splitmix64_reference_stream():
    """The finaliser over the golden-ratio counter is the published splitmix64 (seed 0)."""
    from slipstream.sampling import _GOLDEN, _mix

    stream = [_mix((i * _GOLDEN) & ((1 << 64) - 1)) for i in (1, 2, 3)]
    assert stream == [0xE220A8397B1DCDAF, 0x6E789E6AA1B965F4, 0x06C45D188009454F]


def test_noise_of_a_token_does_not_depend_on_the_vocabulary():
    assert torch.equal(gumbel_noise(3, 11, 49152)[:97], gumbel_noise(3, 11, 97))


def test_noise_is_finite_and_has_gumbel_moments():
    noise = torch.cat([gumbel_noise(s, p, 49152) for s, p in ((0, 0), (0, 1), (9, 500))]).double()
    n = noise.numel()
    assert noise.dtype == torch.float64 and bool(noise.isfinite().all())
    variance = math.pi**2 / 6
    assert abs(noise.mean() - 0.5772156649) < 4 * math.sqrt(variance / n)
    assert abs(noise.var() - variance) < 4 * variance * math.sqrt(4.4 / n)  # kurtosis 5.4


def test_bits_are_uniform_in_their_top_and_middle():
    bits = torch.cat([noise_bits(7, position, 20000, CPU) for position in range(10)])
    for shift in (56, 40, 24, 11):  # one byte each; the lowest 11 bits are not used
        counts = torch.bincount((bits >> shift) & 255, minlength=256)
        found, df = chi_square(counts, torch.full((256,), 1 / 256))
        assert found < critical(df)


@pytest.mark.parametrize(
    ("one", "other"),
    [
        ((0, 0), (0, 1)),  # neighbouring positions
        ((0, 0), (1, 0)),  # neighbouring seeds
        ((0, 1), (1, 0)),  # seed and position exchanged
        ((5, 1000), (5, 1064)),
        ((0, 3), (2**32, 3)),  # seeds that differ only in their upper half
        ((0, 3), (-1, 3)),
    ],
)
def test_noise_is_uncorrelated_between_keys(one, other):
    """|correlation| under 4 / sqrt(n): a false alarm once in 16,000 pairs."""
    n = 49152
    a, b = gumbel_noise(*one, n), gumbel_noise(*other, n)
    for lag in (0, 1, 2):
        pair = torch.stack([a[: n - lag], b[lag:]])
        assert abs(float(torch.corrcoef(pair)[0, 1])) < 4 / math.sqrt(n)


def test_noise_is_uncorrelated_within_a_position_and_along_positions():
    n = 49152
    noise = gumbel_noise(1, 1, n)
    for lag in (1, 2, 3, 64):
        pair = torch.stack([noise[:-lag], noise[lag:]])
        assert abs(float(torch.corrcoef(pair)[0, 1])) < 4 / math.sqrt(n)
    one_token = torch.stack([gumbel_noise(1, p, 8)[5] for p in range(4000)])
    pair = torch.stack([one_token[:-1], one_token[1:]])
    assert abs(float(torch.corrcoef(pair)[0, 1])) < 4 / math.sqrt(4000)


def test_keys_do_not_share_streams():
    words = torch.cat([noise_bits(s, p, 50, CPU) for s in range(30) for p in range(30)])
    assert words.unique().numel() == words.numel()


def test_noise_is_kept_and_the_store_is_bounded():
    s = sampler(5, temperature=1.0)
    assert s.noise(3) is s.noise(3)
    first = s.noise(0).clone()
    for position in range(200):
        s.noise(position)
    assert len(s._noise) <= 32
    assert torch.equal(s.noise(0), first)


# --- the law of choose ------------------------------------------------------------------------


@pytest.mark.parametrize(
    "settings",
    [
        {"temperature": 1.0},
        {"temperature": 0.5},
        {"temperature": 2.0},
        {"temperature": 1.0, "top_p": 0.8},
        {"temperature": 1.3, "top_k": 3},
        {"temperature": 0.7, "top_k": 4, "top_p": 0.9},
    ],
)
def test_choices_follow_the_warped_distribution(settings):
    """Reports B10, B18: 3,000 draws; a false alarm once in 1,000 (the seed is fixed)."""
    logits = torch.tensor([[1.0, 2.0, 0.5, -1.0, 2.5, 0.0]])
    s = sampler(6, seed=3, **settings)
    found, df = chi_square(draw(s, logits, 3000), s.probs(logits)[0])
    assert found < critical(df)


def test_pairs_of_neighbouring_positions_are_independent():
    logits = torch.tensor([[0.3, 1.0, 0.0]])
    s = sampler(3, temperature=1.0, seed=8)
    chosen = s.choose(logits.expand(10000, -1), list(range(10000)))
    pairs = torch.bincount(chosen[0::2] * 3 + chosen[1::2], minlength=9)
    p = s.probs(logits)[0]
    found, df = chi_square(pairs, torch.outer(p, p).flatten())
    assert found < critical(df)


def test_seeds_give_different_tokens_with_the_right_law():
    """Report B18: many seeds, one position."""
    logits = torch.tensor([[0.5, 1.0, 0.0, -0.5]])
    chosen = [int(sampler(4, temperature=1.0, seed=i).choose(logits, [17])) for i in range(2000)]
    counts = torch.bincount(torch.tensor(chosen), minlength=4)
    found, df = chi_square(counts, logits[0].softmax(0))
    assert len(set(chosen[:200])) > 1 and found < critical(df)


def test_a_seed_is_reproducible_alone_in_a_batch_and_later():
    """Report B135."""
    torch.manual_seed(0)
    logits = torch.randn(3, 97)
    for settings in ({}, {"top_p": 0.9}, {"top_k": 20}):
        s = sampler(97, temperature=1.0, seed=5, **settings)
        alone = [int(s.choose(logits[i : i + 1], [40 + i])) for i in range(3)]
        torch.rand(100)  # other users of the global generator
        again = sampler(97, temperature=1.0, seed=5, **settings)
        assert again.choose(logits, [40, 41, 42]).tolist() == alone
        assert s.choose(logits.flip(0), [42, 41, 40]).tolist() == alone[::-1]
    rows = logits[:1].expand(40, -1)
    one, two = (
        sampler(97, temperature=1.0, seed=i).choose(rows, list(range(40))).tolist() for i in (1, 2)
    )
    assert one != two


def test_adding_a_constant_to_the_logits_changes_nothing():
    torch.manual_seed(1)
    logits = torch.randint(-40, 40, (50, 97)) / 8  # exact in float32 after the shift
    s = sampler(97, temperature=0.7, seed=1)
    positions = list(range(50))
    assert torch.equal(s.choose(logits, positions), s.choose(logits + 512, positions))


# --- greedy and ties --------------------------------------------------------------------------


@pytest.mark.parametrize("settings", [{}, {"top_p": 0.5}, {"top_k": 1}, {"top_k": 2, "seed": 9}])
def test_greedy_takes_the_lowest_id_of_equal_maxima(settings):
    """Reports B08, B20: a fixed tie rule, whatever top-p and whoever shares the batch."""
    logits = torch.zeros(1, 97)
    logits[0, [13, 40, 96]] = 3.0
    greedy, other = sampler(97, **settings), sampler(97, temperature=1.0, seed=2)
    for step in range(100):
        other.choose(logits, [step])
        assert greedy.choose(logits, [step]).tolist() == [13]
    assert greedy.choose(logits.expand(16, -1), [0] * 16).tolist() == [13] * 16
    assert greedy.probs(logits).nonzero().tolist() == [[0, 13]]


def test_ties_at_the_edges_keep_the_lower_ids():
    logits = torch.tensor([[1.0, 2.0, 1.0, 1.0, 2.0, 0.0]])
    assert sampler(6, temperature=1.0, top_k=3).probs(logits)[0].nonzero().flatten().tolist() == [
        0,
        1,
        4,
    ]
    flat = torch.zeros(1, 10)
    kept = sampler(10, temperature=1.0, top_p=0.35).probs(flat)[0]
    assert kept.nonzero().flatten().tolist() == [0, 1, 2, 3]
    assert kept[:4].tolist() == pytest.approx([0.25] * 4)


# --- the warp ---------------------------------------------------------------------------------


@pytest.mark.parametrize("temperature", [0.5, 1.0, 1.7])
@pytest.mark.parametrize("top_k", [0, 1, 7, 300, 5000])
@pytest.mark.parametrize("top_p", [1.0, 0.95, 0.5, 0.01])
@pytest.mark.parametrize("scale", [0.1, 4.0])
def test_the_warp_is_transformers(temperature, top_k, top_p, scale):
    """Flat rows make top-p look past its first prefix; 3,000 tokens are two widenings."""
    from transformers import (
        LogitsProcessorList,
        TemperatureLogitsWarper,
        TopKLogitsWarper,
        TopPLogitsWarper,
    )

    vocab_size = 3000
    generator = torch.Generator().manual_seed(top_k + int(100 * top_p))
    logits = torch.randn(2, vocab_size, generator=generator, dtype=torch.float64) * scale
    logits = logits.float()
    warpers = LogitsProcessorList([TemperatureLogitsWarper(temperature)])
    if top_k:
        warpers.append(TopKLogitsWarper(top_k))
    if top_p < 1:
        warpers.append(TopPLogitsWarper(top_p))
    want = warpers(None, logits).softmax(-1)
    got = sampler(vocab_size, temperature=temperature, top_k=top_k, top_p=top_p).probs(logits)
    differing = (got > 0) != (want > 0)
    # transformers sums in float32, so where the mass crosses may move by a token in a flat row
    assert int(differing.sum()) <= (2 if scale < 1 else 0)
    assert torch.allclose(got[~differing], want[~differing], atol=1e-4 if scale < 1 else 1e-6)


def test_top_p_keeps_the_token_that_crosses():
    logits = torch.tensor([[0.5, 0.3, 0.2]]).log()
    kept = sampler(3, temperature=1.0, top_p=0.6).probs(logits)[0]
    assert kept.tolist() == pytest.approx([0.625, 0.375, 0.0])
    first = sampler(3, temperature=1.0, top_p=0.01).probs(logits)[0]
    assert first.tolist() == [1.0, 0.0, 0.0]


def test_choices_stay_inside_the_truncation():
    torch.manual_seed(2)
    logits = torch.randn(1, 2000)
    s = sampler(2000, temperature=1.5, top_k=900, top_p=0.6)
    kept = s.probs(logits)[0] > 0
    assert bool(kept[s.choose(logits.expand(300, -1), list(range(300)))].all())


def test_extreme_temperatures_and_impossible_tokens():
    logits = torch.tensor([[0.0, 1.0, float("-inf"), 0.9999]])
    assert int(sampler(4, temperature=1e-50).choose(logits, [0])) == 1
    assert sampler(4, temperature=1e30).probs(logits)[0].tolist() == pytest.approx(
        [1 / 3, 1 / 3, 0.0, 1 / 3]
    )
    assert int(draw(sampler(4, temperature=5.0), logits, 500)[2]) == 0


def test_half_precision_logits_are_warped_in_float32():
    logits = torch.randn(1, 50, generator=torch.Generator().manual_seed(0)).bfloat16()
    s = sampler(50, temperature=0.7)
    assert s.probs(logits).dtype == torch.float32
    assert torch.equal(s.probs(logits), s.probs(logits.float()))


# --- errors -----------------------------------------------------------------------------------


@pytest.mark.parametrize("settings", [{}, {"temperature": 1.0}, {"temperature": 1.0, "top_p": 0.9}])
@pytest.mark.parametrize("bad", [float("nan"), float("inf"), None])
def test_nan_and_rows_without_a_maximum_are_refused(settings, bad):
    """Report B137: an all-NaN row must not become token 0 or V."""
    logits = torch.zeros(2, 8)
    s = sampler(8, **settings)
    if bad is None:
        logits[1] = float("nan")
    else:
        logits[1, 5] = bad
    if bad == float("inf") and s.is_greedy:
        assert s.choose(logits, [0, 0]).tolist() == [0, 5]  # an argmax exists
        return
    with pytest.raises(NumericError):
        s.choose(logits, [0, 0])
    with pytest.raises(NumericError):
        s.probs(logits)
    assert s.choose(logits[:1], [0]).shape == (1,)  # the other row is unaffected


def test_shapes_are_checked():
    s = sampler(8, temperature=1.0)
    with pytest.raises(ShapeError, match=r"choose: logits is \[1, 9\]"):
        s.choose(torch.zeros(1, 9), [0])
    with pytest.raises(ShapeError, match="2 positions for 1 rows"):
        s.choose(torch.zeros(1, 8), [0, 1])
    with pytest.raises(ShapeError):
        s.probs(torch.zeros(8))
    with pytest.raises(SettingError):
        sampler(0)


def test_generators_are_the_requests_own():
    def first(seed, stream):
        return float(torch.rand((), generator=sampler(4, seed=seed).generator(stream)))

    assert first(1, "verify") == first(1, "verify")
    assert len({first(1, "verify"), first(1, "draft"), first(2, "verify"), first(-1, "draft")}) == 4
    s = sampler(4)
    assert s.generator("draft") is s.generator("draft")
