"""The catalogue agrees with itself and imports nothing."""

from __future__ import annotations

import subprocess
import sys

import pytest

import slipstream
from slipstream import methods
from slipstream.errors import UnknownNameError

TRAINED_ELSEWHERE = ("peagle",)


@pytest.mark.parametrize("method", methods.all(), ids=lambda m: m.name)
def test_records_point_to_real_things_and_their_defaults_fit(method: methods.Method) -> None:
    for reference in (method.drafter, method.model, method.objective):
        if reference is not None:
            assert isinstance(methods.resolve(reference), type)
    assert method.tree in method.trees and set(method.trees) <= set(methods.TREES)
    assert method.verifier in method.verifiers and set(method.verifiers) <= set(methods.VERIFIERS)
    assert set(method.verifiers) - set(method.lossless) <= set(methods.LOSSY)
    assert not set(method.lossless) & set(methods.LOSSY)
    has_own_weights = method.needs_checkpoint and not method.weights
    assert method.is_trainable == (has_own_weights and method.name not in TRAINED_ELSEWHERE)


def test_lossy_verifiers_are_left_out_and_marked() -> None:
    lossy = methods.Method("any", "", "", "", verifiers=("walk", "typical", "token"))
    assert lossy.lossless == ("walk", "token")
    assert methods.marked(lossy.verifiers) == ["walk", "typical (lossy)", "token"]


def test_verifiers_resolve() -> None:
    assert set(methods.FOR_CHAINS) | set(methods.LOSSY) <= methods.VERIFIERS.keys()
    assert set(methods.FIXED_TREES) <= set(methods.TREES)
    assert all(callable(methods.resolve(reference)) for reference in methods.VERIFIERS.values())


def test_an_unknown_method_suggests_neighbours() -> None:
    with pytest.raises(UnknownNameError, match=r"no method 'eagel3'. Did you mean: eagle3"):
        methods.get("eagel3")


def test_public_names_are_there_and_lazy() -> None:
    for name in slipstream.__all__:
        assert getattr(slipstream, name) is not None
    assert set(slipstream.__all__) <= set(dir(slipstream))
    with pytest.raises(AttributeError, match="nothing_here"):
        _ = slipstream.nothing_here
    program = (
        "import sys, slipstream, slipstream.methods; "
        "assert callable(slipstream.methods.get); "
        "sys.exit(any(m in sys.modules for m in ('torch', 'transformers', 'numpy')))"
    )
    assert subprocess.run([sys.executable, "-c", program], check=False).returncode == 0
