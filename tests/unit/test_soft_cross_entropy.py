"""The fused head loss against the plain computation."""

import pytest
import torch

from slipstream.train.objectives import soft_cross_entropy as module
from slipstream.train.objectives.soft_cross_entropy import soft_cross_entropy


def numbers(rows=11, size=5, ids=7, dtype=torch.float64):
    hidden = torch.randn(rows, size, dtype=dtype, requires_grad=True)
    weight = torch.randn(ids, size, dtype=dtype, requires_grad=True)
    probs = torch.randn(4, ids, dtype=dtype).softmax(-1)
    return hidden, weight, probs, torch.randint(0, 4, (rows,))


def plainly(hidden, weight, probs, rows, row_weights=None):
    losses = -(probs[rows] * (hidden @ weight.T).log_softmax(-1)).sum(-1)
    return (
        losses.mean() if row_weights is None else (losses * row_weights).sum() / row_weights.sum()
    )


@pytest.mark.parametrize(("block", "chunk"), [(1, 1), (4, 3), (8, 4), (256, 256)])
@pytest.mark.parametrize("is_weighted", [False, True])
def test_equals_the_plain_loss_and_its_gradients(monkeypatch, block, chunk, is_weighted):
    monkeypatch.setattr(module, "BLOCK", block)
    monkeypatch.setattr(module, "CHUNK", chunk)
    hidden, weight, probs, rows = numbers()
    row_weights = torch.rand(len(rows), dtype=torch.float64) if is_weighted else None
    said = soft_cross_entropy(hidden, weight, probs, rows, row_weights)
    expected = plainly(hidden, weight, probs, rows, row_weights)
    assert torch.allclose(said.loss, expected, atol=1e-12)
    assert torch.equal(said.choice, (hidden @ weight.T).argmax(-1))
    for got, wanted in zip(
        torch.autograd.grad(3 * said.loss, (hidden, weight)),
        torch.autograd.grad(3 * expected, (hidden, weight)),
        strict=True,
    ):
        assert torch.allclose(got, wanted, atol=1e-12)


def test_autocast_stays_near_full_precision():
    hidden, weight, probs, rows = numbers(rows=64, size=32, ids=50, dtype=torch.float32)
    expected = plainly(hidden, weight, probs, rows)
    with torch.autocast("cpu", torch.bfloat16):
        said = soft_cross_entropy(hidden, weight, probs, rows)
    assert said.loss.dtype == torch.float32
    assert float((said.loss - expected).detach().abs()) < 0.05
    got, wanted = (
        torch.autograd.grad(loss, weight, retain_graph=True)[0] for loss in (said.loss, expected)
    )
    assert got.dtype == torch.float32
    assert float((got - wanted).norm() / wanted.norm()) < 0.03


def test_no_rows_is_a_loss_of_zero_that_can_be_differentiated():
    hidden, weight, probs, rows = numbers()
    said = soft_cross_entropy(hidden[:0], weight, probs, rows[:0])
    said.loss.backward()
    assert float(said.loss.detach()) == 0 and not weight.grad.any()


def test_nothing_is_kept_for_gradients_that_nobody_wants():
    hidden, weight, probs, rows = numbers()
    with torch.no_grad():
        said = soft_cross_entropy(hidden, weight, probs, rows)
    assert not said.loss.requires_grad
    assert torch.allclose(said.loss, plainly(hidden, weight, probs, rows))
