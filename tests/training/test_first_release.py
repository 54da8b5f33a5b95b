"""The mean of features that is released before the updates is released once, counted once beside the updates, and
survives any kill.
"""

import json
import math
import signal

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

import sfumato
from sfumato import cli, config
from sfumato.accounting.mechanism import Mechanism
from sfumato.data.examples import FeatureSet
from sfumato.data.loading import load
from sfumato.evaluation.trained import load as load_trained
from sfumato.randomness import Stream
from sfumato.run_folder import ledger
from sfumato.training import first_release, step
from sfumato.training.first_release import SENSITIVITY, MeanFeatures
from sfumato.training.logs import Progress
from tests.accounting import truth
from tests.data.conftest import cache_home, refused  # noqa: F401  (a fixture for all)
from tests.training import faults

CPU = torch.device("cpu")
STEPS = 8
RECIPE = {
    "data": {"name": "digits"},
    "model": {"trainable": "classifier", "features": "centred", "options": {"width": 4}},
    "privacy": {"target_epsilon": 2.0, "delta": 1e-5},
    "training": {"batch_size": 128, "num_steps": STEPS, "checkpoint_every": 3, "evaluate_every": 4},
}


def examples(features, labels=None, readable=None):
    labels = torch.zeros(len(features), dtype=torch.int64) if labels is None else labels
    readable = torch.ones(len(features), dtype=torch.bool) if readable is None else readable
    return FeatureSet(features, labels, readable, None)


def random_features(count, num_features=4, seed=0):
    generator = torch.Generator().manual_seed(seed)
    directions = torch.nn.functional.normalize(torch.randn(count, num_features, generator=generator))
    return directions * torch.exp(2 * torch.randn(count, 1, generator=generator))


def recipe_of(**changes):
    return {section: {**RECIPE.get(section, {}), **changes.get(section, {})} for section in {**RECIPE, **changes}}


def written(folder):
    path = folder / "centred.toml"
    path.write_text(config.to_toml(config.parse(RECIPE)))
    return path


def steps_of(folder):
    return [line.release for line in ledger.read(folder / "ledger.jsonl").releases]


def claim_of(folder):
    return json.loads((folder / "privacy.json").read_text())


def mean_of_features(sigma=0.0, num_examples=16):
    return MeanFeatures(Mechanism(num_examples, 4, 1.0, 5, first_release_noise=sigma or None), CPU)


def test_no_image_moves_the_sum_of_features_by_more_than_the_sensitivity_and_every_one_of_full_length_does():
    release = mean_of_features()
    features = torch.cat([random_features(300), torch.eye(4), torch.full((1, 4), 9.0)])
    moved = np.array([float(release.collect(examples(row[None]))["features"].norm()) for row in features])
    assert (moved <= SENSITIVITY).all()
    lengths = features.norm(dim=1).numpy()
    np.testing.assert_allclose(moved[lengths > 1.001], SENSITIVITY, rtol=1e-5)
    np.testing.assert_allclose(moved[lengths < 0.9], lengths[lengths < 0.9], rtol=0.1, atol=1e-5)
    one, other = (release.collect(examples(features, torch.full((305,), label)))["features"] for label in (0, 3))
    assert torch.equal(one, other)  # no label is looked at
    assert torch.equal(one, release.collect(examples(features.flip(0)))["features"])


def test_sums_with_and_without_one_image_differ_by_exactly_what_it_adds_in_any_order():
    features, release = random_features(6000, 33), mean_of_features(0.0, 6000)
    summed = lambda rows: release.collect(examples(rows))["features"]  # noqa: E731
    alone = summed(features[4321:4322])
    assert torch.equal(summed(features) - summed(torch.cat([features[:4321], features[4322:]])), alone) and alone.any()
    assert torch.equal(summed(features), summed(features[torch.randperm(6000)]))


@pytest.mark.parametrize(
    "row", [[1e30, -1e30, 1e30, 3e38], [1e-30, 1e-38, 0, 0], [1.0000001, 0, 0, 0], [0, 0, 0, 0], [0.5] * 4]
)
def test_a_vector_of_any_size_is_at_most_1_long_exactly(row):
    x = first_release.bounded(torch.tensor([row]), 20)
    assert x.square().sum() <= 1
    assert torch.equal(x * 2.0**20, (x * 2.0**20).round())
    assert (x.sign() * torch.tensor(row).sign() >= 0).all()


def test_random_vectors_of_length_1_stay_at_most_1_long_exactly():
    x = torch.nn.functional.normalize(torch.randn(20_000, 50, generator=torch.Generator().manual_seed(0)))
    assert (x.double().norm(dim=1) > 1).any()  # float32 rounds some up
    squares = first_release.bounded(x, 18).square().sum(1)
    assert (squares <= 1).all() and squares.min() > 0.999


