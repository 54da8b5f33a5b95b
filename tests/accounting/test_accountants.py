import math

import pytest

from sfumato.accounting import accountants
from sfumato.accounting.accountants import EpsilonCurve, epsilon
from sfumato.accounting.mechanism import Mechanism
from sfumato.accounting.pld import Tight
from sfumato.errors import InputError
from tests.accounting import truth
from tests.accounting.tables import DISTINCT_ROWS

TABLE_12 = Mechanism(50_000, 4096, 3.0, 2468)


@pytest.fixture
def no_cache():
    accountants._epsilon.cache_clear()
    yield
    accountants._epsilon.cache_clear()


def test_epsilon_is_plds_and_below_rdps():
    spent = epsilon(TABLE_12, 1e-5)
    assert spent.accountant == "pld" and spent.note == ""
    assert spent.epsilon == spent.epsilon_pld < spent.epsilon_rdp
    assert (round(spent.epsilon_pld, 2), round(spent.epsilon_rdp, 2)) == (6.54, 7.05)


def test_rdp_is_reported_where_it_is_asked_for():
    spent = epsilon(TABLE_12, 1e-5, "rdp")
    assert spent.epsilon == spent.epsilon_rdp == epsilon(TABLE_12, 1e-5).epsilon_rdp
    assert (spent.accountant, spent.epsilon_pld, spent.note) == ("rdp", None, "")


def test_no_steps_spend_nothing_and_no_noise_spends_everything():
    assert epsilon(TABLE_12.replace(num_steps=0), 1e-5).epsilon == 0
    assert epsilon(TABLE_12.replace(num_steps=0, noise_multiplier=0.0), 1e-5).epsilon == 0
    silent = epsilon(TABLE_12.replace(noise_multiplier=0.0), 1e-5)
    assert silent.epsilon == silent.epsilon_rdp == math.inf and silent.epsilon_pld is None


@pytest.mark.parametrize("answer", [Tight(None, "it failed."), Tight(1e9)], ids=["none", "above RDP"])
def test_rdp_is_reported_and_said_where_pld_cannot_certify(monkeypatch, no_cache, answer):
    monkeypatch.setattr(accountants, "epsilon_pld", lambda *numbers: answer)
    spent = epsilon(TABLE_12, 1e-5)
    assert (spent.epsilon, spent.epsilon_pld, spent.accountant) == (spent.epsilon_rdp, None, "rdp")
    assert spent.note.startswith("epsilon is RDP's: ") and spent.note.endswith(".")


@pytest.mark.parametrize("accountant", ["pld", "rdp"])
@pytest.mark.parametrize("change", [{}, {"num_steps": 0}, {"noise_multiplier": 0.0}])
def test_shuffled_batches_are_refused(accountant, change):
    with pytest.raises(InputError, match="shuffled"):
        epsilon(TABLE_12.replace(sampling="shuffled", **change), 1e-5, accountant)


@pytest.mark.parametrize("delta", [0.0, 1.0, -1e-5, 2.0, math.nan])
def test_a_delta_out_of_range_is_refused(delta):
    with pytest.raises(InputError, match="delta"):
        epsilon(TABLE_12, delta)


@pytest.mark.parametrize("accountant", ["pld", "rdp"])
def test_epsilon_is_monotone(accountant):
    for row in DISTINCT_ROWS[1:12:4]:
        mechanism = Mechanism(row.num_examples, row.batch_size, row.noise_multiplier, row.num_steps)
        here = epsilon(mechanism, row.delta, accountant).epsilon
        assert epsilon(mechanism.replace(num_steps=row.num_steps + 1), row.delta, accountant).epsilon > here
        assert epsilon(mechanism.replace(batch_size=row.batch_size + 1), row.delta, accountant).epsilon > here
        assert (
            epsilon(mechanism.replace(noise_multiplier=row.noise_multiplier * 0.999), row.delta, accountant).epsilon
            > here
        )
        assert epsilon(mechanism, row.delta * 0.99, accountant).epsilon > here


@pytest.mark.parametrize(
    "mechanism",
    [
        Mechanism(100_000, 1, 200.0, 2_000_000),
        Mechanism(100_000, 1, 0.3, 1),
        Mechanism(1, 1, 0.3, 2_000_000),
        Mechanism(1, 1, 200.0, 1),
        Mechanism(2, 1, 0.3, 1_000_000),
        Mechanism(10, 9, 0.05, 3),
        Mechanism(2, 1, 200.0, 2_000_000),
        Mechanism(10, 1, 1e5, 10),
    ],
    ids=str,
)
def test_the_corners_of_the_range_have_an_epsilon_and_no_warning_reaches_anyone(mechanism, capfd):
    spent = epsilon(mechanism, 1e-5)  # a Python warning would be an error here
    assert 0 <= spent.epsilon <= spent.epsilon_rdp < math.inf
    assert capfd.readouterr() == ("", "")


@pytest.mark.parametrize("accountant", ["pld", "rdp"])
@pytest.mark.parametrize("num_steps", [1, 7, 300])
def test_a_curve_is_an_upper_bound_that_never_falls_and_ends_at_epsilon(accountant, num_steps):
    mechanism = TABLE_12.replace(num_steps=num_steps)
    curve = EpsilonCurve(mechanism, 1e-5, accountant)
    steps = sorted({0, 1, num_steps // 3, num_steps // 2, num_steps - 1, num_steps})
    values = [curve.at(step) for step in steps]
    assert values == sorted(values) and values[0] == 0
    assert values[-1] == epsilon(mechanism, 1e-5, accountant).epsilon == curve.spent.epsilon
    for step, value in zip(steps, values, strict=True):
        exact = epsilon(mechanism.replace(num_steps=step), 1e-5, accountant).epsilon
        assert exact <= value <= exact + 0.06 * curve.spent.epsilon + 1e-12


def test_a_curve_of_a_costly_mechanism_is_rdps_before_its_end():
    mechanism = Mechanism(1_271_167, 16_384, 2.5, 71_589)
    curve = EpsilonCurve(mechanism, 8e-7)
    assert curve.at(71_589) == epsilon(mechanism, 8e-7).epsilon_pld
    assert curve.at(40_000) >= epsilon(mechanism.replace(num_steps=40_000), 8e-7, "rdp").epsilon
    values = [curve.at(step) for step in range(0, 71_589, 10)]
    assert values == sorted(values) and values[-1] <= curve.at(71_589)
    assert curve.at(40_000) >= truth.epsilon(mechanism.sampling_prob, 2.5, 40_000, 8e-7)


def test_a_curve_answers_for_steps_beyond_its_plan_too():
    curve = EpsilonCurve(TABLE_12, 1e-5)
    assert curve.at(2500) == epsilon(TABLE_12.replace(num_steps=2500), 1e-5).epsilon
    with pytest.raises(InputError):
        EpsilonCurve(TABLE_12.replace(sampling="shuffled"), 1e-5)


def test_a_curve_without_noise_is_infinite_after_the_first_step():
    curve = EpsilonCurve(TABLE_12.replace(noise_multiplier=0.0), 1e-5)
    assert curve.at(0) == 0 and curve.at(1) == math.inf
