"""What a recipe and the public numbers of its data set make of a run: what is solved for, and what is warned about or
refused.
"""

import dataclasses
import re
from pathlib import Path

import pytest

from sfumato import config, recipes
from sfumato.accounting.accountants import epsilon
from sfumato.accounting.mechanism import Mechanism
from sfumato.data.catalogue import Facts
from sfumato.errors import InputError
from sfumato.planning.advice import MEASURED
from sfumato.planning.claims import claims
from sfumato.planning.resolve import resolve
from tests.accounting import truth

BUDGET = {"target_epsilon": 4.0, "delta": 5e-6, "accountant": "rdp"}


def plan_of(privacy, num_examples=20_000, optimizer=None, **training):
    """Without a [privacy] section where privacy is None."""
    data = {"name": "folder"} | ({"group_by": "group"} if "unit" in (privacy or {}) else {})
    values = {"data": data, "model": {"name": "small_cnn"}, "training": training, "optimizer": optimizer or {}}
    return resolve(
        config.parse(values | ({} if privacy is None else {"privacy": privacy})), Facts(num_examples, 2, 32, 3)
    )


@pytest.mark.parametrize(
    ("given", "training", "solved"),
    [
        ({}, {"batch_size": 500, "num_steps": 200}, "privacy.noise_multiplier"),
        ({"noise_multiplier": 2.0}, {}, "training.num_steps"),
        ({"noise_multiplier": 2.0}, {"num_steps": 200}, "training.batch_size"),
    ],
)
def test_one_quantity_is_solved_for_and_spends_the_budget_and_no_more(given, training, solved):
    plan = plan_of({**BUDGET, **given}, **training)
    assert solved in {choice.key for choice in plan.choices}
    spent = epsilon(plan.mechanism, 5e-6, "rdp").epsilon
    assert 0.98 * 4.0 < spent <= 4.0 and plan.private
    mechanism = plan.mechanism
    usual = {
        "training.batch_size": (mechanism.batch_size, training.get("batch_size", 4096)),
        "training.num_steps": (mechanism.num_steps, 150),
    }
    for key, (found, expected) in usual.items():
        if key != solved:
            assert found == training.get(key.split(".")[1], expected)


def test_steps_beyond_the_target_are_cut_and_said_and_others_stay():
    most = plan_of({**BUDGET, "noise_multiplier": 2.0}, batch_size=500).mechanism.num_steps
    cut = plan_of({**BUDGET, "noise_multiplier": 2.0}, batch_size=500, num_steps=most + 1)
    assert cut.mechanism.num_steps == most and f"only {most} of {most + 1} steps fit" in " ".join(cut.warnings)
    kept = plan_of({**BUDGET, "noise_multiplier": 2.0}, batch_size=500, num_steps=most)
    assert kept.mechanism.num_steps == most and kept.warnings == []


@pytest.mark.parametrize(
    ("times_n", "warning"),
    [
        (0.1, None),
        (0.11, "within a factor of ten of 1/N"),
        (1.0, "within a factor of ten of 1/N"),
        (1.01, "publishing one image at random"),
    ],
)
def test_a_delta_near_one_over_n_or_that_one_published_image_would_satisfy_is_warned_about(times_n, warning):
    plan = plan_of({**BUDGET, "delta": times_n / 20_000}, batch_size=500, num_steps=10)
    said = [each for each in plan.warnings if "delta" in each]
    assert said == [] if warning is None else len(said) == 1 and warning in said[0]


@pytest.mark.parametrize(("num_examples", "warned"), [(999, True), (1_000, False)])
def test_few_images_are_warned_about(num_examples, warned):
    plan = plan_of({"target_epsilon": 8.0}, num_examples=num_examples)
    assert any("images are few" in warning for warning in plan.warnings) == warned


@pytest.mark.parametrize(
    ("num_examples", "privacy", "training"),
    [
        (100, {"target_epsilon": 0.5}, {}),
        (20_000, {"target_epsilon": 0.003}, {}),
        (3_000, {"target_epsilon": 0.03}, {"batch_size": 16, "num_steps": 20}),
        (1_437, {"noise_multiplier": 4000.0}, {}),
        (3_000, {"noise_multiplier": 400.0, "target_epsilon": 0.02}, {"num_steps": 50}),
        pytest.param(
            *(3_000, {"noise_multiplier": 400.0, "target_epsilon": 0.02}, {"batch_size": 64}), marks=pytest.mark.slow
        ),
    ],
)
def test_noise_that_drowns_the_signal_is_warned_about_with_numbers_that_help(num_examples, privacy, training):
    plan = plan_of(privacy, num_examples=num_examples, **training)
    (text,) = [warning for warning in plan.warnings if "drowns" in warning]
    images = re.search(r"(\d+) training images(?: teach)?;", text)
    larger = re.search(r"an epsilon of ([\d.]+)", text)
    assert bool(images) == ("target_epsilon" in privacy and len(training) < 2)  # a size is left to solve for
    assert images or larger or "a larger batch" in text
    helped = [plan_of(privacy, num_examples=int(images[1]), **training)] if images else []
    helped += [plan_of({**privacy, "target_epsilon": float(larger[1])}, num_examples, **training)] if larger else []
    assert not any("drowns" in warning for each in helped for warning in each.warnings)
    too_few = [plan_of(privacy, num_examples=int(int(images[1]) / 1.4), **training)] if images and training else []
    assert all(any("drowns" in warning for warning in each.warnings) for each in too_few)
    assert not any("are few" in warning for warning in plan.warnings)  # one of the two is said


