"""The recipes sander2022/* against an independent transcription of the paper's tables, and what may be done with
them.
"""

import math

import pytest

from sfumato import config, recipes
from sfumato.accounting.gaussian import snr
from sfumato.accounting.mechanism import Mechanism
from sfumato.accounting.rdp import epsilon_rdp
from sfumato.data.catalogue import public_facts
from sfumato.models.registry import MODELS
from sfumato.planning.resolve import resolve
from sfumato.scaling.simulate import simulated
from tests.accounting.tables import TAN_MISPRINTS, TAN_ROWS
from tests.cli.test_cli import json_of, refused, settings

ON_IMAGENET = [row for row in TAN_ROWS if row.recipe.startswith("imagenet")]


def read(row):
    return config.parse(config.read(recipes.find(f"sander2022/{row.recipe}")))


def text_of(row):
    return recipes.find(f"sander2022/{row.recipe}").read_text(encoding="utf-8")


def test_every_recipe_is_transcribed_and_every_table_and_figure_has_one():
    shipped = [name for name in recipes.names() if name.startswith("sander2022/")]
    assert shipped == sorted(f"sander2022/{row.recipe}" for row in TAN_ROWS)
    sources = " ".join(text_of(row).splitlines()[0] for row in TAN_ROWS)
    assert all(f"Table {n}" in sources for n in (3, 5, 6))
    for place in ("Tables 1", "Tables 2 and 4", "Figures 1 and 4 (right)", "Figures 5 and 4 (left)"):
        assert place in sources


@pytest.mark.parametrize("row", TAN_ROWS, ids=str)
def test_a_recipe_holds_the_paper_s_numbers(row):
    recipe = read(row)
    assert public_facts(recipe.data).num_examples == row.num_examples
    assert recipe.data.split == "train+valid"  # judged on the test images
    privacy, training = recipe.privacy, recipe.training
    assert (training.batch_size, training.num_steps) == (row.batch_size, row.num_steps)
    assert (privacy.noise_multiplier, privacy.delta, privacy.clipping_norm) == (row.noise_multiplier, row.delta, 1.0)
    assert privacy.target_epsilon == float(row.epsilon)
    optimizer = recipe.optimizer
    assert (optimizer.name, optimizer.schedule) == ("sgd", "constant")
    assert (optimizer.learning_rate, optimizer.momentum, optimizer.dampening) == (row.learning_rate, 0, 0)
    assert recipe.ema.decays == [row.ema_decay] and (recipe.augmentation.augmult or 0) == row.augmult
    assert (recipe.augmentation.kind == "none") == (row.augmult == 0)
    assert (recipe.augmentation.padding or 4) == (20 if row.augmult == 8 else 4)  # "Ours" of Section 4.2; left out, 4
    if row in ON_IMAGENET:
        assert (recipe.data.name, recipe.model.name) == ("imagenet", "nf_resnet50")
    else:
        order = "norm-activation" if row.recipe.endswith("norm-activation") else "activation-norm"
        assert (recipe.data.name, recipe.model.name) == ("cifar10", "wide_resnet")
        assert recipe.model.options == {"depth": 16, "width": 4, "order": order, "weight_standardization": False}


def test_the_printed_epsilon_is_met_by_rdp_to_its_last_digit_but_for_the_known_misprints():
    for row in TAN_ROWS:
        last_digit, spent = 10.0 ** -len(row.epsilon.partition(".")[2]), epsilon_rdp([row.numbers[:3]], row.delta)
        assert ("Misprint" in text_of(row)) == (row.recipe in TAN_MISPRINTS), row
        if row.recipe in TAN_MISPRINTS:
            assert spent == pytest.approx(TAN_MISPRINTS[row.recipe], rel=0.005)
            assert spent > float(row.epsilon) + 4 * last_digit
        else:
            assert abs(spent - float(row.epsilon)) < last_digit, row


def test_a_simulation_of_the_recipe_is_the_run_that_the_paper_trained():
    for row in (row for row in TAN_ROWS if row.simulated_at):
        resolved = resolve(read(row), public_facts(read(row).data), cut_to_target=False).recipe
        found = simulated(resolved, row.simulated_at[0], seed=0)
        assert (found.training.batch_size, found.privacy.noise_multiplier) == row.simulated_at, row
        assert found.training.num_steps == row.num_steps


def test_table_3_keeps_eta_and_scales_the_learning_rate_but_for_its_misprint():
    rows = {row.num_steps: row for row in TAN_ROWS if "table-3" in row.recipe}
    ratios = {
        steps: snr(Mechanism(row.num_examples, batch_size, row.noise_multiplier, steps))
        for steps, row in rows.items()
        for batch_size in [row.batch_size if steps != 9_000 else 64 * 724]
    }
    assert all(ratio == pytest.approx(ratios[72_000], rel=2e-4) for ratio in ratios.values())
    as_printed = snr(Mechanism(rows[9_000].num_examples, 64 * 756, 2.5, 9_000))
    assert as_printed / ratios[72_000] == pytest.approx(756 / 724, rel=2e-4)
    assert all(row.learning_rate * steps == 8 * 72_000 for steps, row in rows.items())


def test_table_5_has_one_signal_and_one_delta_for_all_its_images():
    rows = [row for row in TAN_ROWS if "table-5" in row.recipe]
    signals = [
        row.num_examples * snr(Mechanism(row.num_examples, row.batch_size, row.noise_multiplier, row.num_steps))
        for row in rows
    ]
    assert all(signal == pytest.approx(signals[0]) for signal in signals)  # N eta, Section 4.4
    assert all(math.isclose(row.delta * row.num_examples, 0.5) for row in rows)


def test_a_recipe_can_be_planned(capsys):
    row = TAN_ROWS[7]
    facts = json_of(capsys, "plan", "--recipe", f"sander2022/{row.recipe}")
    assert [facts[key] for key in ("num_examples", "batch_size", "num_steps")] == [*row[2:4], row.num_steps]
    assert facts["epsilon_rdp"] == pytest.approx(epsilon_rdp([row.numbers[:3]], row.delta))


@pytest.mark.parametrize("arguments", [["train"], ["simulate", "--batch-size", "128"]], ids=" ".join)
def test_a_recipe_on_imagenet_is_refused_in_one_line_where_its_images_are_not_there(
    arguments, capsys, tmp_path, monkeypatch
):
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("SFUMATO_DATA", raising=False)
    err = refused(capsys, arguments[0], "sander2022/imagenet-baseline", *arguments[1:])
    assert err.startswith("error: data set imagenet lies in no known folder") and "--data-root" in err
    assert not list(tmp_path.iterdir())


def test_imagenet_s_number_of_images_cannot_be_claimed_for_other_data(capsys, tmp_path):
    others = settings({"data.name": "digits", "model.name": "small_cnn"})
    err = refused(capsys, "train", "sander2022/imagenet-baseline", *others, "--output", tmp_path / "run")
    assert "data.num_examples = 1271167 is more than the 1437 images" in err


def test_every_shipped_recipe_names_a_network_that_is_known():
    named = {config.parse(config.read(recipes.find(name))).model.name for name in recipes.names()} - {None}
    assert named <= set(MODELS)
