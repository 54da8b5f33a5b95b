"""What a budget allows: within the target by the accountant itself, and hardly less than allowed."""

import itertools
import math

import pytest

from sfumato.accounting import calibration
from sfumato.accounting.accountants import epsilon
from sfumato.accounting.calibration import SMALLEST_SIGMA, solve_batch_size, solve_noise_multiplier, solve_num_steps
from sfumato.accounting.mechanism import Mechanism
from sfumato.accounting.selection import Selection
from sfumato.errors import InputError

# N, batch size, steps, delta, sigma for the solvers of steps and batch
RUNS = [
    (1_437, 512, 60, 1e-4, 6.0),
    (60_000, 2_048, 1_500, 1e-5, 2.0),
    (50_000, 16_384, 1_000, 1e-5, 15.0),
    (1_271_167, 16_384, 71_589, 8e-7, 3.0),
    (4_000, 100, 30_000, 1e-5, 12.0),
]
TARGETS = [0.1, 0.5, 1.0, 2.93, 8.0, 20.0, 150.0]
# PLD takes a few hundredths to a second a value; the whole grid is marked slow.
WHOLE = [(*each, by) for *each, by in itertools.product(RUNS, TARGETS, ("rdp", "pld"))]
SOME = zip(RUNS * 2, [0.1, 150.0, 1.0, 8.0, 2.93, 2.93, 0.5, 20.0, 2.93, 8.0], ["rdp"] * 10, strict=True)
FEW = [*SOME, (RUNS[0], 0.5, "pld"), (RUNS[1], 8.0, "pld"), (RUNS[2], 0.5, "pld"), (RUNS[2], 8.0, "pld")]
GRID = pytest.mark.parametrize(
    ("run", "target", "accountant"), [*FEW, *(pytest.param(*each, marks=pytest.mark.slow) for each in WHOLE)]
)


def spent(n, batch, sigma, steps, delta, accountant):
    return epsilon(Mechanism(n, batch, sigma, steps), delta, accountant).epsilon


@GRID
def test_the_noise_is_within_the_target_and_a_thousandth_less_exceeds_it(run, target, accountant):
    n, batch, steps, delta, _ = run
    sigma = solve_noise_multiplier(
        num_examples=n, batch_size=batch, num_steps=steps, target_epsilon=target, delta=delta, accountant=accountant
    )
    assert float(f"{sigma:.4g}") == sigma
    assert spent(n, batch, sigma, steps, delta, accountant) <= target
    assert spent(n, batch, 0.999 * sigma, steps, delta, accountant) > target


@GRID
def test_the_steps_are_within_the_target_and_one_more_exceeds_it(run, target, accountant):
    n, batch, _, delta, sigma = run
    budget = {"noise_multiplier": sigma, "target_epsilon": target, "delta": delta, "accountant": accountant}
    if spent(n, batch, sigma, 1, delta, accountant) > target:
        with pytest.raises(InputError, match="one step"):
            solve_num_steps(num_examples=n, batch_size=batch, **budget)
        return
    steps = solve_num_steps(num_examples=n, batch_size=batch, **budget)
    more = steps + 1 if steps <= 20_000 else math.floor(1.001 * steps)
    assert spent(n, batch, sigma, steps, delta, accountant) <= target < spent(n, batch, sigma, more, delta, accountant)


@GRID
def test_the_batch_is_within_the_target_and_one_image_more_exceeds_it(run, target, accountant):
    n, _, steps, delta, sigma = run
    budget = {"noise_multiplier": sigma, "target_epsilon": target, "delta": delta, "accountant": accountant}
    if spent(n, 1, sigma, steps, delta, accountant) > target:
        with pytest.raises(InputError, match="batch of 1"):
            solve_batch_size(num_examples=n, num_steps=steps, **budget)
        return
    batch = solve_batch_size(num_examples=n, num_steps=steps, **budget)
    assert spent(n, batch, sigma, steps, delta, accountant) <= target
    assert batch == n or spent(n, batch + 1, sigma, steps, delta, accountant) > target


@pytest.mark.parametrize(
    "beside", [{"first_release_noise": 5.0}, {"images_per_unit": 3}, {"selection": Selection(10.0, 0.0)}], ids=str
)
def test_what_else_the_target_pays_for_is_within_it_too(beside):
    given = {"num_examples": 10_000, "batch_size": 1000, "num_steps": 100, "target_epsilon": 2.0, "delta": 1e-5}
    sigma = solve_noise_multiplier(**given, **beside)
    facts = {key: value for key, value in beside.items() if key != "selection"}
    within, selection = Mechanism(10_000, 1000, sigma, 100, **facts), beside.get("selection")
    assert epsilon(within, 1e-5, "pld", selection).epsilon <= 2.0
    assert epsilon(within.replace(noise_multiplier=0.998 * sigma), 1e-5, "pld", selection).epsilon > 2.0
    if selection is None:
        del given["batch_size"]
        assert solve_batch_size(noise_multiplier=sigma, **given, **beside) in range(1000, 1003)
        del given["num_steps"]
        assert 100 <= solve_num_steps(batch_size=1000, noise_multiplier=sigma, **given, **beside) < 103


def test_a_search_ends_at_the_last_that_is_within_wherever_it_starts():
    for answer in (0, 1, 2, 57, 99, 100):
        for start in range(1, 101):
            found = calibration._search(lambda n: n <= answer, 1, 100, start, lambda n: 1)  # noqa: B023
            assert found == (answer or None)