@pytest.mark.parametrize("num_examples, target", [(300, 0.1), (3_000, 1.0), (50_000, 3.0)])
def test_a_tip_follows_from_public_numbers_and_reaches_no_further_than_what_was_measured(num_examples, target):
    """The table of docs/defaults.md has the signals; beyond them nothing is advised."""
    page = (Path(__file__).parents[2] / "docs/defaults.md").read_text()
    rows = re.findall(r"^\| [\d,]+ \| [\d.]+ \| ([\d,]+) \| [\d.]+ % ", page, re.MULTILINE)
    assert max(int(row.replace(",", "")) for row in rows) == MEASURED
    plan = plan_of({"target_epsilon": target}, num_examples=num_examples)
    numbers = plan.mechanism
    signal = numbers.batch_size * numbers.num_steps**0.5 / numbers.noise_multiplier
    assert (plan.tip is not None) == (signal < MEASURED)
    if plan.tip is not None:
        assert f"here {signal:,.0f}" in plan.tip and "docs/defaults.md" in plan.tip
        assert ("others trained" in plan.tip) == bool(plan.warnings)
        assert all(plan.tip in warning for warning in plan.warnings)
    assert plan_of(None).tip is None


def test_what_the_shipped_recipes_reach_is_not_called_drowned():
    for name in ("demo/digits", "fashion-mnist-eps-1", "mnist-eps-1", "cifar10-eps-8"):
        recipe = recipes.recipe_of(name, {})
        facts = Facts({"demo/digits": 1437}.get(name, 50_000), 10, 32, 1)
        assert not any("drowns" in warning for warning in resolve(recipe, facts).warnings)


@pytest.mark.parametrize(("name", "rate", "warned"), [("adam", 0.1, True), ("adamw", 0.09, False), ("sgd", 2.0, False)])
def test_a_rate_for_sgd_is_warned_about_under_others(name, rate, warned):
    plan = plan_of(BUDGET, optimizer={"name": name, "learning_rate": rate}, batch_size=500, num_steps=10)
    assert any("is a rate for sgd" in warning for warning in plan.warnings) == warned


def test_ordinary_training_has_no_noise_and_shuffles_as_many_images_as_there_are():
    plan = plan_of(None, num_examples=100, batch_size=500, num_steps=10)
    mechanism = plan.mechanism
    assert mechanism == Mechanism(100, 100, 0.0, 10, "shuffled")
    assert not plan.private and "ordinary training" in plan.why_not_private
    with pytest.raises(InputError, match="norm_histogram_every"):
        plan_of(None, batch_size=50, num_steps=10, norm_histogram_every=2)


def test_of_a_run_selected_from_others_only_the_noise_is_solved_for():
    selected = {**BUDGET, "selected_from": 10.0}
    whole = {"batch_size": 500, "num_steps": 200}
    noise = plan_of(selected, **whole).mechanism.noise_multiplier
    for training in ({"batch_size": 500}, {"num_steps": 200}):
        with pytest.raises(InputError, match="only the noise is solved for"):
            plan_of({**selected, "noise_multiplier": noise}, **training)
    assert plan_of({**selected, "noise_multiplier": noise}, **whole).mechanism.noise_multiplier == noise
    with pytest.raises(InputError, match="the best of 10 expected runs spends epsilon"):
        plan_of({**selected, "noise_multiplier": 0.9 * noise}, **whole)


@pytest.mark.parametrize(
    ("privacy", "training", "names"),
    [
        ({"delta": 1e-5}, {}, "states no budget"),
        (BUDGET, {"batch_size": 20_001}, "at most num_examples = 20000"),
        ({**BUDGET, "noise_multiplier": 0.0}, {"batch_size": 500}, "cannot meet a target"),
        ({**BUDGET, "max_images_per_person": 2, "sampling": "shuffled"}, {}, "max_images_per_person"),
        ({**BUDGET, "max_images_per_person": 2, "selected_from": 10.0}, {}, "max_images_per_person"),
        ({**BUDGET, "sampling": "shuffled", "selected_from": 10.0}, {}, "shuffled"),
        ({**BUDGET, "score_noise": 5.0}, {}, "score_noise"),
        # its images would be trained on as well
        ({**BUDGET, "score_noise": 5.0, "selected_from": 10.0}, {}, "score_noise"),
    ],
)
def test_a_budget_that_means_nothing_is_refused(privacy, training, names):
    with pytest.raises(InputError, match=names):
        plan_of(privacy, **training)


