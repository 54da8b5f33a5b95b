"""A simulation is the same run but for batch and noise, and never calls itself private."""

import json
import math

import pytest

from sfumato import config
from sfumato.cli import run as sfumato
from sfumato.data.catalogue import Facts
from sfumato.errors import InputError
from sfumato.planning.resolve import resolve
from sfumato.scaling.law import read_study, scaling_law
from sfumato.scaling.simulate import simulated, simulations

RECIPE = config.parse_resolved(
    {
        "model": {"name": "small_cnn", "trainable": "all", "features": "raw"},
        "augmentation": {"kind": "none", "augmult": 0, "padding": 4},
        "data": {"name": "mnist"},
        "privacy": {"noise_multiplier": 3.0, "target_epsilon": 2.93, "delta": 1e-5},
        "optimizer": {"name": "sgd", "learning_rate": 4.0},
        "training": {"batch_size": 4096, "num_steps": 220},
    }
)


@pytest.mark.parametrize("batch_size", [1, 1000])
def test_nothing_changes_but_batch_noise_budget_and_seed(batch_size):
    found = simulated(RECIPE, batch_size, 7)
    assert found.privacy.noise_multiplier / batch_size == pytest.approx(3.0 / 4096, rel=1e-15)
    before, after = config.flatten(RECIPE), config.flatten(found)
    changed = {key for key in before.keys() | after.keys() if before.get(key) != after.get(key)}
    assert changed <= {"privacy.noise_multiplier", "privacy.target_epsilon", "training.batch_size", "run.seed"}
    assert found.run.seed == 7


def test_wrong_input_and_a_recipe_without_noise_are_refused():
    for batch_size, seeds, names in ((0, [0], "--batch-size"), (5000, [0], "--batch-size"), (32, [1, 1], "--seeds")):
        with pytest.raises(InputError, match=names):
            simulations(RECIPE, batch_size, seeds)
    with pytest.raises(InputError, match="no budget"):
        simulated(RECIPE.model_copy(update={"privacy": None}), 32, 0)


SIMULATE = "simulate demo/digits --set training.num_steps="


@pytest.fixture(scope="module")
def study(tmp_path_factory):
    """Real simulations of the demo at three batch sizes, two seeds each."""
    folder = tmp_path_factory.mktemp("study")
    for batch_size in (16, 32, 64):
        words = [*f"{SIMULATE}12".split(), "--batch-size", str(batch_size), "--seeds", "0,1"]
        assert sfumato([*words, "--output", str(folder / str(batch_size))]) == 0
    return folder


def test_runs_of_one_seed_share_initial_weights_and_noise_and_no_artefact_says_private(study):
    for run in study.glob("*/seed-*"):
        claim = json.loads((run / "privacy.json").read_text())
        assert claim["private"] is False and claim["epsilon"] is None
        assert "not private" in (run / "report.html").read_text().lower()
        assert not (run / "key").exists()


def test_the_same_command_again_goes_on_where_it_stopped_and_means_are_of_all_seeds(study, tmp_path, capsys):
    arguments = [*f"{SIMULATE}12".split(), "--batch-size", "16", "--output", str(tmp_path / "again"), "--json"]
    assert sfumato([*arguments, "--seeds", "0"]) == 0
    ledger = (tmp_path / "again" / "seed-0" / "ledger.jsonl").read_bytes()
    assert sfumato([*arguments, "--seeds", "0,1"]) == 0
    assert (tmp_path / "again" / "seed-0" / "ledger.jsonl").read_bytes() == ledger
    one, two = (json.loads(line) for line in capsys.readouterr().out.splitlines())
    assert two["runs"][0] == one["runs"][0] and two["compute_fraction"] == 16 / 512
    averaged = ("accuracy", "accuracy_last", "accuracy_top5", "test_accuracy", "balanced_accuracy")
    assert [two[key] for key in averaged] == [
        pytest.approx(sum(run[key] for run in two["runs"]) / 2) for key in averaged
    ]
    assert any(two[key] != one[key] for key in averaged)
    assert one["accuracy_interval"] is not None and two["accuracy_interval"] is None
    first = json.loads((study / "16" / "seed-1" / "result.json").read_text())
    assert two["runs"][1]["accuracy"] == first["accuracy"]  # equal seeds, equal runs
    assert sfumato([*arguments, "--seeds", "0", "--set", "optimizer.learning_rate=9.0"]) == 2
    assert "optimizer.learning_rate" in capsys.readouterr().err


def test_a_study_gives_a_law_a_prediction_a_plot_and_a_page(study, capsys, tmp_path):
    plot, page = tmp_path / "law.svg", tmp_path / "law.html"
    words = ["scaling-law", str(study), "--predict-batch-size", "512", "--plot", str(plot), "--page", str(page)]
    assert sfumato([*words, "--json"]) == 0
    facts = json.loads(capsys.readouterr().out)
    assert set(facts["coefficients"]) == {"a", "b"} and facts["num_runs"] == 6
    assert facts["law"] in ("a + b / B", "a + b log2 B")
    (prediction,) = facts["predictions"]
    low, high = prediction["low"], prediction["high"]
    assert low < high and low <= prediction["accuracy"] <= high <= 1 and prediction["batch_size"] == 512
    assert set(facts["rho"]) == {"16", "64"} and 0 < facts["rho"]["64"] < facts["rho"]["16"] < math.inf
    assert "<svg" in plot.read_text()
    shown = " ".join(page.read_text().split())
    assert f"<td>512</td><td>{100 * prediction['accuracy']:.2f} %</td>" in shown
    assert f"Accuracy follows {facts['law']}" in shown and "not private" in shown
    assert str(facts["rho"]["16"])[:6] not in shown  # a statistic of the training images
    assert sfumato([*words[:-1], str(tmp_path / "law.pdf")]) == 2 and "ends in .html" in capsys.readouterr().err


def test_runs_that_do_not_belong_together_are_refused_by_name(study, tmp_path):
    assert sfumato([*f"{SIMULATE}3".split(), "--batch-size", "32", "--output", str(tmp_path / "longer")]) == 0
    with pytest.raises(InputError, match="steps 3 in .*steps|steps 3 in|steps 12 in"):
        read_study([study, tmp_path / "longer"])
    with pytest.raises(InputError, match="three"):
        scaling_law(read_study([study / "16", study / "32"]), [])
    with pytest.raises(InputError, match="no finished run"):
        read_study([tmp_path / "nothing"])


def test_a_run_that_was_selected_by_noisy_scores_is_simulated_as_the_one_run_that_it_is():
    """What a paid search publishes names its selection; a simulation selects nothing."""
    selection = {"selected_from": 10.0, "selection_shape": 1.0, "score_noise": 5.0}
    privacy = RECIPE.privacy.model_copy(update=selection)
    data = RECIPE.data.model_copy(update={"split": "train"})
    selected = RECIPE.model_copy(update={"privacy": privacy, "data": data})
    recipe = simulated(selected, 16, 0)
    assert [getattr(recipe.privacy, key) for key in selection] == [None, 0.0, None]
    plan = resolve(recipe, Facts(55_000, 10, 28, 1))  # what training does with it
    assert not plan.private and plan.selection is None
