"""`sfumato sweep` and `sfumato figures` as commands: strict JSON, one line for what is wrong."""

import json

import pytest

from sfumato.studies.figures import names, read_figure
from tests.cli.test_cli import call, json_of, refused, settings


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        ([], "--grid section.key=v1,v2"),
        (["--grid", "optimizer.learning_rat=1.0,2.0"], "optimizer.learning_rate"),
        (["--grid", "optimizer.learning_rate="], "has no values"),
        (["--grid", "ema.decay=0.5", "--grid", "ema.decay=0.9"], "twice"),
        (["--grid", "run.seed=0,1"], "--seeds N"),
        (["--grid", "optimizer.learning_rate=1.0,-1.0"], "learning_rate=-1.0 cannot be"),
        (["--grid", "optimizer.learning_rate=1.0,fast"], "learning_rate=fast cannot be"),
        (["--grid", "ema.decay=0.5", "--set", "privacy.noise_multiplie="], "privacy.noise_multiplier"),
        (["--grid", "ema.decay=0.5", "--seeds", "0"], "--seeds"),
    ],
)
def test_a_wrong_sweep_is_refused_in_one_line_with_status_2(arguments, says, capsys, tmp_path):
    assert says in refused(capsys, "sweep", "demo/digits", *arguments, "--output", tmp_path / "sweep", "--json")
    assert not list(tmp_path.rglob("ledger.jsonl"))  # nothing has run


def test_a_sweep_prints_one_strict_object_and_its_csv_and_page_lie_beside(capsys, tmp_path):
    cells = tmp_path / "cells.toml"
    cells.write_text("[[cell]]\n[cell.ema]\ndecay = 0.5\n")
    tiny = {"model.options.width": 8, "training.num_steps": 2, "training.batch_size": 32, "data.split": "train"}
    chosen = settings(tiny | {"privacy.target_epsilon": "", "privacy.noise_multiplier": 1.0})
    folder, grid = tmp_path / "sweep", ["--grid", "optimizer.learning_rate=1.0", "--paired"]
    found = json_of(capsys, "sweep", "demo/digits", *chosen, "--cells", cells, *grid, "--output", folder)
    [cell] = found["cells"]
    assert cell["settings"] == {"ema.decay": 0.5, "optimizer.learning_rate": 1.0}
    assert {"seeds", "median", "mean", "std", "standard_error", "runs"} <= cell.keys()
    assert (cell["seeds"], cell["std"], cell["standard_error"]) == (1, None, None)
    assert cell["private"] is found["private"] is False
    assert cell["epsilon"] is found["epsilon_together"] is None
    assert {"sweep.json", "sweep.csv", "sweep.html", "sweep_private.json"} <= {path.name for path in folder.iterdir()}


def test_a_key_that_is_unset_is_solved_for(capsys):
    quick = {"model.name": "small_cnn", "model.options.depth": "", "model.options.width": 8}  # to estimate
    plans = [
        json_of(capsys, "train", "de2022/cifar10-wrn-16-4-eps-8", *settings(quick | unset), "--dry-run")
        for unset in ({}, {"privacy.noise_multiplier": ""}, {"training.num_steps": ""})
    ]
    printed, less_noise, more_steps = plans
    assert less_noise["noise_multiplier"] < printed["noise_multiplier"] == 3.0
    assert less_noise["num_steps"] == printed["num_steps"] == 2468
    assert more_steps["num_steps"] > 2468
    for plan in (less_noise, more_steps):
        assert printed["epsilon"] < plan["epsilon"] <= 8.0


def test_figures_are_listed_and_a_full_one_is_planned_with_its_cost(capsys):
    listed = {figure["name"]: figure for figure in json_of(capsys, "figures", "list")["figures"]}
    assert listed["de2022/figure-3"]["scales"] == ["full", "small"]
    assert listed["sander2022/figure-2"]["instead"].startswith("sfumato plan")
    planned = json_of(capsys, "figures", "run", "de2022/figure-8")
    assert planned["trained"] is False
    assert planned["cost"] == {"runs": 25, "updates": 25 * 2468, "view_gradients": 25 * 2468 * 4096 * 16}
    assert planned["not_stated"]


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["de2022/figure-33"], "no figure"),
        (["de2022/figure-3", "--scale", "tiny"], "--scale"),
        (["sander2022/figure-3", "--scale", "small"], "sfumato plan"),
    ],
)
def test_a_wrong_figure_is_refused_in_one_line_with_status_2(arguments, says, capsys):
    assert says in refused(capsys, "figures", "run", *arguments, "--json")


@pytest.mark.slow
@pytest.mark.parametrize("name", [name for name in names() if read_figure(name).full is not None])
def test_every_full_size_figure_is_planned_by_its_command(name, capsys):
    """No image is read and no weights are needed: what must be there first is said."""
    planned = json_of(capsys, "figures", "run", name)
    study = read_figure(name).full
    assert planned["trained"] is False
    assert planned["cost"]["runs"] >= len({json.dumps(each["settings"]) for each in planned["planned"]}) > 0 or any(
        "training.num_steps" in each["settings"] for each in planned["planned"]
    )
    assert planned["cost"]["updates"] > 0 and planned["cost"]["view_gradients"] > 0
    assert planned["needs"] == study.needs and planned["assumed"] == study.assumed
    assert all(each["num_steps"] >= 0 and each["batch_size"] > 0 for each in planned["planned"])
    assert f"sfumato figures run {name} --train" in call(capsys, "figures", "run", name)[1]