def test_steps_that_are_kept_are_certified_within_the_target_even_where_fewer_seem_to_cost_more(monkeypatch):
    """PLD gives up at 1,828 steps, and RDP's epsilon is larger; at 1,834 PLD certifies less. Such a delta is beyond the
    reach of the noise, which would be said first.
    """
    monkeypatch.setattr("sfumato.planning.resolve.refuse_beyond_reach", lambda mechanism, delta: None)
    privacy = {"target_epsilon": 80, "noise_multiplier": 0.1931, "delta": 1.08e-11}
    plan = plan_of(privacy, num_examples=31743, batch_size=4, num_steps=1828)
    assert claims(plan, plan.mechanism).epsilon <= 80 and plan.mechanism.num_steps < 1828
    assert "of 1828 steps fit" in plan.warnings[-1]


@pytest.mark.parametrize(
    ("given", "training"),
    [
        ({}, {"batch_size": 500, "num_steps": 200}),
        ({"noise_multiplier": 6.0}, {"batch_size": 500}),
        ({"noise_multiplier": 6.0}, {"num_steps": 200}),
    ],
)
def test_a_target_of_persons_is_held_for_all_their_images_and_used_up(given, training):
    privacy = {"target_epsilon": 4.0, "delta": 1e-6, "unit": "person", "max_images_per_person": 4, **given}
    plan = plan_of(privacy, **training)
    mechanism = plan.mechanism
    steps = mechanism.sampling_prob, mechanism.noise_multiplier, mechanism.num_steps
    exact = truth.epsilon(*steps, 1e-6, images=4)
    assert 0.97 * 4.0 < exact <= 4.0
    claimed = claims(plan, plan.mechanism)
    assert claimed.unit == "one person with at most 4 images" and "one person" in claimed.relation
    assert exact <= claimed.epsilon == claimed.epsilon_person <= 4.0 and claimed.epsilon_rdp is None
    assert claimed.epsilon_image == epsilon(plan.mechanism.replace(images_per_unit=1), 1e-6).epsilon < 2.0
    assert claimed.attacker == claimed.attacker_person


def test_noise_that_drowns_what_persons_teach_is_warned_about():
    privacy = {"target_epsilon": 0.05, "delta": 1e-6, "unit": "person", "max_images_per_person": 2}
    assert any("drowns" in warning for warning in plan_of(privacy, num_examples=300).warnings)


def test_steps_beyond_the_target_of_persons_are_cut():
    privacy = {"target_epsilon": 4.0, "delta": 1e-6, "unit": "person", "max_images_per_person": 2}
    cut = plan_of({**privacy, "noise_multiplier": 6.0}, batch_size=500, num_steps=50_000)
    assert "steps fit epsilon 4" in " ".join(cut.warnings)
    assert epsilon(cut.mechanism, 1e-6).epsilon <= 4.0 < epsilon(cut.mechanism.replace(num_steps=50_000), 1e-6).epsilon


def test_persons_whom_nobody_tells_apart_without_a_limit_or_by_rdp_are_refused():
    values = {"data": {"name": "folder"}, "privacy": {"target_epsilon": 3.0, "unit": "person"}}
    values["privacy"]["max_images_per_person"] = 1
    with pytest.raises(InputError, match="data.group_by"):
        resolve(config.parse(values), Facts(20_000, 2, 32, 3))
    with pytest.raises(InputError, match="--images-per-person"):
        plan_of({"target_epsilon": 4.0, "unit": "person"})
    with pytest.raises(InputError, match="PLD alone"):
        plan_of({"target_epsilon": 4.0, "unit": "person", "max_images_per_person": 2, "accountant": "rdp"})


def test_a_public_seed_makes_a_target_of_persons_hypothetical():
    values = {
        "data": {"name": "folder", "group_by": "group"},
        "run": {"seed": 0},
        "privacy": {"target_epsilon": 4.0, "unit": "person", "max_images_per_person": 3},
    }
    plan = resolve(config.parse(values), Facts(20_000, 2, 32, 3))
    claimed = claims(plan, plan.mechanism)
    assert claimed.epsilon is claimed.epsilon_image is claimed.epsilon_person is None and not claimed.holds
    assert claimed.epsilon_image_if_private < claimed.epsilon_if_private == claimed.epsilon_person_if_private <= 4.0


def test_only_a_private_run_with_a_finite_epsilon_holds_and_any_other_says_what_it_would_have_been():
    private = plan_of({**BUDGET, "max_images_per_person": 2}, batch_size=500, num_steps=10)
    seeded = dataclasses.replace(private, why_not_private="its seed is public")
    ordinary = plan_of(None, batch_size=50, num_steps=10)
    held, would, none = (claims(plan, plan.mechanism) for plan in (private, seeded, ordinary))
    assert (held.holds, would.holds, none.holds) == (True, False, False)
    assert none.epsilon is none.epsilon_if_private is none.delta is none.unit is None
    for name in ("epsilon", "epsilon_rdp", "epsilon_person"):
        assert getattr(held, name) == getattr(would, f"{name}_if_private") > 0
        assert getattr(would, name) is getattr(held, f"{name}_if_private") is None
    assert held.attacker is not None and would.attacker is would.attacker_person is None
    for lacks in ({"epsilon": None}, {"private": False}, {"delta": None}):
        assert not held.model_copy(update=lacks).holds