def test_an_image_that_cannot_be_read_or_is_not_finite_adds_nothing():
    features, release = random_features(6), mean_of_features(0.0, 6)
    good = release.collect(examples(features[:3]))["features"]
    features[3, 1], features[4, 2] = math.nan, math.inf
    readable = torch.tensor([True] * 5 + [False])
    assert torch.equal(release.collect(examples(features, None, readable))["features"], good)


@pytest.mark.parametrize("num_examples", [1, 1000, 60_000, 1_281_167])
def test_sums_of_as_many_images_as_there_are_still_fit(num_examples):
    """All of length 1 along one axis: the largest entry there can be."""
    bits = first_release.fraction_bits(num_examples)
    x = first_release.bounded(torch.tensor([[1.0, 1e-7]]), bits)
    assert x[0, 0] <= 1 and x[0, 0] > 1 - 2.0 ** (1 - bits) and num_examples * 4**bits <= 2**53
    assert bits >= 15


def test_the_mean_is_the_mean_and_its_noise_has_the_claimed_scale_over_the_public_number_of_images():
    features = torch.nn.functional.normalize(random_features(1000, 6))
    exact = mean_of_features(0.0, 1000).release(mean_of_features(0.0, 1000).collect(examples(features)), None)
    torch.testing.assert_close(exact, features.mean(0), rtol=0, atol=1e-4)
    release = mean_of_features(2.5, 20)
    assert release.noise_stddev == 2.5 * SENSITIVITY > 2.5
    noise = release.release(release.collect(examples(torch.zeros(16, 4000))), Stream(bytes(32)))
    assert float(noise.std()) * 20 == pytest.approx(2.5, rel=4 / 4000**0.5)


def test_the_published_network_computes_on_images_what_the_run_learned_on_centred_features(tmp_path):
    """Its logits are those of the plain formula, by the published numbers alone."""
    run = tmp_path / "run"
    result = sfumato.train(recipe_of(privacy={"target_epsilon": 30.0}), run)
    trained, tensors = load_trained(run), load_file(run / "model.safetensors")
    (head,) = {name.removesuffix(".centre") for name in tensors if name.endswith(".centre")}
    images = load(config.DataConfig(name="digits"), None, print).held_out
    batch = images.batch(torch.arange(len(images)))
    seen = []
    trained.model.get_submodule(head).register_forward_pre_hook(lambda _, given: seen.append(given[0]))
    with torch.no_grad():
        logits = trained.model(batch)
    rows = seen[0].double()
    rows = rows / rows.norm(dim=1, keepdim=True) - tensors[f"{head}.centre"].double()
    rows = rows / rows.norm(dim=1, keepdim=True)
    expected = rows @ tensors[f"{head}.weight"].double().T + 0.1 * tensors[f"{head}.bias"].double()
    torch.testing.assert_close(logits.double(), expected, rtol=1e-4, atol=1e-5)
    assert tensors[f"{head}.centre"].any()
    assert float((logits.argmax(1) == images.labels).float().mean()) == pytest.approx(result.accuracy, abs=0.003)


def test_a_classifier_of_centred_features_is_no_start_for_one_of_others(tmp_path):
    sfumato.train(recipe_of(), tmp_path / "run")
    weights = load_file(tmp_path / "run" / "model.safetensors")
    for features in ("unit", "centred", "raw"):
        model = {**RECIPE["model"], "features": features, "init_from": str(tmp_path / "run"), "pretrained_on": "digits"}
        said, folder = [], tmp_path / features
        recipe = {**RECIPE, "model": model, "training": {"batch_size": 128, "num_steps": 1}}
        sfumato.train(recipe, folder, progress=Progress(message=said.append))
        assert any("the classifier is new, and starts at zero" in line for line in said)
        found = load_file(folder / "model.safetensors")
        backbone = [name for name in weights if name in found and found[name].ndim > 2]
        assert backbone and all(torch.equal(found[name], weights[name]) for name in backbone)


