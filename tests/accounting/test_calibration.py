import itertools
import math

import pytest

from sfumato.accounting import calibration
from sfumato.accounting.accountants import epsilon
from sfumato.accounting.calibration import SMALLEST_SIGMA, solve_batch_size, solve_noise_multiplier, solve_num_steps
from sfumato.accounting.mechanism import Mechanism
from sfumato.accounting.selection import Selection
from sfumato.errors import InputError

# N, batch size, steps, delta, sigma for the solvers of steps and batch; times targets: 5 x 7 x 3 solvers = 105 targets.
RUNS = [
    (1_437, 512, 60, 1e-4, 6.0),
    (60_000, 2_048, 1_500, 1e-5, 2.0),
    (50_000, 16_384, 1_000, 1e-5, 15.0),
    (1_271_167, 16_384, 71_589, 8e-7, 3.0),
    (4_000, 100, 30_000, 1e-5, 12.0),
]
TARGETS = [0.1, 0.5, 1.0, 2.93, 8.0, 20.0, 150.0]
# PLD takes a few hundredths to a second a value; the whole grid with it is marked slow.
FEW = [(run, target, "pld") for run in RUNS[:3] for target in (0.5, 8.0)]
WHOLE = [(run, target, "rdp") for run, target in itertools.product(RUNS, TARGETS)]
SLOW = [pytest.param(run, target, "pld", marks=pytest.mark.slow) for run, target in itertools.product(RUNS, TARGETS)]
GRID = pytest.mark.parametrize(("run", "target", "accountant"), [*WHOLE, *FEW, *SLOW])


def spent(n, batch, sigma, steps, delta, accountant):
    return epsilon(Mechanism(n, batch, sigma, steps), delta, accountant).epsilon


@GRID
def test_the_noise_is_within_the_target_and_a_thousandth_less_exceeds_it(run, target, accountant):
    n, batch, steps, delta, _ = run
    sigma = solve_noise_multiplier(
        num_examples=n, batch_size=batch, num_steps=steps, target_epsilon=target, delta=delta, accountant=accountant
    )
    assert float(f"{sigma:.4g}") == sigma
    assert (
        spent(n, batch, sigma, steps, delta, accountant)
        <= target
        < spent(n, batch, 0.999 * sigma, steps, delta, accountant)
    )


@GRID
def test_the_steps_are_within_the_target_and_one_more_exceeds_it(run, target, accountant):
    n, batch, _, delta, sigma = run
    budget = {
        "num_examples": n,
        "batch_size": batch,
        "noise_multiplier": sigma,
        "target_epsilon": target,
        "delta": delta,
        "accountant": accountant,
    }
    if spent(n, batch, sigma, 1, delta, accountant) > target:
        with pytest.raises(InputError, match="one step"):
            solve_num_steps(**budget)
        return
    steps = solve_num_steps(**budget)
    more = steps + 1 if steps <= 20_000 else math.floor(1.001 * steps)
    assert spent(n, batch, sigma, steps, delta, accountant) <= target < spent(n, batch, sigma, more, delta, accountant)


@GRID
def test_the_batch_is_within_the_target_and_one_image_more_exceeds_it(run, target, accountant):
    n, _, steps, delta, sigma = run
    budget = {
        "num_examples": n,
        "num_steps": steps,
        "noise_multiplier": sigma,
        "target_epsilon": target,
        "delta": delta,
        "accountant": accountant,
    }
    if spent(n, 1, sigma, steps, delta, accountant) > target:
        with pytest.raises(InputError, match="batch of 1"):
            solve_batch_size(**budget)
        return
    batch = solve_batch_size(**budget)
    assert spent(n, batch, sigma, steps, delta, accountant) <= target
    assert batch == n or spent(n, batch + 1, sigma, steps, delta, accountant) > target


def test_known_answers():
    table_12 = {"num_examples": 50_000, "batch_size": 4096, "delta": 1e-5, "accountant": "rdp"}
    assert 9.8 < solve_noise_multiplier(num_steps=875, target_epsilon=1.0, **table_12) <= 10.0  # the paper prints 10.0
    assert 875 <= solve_num_steps(noise_multiplier=10.0, target_epsilon=1.0, **table_12) < 910
    del table_12["batch_size"]
    assert 4096 <= solve_batch_size(noise_multiplier=10.0, num_steps=875, target_epsilon=1.0, **table_12) < 4200


def test_pld_allows_more_than_rdp():
    budget = {"num_examples": 60_000, "delta": 1e-5, "target_epsilon": 2.93}
    by_pld = solve_noise_multiplier(batch_size=2048, num_steps=1500, **budget)
    by_rdp = solve_noise_multiplier(batch_size=2048, num_steps=1500, accountant="rdp", **budget)
    assert 0.9 * by_rdp < by_pld < 0.97 * by_rdp
    assert solve_num_steps(batch_size=2048, noise_multiplier=by_rdp, **budget) > 1550


