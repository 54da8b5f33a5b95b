"""Epsilon of one mechanism: which accountant's it is, what is refused, and the curve over the steps."""

import math
import operator

import pytest

from sfumato.accounting import accountants
from sfumato.accounting.accountants import EpsilonCurve, epsilon
from sfumato.accounting.mechanism import Mechanism
from sfumato.accounting.pld import Tight
from sfumato.accounting.selection import Selection
from sfumato.errors import InputError
from tests.accounting import truth
from tests.accounting.tables import DISTINCT_ROWS

TABLE_12 = Mechanism(50_000, 4096, 3.0, 2468)


@pytest.mark.parametrize(
    "key, bad, good",
    [
        ("num_examples", [0, -1, 2.5], [4097, 10**9]),
        ("batch_size", [0, -3, 50_001, 10**400], [1, 50_000]),
        ("noise_multiplier", [-1e-300, -math.inf, math.inf, math.nan, "1"], [0.0, 1e-300, 1e300]),
        ("num_steps", [-1, "7"], [0, 10**9]),
        ("sampling", ["Poisson", ""], ["poisson", "shuffled"]),
        ("images_per_unit", [0], [1, 10**15]),
    ],
)
def test_each_number_is_refused_out_of_its_range_by_name_and_taken_up_to_its_ends(key, bad, good):
    for value in bad:
        with pytest.raises(InputError, match=key):
            TABLE_12.replace(**{key: value})
    for value in good:
        assert getattr(TABLE_12.replace(**{key: value}), key) == value


def test_epsilon_is_plds_and_below_rdps():
    spent = epsilon(TABLE_12, 1e-5)
    assert spent.accountant == "pld" and spent.note == ""
    assert spent.epsilon == spent.epsilon_pld < spent.epsilon_rdp
    assert (round(spent.epsilon_pld, 2), round(spent.epsilon_rdp, 2)) == (6.54, 7.05)
    by_rdp = epsilon(TABLE_12, 1e-5, "rdp")
    assert by_rdp.epsilon == by_rdp.epsilon_rdp == spent.epsilon_rdp
    assert (by_rdp.accountant, by_rdp.epsilon_pld, by_rdp.note) == ("rdp", None, "")


@pytest.mark.parametrize("answer", [Tight(None, "it failed."), Tight(1e9)], ids=["none", "above RDP"])
def test_rdp_is_reported_and_said_where_pld_cannot_certify(monkeypatch, answer):
    monkeypatch.setattr(accountants, "epsilon_pld", lambda *numbers: answer)
    spent = accountants._epsilon.__wrapped__(TABLE_12.parts, 1, 1e-5, "pld")
    assert (spent.epsilon, spent.epsilon_pld, spent.accountant) == (spent.epsilon_rdp, None, "rdp")
    assert spent.note.startswith("epsilon is RDP's: ") and spent.note.endswith(".")


@pytest.mark.parametrize("change", [{}, {"num_steps": 0, "images_per_unit": 2}, {"noise_multiplier": 0.0}])
def test_shuffled_batches_and_a_delta_out_of_range_are_refused(change):
    for accountant in ("pld", "rdp"):
        with pytest.raises(InputError, match="shuffled"):
            epsilon(TABLE_12.replace(sampling="shuffled", **change), 1e-5, accountant)
    for delta in (0.0, 1.0, -1e-5, 2.0, math.nan):
        with pytest.raises(InputError, match="delta"):
            epsilon(TABLE_12.replace(**change), delta)


def test_several_runs_each_selected_from_others_have_no_epsilon_that_is_known():
    with pytest.raises(InputError, match="give one mechanism"):
        epsilon([TABLE_12, TABLE_12], 1e-5, selection=Selection(4.0, 0.0))


@pytest.mark.parametrize(("images", "accountant"), [(1, "pld"), (1, "rdp"), (2, "pld")])
def test_what_releases_nothing_spends_nothing_under_each_accountant_that_there_is(images, accountant):
    spent = epsilon(Mechanism(40, 8, 2.0, 0, images_per_unit=images), 1e-5, accountant)
    assert spent.epsilon == 0
    assert spent.epsilon_rdp == (0.0 if images == 1 else None)
    assert spent.epsilon_pld == (0.0 if accountant == "pld" else None)


@pytest.mark.parametrize("row", DISTINCT_ROWS[1:12:5], ids=str)
def test_epsilon_is_monotone(row):
    mechanism = Mechanism(row.num_examples, row.batch_size, row.noise_multiplier, row.num_steps)
    here = epsilon(mechanism, row.delta).epsilon
    for change in (
        {"num_steps": row.num_steps + 1},
        {"batch_size": row.batch_size + 1},
        {"noise_multiplier": row.noise_multiplier * 0.999},
    ):
        assert epsilon(mechanism.replace(**change), row.delta).epsilon > here
    assert epsilon(mechanism, row.delta * 0.99).epsilon > here


