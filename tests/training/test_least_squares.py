"""A classifier that is solved for: what one image adds has a known length, sums are exact, noise comes first."""

import dataclasses
import json
import math
import signal

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

import sfumato
from sfumato.accounting.mechanism import Mechanism
from sfumato.data.features import FeatureSet
from sfumato.errors import InputError
from sfumato.randomness import Stream
from sfumato.run_folder.ledger import Ledger
from sfumato.training import moments
from sfumato.training.least_squares import LeastSquaresStep, noise_edge, solve
from sfumato.training.step import Randomness
from tests.accounting import truth
from tests.training import faults

CPU = torch.device("cpu")
CLASSES, FEATURES = 3, 4


@pytest.fixture(autouse=True)
def own_cache(tmp_path_factory, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path_factory.mktemp("cache_home")))


def examples(features, labels=None, readable=None):
    features = torch.as_tensor(features, dtype=torch.float32)
    labels = torch.zeros(len(features), dtype=torch.int64) if labels is None else torch.as_tensor(labels)
    readable = torch.ones(len(features), dtype=torch.bool) if readable is None else readable
    return FeatureSet(features, labels, readable, None, torch.arange(len(features)))


def step_for(num_examples, sigma=0.0, num_features=FEATURES, num_classes=CLASSES):
    mechanism = Mechanism(num_examples, num_examples, sigma, 1)
    return LeastSquaresStep(mechanism, (num_features,), ("weight", "bias"), num_classes, CPU)


def sums_of(step, given, indices=None):
    """What is released but for the noise, as one vector."""
    indices = np.arange(len(given)) if indices is None else np.asarray(indices)
    sums, _ = step.collect(given, {}, Randomness(indices, np.zeros((0, 0)), b""))
    return torch.cat([value.flatten() for value in sums.values()])


def random_features(count, num_features=FEATURES, seed=0):
    generator = torch.Generator().manual_seed(seed)
    directions = torch.nn.functional.normalize(torch.randn(count, num_features, generator=generator))
    return directions * torch.exp(2 * torch.randn(count, 1, generator=generator)), generator


def test_no_image_moves_the_sums_by_more_than_the_sensitivity_and_every_one_of_full_length_does():
    """By brute force: over random directions and lengths, and along the axes, where the upper triangle of x x' alone
    would be longest.
    """
    random, _ = random_features(2000)
    corners = torch.cat([torch.eye(FEATURES), -torch.eye(FEATURES), torch.full((1, FEATURES), 7.0)])
    found = []
    step = step_for(16)
    for features in torch.cat([random, corners]):
        for label in range(CLASSES):
            alone = sums_of(step, examples(features[None], [label]))
            found.append((float(alone.norm()), float(features.norm())))
    moved, lengths = np.array(found).T
    assert (moved <= step.sensitivity).all()
    np.testing.assert_allclose(moved[lengths > 1.001], step.sensitivity, rtol=1e-5)
    assert moved[lengths < 0.5].max() < 0.6 * step.sensitivity


def test_the_sensitivity_is_that_of_the_formula():
    a, b, label = 0.7, 1.9, math.sqrt(2 / 3)
    assert moments.sensitivity(a, b, 3) == pytest.approx(math.sqrt(a**2 + b**2 * label**2), rel=2e-9)
    assert moments.sensitivity(a, b, 3) > math.sqrt(a**2 + b**2 * label**2)
    assert moments.sensitivity(a, 0.0, 3) == pytest.approx(a, rel=2e-9)
    assert step_for(16).sensitivity == pytest.approx(1, rel=2e-9)


