"""What a budget allows: within the target by the accountant itself, and hardly less than allowed."""

import itertools
import math

import pytest

from sfumato.accounting import calibration
from sfumato.accounting.accountants import epsilon
from sfumato.accounting.calibration import SMALLEST_SIGMA, solve
from sfumato.accounting.mechanism import Mechanism
from sfumato.accounting.selection import Selection
from sfumato.errors import InputError

# N, batch size, steps, delta, sigma where steps or the batch are solved for
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
SOME = zip(RUNS, [0.1, 150.0, 0.5, 8.0, 2.93], ["rdp"] * 5, strict=True)
FEW = [*SOME, (RUNS[0], 0.5, "pld"), (RUNS[2], 8.0, "pld")]
GRID = pytest.mark.parametrize(
    ("run", "target", "accountant"), [*FEW, *(pytest.param(*each, marks=pytest.mark.slow) for each in WHOLE)]
)


def spent(mechanism, delta, accountant, selection=None):
    return epsilon(mechanism, delta, accountant, selection).epsilon


@GRID
def test_the_noise_is_within_the_target_and_a_thousandth_less_exceeds_it(run, target, accountant):
    n, batch, steps, delta, _ = run
    found = solve(Mechanism(n, batch, 1.0, steps), "noise_multiplier", target, delta, accountant)
    sigma = found.noise_multiplier
    assert float(f"{sigma:.4g}") == sigma and found == Mechanism(n, batch, sigma, steps)
    assert spent(found, delta, accountant) <= target
    assert spent(found.replace(noise_multiplier=0.999 * sigma), delta, accountant) > target


@GRID
@pytest.mark.parametrize(("unknown", "least"), [("num_steps", "one step"), ("batch_size", "batch of 1")])
def test_steps_and_batch_are_within_the_target_and_one_more_exceeds_it(run, target, accountant, unknown, least):
    n, batch, steps, delta, sigma = run
    mechanism = Mechanism(n, batch, sigma, steps)
    if spent(mechanism.replace(**{unknown: 1}), delta, accountant) > target:
        with pytest.raises(InputError, match=least):
            solve(mechanism, unknown, target, delta, accountant)
        return
    found = solve(mechanism, unknown, target, delta, accountant)
    number = getattr(found, unknown)
    assert found == mechanism.replace(**{unknown: number}) and spent(found, delta, accountant) <= target
    more = number + 1 if unknown == "batch_size" or number <= 20_000 else math.floor(1.001 * number)
    if unknown == "num_steps" or number < n:
        assert spent(found.replace(**{unknown: more}), delta, accountant) > target


@pytest.mark.parametrize("beside", [{"images_per_unit": 3}, {"selection": Selection(10.0, 0.0)}], ids=str)
def test_what_else_the_target_pays_for_is_within_it_too(beside):
    facts = {key: value for key, value in beside.items() if key != "selection"}
    selection = beside.get("selection")
    within = solve(Mechanism(10_000, 1000, 1.0, 100, **facts), "noise_multiplier", 2.0, 1e-5, selection=selection)
    assert spent(within, 1e-5, "pld", selection) <= 2.0
    assert spent(within.replace(noise_multiplier=0.998 * within.noise_multiplier), 1e-5, "pld", selection) > 2.0
    if selection is None:
        assert solve(within, "batch_size", 2.0, 1e-5).batch_size in range(1000, 1003)
        assert 100 <= solve(within, "num_steps", 2.0, 1e-5).num_steps < 103


def test_a_search_ends_at_the_last_that_is_within_wherever_it_starts_and_asks_seldom_where_it_starts_near():
    for answer in (0, 1, 2, 57, 99, 100):
        for start in range(1, 101):
            asked = []
            within = lambda n: asked.append(n) or n <= answer  # noqa: B023, E731
            assert calibration._search(within, 1, 100, start, lambda n: 1) == (answer or None)
            assert len(asked) <= 2 + 2 * math.log2(1 + abs(start - answer))


