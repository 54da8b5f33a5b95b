"""The laws of trading one total amount of noise, and a table of Sander et al. (2022) to its printed digits."""

import json
import math

import pytest

from sfumato.accounting import accountants, gaussian
from sfumato.accounting.mechanism import Mechanism
from sfumato.cli import run as sfumato
from sfumato.scaling.cost import Price
from sfumato.scaling.equal_noise import (
    advice,
    at_batch_size,
    batch_size_for_overcharge,
    overcharge_estimate,
    table,
    with_more_data,
)

IMAGENET = Mechanism(1_271_167, 16_384, 2.5, 71_589)
SMALL_SIGMA = Mechanism(50_000, 512, 0.8, 2_000)


def test_table_6():
    for factor, printed, by_tan in ((1.0, 8.00, 8.26), (0.5, 17.98, 18.06)):
        found = with_more_data(IMAGENET, 8e-7, factor, "rdp")
        assert (round(found["epsilon"], 2), round(found["epsilon_tan"], 2)) == (printed, by_tan)


@pytest.mark.parametrize("target", [0.1, 0.01])
def test_the_least_batch_that_is_not_overcharged(target):
    batch_size = batch_size_for_overcharge(SMALL_SIGMA, 1e-5, target)
    there = at_batch_size(SMALL_SIGMA, batch_size)
    by_pld = gaussian.overcharge(there, 1e-5, accountants.epsilon(there, 1e-5, "pld").epsilon)
    assert 0.9 * target < by_pld < target


def test_where_no_batch_suffices_none_is_named_and_without_noise_the_overcharge_has_no_end():
    assert math.isinf(overcharge_estimate(SMALL_SIGMA.replace(noise_multiplier=0.01), 1e-5))
    assert batch_size_for_overcharge(Mechanism(600, 512, 0.5, 2_000), 1e-3, 0.01) is None


@pytest.mark.parametrize(("sigma", "sampling_prob", "num_steps"), [(0.8, 0.01, 2_000), (2.0, 0.08, 2_500)])
def test_the_central_limit_plans_and_never_certifies(sigma, sampling_prob, num_steps):
    """Near PLD where sigma is large; elsewhere neither near nor on one side of it."""
    mechanism = Mechanism(50_000, round(50_000 * sampling_prob), sigma, num_steps)
    exact = 1 + gaussian.overcharge(mechanism, 1e-5, accountants.epsilon(mechanism, 1e-5, "pld").epsilon)
    assert 1 + overcharge_estimate(mechanism, 1e-5) == pytest.approx(exact, rel=0.03 if sigma >= 2 else 0.2)


def test_every_row_of_a_table_has_one_total_amount_of_noise():
    rows = table(IMAGENET, 8e-7, "rdp", Price(views=8, throughput=2_000.0, devices=32), learning_rate=8.0)
    assert all(row["snr"] == pytest.approx(gaussian.snr(IMAGENET), rel=2e-4) for row in rows)
    own = next(row for row in rows if row["batch_size"] == 16_384)
    assert own["learning_rate"] == 8.0 and own["views_processed"] == 16_384 * 71_589 * 8
    hours = own["views_processed"] / 2_000 / 3_600
    assert own["hours"] * 32 == pytest.approx(own["device_hours"]) == pytest.approx(hours)
    quarter = next(row for row in rows if row["kind"] == "sigma constant" and row["num_steps"] == round(71_589 / 4))
    keys = ("batch_size", "learning_rate", "noise_multiplier")
    assert [quarter[key] for key in keys] == [32_768, 32.0, 2.5]  # the paper's best run
    constant = [row["epsilon"] for row in rows if row["kind"] == "steps constant"]
    assert constant == sorted(constant, reverse=True)


def test_ample_noise_is_told_what_half_the_compute_costs():
    assert advice(SMALL_SIGMA, 1e-5)["half_batch_costs"] is None
    costs = advice(Mechanism(50_000, 16_384, 40.0, 875), 1e-5)["half_batch_costs"]
    assert 0 < costs < 0.01


def test_plan_draws_this_run_and_writes_its_table(tmp_path, capsys):
    numbers = "--num-examples 50000 --delta 1e-5 --batch-size 4096 --num-steps 875 --noise-multiplier 10"
    arguments = ["plan", *numbers.split()]
    plot = tmp_path / "plan.svg"
    more = ["--table", "--throughput", "5000", "--devices", "2", "--more-data", "2", "--json"]
    assert sfumato([*arguments, "--plot", str(plot), *more]) == 0
    facts = json.loads(capsys.readouterr().out)
    assert "<svg" in plot.read_text() and len(facts["table"]) == 9
    assert facts["hours"] * 2 == pytest.approx(facts["device_hours"]) == pytest.approx(4096 * 875 / 5000 / 3600)
    assert facts["more_data"]["num_examples"] == 100_000 and facts["more_data"]["epsilon"] < facts["epsilon"]
    assert sfumato([*arguments, "--plot", str(tmp_path / "plan.txt")]) == 2 and ".svg" in capsys.readouterr().err
