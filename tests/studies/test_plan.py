"""Cells before they run: what each resolves to, which share a run, what is refused."""

import dataclasses

import numpy as np
import pytest
from scipy import stats

from sfumato.accounting.accountants import epsilon
from sfumato.errors import InputError
from sfumato.studies.plan import SweepOptions, plan_sweep
from sfumato.studies.result import CellRun, paired, summarise
from sfumato.studies.summary import epsilon_together, summary
from tests.accounting import truth

FIXED = {"privacy.target_epsilon": None, "privacy.noise_multiplier": 1.0, "data.split": "train"}
STEPS = {"training.num_steps": [4, 2, 8]}


def planned(grid, *, settings=None, recipe="demo/digits", **options):
    settings = FIXED if settings is None else settings
    return plan_sweep(SweepOptions(recipe, grid, settings=settings, report=lambda line: None, **options))


def groups(sweep):
    return [run.cells for run in sweep.runs]


def test_sigma_is_solved_for_each_cell_and_no_cell_exceeds_the_target():
    sweep = planned({"training.batch_size": [64, 256]}, settings={"training.num_steps": 20})
    noises = [cell.plan.mechanism.noise_multiplier for cell in sweep.cells]
    assert noises[0] < noises[1]  # a larger batch is sampled more often
    for cell in sweep.cells:
        spent = epsilon(cell.plan.mechanism, cell.plan.delta).epsilon
        assert 0.99 * 3.0 < spent <= 3.0


def test_steps_are_solved_for_where_the_noise_is_swept_and_the_steps_are_taken_out():
    sweep = planned({"privacy.noise_multiplier": [2.0, 4.0]}, settings={"training.num_steps": None})
    steps = [cell.plan.mechanism.num_steps for cell in sweep.cells]
    assert steps[0] < steps[1]
    for cell in sweep.cells:
        assert epsilon(cell.plan.mechanism, cell.plan.delta).epsilon <= 3.0
        more = cell.plan.mechanism.replace(num_steps=cell.plan.mechanism.num_steps + 1)
        assert epsilon(more, cell.plan.delta).epsilon > 3.0


def test_numbers_of_steps_at_one_noise_share_a_run_of_the_longest():
    sweep = planned(STEPS, seeds=2)
    assert groups(sweep) == [(1, 0, 2)] * 2
    assert [sweep.steps_of(run) for run in sweep.runs] == [[2, 4, 8]] * 2
    assert sweep.plan_of(sweep.runs[0]).mechanism.num_steps == 8
    both = planned({**STEPS, "ema.decay": [0.5, 0.9]})
    assert groups(both) == [(2, 0, 4), (3, 1, 5)]  # one run for each decay


@pytest.mark.parametrize(
    "settings",
    [
        {"data.split": "train"},  # a target: sigma follows from the number of steps
        {**FIXED, "privacy.target_epsilon": 90.0},  # all given, but the target may cut the steps
        {**FIXED, "optimizer.schedule": "cosine"},
        {**FIXED, "augmentation.kind": "flip", "augmentation.augmult": 1, "augmentation.test_views": 2},
    ],
)
def test_no_run_is_shared_where_an_update_or_a_score_depends_on_the_number_of_steps(settings):
    assert groups(planned(STEPS, settings=settings)) == [(0,), (1,), (2,)]


def test_cells_that_differ_in_more_than_steps_share_no_run():
    listed = [{"training.num_steps": 4, "ema.decay": 0.5}, {"training.num_steps": 8, "ema.decay": 0.9}]
    assert groups(planned({}, cells=listed)) == [(0,), (1,)]


def test_paired_runs_have_the_seeds_from_0_in_every_cell_and_are_not_private():
    sweep = planned({"ema.decay": [0.5, 0.9]}, seeds=3, paired=True)
    assert [(run.cells, run.seed) for run in sweep.runs] == [((c,), s) for s in range(3) for c in range(2)]
    for run in sweep.runs:
        assert sweep.plan_of(run).recipe.run.seed == run.seed
        assert not sweep.plan_of(run).private


@pytest.mark.parametrize(
    ("grid", "settings", "seeds", "says"),
    [
        ({"optimizer.learning_rate": [1.0, -2.0]}, {}, 1, "learning_rate=-2.0 cannot be"),
        ({"ema.decay": [0.5]}, {"run.seed": 1}, 1, "--paired"),
        ({"ema.decay": [0.5]}, {"privacy.selected_from": 4.0}, 1, "selected from others"),
        ({"ema.decay": [0.5]}, {}, 0, "--seeds"),
        ({"ema.decay": [0.5]}, {"privacy.nois_multiplier": None}, 1, "privacy.noise_multiplier"),
        ({"ema.decay": [0.1 * i for i in range(9)], "optimizer.learning_rate": list(range(1, 13))}, {}, 100, "10000"),
    ],
)
def test_what_cannot_be_is_refused_before_anything_runs(grid, settings, seeds, says):
    with pytest.raises(InputError, match=says) as refusal:
        planned(grid, settings=settings, seeds=seeds)
    assert "\n" not in str(refusal.value)