def test_a_release_that_takes_the_whole_target_is_refused():
    given = {"num_examples": 10_000, "batch_size": 1000, "num_steps": 100, "target_epsilon": 2.0, "delta": 1e-5}
    with pytest.raises(InputError, match="epsilon"):
        solve_noise_multiplier(**given, first_release_noise=1.0)


def test_known_answers():
    table_12 = {"num_examples": 50_000, "batch_size": 4096, "delta": 1e-5, "accountant": "rdp"}
    assert 9.8 < solve_noise_multiplier(num_steps=875, target_epsilon=1.0, **table_12) <= 10.0  # the paper prints 10.0
    assert 875 <= solve_num_steps(noise_multiplier=10.0, target_epsilon=1.0, **table_12) < 910
    del table_12["batch_size"]
    assert 4096 <= solve_batch_size(noise_multiplier=10.0, num_steps=875, target_epsilon=1.0, **table_12) < 4200
    budget = {"num_examples": 60_000, "delta": 1e-5, "target_epsilon": 2.93, "batch_size": 2048}
    by_pld = solve_noise_multiplier(num_steps=1500, **budget)
    by_rdp = solve_noise_multiplier(num_steps=1500, accountant="rdp", **budget)
    assert 0.9 * by_rdp < by_pld < 0.97 * by_rdp
    assert solve_num_steps(noise_multiplier=by_rdp, **budget) > 1550


@pytest.mark.parametrize("beside", [{}, {"accountant": "rdp"}, {"selection": Selection(10.0, 0.0)}], ids=str)
@pytest.mark.parametrize("target", [0.5, 8.0])
def test_what_takes_long_is_asked_a_few_times(beside, target, monkeypatch):
    """From anywhere in the range a search would ask 20 to 60 times."""
    asked = []
    monkeypatch.setattr(calibration, "epsilon", lambda *given: asked.append(given[2]) or epsilon(*given))
    n, batch, steps, delta, _ = RUNS[1]
    budget = {"num_examples": n, "batch_size": batch, "num_steps": steps, "target_epsilon": target, "delta": delta}
    solve_noise_multiplier(**budget, **beside)
    assert 0 < asked.count("pld") + asked.count("rdp") * bool(beside) <= 10 and len(asked) <= 16


def test_an_impossible_budget_is_refused():
    given = {"num_examples": 100, "delta": 1e-3}
    for target in (0.0, -1.0, math.nan, math.inf):
        with pytest.raises(InputError, match="epsilon must be positive"):
            solve_noise_multiplier(**given, batch_size=10, num_steps=10, target_epsilon=target)
        with pytest.raises(InputError, match="epsilon must be positive"):
            solve_num_steps(**given, batch_size=10, noise_multiplier=1.0, target_epsilon=target)
        with pytest.raises(InputError, match="epsilon must be positive"):
            solve_batch_size(**given, num_steps=10, noise_multiplier=1.0, target_epsilon=target)
    for delta in (0.0, 1.0, 1.5, -1e-5):
        with pytest.raises(InputError, match="delta must lie"):
            solve_noise_multiplier(num_examples=100, batch_size=10, num_steps=10, target_epsilon=1.0, delta=delta)
    with pytest.raises(InputError, match="noise_multiplier 0"):
        solve_num_steps(**given, batch_size=10, noise_multiplier=0.0, target_epsilon=1.0)


def test_a_refusal_names_an_epsilon_that_is_feasible():
    budget = {"num_examples": 1000, "batch_size": 500, "noise_multiplier": 0.5, "delta": 1e-5}
    with pytest.raises(InputError, match="one step already spends epsilon .* epsilon [0-9.]+ or more") as caught:
        solve_num_steps(target_epsilon=0.1, **budget)
    named = float(str(caught.value).split("ask for epsilon ")[1].split()[0])
    assert solve_num_steps(target_epsilon=named, **budget) >= 1
    budget = {"num_examples": 10, "num_steps": 5000, "noise_multiplier": 1.0, "delta": 1e-5}
    with pytest.raises(InputError, match="batch of 1") as caught:
        solve_batch_size(target_epsilon=0.1, **budget)
    named = float(str(caught.value).split("ask for epsilon ")[1].split()[0])
    assert solve_batch_size(target_epsilon=named, **budget) >= 1
    with pytest.raises(InputError, match="noise_multiplier above"):
        solve_noise_multiplier(num_examples=1, batch_size=1, num_steps=2_000_000, target_epsilon=1e-4, delta=1e-6)


def test_a_budget_larger_than_needed_gives_the_ends_of_the_range():
    budget = {"delta": 1e-5}
    for target in (1e6, 1e308):
        budget["target_epsilon"] = target
        assert solve_noise_multiplier(num_examples=1000, batch_size=1, num_steps=1, **budget) == SMALLEST_SIGMA
    budget["target_epsilon"] = 8.0
    assert solve_batch_size(num_examples=1000, num_steps=1, noise_multiplier=100.0, **budget) == 1000
    endless = {"num_examples": 10**9, "batch_size": 1, "noise_multiplier": 200.0, "accountant": "rdp"}
    assert solve_num_steps(**endless, **budget) == 10**9
    assert solve_noise_multiplier(num_examples=1000, batch_size=1, num_steps=0, **budget) == SMALLEST_SIGMA