def test_known_answers():
    table_12 = Mechanism(50_000, 4096, 10.0, 875)  # the paper prints sigma = 10.0
    budget = (1.0, 1e-5, "rdp")
    assert 9.8 < solve(table_12, "noise_multiplier", *budget).noise_multiplier <= 10.0
    assert 875 <= solve(table_12, "num_steps", *budget).num_steps < 910
    assert 4096 <= solve(table_12, "batch_size", *budget).batch_size < 4200
    run = Mechanism(60_000, 2048, 1.0, 1500)
    by_pld, by_rdp = (solve(run, "noise_multiplier", 2.93, 1e-5, by) for by in ("pld", "rdp"))
    assert 0.9 * by_rdp.noise_multiplier < by_pld.noise_multiplier < 0.97 * by_rdp.noise_multiplier
    assert solve(by_rdp, "num_steps", 2.93, 1e-5).num_steps > 1550


@pytest.mark.parametrize(
    ("beside", "target"),
    [({}, 0.5), ({}, 8.0), ({"accountant": "rdp"}, 0.5), ({"selection": Selection(10.0, 0.0)}, 8.0)],
)
def test_what_takes_long_is_asked_a_few_times(beside, target, monkeypatch):
    """From anywhere in the range a search would ask 20 to 60 times."""
    asked = []
    monkeypatch.setattr(calibration, "epsilon", lambda *given: asked.append(given[2]) or epsilon(*given))
    n, batch, steps, delta, _ = RUNS[1]
    solve(Mechanism(n, batch, 1.0, steps), "noise_multiplier", target, delta, **beside)
    assert 0 < asked.count("pld") + asked.count("rdp") * bool(beside) <= 10 and len(asked) <= 16


@pytest.mark.parametrize("unknown", ["noise_multiplier", "num_steps", "batch_size"])
def test_an_impossible_budget_is_refused(unknown):
    mechanism = Mechanism(100, 10, 1.0, 10)
    for target in (0.0, -1.0, math.nan, math.inf):
        with pytest.raises(InputError, match="epsilon must be positive"):
            solve(mechanism, unknown, target, 1e-3)
    for delta in (0.0, 1.0, 1.5, -1e-5):
        with pytest.raises(InputError, match="delta must lie"):
            solve(mechanism, unknown, 1.0, delta)
    if unknown != "noise_multiplier":
        with pytest.raises(InputError, match="noise_multiplier 0"):
            solve(mechanism.replace(noise_multiplier=0.0), unknown, 1.0, 1e-3)


@pytest.mark.parametrize(
    ("mechanism", "unknown", "target", "delta", "what"),
    [
        (Mechanism(1000, 500, 0.5, 1), "num_steps", 0.1, 1e-5, "one step"),
        (Mechanism(10, 1, 1.0, 5000), "batch_size", 0.1, 1e-5, "a batch of 1"),
        (Mechanism(1, 1, 1.0, 2_000_000), "noise_multiplier", 1e-4, 1e-6, r"a noise_multiplier of 1e\+06"),
    ],
)
def test_a_refusal_names_an_epsilon_that_is_feasible(mechanism, unknown, target, delta, what):
    with pytest.raises(InputError, match=f"even {what} spends epsilon .* epsilon [0-9.]+ or more") as caught:
        solve(mechanism, unknown, target, delta)
    named = float(str(caught.value).split("ask for epsilon ")[1].split()[0])
    assert spent(solve(mechanism, unknown, named, delta), delta, "pld") <= named


def test_a_budget_larger_than_needed_gives_the_ends_of_the_range():
    for target in (1e6, 1e308):
        assert solve(Mechanism(1000, 1, 1.0, 1), "noise_multiplier", target, 1e-5).noise_multiplier == SMALLEST_SIGMA
    assert solve(Mechanism(1000, 1, 100.0, 1), "batch_size", 8.0, 1e-5).batch_size == 1000
    assert solve(Mechanism(10**9, 1, 200.0, 1), "num_steps", 8.0, 1e-5, "rdp").num_steps == 10**9
    assert solve(Mechanism(1000, 1, 1.0, 0), "noise_multiplier", 8.0, 1e-5).noise_multiplier == SMALLEST_SIGMA
