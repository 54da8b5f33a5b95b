"""Cells before they run: what each resolves to, which share a run, what is refused."""

import dataclasses

import pytest

from sfumato.accounting.accountants import epsilon
from sfumato.errors import InputError
from sfumato.searching.worker import Begun
from sfumato.studies.plan import Reached, plan_sweep
from sfumato.studies.price import Spent, epsilon_of, epsilon_together
from sfumato.studies.summary import summary
from tests.accounting import truth

FIXED = {"privacy.target_epsilon": None, "privacy.noise_multiplier": 1.0, "data.split": "train"}
STEPS = {"training.num_steps": [4, 2, 8]}


def planned(grid, *, settings=None, seeds=1, paired=False, recipe="demo/digits", listed=()):
    return plan_sweep(
        recipe,
        grid,
        listed,
        settings=FIXED if settings is None else settings,
        seeds=seeds,
        paired=paired,
        data_root=None,
        report=lambda line: None,
    )


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
    assert groups(planned({}, listed=listed)) == [(0,), (1,)]


def test_paired_runs_have_the_seeds_from_0_in_every_cell_and_are_not_private():
    sweep = planned({"ema.decay": [0.5, 0.9]}, seeds=3, paired=True)
    assert [(run.cells, run.seed) for run in sweep.runs] == [((c,), s) for s in range(3) for c in range(2)]
    for run in sweep.runs:
        assert sweep.plan_of(run).recipe.run.seed == run.seed
        assert not sweep.plan_of(run).private


def test_unpaired_runs_have_keys_of_their_own_and_are_private():
    sweep = planned({"ema.decay": [0.5, 0.9]}, seeds=2)
    assert all(sweep.plan_of(run).private and sweep.plan_of(run).recipe.run.seed is None for run in sweep.runs)
    assert len({run.name for run in sweep.runs}) == 4