@pytest.mark.parametrize("run", RUNS[:3])
@pytest.mark.parametrize("target", [0.5, 8.0])
def test_what_takes_long_is_asked_a_few_times_after_a_search_by_what_does_not(run, target, monkeypatch):
    """The search alone would ask for 20 and more."""
    asked = []

    def counted(mechanism, delta, accountant="pld", selection=None):
        asked.append((accountant, selection))
        return epsilon(mechanism, delta, accountant, selection)

    monkeypatch.setattr(calibration, "epsilon", counted)
    n, batch, steps, delta, _ = run
    budget = {"num_examples": n, "batch_size": batch, "num_steps": steps, "target_epsilon": target, "delta": delta}
    solve_noise_multiplier(**budget)
    assert 0 < asked.count(("pld", None)) <= 12
    asked.clear()
    solve_noise_multiplier(**budget, selection=Selection(10.0, 0.0))
    assert 0 < len(asked) <= 13


@pytest.mark.parametrize("run", RUNS)
@pytest.mark.parametrize("target", [0.5, 2.93, 8.0])
def test_a_search_starts_near_its_answer(run, target, monkeypatch):
    """From anywhere in a range of a billion steps it would ask for up to 60."""
    asked = []
    monkeypatch.setattr(calibration, "epsilon", lambda *given: asked.append(given) or epsilon(*given))
    n, batch, steps, delta, sigma = run
    budget = {"num_examples": n, "target_epsilon": target, "delta": delta, "accountant": "rdp"}
    for solve, given in (
        (solve_noise_multiplier, {"batch_size": batch, "num_steps": steps}),
        (solve_num_steps, {"batch_size": batch, "noise_multiplier": sigma}),
        (solve_batch_size, {"num_steps": steps, "noise_multiplier": sigma}),
    ):
        asked.clear()
        solve(**budget, **given)
        assert 0 < len(asked) <= 30


@pytest.mark.parametrize("target", [0.0, -1.0, math.nan, math.inf])
def test_an_impossible_epsilon_is_refused(target):
    with pytest.raises(InputError, match="epsilon must be positive"):
        solve_noise_multiplier(num_examples=100, batch_size=10, num_steps=10, target_epsilon=target, delta=1e-3)
    with pytest.raises(InputError, match="epsilon must be positive"):
        solve_num_steps(num_examples=100, batch_size=10, noise_multiplier=1.0, target_epsilon=target, delta=1e-3)
    with pytest.raises(InputError, match="epsilon must be positive"):
        solve_batch_size(num_examples=100, num_steps=10, noise_multiplier=1.0, target_epsilon=target, delta=1e-3)


@pytest.mark.parametrize("delta", [0.0, 1.0, 1.5, -1e-5])
def test_an_impossible_delta_is_refused(delta):
    with pytest.raises(InputError, match="delta must lie"):
        solve_noise_multiplier(num_examples=100, batch_size=10, num_steps=10, target_epsilon=1.0, delta=delta)


def test_a_refusal_names_an_epsilon_that_is_feasible():
    budget = {"num_examples": 1000, "batch_size": 500, "noise_multiplier": 0.5, "delta": 1e-5}
    with pytest.raises(
        InputError, match="one step already spends epsilon .* or ask for epsilon [0-9.]+ or more"
    ) as caught:
        solve_num_steps(target_epsilon=0.1, **budget)
    named = float(str(caught.value).split("ask for epsilon ")[1].split()[0])
    assert solve_num_steps(target_epsilon=named, **budget) >= 1
    with pytest.raises(InputError, match="batch of 1") as caught:
        solve_batch_size(num_examples=10, num_steps=5000, noise_multiplier=1.0, target_epsilon=0.1, delta=1e-5)
    named = float(str(caught.value).split("ask for epsilon ")[1].split()[0])
    assert (
        solve_batch_size(num_examples=10, num_steps=5000, noise_multiplier=1.0, target_epsilon=named, delta=1e-5) >= 1
    )
    with pytest.raises(InputError, match="noise_multiplier above"):
        solve_noise_multiplier(num_examples=1, batch_size=1, num_steps=2_000_000, target_epsilon=1e-4, delta=1e-6)


def test_without_noise_nothing_meets_a_target():
    with pytest.raises(InputError, match="noise_multiplier 0"):
        solve_num_steps(num_examples=100, batch_size=10, noise_multiplier=0.0, target_epsilon=1.0, delta=1e-3)


def test_a_budget_larger_than_needed_gives_the_ends_of_the_range():
    assert (
        solve_noise_multiplier(num_examples=1000, batch_size=1, num_steps=1, target_epsilon=1e6, delta=1e-5)
        == SMALLEST_SIGMA
    )
    assert (
        solve_batch_size(num_examples=1000, num_steps=1, noise_multiplier=100.0, target_epsilon=8.0, delta=1e-5) == 1000
    )
    endless = {
        "num_examples": 10**9,
        "batch_size": 1,
        "noise_multiplier": 200.0,
        "target_epsilon": 8.0,
        "delta": 1e-5,
        "accountant": "rdp",
    }
    assert solve_num_steps(**endless) == 10**9