def test_cells_that_differ_in_batch_noise_and_length_have_one_epsilon_together():
    listed = [
        {"training.batch_size": 64, "privacy.noise_multiplier": 1.0, "training.num_steps": 7},
        {"training.batch_size": 256, "privacy.noise_multiplier": 2.0, "training.num_steps": 20},
        {"training.batch_size": 256, "privacy.noise_multiplier": 2.0, "training.num_steps": 30, "ema.decay": 0.5},
    ]
    runs = planned({}, cells=listed).plans
    together, why_not = epsilon_together(runs)
    assert why_not is None
    parts = [(64 / 1150, 1.0, 7), (256 / 1150, 2.0, 50)]
    exact = truth.epsilon_of_unlike(parts, 1e-5)
    assert exact <= together <= 1.02 * exact
    assert exact > max(epsilon_together(runs[:1])[0], epsilon_together(runs[1:])[0])


def test_one_accountant_for_all_is_the_one_that_was_asked_for():
    grid, found = {"training.batch_size": [64, 128]}, []
    for accountant in ("pld", "rdp"):
        settings = {**FIXED, "training.num_steps": 7, "privacy.accountant": accountant}
        found.append(epsilon_together(planned(grid, settings=settings).plans)[0])
    assert found[1] > found[0]


@pytest.mark.parametrize(
    ("grid", "says"),
    [
        ({"privacy.delta": [1e-5, 1e-6]}, "different deltas"),
        ({"data.num_examples": [1000, 1100]}, "same images"),
        ({"privacy.noise_multiplier": [1.0, 0]}, "not every cell is private"),
    ],
)
def test_no_epsilon_covers_cells_of_other_images_or_deltas_or_one_that_is_not_private(grid, says):
    settings = {key: value for key, value in FIXED.items() if key not in grid} | {"training.batch_size": 64}
    together, why_not = epsilon_together(planned(grid, settings=settings).plans)
    assert together is None and says in why_not


def summed_up(sweep, folder, accuracies=None, num_lost=0):
    """What a sweep says whose runs reached these accuracies, by their names."""
    reached = {}
    for run in sweep.runs:
        accuracy = (accuracies or {}).get(run.name, 0.5)
        look = CellRun(run=run.name, seed=run.seed, accuracy=accuracy, accuracy_last=0.0, num_lost=num_lost)
        reached[run.name] = [look] * len(run.cells)
    options = dataclasses.replace(sweep.options, output=folder)
    return summary(dataclasses.replace(sweep, options=options), reached, "valid")


def test_each_cell_of_a_shared_run_has_the_epsilon_of_its_own_updates_and_together_they_cost_the_longest(tmp_path):
    sweep = planned(STEPS)
    found, mechanism = summed_up(sweep, tmp_path), sweep.cells[0].plan.mechanism
    alone = [epsilon(mechanism.replace(num_steps=steps), 1e-5).epsilon for steps in (4, 2, 8)]
    assert [cell.epsilon for cell in found.cells] == alone
    assert found.updates_together == 8 and found.epsilon_together == found.cells[2].epsilon
    assert all(cell.shares_runs for cell in found.cells)


def test_updates_that_a_crash_cost_are_said_and_count(tmp_path):
    sweep = planned({"ema.decay": [0.5, 0.9]}, settings={**FIXED, "training.num_steps": 7})
    found = summed_up(sweep, tmp_path, num_lost=2)
    assert found.updates_together == 14 and found.cells[0].runs[0].num_lost == 2
    assert sum("lost 2 updates" in warning for warning in found.warnings) == 2


def test_median_mean_and_spread_are_numpys():
    values = np.random.default_rng(17).random(17)
    found = summarise(values.tolist())
    assert (found.median, found.mean) == pytest.approx((np.median(values), values.mean()), rel=1e-12)
    assert (found.std, found.standard_error) == pytest.approx((values.std(ddof=1), stats.sem(values)), rel=1e-12)


def test_one_run_has_no_spread():
    found = summarise([0.5])
    assert (found.median, found.mean, found.std, found.standard_error) == (0.5, 0.5, None, None)
    assert paired([0.5], [0.25]).standard_error is None


def test_a_paired_difference_has_the_standard_error_of_the_differences():
    draws = np.random.default_rng(0)
    level = draws.random(9)  # of each seed, which all cells share
    first, other = level + 0.001 * draws.random(9), level + 0.01 + 0.001 * draws.random(9)
    found = paired(other.tolist(), first.tolist())
    assert found.difference == pytest.approx((other - first).mean())
    assert found.standard_error == pytest.approx(stats.sem(other - first))
    assert found.standard_error < np.hypot(stats.sem(other), stats.sem(first)) / 50  # what pairing is for