def test_sums_with_and_without_one_image_differ_by_exactly_what_it_adds_in_any_order():
    features, generator = random_features(6000, 33)
    labels = torch.randint(0, CLASSES, (6000,), generator=generator)
    bits = moments.fraction_bits(6000)

    def summed(indices):
        return moments.summed(examples(features, labels), indices, CLASSES, bits, CPU)

    everything = torch.arange(6000)
    with_it, without, alone = summed(everything), summed(everything[everything != 4321]), summed(torch.tensor([4321]))
    shuffled = summed(torch.randperm(6000, generator=generator))
    for index in range(2):
        assert torch.equal(with_it[index] - without[index], alone[index])
        assert torch.equal(with_it[index], shuffled[index])
        assert alone[index].any()


@pytest.mark.parametrize("num_examples", [1, 1000, 60_000, 1_281_167])
def test_sums_of_as_many_images_as_there_are_still_fit(num_examples):
    """All of length 1 along one axis: the largest entry there can be."""
    bits = moments.fraction_bits(num_examples)
    x = moments.bounded(torch.tensor([[1.0, 1e-7]]), bits)
    total = num_examples * 4 ** moments.fraction_bits(num_examples)
    assert x[0, 0] <= 1 and x[0, 0] > 1 - 2.0 ** (1 - bits) and total <= 2**53
    assert bits >= 15


@pytest.mark.parametrize(
    "row", [[1e30, -1e30, 1e30, 3e38], [1e-30, 1e-38, 0, 0], [1.0000001, 0, 0, 0], [0, 0, 0, 0], [0.5] * 4]
)
def test_a_vector_of_any_size_is_at_most_1_long_exactly(row):
    x = moments.bounded(torch.tensor([row]), 20)
    assert x.square().sum() <= 1
    assert torch.equal(x * 2.0**20, (x * 2.0**20).round())
    assert (x.sign() * torch.tensor(row).sign() >= 0).all()


def test_random_vectors_of_length_1_stay_at_most_1_long_exactly():
    x = torch.nn.functional.normalize(torch.randn(20_000, 50, generator=torch.Generator().manual_seed(0)))
    assert (x.double().norm(dim=1) > 1).any()  # float32 rounds some up
    squares = moments.bounded(x, 18).square().sum(1)
    assert (squares <= 1).all() and squares.min() > 0.999


def test_an_image_that_cannot_be_read_or_is_not_finite_adds_nothing():
    features = random_features(6)[0]
    labels = [0, 1, 2, 0, 1, 2]
    step = step_for(6)
    good = sums_of(step, examples(features, labels), [0, 1, 2])
    features[3, 1], features[4, 2] = math.nan, math.inf
    readable = torch.tensor([True] * 5 + [False])
    assert torch.equal(sums_of(step, examples(features, labels, readable)), good)


