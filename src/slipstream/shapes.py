"""One-line shape contracts with readable failures.

`check("walk", logits=(logits, "N V"), tokens=(tokens, "N"))` binds each letter to the first size
it meets and fails, naming the operation, the shape found and the rule, when a later one differs.
"""

from __future__ import annotations

from torch import Tensor

from slipstream.errors import ShapeError


def check(operation: str, /, **tensors: tuple[Tensor, str]) -> dict[str, int]:
    """Check tensors against space-separated letters; digits are literal sizes.

    Returns:
        The size each letter was bound to.

    Raises:
        ShapeError: a tensor has another number of dimensions, or a letter two sizes.

    Example:
        >>> import torch
        >>> check("walk", logits=(torch.zeros(6, 97), "N V"))
        {'N': 6, 'V': 97}
    """
    sizes: dict[str, int] = {}
    for name, (tensor, rule) in tensors.items():
        letters = rule.split()
        found = list(tensor.shape)
        fits = len(letters) == len(found)
        if fits:
            for letter, size in zip(letters, found, strict=True):
                expected = int(letter) if letter.isdigit() else sizes.setdefault(letter, size)
                fits = fits and size == expected
        if not fits:
            bound = ", ".join(f"{k}={v}" for k, v in sizes.items() if k in letters)
            raise ShapeError(
                f"{operation}: {name} is {found}, expected [{', '.join(letters)}]"
                + (f" with {bound}" if bound else "")
            )
    return sizes
