"""Planning at the edges: one line of refusal or an answer within the target, never a fault."""

import dataclasses
import json
import math
import random
import subprocess
import sys
import time
from types import SimpleNamespace

import pytest
import torch

from sfumato import config, recipes
from sfumato.accounting import accountants
from sfumato.accounting.mechanism import Mechanism
from sfumato.cli import run
from sfumato.data.catalogue import public_facts
from sfumato.errors import InputError
from sfumato.planning.resolve import resolve
from sfumato.scaling.cost import Price, noise_seconds_per_million, num_trainable
from sfumato.scaling.equal_noise import table, with_more_data
from sfumato.scaling.plan import plan
from sfumato.training.network import Network


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


def test_impossible_shares_of_data_are_refused():
    for factor in (math.nan, 1e308, 0.0, 1e-6):
        with pytest.raises(InputError, match="times as many images"):
            with_more_data(Mechanism(50_000, 512, 1.0, 2_000), 1e-5, factor)
    with pytest.raises(InputError, match="delta"):
        with_more_data(Mechanism(50_000, 1, 1.0, 10), 1e-3, 1e-4)


def test_random_plans_never_exceed_their_target_and_never_fail(monkeypatch):
    """By RDP, which takes milliseconds, and without advice, which is by PLD; numbers over all that is possible."""
    monkeypatch.setattr("sfumato.scaling.equal_noise.advice", lambda mechanism, delta: {})
    rng, answered = random.Random(0), 0
    for _ in range(12):
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
            rows = table(mechanism, facts.delta, "rdp", Price(), None)
            assert all(1 <= row["batch_size"] <= num_examples for row in rows)
    assert answered > 6


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


IMAGENET = Mechanism(1_280_000, 16_384, 2.5, 72_000)
CLUSTER = Price(8, 9_000.0, 32, 2.0, 200.0, num_parameters=25_557_048, noise_seconds_per_million=0.002)


def test_each_part_of_an_update_is_shared_by_all_devices_and_a_run_without_noise_draws_none():
    price = dataclasses.replace(CLUSTER, reading=1.0, image_bytes=3 * 256**2)
    for count in (1, 2, 32):
        expected = {
            "arithmetic": 16_384 / count * 8 / 9_000,
            "reduction": 2 * (count - 1) / count * 4 * 25_557_048 / 200e9,
            "noise": 25.557048 / count * 0.002,
            "reading": 16_384 / count * 3 * 256**2 / 1e9,
        }
        shared = dataclasses.replace(price, devices=count)
        assert shared.update_seconds(IMAGENET) == pytest.approx(expected)
        assert shared.update_seconds(IMAGENET.replace(noise_multiplier=0.0)) == pytest.approx(expected | {"noise": 0.0})


def test_a_run_takes_its_updates_and_costs_its_device_hours():
    """Images are read while others are computed: of both the longer one counts."""
    for reading, bound_by in ((1.0, "arithmetic"), (0.1, "reading")):
        price = dataclasses.replace(CLUSTER, reading=reading, image_bytes=3 * 256**2)
        found, parts = price.of(IMAGENET), price.update_seconds(IMAGENET)
        update = parts[bound_by] + parts["reduction"] + parts["noise"]
        assert found["bound_by"] == bound_by and found["update_seconds"] == parts
        assert found["seconds"] == pytest.approx(72_000 * update) == pytest.approx(3600 * found["hours"])
        assert found["cost"] == pytest.approx(2.0 * found["device_hours"]) == pytest.approx(2.0 * 32 * found["hours"])


def test_where_less_is_known_less_is_counted():
    assert Price(8).of(IMAGENET)["seconds"] is None and Price(8).of(IMAGENET)["bound_by"] is None
    found = Price(8, 9_000.0, 32).of(IMAGENET)
    assert found["update_seconds"] == {"arithmetic": 512 * 8 / 9_000, "reduction": None, "noise": None, "reading": None}
    assert found["bound_by"] == "arithmetic" and found["cost"] is None
    assert found["device_hours"] == pytest.approx(found["views_processed"] / 9_000 / 3_600)


def test_noise_is_timed_by_the_least_of_three(monkeypatch):
    pauses, seen = [0.06, 0.01, 0.06], []

    def add_noise(grad_sum, noise_stddev, stream):
        seen.append(sum(value.numel() for value in grad_sum.values()))
        time.sleep(pauses[len(seen) - 1])

    monkeypatch.setattr("sfumato.training.noise.add_noise", add_noise)
    found = noise_seconds_per_million() * seen[0] / 1e6
    assert 0.01 <= found < 0.05 and len(seen) == 3