def test_a_matrix_and_its_vector_are_equally_long_and_the_same():
    half = torch.randn(5, 5, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    matrix = half + half.T
    vector = moments.as_vector(matrix)
    assert float(vector.norm()) == pytest.approx(float(matrix.norm()), rel=1e-14)
    torch.testing.assert_close(moments.as_matrix(vector, 5), matrix)


def test_noise_has_the_claimed_scale_in_every_entry_that_is_released():
    sigma, num_features = 2.0, 60
    step = step_for(8, sigma, num_features)
    zeros = examples(torch.zeros(8, num_features))
    sums, _ = step.collect(zeros, {}, Randomness(np.arange(8), np.zeros((0, 0)), b""))
    seen = {}
    original = moments.as_matrix

    def spy(vector, count):
        seen["moments"] = vector * step.of_moments
        return original(vector, count)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(moments, "as_matrix", spy)
        step.release(sums, Stream(bytes(32)))
    noise = seen["moments"]
    assert len(noise) == num_features * (num_features + 1) // 2
    assert float(noise.std()) == pytest.approx(sigma * step.sensitivity, rel=0.06)
    assert step.noise_stddev == sigma * step.sensitivity


def test_without_noise_it_is_ridge_regression_on_centred_labels():
    features, generator = random_features(400, 6)
    features = torch.nn.functional.normalize(features)
    labels = torch.randint(0, CLASSES, (400,), generator=generator)
    step = step_for(400, num_features=6)
    sums, _ = step.collect(examples(features, labels), {}, Randomness(np.arange(400), np.zeros((0, 0)), b""))
    weight = step.release(sums, Stream(bytes(32)))["weight"]
    x, targets = features.double(), torch.nn.functional.one_hot(labels, CLASSES).double() - 1 / CLASSES
    ridge = 0.3 * 400 / 6
    expected = torch.linalg.solve(x.T @ x + ridge * torch.eye(6, dtype=torch.float64), x.T @ targets).T
    torch.testing.assert_close(weight, expected.float(), rtol=1e-3, atol=1e-4)


def test_noise_alone_has_no_larger_eigenvalue_than_its_edge_and_no_negative_one_is_inverted():
    generator = torch.Generator().manual_seed(0)
    vector = torch.randn(200 * 201 // 2, dtype=torch.float64, generator=generator)
    matrix = moments.as_matrix(vector, 200)
    assert float(torch.linalg.eigvalsh(matrix).abs().max()) == pytest.approx(noise_edge(200, 1.0), rel=0.1)
    products = torch.randn(200, 3, dtype=torch.float64, generator=generator)
    solved = solve(matrix, products, 10, 1.0)
    assert (products * solved).sum() > 0  # P' W is positive where S is
    assert float(solved.norm()) <= float(products.norm()) / (0.3 * noise_edge(200, 1.0))


RECIPE = {
    "data": {"name": "digits"},
    "model": {"trainable": "classifier", "classifier": "least_squares", "options": {"width": 4}},
    "privacy": {"target_epsilon": 2.0, "delta": 1e-5},
}


def written(folder, **privacy):
    """The recipe as a file."""
    path = folder / "least_squares.toml"
    budget = "".join(f"{key} = {value!r}\n" for key, value in {**RECIPE["privacy"], **privacy}.items())
    path.write_text(
        '[data]\nname = "digits"\n[model]\ntrainable = "classifier"\nclassifier = "least_squares"\n'
        f"options = {{ width = 4 }}\n[privacy]\n{budget}"
    )
    return path


def test_a_run_is_one_release_whose_epsilon_is_that_of_the_analytic_gaussian(tmp_path):
    result = sfumato.train(RECIPE, tmp_path / "run")
    n = result.num_examples
    assert (result.num_steps, result.batch_size) == (1, n)
    exact = truth.epsilon_of_gaussian(1 / result.noise_multiplier, 1e-5)
    assert exact <= result.epsilon <= min(2.0, exact * (1 + 1e-6))
    assert truth.epsilon_of_gaussian(1 / (result.noise_multiplier * 0.998), 1e-5) > 2.0
    steps = [line for line in Ledger.open(tmp_path / "run" / "ledger.jsonl").lines if line["kind"] == "step"]
    assert [line["step"] for line in steps] == [1]
    claim = json.loads((tmp_path / "run" / "privacy.json").read_text())
    assert claim["clipping_norm"] == 1.0 and claim["sampling_prob"] == 1.0
    assert result.accuracy == result.accuracy_last > 0.2
    again = sfumato.resume(tmp_path / "run")
    assert again.epsilon == result.epsilon


def test_two_runs_have_noise_of_their_own_and_non_private_ones_have_none(tmp_path):
    weights = []
    for name, plain in (("one", False), ("two", False), ("three", True), ("four", True)):
        sfumato.train({**RECIPE, "run": {"seed": 0}} if plain else RECIPE, tmp_path / name, non_private=plain)
        weights.append(load_file(tmp_path / name / "model.safetensors"))
    name = next(name for name, value in weights[0].items() if value.ndim == 2 and len(value) == 10)
    one, two, three, four = (found[name] for found in weights)
    assert not torch.equal(one, two) and torch.equal(three, four)


@pytest.mark.parametrize(
    "die_at", [("ledger", 3, 0.0), ("ledger", 3, 0.5), ("ledger", 3, 1.0), ("file", 6, 1.0), ("file", 8, 0.5)], ids=str
)
def test_killed_inside_a_write_it_ends_with_one_release(tmp_path, die_at):
    recipe, folder, log = written(tmp_path), tmp_path / "run", tmp_path / "log"
    died = faults.run(["train", str(recipe), "--output", str(folder)], die_at=die_at)
    assert died == -signal.SIGKILL
    spent = json.loads((folder / "privacy.json").read_text()) if (folder / "privacy.json").exists() else None
    assert faults.run(["resume", str(folder)], log=log) == 0, log.read_text()
    lines = Ledger.open(folder / "ledger.jsonl").lines
    assert [line["step"] for line in lines if line["kind"] == "step"] == [1]
    claim = json.loads((folder / "privacy.json").read_text())
    assert claim["status"] == "complete" and (spent is None or claim["epsilon"] == spent["epsilon"])
    assert json.loads((folder / "result.json").read_text())["accuracy"] > 0.2


def test_a_release_that_was_made_elsewhere_and_lost_ends_in_a_refusal_not_in_an_untrained_classifier(
    tmp_path, monkeypatch
):
    recipe, folder = written(tmp_path), tmp_path / "run"
    assert faults.run(["train", str(recipe), "--output", str(folder)], die_at=("ledger", 3, 1.0)) == -signal.SIGKILL
    monkeypatch.setattr("sfumato.run_folder.environment._processor", lambda: "another processor")
    with pytest.raises(InputError, match="no classifier was trained"):
        sfumato.train(recipe, folder, resume=True)
    assert not (folder / "model.safetensors").exists()
    claim = json.loads((folder / "privacy.json").read_text())
    assert claim["num_steps"] == 1 and claim["epsilon"] > 0


@pytest.mark.parametrize(
    ("section", "key", "value"),
    [
        ("optimizer", "learning_rate", 2.0),
        ("optimizer", "momentum", 0.9),
        ("training", "num_steps", 2),
        ("training", "batch_size", 100),
        ("training", "engine", "func"),
        ("training", "microbatch_size", 50),
        ("training", "verify_every", 5),
        ("augmentation", "augmult", 2),
        ("privacy", "clipping_norm", 0.5),
        ("model", "features", "raw"),
        ("model", "trainable", "all"),
        ("data", "class_proportions", [0.1] * 10),
    ],
)
def test_a_key_that_has_no_meaning_is_refused_by_name(tmp_path, section, key, value):
    recipe = {**RECIPE, section: {**RECIPE.get(section, {}), key: value}}
    with pytest.raises(InputError, match=f"{section}.{key}"):
        sfumato.train(recipe, tmp_path / "run")
    assert not (tmp_path / "run").exists()


def test_an_epsilon_for_a_person_multiplies_the_sensitivity_by_their_images(tmp_path):
    recipe = {**RECIPE, "privacy": {**RECIPE["privacy"], "unit": "person", "max_images_per_person": 3}}
    result = sfumato.train(recipe, tmp_path / "run")
    exact = truth.epsilon_of_gaussian(3 / result.noise_multiplier, 1e-5)
    assert exact <= result.epsilon <= min(2.0, exact * (1 + 1e-6))
    people = {**recipe, "privacy": {**recipe["privacy"], "person_sampling": "persons"}}
    with pytest.raises(InputError, match="least_squares"):
        sfumato.train(people, tmp_path / "people")


def test_features_that_changed_after_the_line_was_written_are_not_released_with_the_same_noise():
    """The line holds a code of the sums: equal noise needs equal sums (tests/training/test_replay.py); here, that one
    feature's last bit is in the sums.
    """
    features = random_features(50)[0]
    step, other = step_for(50), features.clone()
    other[7, 0] += 0.01
    assert not torch.equal(sums_of(step, examples(features)), sums_of(step, examples(other)))
    moved = dataclasses.replace(examples(features), labels=torch.ones(50, dtype=torch.int64))
    assert not torch.equal(sums_of(step, examples(features)), sums_of(step, moved))