@pytest.mark.parametrize(
    ("grid", "settings", "seeds", "says"),
    [
        ({"optimizer.learning_rate": [1.0, -2.0]}, {}, 1, "learning_rate=-2.0 cannot be"),
        ({"model.options.width": [8], "training.batch_size": [64, 10**6]}, {}, 1, "batch_size=1000000 cannot be"),
        ({"augmentation.kind": ["none", "crop_flp"]}, {}, 1, "Did you mean 'crop_flip'"),
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


def test_all_runs_of_one_mechanism_cost_what_one_run_of_all_their_updates_costs():
    sweep = planned({"optimizer.learning_rate": [1.0, 2.0]}, settings={**FIXED, "training.num_steps": 7}, seeds=3)
    spent = [Spent(sweep.plan_of(run), 7) for run in sweep.runs]
    mechanism = sweep.cells[0].plan.mechanism
    together, why_not = epsilon_together(spent)
    assert why_not is None
    assert together == epsilon(mechanism.replace(num_steps=42), 1e-5).epsilon
    assert epsilon_together(spent[:1])[0] == epsilon(mechanism, 1e-5).epsilon < together
    # What a run releases before its updates is released by each: six with one noise are one with that over sqrt(6).
    beside = [
        Spent(dataclasses.replace(each.plan, mechanism=each.plan.mechanism.replace(first_release_noise=9.0)), 7)
        for each in spent
    ]
    as_one = mechanism.replace(num_steps=42, first_release_noise=9.0 / 6**0.5)
    assert epsilon_together(beside)[0] == pytest.approx(epsilon(as_one, 1e-5).epsilon, rel=1e-9)
    assert epsilon_of(beside[0]) > epsilon_of(spent[0])
    twice = dataclasses.replace(beside[0], updates=15)
    assert epsilon_of(twice) is None
    assert epsilon_together([*beside[1:], twice]) == (
        None,
        "a run was begun twice, with what it releases before its updates",
    )


def spent_of(grid, settings=FIXED, **options):
    sweep = planned(grid, settings=settings, **options)
    return [Spent(sweep.plan_of(run), sweep.plan_of(run).mechanism.num_steps) for run in sweep.runs]


def test_cells_that_differ_in_batch_noise_and_length_have_one_epsilon_together():
    listed = [
        {"training.batch_size": 64, "privacy.noise_multiplier": 1.0, "training.num_steps": 7},
        {"training.batch_size": 256, "privacy.noise_multiplier": 2.0, "training.num_steps": 20},
        {"training.batch_size": 256, "privacy.noise_multiplier": 2.0, "training.num_steps": 30, "ema.decay": 0.5},
    ]
    runs = spent_of({}, listed=listed)
    together, why_not = epsilon_together(runs)
    assert why_not is None
    parts = [(64 / 1150, 1.0, 7), (256 / 1150, 2.0, 50)]
    exact = truth.epsilon_of_unlike(parts, 1e-5)
    assert exact <= together <= 1.02 * exact
    assert exact > max(epsilon_together(runs[:1])[0], epsilon_together(runs[1:])[0])


def test_one_accountant_for_all_is_the_one_that_was_asked_for():
    grid = {"training.batch_size": [64, 128]}
    settings = {**FIXED, "training.num_steps": 7}
    by_rdp = epsilon_together(spent_of(grid, {**settings, "privacy.accountant": "rdp"}))[0]
    assert by_rdp > epsilon_together(spent_of(grid, settings))[0]


@pytest.mark.parametrize(
    ("grid", "says"),
    [
        ({"privacy.delta": [1e-5, 1e-6]}, "different deltas"),
        ({"data.num_examples": [1000, 1100]}, "same images"),
    ],
)
def test_no_epsilon_covers_cells_of_other_images_or_deltas(grid, says):
    settings = {key: value for key, value in FIXED.items() if key not in grid}
    together, why_not = epsilon_together(spent_of(grid, {**settings, "training.batch_size": 64}))
    assert together is None
    assert says in why_not


def test_a_sweep_with_a_cell_that_is_not_private_has_no_epsilon():
    sweep = planned({"privacy.noise_multiplier": [1.0, 0]}, settings=FIXED)
    assert [cell.plan.private for cell in sweep.cells] == [True, False]
    assert epsilon_together([Spent(sweep.plan_of(run), 7) for run in sweep.runs])[0] is None


def test_seeded_runs_of_one_mechanism_have_no_epsilon():
    sweep = planned({"ema.decay": [0.5, 0.9]}, settings={**FIXED, "training.num_steps": 7}, paired=True)
    assert epsilon_together([Spent(sweep.plan_of(run), 7) for run in sweep.runs]) == (None, "not every cell is private")


def finished_of(sweep, updates=None):
    look = {"accuracy": 0.5, "accuracy_last": 0.5}
    return {
        run.key: sweep.read(
            {
                "settings": run.settings,
                "updates": updates or sweep.steps_of(run)[-1],
                "looks": [look] * len(run.cells),
                "held_out": "valid",
            },
            given_up=False,
        )
        for run in sweep.runs
    }


def begun_at(*places):
    """Trials; "there!" found nothing of their run there."""
    return [Begun(place.rstrip("!"), place.endswith("!")) for place in places]


TARGET = {"training.num_steps": 7}


@pytest.mark.parametrize(
    ("settings", "places", "extra"),
    [
        (TARGET, ["here!"], 0),
        (TARGET, ["here!", "here", "here"], 0),  # gone on with, in the same folder
        (TARGET, ["there!", "here!"], 7),
        # The target bounds what each folder holds.
        (TARGET, ["there!", "elsewhere!", "there", "here!"], 14),
        ({**FIXED, **TARGET}, ["there!", "here!"], 14),  # nothing does: updates may be drawn afresh
        ({**FIXED, **TARGET}, ["there!", "there", "here!"], 28),
        # Its folder was taken away, and all that it had released.
        (TARGET, ["here!", "here", "here!"], 7),
        (TARGET, ["here!", "here!", "here!", "here"], 14),
        (TARGET, ["there!", "there!", "here!"], 14),
        ({**FIXED, **TARGET}, ["here!", "here", "here!"], 28),
    ],
)
def test_a_run_that_was_begun_again_counts_each_time(settings, places, extra, tmp_path):
    sweep = planned({"ema.decay": [0.5, 0.9]}, settings=settings)
    begun = {sweep.runs[0].key: begun_at(*places), sweep.runs[1].key: begun_at("here!")}
    found = summary(sweep, finished_of(sweep), begun, name="digits", folder=tmp_path, storage="")
    assert found.updates_together == 14 + extra
    mechanism = sweep.cells[0].plan.mechanism
    assert found.epsilon_together == epsilon(mechanism.replace(num_steps=14 + extra), 1e-5).epsilon
    assert (found.begun_again != []) == (extra > 0)
    assert any("begun again" in warning for warning in found.warnings) == (extra > 0)


def test_updates_that_were_drawn_afresh_count_in_every_cell_of_a_shared_run(tmp_path):
    sweep = planned(STEPS)
    found = summary(sweep, finished_of(sweep, updates=11), {}, name="digits", folder=tmp_path, storage="")
    assert [cell.runs[0].updates for cell in found.cells] == [7, 5, 11]
    assert found.updates_together == 11
    mechanism = sweep.cells[0].plan.mechanism
    assert found.cells[1].epsilon == epsilon(mechanism.replace(num_steps=5), 1e-5).epsilon


def test_a_storage_that_claims_fewer_updates_than_were_planned_is_not_believed(tmp_path):
    sweep = planned(STEPS)
    lying = {key: dataclasses.replace(reached, updates=0) for key, reached in finished_of(sweep).items()}
    found = summary(sweep, lying, {}, name="digits", folder=tmp_path, storage="")
    assert found.updates_together == 8
    assert [cell.runs[0].updates for cell in found.cells] == [4, 2, 8]


@pytest.mark.parametrize(
    "change",
    [
        {"updates": -1},
        {"updates": 1.5},
        {"updates": True},
        {"looks": []},
        {"looks": [{"accuracy": 2.0, "accuracy_last": 0.5}]},
        {"looks": [{"accuracy": 0.5}]},
        {"settings": {"model.name": "os:system"}},
        {"held_out": "all"},
    ],
)
def test_what_no_run_of_a_sweep_finds_is_not_read(change):
    sweep = planned({"ema.decay": [0.5, 0.9]})
    run = sweep.runs[0]
    looks = [{"accuracy": 0.5, "accuracy_last": 0.5}]
    facts = {"settings": run.settings, "updates": 60, "looks": looks, "held_out": "test"}
    assert sweep.fits(run, sweep.read(facts, given_up=False))
    try:
        found: Reached = sweep.read({**facts, **change}, given_up=False)
    except (ValueError, KeyError, TypeError):
        return
    assert not sweep.fits(run, found)