def test_the_ledger_has_one_first_release_and_epsilon_is_that_of_both_together(tmp_path):
    result = sfumato.train(recipe_of(), tmp_path / "run")
    assert steps_of(tmp_path / "run") == list(range(STEPS + 1))
    claim = claim_of(tmp_path / "run")
    assert claim["num_steps"] == STEPS and claim["first_release_noise"] == result.first_release_noise
    q, first = claim["sampling_prob"], claim["first_release_noise"]
    exact = truth.epsilon(q, claim["noise_multiplier"], STEPS, 1e-5, first_mu=1 / first)
    assert exact <= result.epsilon <= min(2.0, 1.02 * exact)
    assert result.epsilon > truth.epsilon(q, claim["noise_multiplier"], STEPS, 1e-5) * 1.01
    share = (truth.epsilon_of_gaussian(1 / (first * 0.1**0.5), 1e-5)) / 2.0  # what all of the signal would spend
    assert share == pytest.approx(1, abs=1e-3)
    assert sfumato.resume(tmp_path / "run").epsilon == result.epsilon
    lines = (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()
    assert [json.loads(line)["epsilon"] for line in lines][-1] == result.epsilon


def test_every_drawing_of_noise_finds_its_line_on_disk(tmp_path, monkeypatch):
    """The first release's too."""
    folder, lines = tmp_path / "run", []

    def noted(real):
        def draw(*given):
            lines.append(steps_of(folder))
            return real(*given)

        return draw

    for module in (step, first_release):
        monkeypatch.setattr(module, "add_noise", noted(module.add_noise))
    sfumato.train(recipe_of(), folder)
    assert lines == [list(range(release + 1)) for release in range(STEPS + 1)]


@pytest.mark.parametrize(("die_at", "is_lost"), [(("ledger", 2, 1.0), True), (("ledger", 3, 0.5), False)])
def test_a_first_release_that_a_kill_lost_is_counted_and_not_made_again_and_any_is_checkpointed_at_once(
    tmp_path, die_at, is_lost
):
    """Lost: its line was on disk, whole, and nothing of it kept. The run goes on without it, and says so."""
    folder, log = tmp_path / "run", tmp_path / "log"
    arguments = ["train", str(written(tmp_path)), "--output", str(folder)]
    assert faults.run(arguments, die_at=die_at) == -signal.SIGKILL
    assert steps_of(folder) == [0] and claim_of(folder)["first_release_noise"] is not None
    assert faults.run(["resume", str(folder)], log=log) == 0, log.read_text()
    assert ("is lost: going on without it" in log.read_text()) == is_lost
    assert steps_of(folder) == list(range(STEPS + 1))
    claim, tensors = claim_of(folder), load_file(folder / "model.safetensors")
    assert claim["epsilon"] == claim["epsilon_so_far"] <= 2.0 and (is_lost or claim["num_lost"] == 0)
    centres = [bool(value.any()) for name, value in tensors.items() if name.endswith(".centre")]
    assert centres and set(centres) == {not is_lost}


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"model": {"features": "unit"}, "privacy": {"first_release_noise": 3.0}}, "_release_noise"),
        ({"model": {"trainable": "all"}}, "model.trainable"),
        ({"augmentation": {"augmult": 2}}, "augmult"),
        ({"privacy": {"target_epsilon": None, "noise_multiplier": 2.0}}, "privacy.first_release_noise"),
        ({"training": {"num_steps": 0}}, "would spend on what is released first and train nothing"),
        ({"privacy": {"selected_from": 5.0}}, "first release"),
        ({"privacy": {"unit": "person", "max_images_per_person": 2, "person_sampling": "persons"}}, "adds up images"),
    ],
    ids=["unit", "all", "views", "no target", "no updates", "selected", "people"],
)
def test_what_does_not_go_together_is_refused_by_name(tmp_path, changes, named):
    refused(named, sfumato.train, recipe_of(**changes), tmp_path / "run")
    assert not (tmp_path / "run").exists()


def test_without_privacy_sums_are_exact_and_nothing_is_claimed(tmp_path):
    result = sfumato.train(recipe_of(run={"seed": 0}), tmp_path / "run", non_private=True)
    assert not result.private and result.first_release_noise is None
    assert steps_of(tmp_path / "run") == list(range(STEPS + 1))


def test_all_images_of_a_person_are_covered(tmp_path):
    """In closed form: batches are of all images here."""
    privacy = {**RECIPE["privacy"], "unit": "person", "max_images_per_person": 3}
    recipe = {**recipe_of(), "privacy": privacy, "training": {"num_steps": STEPS}}
    result = sfumato.train(recipe, tmp_path / "run")
    mu = 3 * math.hypot(math.sqrt(STEPS) / result.noise_multiplier, 1 / result.first_release_noise)
    exact = truth.epsilon_of_gaussian(mu, 1e-5)
    assert exact <= result.epsilon <= min(2.0, exact * (1 + 1e-6))


@pytest.mark.parametrize("command", ["search", "simulate", "sweep"])
def test_what_counts_updates_alone_refuses_what_releases_more(tmp_path, command):
    folder, recipe = tmp_path / "out", {key: RECIPE[key] for key in ("data", "model", "privacy")}
    calls = {
        "search": lambda: sfumato.search(recipe, 3, output=folder),
        "simulate": lambda: sfumato.simulate(recipe, 16, output=folder),
        "sweep": lambda: sfumato.sweep(recipe, {"optimizer.learning_rate": [0.5, 1.0]}, output=folder),
    }
    refused(f'{command} knows of updates alone, and model.features = "centred"', calls[command])
    assert not folder.exists()


def test_plan_refuses_it_too(tmp_path, capsys):
    assert cli.run(["plan", "--recipe", str(written(tmp_path))]) == 2
    assert 'plan knows of updates alone, and model.features = "centred" releases more' in capsys.readouterr().err
