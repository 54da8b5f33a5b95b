"""Planning at the edges: one line of refusal or an answer within the target, never a fault."""

import json
import math
import random

import pytest

from sfumato.accounting import accountants
from sfumato.accounting.mechanism import Mechanism
from sfumato.cli import run
from sfumato.errors import InputError
from sfumato.scaling.equal_noise import table, with_more_data
from sfumato.scaling.plan import plan


def certified(facts):
    """What the plan's own numbers spend, once more."""
    mechanism = Mechanism(facts.num_examples, facts.batch_size, facts.noise_multiplier, facts.num_steps)
    return accountants.epsilon(mechanism, facts.delta, facts.accountant).epsilon


@pytest.mark.parametrize(
    ("num_examples", "delta", "given"),
    [
        (1, None, {"batch_size": 1, "num_steps": 10, "epsilon": 1.0}),  # a batch below 1 was looked for
        (274, 0.1, {"batch_size": 131, "num_steps": 53, "epsilon": 0.001}),  # PLD's overcharge is negative there
        (3, None, {"batch_size": 1, "num_steps": 9, "epsilon": 0.0165}),
        (10**12, None, {"batch_size": 1, "num_steps": 9, "epsilon": 1e-3}),  # orders up to 1e13 took all memory
    ],
)
def test_small_and_large_plans_have_an_answer_within_the_target(num_examples, delta, given):
    facts = plan(num_examples, delta, "rdp" if num_examples > 1_000 else "pld", **given)
    assert certified(facts) <= given["epsilon"] and facts.epsilon <= given["epsilon"]
    for share in (10, 1):
        batch_size = getattr(facts, f"batch_size_overcharge_{share}_percent")
        assert batch_size is None or 1 <= batch_size <= num_examples


RUN = {"batch_size": 512, "num_steps": 2_000, "noise_multiplier": 1.0, "epsilon": None}


@pytest.mark.parametrize(
    ("changes", "option"),
    [
        ({"noise_multiplier": 1e300}, "--noise-multiplier"),
        ({"noise_multiplier": 1e-200}, "--noise-multiplier"),
        ({"noise_multiplier": math.nan}, "--noise-multiplier"),
        ({"noise_multiplier": 0.0, "num_steps": None, "epsilon": 1.0}, "--noise-multiplier 0"),
        ({"noise_multiplier": None, "epsilon": 1e-17}, "--epsilon"),
        ({"noise_multiplier": None, "epsilon": 1.0, "delta": 1e-320}, "--delta"),
        ({"num_steps": 10**26}, "--num-steps"),
        ({"batch_size": 0}, "--batch-size"),
        ({"num_examples": 10**30}, "--num-examples"),
    ],
)
def test_numbers_out_of_range_are_refused_by_their_option_in_one_line(changes, option):
    given = {"num_examples": 50_000, "delta": None, **RUN, **changes}
    with pytest.raises(InputError, match=option) as refusal:
        plan(**given)
    assert "\n" not in str(refusal.value)


@pytest.mark.parametrize("factor", [math.nan, 1e308, 0.0, 1e-6])
def test_impossible_shares_of_data_are_refused(factor):
    with pytest.raises(InputError, match="times as many images"):
        with_more_data(Mechanism(50_000, 512, 1.0, 2_000), 1e-5, factor)
    with pytest.raises(InputError, match="delta"):
        with_more_data(Mechanism(50_000, 1, 1.0, 10), 1e-3, 1e-4)


def test_random_plans_never_exceed_their_target_and_never_fail(monkeypatch):
    """By RDP, which takes milliseconds, and without advice, which is by PLD; numbers over all that is possible."""
    monkeypatch.setattr("sfumato.scaling.equal_noise.advice", lambda mechanism, delta: {})
    rng, answered = random.Random(0), 0
    for _ in range(25):
        num_examples = int(10 ** rng.uniform(0, 9))
        given = {
            "batch_size": rng.choice([1, num_examples, max(1, num_examples // 2)]),
            "num_steps": rng.choice([0, 1, int(10 ** rng.uniform(0, 6))]),
            "noise_multiplier": 10 ** rng.uniform(-4, 4),
            "epsilon": 10 ** rng.uniform(-5, 3),
        }
        given[rng.choice(list(given))] = None
        delta = rng.choice([None, 1e-100, 1e-5, 0.5])
        try:
            facts = plan(num_examples, delta, "rdp", **given)
        except InputError as refusal:
            assert "\n" not in str(refusal) and "not 0:" not in str(refusal)
            continue
        answered += 1
        if given["epsilon"] is not None:
            assert certified(facts) <= given["epsilon"], (num_examples, delta, given)
        if facts.noise_multiplier and facts.num_steps:
            mechanism = Mechanism(num_examples, facts.batch_size, facts.noise_multiplier, facts.num_steps)
            assert all(1 <= row["batch_size"] <= num_examples for row in table(mechanism, facts.delta, "rdp"))
    assert answered > 12


NUMBERS = (
    '[data]\nname = "digits"\n[privacy]\nnoise_multiplier = 2.0\ndelta = 1e-4\n{privacy}'
    "[training]\nbatch_size = 128\nnum_steps = 60\n{rest}"
)


@pytest.mark.parametrize(
    ("privacy", "rest", "why"),
    [('sampling = "shuffled"\n', "", "shuffled"), ("", "[run]\nseed = 1\n", "public seed"), ("", "", None)],
)
def test_a_recipe_that_is_not_private_has_no_epsilon_in_a_plan_as_in_a_dry_run(tmp_path, capsys, privacy, rest, why):
    path = tmp_path / "r.toml"
    path.write_text(NUMBERS.format(privacy=privacy, rest=rest))

    def told(*words):
        assert run([*words, "--json"]) == 0
        return json.loads(capsys.readouterr().out)

    planned, dry = told("plan", "--recipe", str(path)), told("train", str(path), "--dry-run")
    names = ("private", "why_not_private", "epsilon", "epsilon_rdp", "epsilon_pld")
    names += () if why is None else ("epsilon_if_private", "epsilon_rdp_if_private", "epsilon_pld_if_private")
    assert {name: planned[name] for name in names} == {name: dry[name] for name in names}
    assert run(["plan", "--recipe", str(path)]) == 0
    out, err = capsys.readouterr()
    if why is None:
        assert planned["epsilon"] > 0 and "not private" not in out + err
    else:
        assert planned["epsilon"] is None and planned["epsilon_if_private"] > 0
        assert any(why in line for line in planned["warnings"]) and why in err
        assert f"not private         {planned['why_not_private']}" in out.splitlines()


def test_a_plan_says_where_a_recipe_s_numbers_spend_more_than_its_target(tmp_path, capsys):
    path = tmp_path / "r.toml"
    path.write_text(NUMBERS.format(privacy="target_epsilon = 0.5\n", rest=""))
    assert run(["plan", "--recipe", str(path), "--json"]) == 0
    assert any("target_epsilon = 0.5" in line for line in json.loads(capsys.readouterr().out)["warnings"])