def shipped():
    """A recipe for each network that shipped recipes plan, and each part of one that trains."""
    found = {}
    for name in recipes.names():
        recipe = config.parse(recipes.read(name)[1])
        facts = public_facts(recipe.data)
        if facts is not None and recipe.privacy is not None:
            found.setdefault((recipe.model.name, recipe.model.trainable), name)
    return found.values()


@pytest.mark.parametrize("name", shipped())
def test_parameters_are_counted_as_training_has_them(name, monkeypatch):
    recipe = config.parse(recipes.read(name)[1])
    facts = public_facts(recipe.data)
    found = resolve(recipe, facts, cut_to_target=False)
    monkeypatch.setattr(Network, "_require_outputs", lambda self: None)  # they compute images, which takes long
    monkeypatch.setattr(Network, "_cut", lambda self: (self.model, None))
    shape, classes = (facts.channels, facts.image_size, facts.image_size), range(facts.num_classes)
    dataset = SimpleNamespace(train=SimpleNamespace(shape=shape), classes=classes)
    real = Network(found, dataset, torch.device("cpu")).model
    count = sum(value.numel() for value in real.parameters() if value.requires_grad)
    assert num_trainable(found.recipe, facts) == count > 0


def test_a_recipe_on_many_devices_has_time_cost_and_what_bounds_them(capsys):
    words = ["plan", "--recipe", "demo/digits", "--throughput", "9000", "--devices", "4", "--bandwidth", "200"]
    assert run([*words, "--reading", "1", "--price", "2", "--json"]) == 0
    facts = json.loads(capsys.readouterr().out)
    parts, count = facts["update_seconds"], facts["num_parameters"]
    assert (
        parts["noise"] == pytest.approx(-(-count // 4) * facts["noise_seconds_per_million"] / 1e6)
        and parts["noise"] > 0
    )
    assert parts["reduction"] == pytest.approx(2 * 3 / 4 * 4 * count / 200e9)
    assert parts["reading"] == pytest.approx(-(-facts["batch_size"] // 4) * 8 * 8 / 1e9)
    assert facts["cost"] == pytest.approx(2 * facts["device_hours"]) and facts["bound_by"] in parts
    assert facts["seconds"] == pytest.approx(3600 * facts["hours"])
    assert run([*words, "--table"]) == 0
    out = capsys.readouterr().out
    assert "bound by            " in out and f"{count} that train" in out and "currency" not in out


def test_only_bandwidth_imports_torch():
    code = (
        "import sys; from sfumato import cli\n"
        "words = 'plan --recipe demo/digits --throughput 9 --devices 2 --price 1 --reading 1'.split()\n"
        "assert cli.run(words) == 0 and 'torch' not in sys.modules\n"
        "assert cli.run([*words, '--bandwidth', '1']) == 0 and 'torch' in sys.modules\n"
        "assert 'torch._dynamo' not in sys.modules\n"  # the network is built for its shapes alone
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize(
    ("words", "why"),
    [
        ("--num-examples 3000 --epsilon 3 --bandwidth 200", "--bandwidth needs --throughput"),
        ("--num-examples 3000 --epsilon 3 --throughput 9 --bandwidth 200", "--bandwidth needs --recipe"),
        ("--num-examples 3000 --epsilon 3 --throughput 9 --reading 1", "--reading needs --recipe"),
        ("--num-examples 3000 --epsilon 1,3 --price 2", "several epsilons"),
        ("--recipe demo/digits --throughput 9 --bandwidth 0", "--bandwidth must lie between"),
        ("--recipe demo/digits --throughput nan", "--throughput must lie between"),
        (f"--recipe demo/digits --throughput 9 --devices 1{'0' * 400}", "--devices must lie between"),
    ],
)
def test_machines_that_cannot_be_are_refused_in_one_line(words, why, capsys):
    assert run(["plan", *words.split()]) == 2
    out, err = capsys.readouterr()
    assert why in err and err.count("\n") == 1 and not out


def test_a_network_of_ones_own_is_counted_once_its_module_is_trusted(tmp_path, capsys, monkeypatch):
    (tmp_path / "own_network.py").write_text(
        "import torch\ndef make(num_classes):\n"
        "    return torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Linear(64, num_classes))\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    path = tmp_path / "r.toml"
    path.write_text(NUMBERS.format(privacy="", rest='[model]\nname = "own_network:make"\n'))
    words = ["plan", "--recipe", str(path), "--throughput", "9", "--bandwidth", "9", "--json"]
    assert run(words) == 2 and "--trust own_network" in capsys.readouterr().err
    assert run([*words, "--trust", "own_network"]) == 0
    assert json.loads(capsys.readouterr().out)["num_parameters"] == 650
