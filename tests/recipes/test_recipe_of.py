"""What may be given for a recipe: a name, a file, dictionaries, a recipe, and what is set otherwise."""

import pytest

from sfumato import config, recipes
from sfumato.errors import InputError

SETTINGS = {"privacy.target_epsilon": 1.5, "optimizer.learning_rate": 0.5}


def test_all_ways_of_giving_a_recipe_mean_the_same(tmp_path):
    shipped = recipes.recipe_of("demo/digits", {})
    path = tmp_path / "mine.toml"
    path.write_text(recipes.find("demo/digits").read_text())
    values = config.read(path)
    for given in (path, str(path), values, shipped):
        assert recipes.recipe_of(given, {}) == shipped
        changed = recipes.recipe_of(given, SETTINGS)
        assert changed.privacy.target_epsilon == 1.5 and changed.optimizer.learning_rate == 0.5
        assert changed.model == shipped.model
    assert values == config.read(path)  # the caller's own is left alone


@pytest.mark.parametrize(
    ("given", "settings", "says"),
    [
        ("demo/digit", {}, "Did you mean demo/digits"),
        ("demo/digits", {"optimizer.learning_rat": 1.0}, "learning_rate"),
        ("demo/digits", {"optimizer.learning_rate.more": 1.0}, "is a value, not a section"),
        ("demo/digits", {"privacy.target_epsilon": -1.0}, "target_epsilon"),
        ("missing.toml", {}, "missing.toml"),
    ],
)
def test_what_is_none_is_refused_by_name(given, settings, says):
    with pytest.raises(InputError, match=says):
        recipes.recipe_of(given, settings)