@pytest.mark.parametrize(
    "mechanism",
    [
        Mechanism(100_000, 1, 200.0, 2_000_000),
        Mechanism(100_000, 1, 0.3, 1),
        Mechanism(1, 1, 0.3, 2_000_000),
        Mechanism(10, 9, 0.05, 3),
        Mechanism(10, 1, 1e5, 10),
        Mechanism(10, 1, 1e-3, 1),
    ],
    ids=str,
)
def test_the_corners_of_the_range_have_an_epsilon_and_no_warning_reaches_anyone(mechanism, capfd):
    spent = epsilon(mechanism, 1e-5)  # a Python warning would be an error here
    assert 0 <= spent.epsilon <= spent.epsilon_rdp < math.inf
    assert capfd.readouterr() == ("", "")


@pytest.mark.parametrize(
    "mechanism",
    [
        TABLE_12.replace(num_steps=300),
        TABLE_12.replace(num_steps=1),
        Mechanism(40, 8, 2.0, 45, images_per_unit=4),
        pytest.param(Mechanism(60_000, 2048, 1.0, 1500), marks=pytest.mark.slow),
    ],
    ids=str,
)
def test_a_curve_bounds_the_epsilon_of_every_step_closely_and_has_that_of_twenty(mechanism, monkeypatch):
    last, of_image = mechanism.num_steps, mechanism.most_images == 1
    curve = EpsilonCurve(mechanism, 1e-5)
    exact = {step: epsilon(mechanism.replace(num_steps=step), 1e-5) for step in {0, 1, last // 3, last - 1, last}}
    asked = []
    real = accountants.epsilon_pld
    monkeypatch.setattr(accountants, "epsilon_pld", lambda parts, *rest: asked.append(parts) or real(parts, *rest))
    accountants._epsilon.cache_clear()
    values = [curve.at(step) for step in range(last + 1)]
    assert values == sorted(values) and values[0] == 0 and values[-1] == curve.spent.epsilon
    assert len(set(asked)) <= 20
    for step, spent in exact.items():
        assert spent.epsilon <= values[step] <= (spent.epsilon_rdp if of_image else spent.epsilon + 0.06 * values[-1])
    for step in {-(-i * last // 20) for i in range(21)} if last == 300 else ():
        assert values[step] == epsilon(mechanism.replace(num_steps=step), 1e-5).epsilon


def test_where_one_point_takes_long_a_curve_has_fewer(monkeypatch):
    mechanism = Mechanism(40, 8, 2.0, 30, images_per_unit=4)
    steps = [0, 3, 17, 29, 30]
    exact = [EpsilonCurve(mechanism, 1e-5).at(step) for step in steps]
    monkeypatch.setattr(accountants, "_seconds", lambda mechanism: 0.9)
    curve = EpsilonCurve(mechanism, 1e-5)
    few = [curve.at(step) for step in steps]
    assert few == sorted(few) and all(map(operator.ge, few, exact)) and len({curve.at(step) for step in range(31)}) <= 6
    assert few[0] == 0 and few[1] < 0.5 * few[-1] == 0.5 * exact[-1]


def test_a_curve_of_a_costly_mechanism_is_above_the_truth():
    mechanism = Mechanism(1_271_167, 16_384, 2.5, 71_589)
    curve, last, half = EpsilonCurve(mechanism, 8e-7), mechanism.num_steps, mechanism.num_steps // 2
    assert curve.at(last) == epsilon(mechanism, 8e-7).epsilon_pld
    values = [curve.at(step) for step in range(0, last, 997)]
    assert values == sorted(values) and values[-1] <= curve.at(last)
    assert curve.at(half) >= truth.epsilon(mechanism.sampling_prob, mechanism.noise_multiplier, half, 8e-7)


def test_a_curve_answers_for_steps_beyond_its_plan_for_very_many_and_without_noise_too():
    curve = EpsilonCurve(TABLE_12, 1e-5)
    assert curve.at(2500) == epsilon(TABLE_12.replace(num_steps=2500), 1e-5).epsilon
    silent = EpsilonCurve(TABLE_12.replace(noise_multiplier=0.0), 1e-5)
    assert silent.at(0) == 0 and silent.at(1) == math.inf
    many = EpsilonCurve(Mechanism(10**9, 1, 200.0, 10**15), 1e-5, "rdp")
    assert many.at(10**14) < many.spent.epsilon
    with pytest.raises(InputError):
        EpsilonCurve(TABLE_12.replace(sampling="shuffled"), 1e-5)
