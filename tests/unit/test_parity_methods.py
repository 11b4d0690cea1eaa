"""The doctor examines a drafter of every trainable method, whatever it is made of."""

import pytest
import torch
from test_recipes import every_tap, material, target  # noqa: F401  (fixtures)

from slipstream.cli import doctor
from slipstream.data.store import Store
from slipstream.formats import folder as files
from slipstream.formats.checkpoint import facts_of
from slipstream.formats.detect import dialect_for
from slipstream.parity.checks import NAMES, examine
from slipstream.train import recipes


def fresh(method, target, features):  # noqa: F811
    """A recipe and what it makes."""
    recipe = recipes.get(method)
    settings = recipe.settings()
    store = Store(features, taps=recipe.taps(settings, target.spec.num_layers))
    return recipe, recipe.make(material(target, store), settings)


@pytest.mark.parametrize("method", recipes.RECIPES)
def test_every_method_can_be_examined(method, target, every_tap, tmp_path):  # noqa: F811
    """A fresh network: every line is there, and none of them is a crash."""
    recipe, checkpoint = fresh(method, target, every_tap)
    recipe.layout.write(checkpoint, tmp_path / "drafter")
    checks = examine(target, method, tmp_path / "drafter", ["a cat?", "three seas"], num_tokens=12)
    assert [check.name for check in checks] == list(NAMES)
    assert all(method in c.detail for c in checks if c.name == "files")


@pytest.mark.parametrize(
    "name",
    ["vllm/eagle", "vllm/eagle3", "speculators/eagle3", "medusa/medusa", "speculators/dflash"],
)
@pytest.mark.filterwarnings("ignore:.*is a pickle")
def test_foreign_folders_can_be_examined(name, target, every_tap, tmp_path):  # noqa: F811
    """As they are; the method is told from the files."""
    checks = examined(name, target, every_tap, tmp_path / "drafter")
    assert [check.name for check in checks] == list(NAMES)


def test_a_path_table_says_what_to_do_instead(target, every_tap, tmp_path):  # noqa: F811
    checks = examined("deepspec/dspark", target, every_tap, tmp_path / "drafter")
    assert [check.ok for check in checks] == [False]
    assert "slipstream generate --method dspark" in checks[0].detail


def examined(name, target, features, place):  # noqa: F811
    """The checks of a fresh drafter in a foreign dialect."""
    dialect = dialect_for(*name.split("/"))
    _, checkpoint = fresh(dialect.method, target, features)
    made = dialect.dump(checkpoint, facts_of(target), torch.float32)
    files.write(place, made.tensors, made.config, weights=made.weights)
    assert doctor._method_of(place) == dialect.method
    return examine(target, dialect.method, place, ["a cat?", "three seas"], num_tokens=12)
