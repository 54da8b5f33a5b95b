"""What a search may change, and that the total amount of noise stays."""

import math

import pytest

from sfumato import config
from sfumato.errors import InputError
from sfumato.searching.space import STEPS, Range, Space, apply, paper_space, possible, proposals, read_space
from tests.searching.made_up_search import made_up_search

RECIPE = made_up_search().recipe


def snr(recipe):
    privacy, training = recipe.privacy, recipe.training
    return training.batch_size * math.sqrt(training.num_steps) / privacy.noise_multiplier


def test_other_steps_keep_sigma_and_the_signal_and_scale_the_learning_rate():
    traded = apply(RECIPE, {STEPS: 15, "optimizer.learning_rate": 4.0})
    assert traded.training.num_steps == 15
    assert traded.privacy.noise_multiplier == RECIPE.privacy.noise_multiplier
    assert snr(traded) == pytest.approx(snr(RECIPE), rel=2e-3)  # batches are whole numbers
    assert traded.optimizer.learning_rate == pytest.approx(4.0 * 60 / 15)  # Section 4.3


def test_other_steps_stretch_the_schedule():
    optimizer = RECIPE.optimizer.model_copy(update={"schedule": "step", "milestones": [20, 40], "warmup_steps": 4})
    stretched = apply(RECIPE.model_copy(update={"optimizer": optimizer}), {STEPS: 30}).optimizer
    assert (stretched.milestones, stretched.warmup_steps) == ([10, 20], 2)


def test_settings_change_nothing_else():
    changed = apply(RECIPE, {"optimizer.learning_rate": 8.0, "ema.decay": 0.9, "model.options.width": 8})
    before, after = config.flatten(RECIPE), config.flatten(changed)
    different = {key for key in before if before[key] != after[key]}
    assert different == {"optimizer.learning_rate", "ema.decay", "model.options"}


def test_keys_of_another_optimizer_are_left_out():
    rolling = apply(RECIPE, {"optimizer.momentum": 0.9, "optimizer.dampening": 0.5})
    adam = apply(rolling, {"optimizer.name": "adam", "optimizer.learning_rate": 0.01, "optimizer.beta1": 0.8})
    assert (adam.optimizer.momentum, adam.optimizer.dampening, adam.optimizer.beta1) == (0.0, 0.0, 0.8)
    back = apply(adam, {"optimizer.name": "sgd", "optimizer.learning_rate": 2.0})
    assert back.optimizer == RECIPE.optimizer


def test_without_a_space_steps_are_those_of_table_3():
    assert paper_space(72_000).choices[STEPS] == [9_000, 18_000, 72_000, 288_000]  # Sander et al. 2022
    assert STEPS not in paper_space(None).choices


def test_proposals_are_possible_all_different_and_never_the_current_settings():
    space = paper_space(60)
    rates, left_out = proposals(RECIPE, space, "learning rate", {}, 1000, 1437)
    assert left_out == []
    # 6 rates x (no momentum, whatever the dampening, or 4 momenta x 5 dampenings), less the recipe's own.
    assert len(rates) == 6 * (1 + 4 * 5) - 1
    assert all(possible(RECIPE, settings, 1437) for settings in rates)
    for group in space.groups:
        found, left_out = proposals(RECIPE, space, group, {"optimizer.learning_rate": 4.0}, 7, 1437)
        assert len(found) <= 7
        assert (found, left_out) == proposals(RECIPE, space, group, {"optimizer.learning_rate": 4.0}, 7, 1437)
        every, _ = proposals(RECIPE, space, group, {"optimizer.learning_rate": 4.0}, 1000, 1437)
        assert sorted(map(str, found + left_out)) == sorted(map(str, every))
        assert len(found) == min(7, len(every))
        assert all(settings["optimizer.learning_rate"] == 4.0 or group == "learning rate" for settings in found)


def test_a_batch_larger_than_the_images_is_not_proposed():
    space = Space({"steps": {STEPS: [1, 60, 120]}})  # one step needs a batch of 3,966
    assert [settings[STEPS] for settings in proposals(RECIPE, space, "steps", {}, 10, 1437)[0]] == [120]


def test_a_file_gives_groups_in_order_with_lists_and_ranges(tmp_path):
    path = tmp_path / "space.toml"
    rates = '"optimizer.learning_rate" = {low = 0.5, high = 16.0, log = true}\noptimizer.momentum = [0.0, 0.9]\n'
    path.write_text(f'["learning rate"]\n{rates}[averaging]\n"ema.decay" = [0.9]\n')
    space = read_space(path)
    assert list(space.groups) == ["learning rate", "averaging"]
    assert space.choices == {
        "optimizer.learning_rate": Range(0.5, 16.0, True),
        "optimizer.momentum": [0.0, 0.9],
        "ema.decay": [0.9],
    }


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("", "names nothing to search"),
        ("rate = [1, 2]", "rate is no group"),
        ('[a]\n"optimizer.learning_rte" = [1.0]', "Did you mean optimizer.learning_rate"),
        ('[a]\n"privacy.noise_multiplier" = [1.0]', "signal-to-noise ratio is held constant"),
        ('[a]\n"run.seed" = [1]', "same images and seeds"),
        ('[a]\n"ema.decay" = []', "neither a list of values nor a range"),
        ('[a]\n"ema.decay" = [0.9]\n[b]\n"ema.decay" = [0.99]', "in two groups"),
        ('[a]\n"augmentation.kind" = ["rcc"]', "augmentation.kind = 'rcc' is not possible"),
        ('[a]\n"training.num_steps" = [0, 2]', "training.num_steps = 0 is not possible: .*at least 1"),
        ('[a]\n"training.num_steps" = ["100", 2]', "training.num_steps = '100' is not possible: .*without quotes"),
        ('[a]\n"ema.decay" = {low = false, high = true}', "neither a list of values nor a range"),
    ],
)
def test_a_bad_space_is_refused_by_name(tmp_path, text, says):
    path = tmp_path / "space.toml"
    path.write_text(text)
    with pytest.raises(InputError, match=says) as error:
        read_space(path)
    assert "\n" not in str(error.value)
