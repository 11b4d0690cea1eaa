"""How each trainable method is trained: one file a family, found by the method's name.

To make a method trainable, write a file with a `Recipe` beside `eagle3.py` and add its line to
`RECIPES`; the command line, the loop, evaluations by decoding and the tests take it from there.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from slipstream.errors import SettingError

if TYPE_CHECKING:
    from slipstream.train.recipes.recipe import Recipe

RECIPES = {
    "chain": "slipstream.train.recipes.chain:CHAIN",
    "medusa": "slipstream.train.recipes.medusa:MEDUSA",
    "eagle": "slipstream.train.recipes.eagle:EAGLE",
    "hass": "slipstream.train.recipes.eagle:HASS",
    "eagle3": "slipstream.train.recipes.eagle3:EAGLE3",
    "dflash": "slipstream.train.recipes.dflash:DFLASH",
    "dspark": "slipstream.train.recipes.dflash:DSPARK",
}
"""Method name to "module:NAME" of its `Recipe`; strings, so that looking at it imports nothing."""


def get(method: str) -> Recipe:
    """The recipe of a method.

    Raises:
        SettingError: the method is not trained here.

    Example:
        >>> get("eagle3").settings().num_unrolled
        4
    """
    from slipstream.train.recipes.recipe import Recipe, load

    if method not in RECIPES:
        raise SettingError("method", method, f"one that is trained: {', '.join(RECIPES)}")
    recipe = load(RECIPES[method])
    assert isinstance(recipe, Recipe)
    return recipe
