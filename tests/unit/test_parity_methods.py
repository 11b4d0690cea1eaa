"""The doctor examines a drafter of every trainable method, whatever it is made of."""

import pytest
from test_recipes import every_tap, material, target  # noqa: F401  (fixtures)

from slipstream.data.store import Store
from slipstream.parity.checks import NAMES, examine
from slipstream.train import recipes


@pytest.mark.parametrize("method", recipes.RECIPES)
def test_every_method_can_be_examined(method, target, every_tap, tmp_path):  # noqa: F811
    """A fresh network: every line is there, and none of them is a crash."""
    recipe = recipes.get(method)
    settings = recipe.settings()
    store = Store(every_tap, taps=recipe.taps(settings, target.spec.num_layers))
    checkpoint = recipe.make(material(target, store), settings)
    recipe.layout.write(checkpoint, tmp_path / "drafter")
    checks = examine(target, method, tmp_path / "drafter", ["a cat?", "three seas"], num_tokens=12)
    assert [check.name for check in checks] == list(NAMES)
    assert all(method in c.detail for c in checks if c.name == "files")
