import tomllib

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sfumato import config, recipes
from sfumato.errors import InputError
from sfumato.planning.defaults import delta_default

LEAST = {"data": {"name": "digits"}}


def refusal(values):
    with pytest.raises(InputError) as error:
        config.parse(values)
    assert "\n" not in str(error.value)
    return str(error.value)


@pytest.mark.parametrize(
    ("key", "value", "names"),
    [
        ("privcy", {}, ["privcy", "privacy"]),
        ("privacy.target_epsilom", 1.0, ["privacy.target_epsilom", "privacy.target_epsilon"]),
        ("training.batchsize", 3, ["training.batchsize", "training.batch_size"]),
        ("privacy.target_epsilon", 0, ["privacy.target_epsilon", "greater than or equal to 0.000000001"]),
        ("privacy.target_epsilon", float("nan"), ["privacy.target_epsilon"]),
        ("privacy.delta", 1.0, ["privacy.delta", "less than 1"]),
        ("privacy.clipping_norm", -1, ["privacy.clipping_norm"]),
        ("data.name", "mnits", ["data.name", "Did you mean 'mnist'?"]),
        ("training.augmult", 2, ["training.augmult", "Did you mean augmentation.augmult?"]),
        ("augmentation.kind", "simCLR", ["augmentation.kind", "Did you mean 'simclr'?"]),
        ("training.batch_size", 2.5, ["training.batch_size"]),
        ("training.microbatch_size", "auot", ["training.microbatch_size = 'auot'", "'auto'", "integer"]),
        ("data", 3, ["data"]),
        ("optimizer.nesterov", True, ["optimizer.nesterov", "optimizer.momentum above 0"]),
        ("optimizer.schedule", "step", ["optimizer.milestones", "Give both"]),
        ("optimizer.milestones", [3], ["optimizer.schedule", "Give both"]),
        ("optimizer.beta1", 0.0, ["optimizer.beta1 = 0.0", "'sgd'", "'adam'"]),
        # What float32 cannot hold.
        ("optimizer.learning_rate", 1e45, ["optimizer.learning_rate = ", "is not possible"]),
        ("optimizer.weight_decay", 1e30, ["optimizer.weight_decay = ", "is not possible"]),
        ("data.std", [1e-45], ["data.std = ", "is not possible"]),
        ("data.mean", [float("nan")], ["data.mean = ", "is not possible"]),
        ("data.mean", [123.675], ["data.mean = ", "is not possible"]),
        ("data.std", [58.4], ["data.std = ", "is not possible"]),
        ("data.classes", [], ["data.classes = ", "is not possible"]),
        # What an optimizer lacks.
        (
            "optimizer",
            {"name": "adam", "momentum": 0.9},
            ["optimizer.momentum = 0.9", "'adam'", "Leave it out", "'sgd'"],
        ),
        ("optimizer", {"name": "adam", "nesterov": True}, ["optimizer.nesterov = True", "'adam'"]),
        ("optimizer", {"schedule": "step", "milestones": [5, 3]}, ["optimizer.milestones = [5, 3]", "earliest first"]),
    ],
)
def test_a_wrong_recipe_gets_one_line_that_names_the_key_and_the_remedy(key, value, names):
    values: dict = {"data": {"name": "digits"}}
    config.put(values, key, value)
    message = refusal(values)
    assert all(name in message for name in names) and "constrained" not in message


def test_every_shipped_recipe_is_valid_and_survives_a_round_trip():
    for name in recipes.names():
        recipe = config.parse(config.read(recipes.find(name)))
        assert config.parse(tomllib.loads(config.to_toml(recipe))) == recipe, name


def test_set_reads_toml_values_and_plain_words_and_an_empty_one_takes_the_key_out():
    values: dict = {}
    for assignment in ("training.batch_size=12", "model.name=lenet", "ema.decay=[0.9, 0.99]", "data.path=a=b"):
        config.set_value(values, assignment)
    found = {"training": {"batch_size": 12}, "model": {"name": "lenet"}, "ema": {"decay": [0.9, 0.99]}}
    assert values == {**found, "data": {"path": "a=b"}}
    config.set_value(values, "data.path=")
    assert values == {**found, "data": {}}


def test_a_malformed_set_is_refused():
    for assignment in ("batch_size=3", "training.batch_size", "=3", "training.=3", ".x=3"):
        with pytest.raises(InputError, match="section.key=value"):
            config.set_value({}, assignment)


@given(st.integers(1, 10**9))
def test_the_default_delta_is_the_largest_power_of_ten_up_to_a_tenth_of_one_over_n(n):
    delta = delta_default(n)
    exponent = round(-__import__("math").log10(delta))
    assert delta == float(f"1e-{exponent}")
    assert 10 * n <= 10**exponent and 10 * n > 10 ** (exponent - 1)


def test_what_may_change_while_a_run_goes_on_is_marked_on_its_field():
    recipe = config.parse({**LEAST, "privacy": {}})
    free = config.flatten(recipe).keys() - config.releasing_keys(recipe).keys()
    assert free == {
        "data.path",
        "model.init_from",
        "model.init_recipe",
        "augmentation.test_views",
        "run.log",
        "run.log_private",
        "run.issuer",
        *(f"training.{key}" for key in ("microbatch_size", "engine", "compile", "rank_timeout", "shard_state")),
        *(f"training.{key}_every" for key in ("evaluate", "checkpoint", "norm_histogram")),
    }


def test_a_recipe_needs_its_data_and_a_resolved_one_leaves_nothing_out():
    assert "needed" in refusal({"optimizer": {"name": "adam"}})
    with pytest.raises(InputError, match="model.name"):
        config.parse_resolved({**LEAST, "model": {}})


def test_a_recipe_with_a_mark_at_its_start_is_read(tmp_path):
    (tmp_path / "marked.toml").write_text('[data]\nname = "digits"\n', encoding="utf-8-sig")
    assert config.parse(config.read(tmp_path / "marked.toml")).data.name == "digits"
