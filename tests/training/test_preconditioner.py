"""DP-FC: second moments are released once, counted once beside the updates, and survive any kill."""

import json
import math
import shutil
import signal

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

import sfumato
from sfumato import config
from sfumato.accounting.accountants import epsilon
from sfumato.accounting.mechanism import Mechanism
from sfumato.data.catalogue import Facts
from sfumato.errors import InputError
from sfumato.planning.resolve import resolve
from sfumato.randomness import Stream
from sfumato.run_folder.ledger import Ledger
from sfumato.training import moments
from sfumato.training.loop import Progress
from sfumato.training.preconditioner import FirstRelease
from tests.accounting import truth
from tests.training import faults
from tests.training.test_least_squares import CPU, examples, own_cache, random_features

__all__ = ["own_cache"]
STEPS = 8
RECIPE = {
    "data": {"name": "digits"},
    "model": {"trainable": "classifier", "classifier": "dp_fc", "options": {"width": 4}},
    "privacy": {"target_epsilon": 2.0, "delta": 1e-5},
    "training": {"batch_size": 128, "num_steps": STEPS, "checkpoint_every": 3, "evaluate_every": 4},
}


def written(folder, privacy="target_epsilon = 2.0"):
    path = folder / "dp_fc.toml"
    path.write_text(
        '[data]\nname = "digits"\n[model]\ntrainable = "classifier"\nclassifier = "dp_fc"\noptions = { width = 4 }\n'
        f"[privacy]\n{privacy}\ndelta = 1e-5\n[training]\nbatch_size = 128\nnum_steps = {STEPS}\n"
        "checkpoint_every = 3\nevaluate_every = 4\n"
    )
    return path


def steps_of(folder):
    return [line["step"] for line in Ledger.open(folder / "ledger.jsonl").lines if line["kind"] == "step"]


def claim_of(folder):
    return json.loads((folder / "privacy.json").read_text())


def first_release(sigma=0.0, num_examples=16, num_features=4):
    mechanism = Mechanism(num_examples, 4, 1.0, 5, first_release_noise=sigma or None)
    return FirstRelease(mechanism, (num_features,), CPU)


def test_no_image_moves_second_moments_by_more_than_the_sensitivity_and_every_one_of_full_length_does():
    release = first_release()
    features = torch.cat([random_features(300)[0], torch.eye(4), torch.full((1, 4), 9.0)])
    moved = np.array([float(release.collect(examples(row[None]))["moments"].norm()) for row in features])
    assert (moved <= release.sensitivity).all()
    lengths = features.norm(dim=1).numpy()
    np.testing.assert_allclose(moved[lengths > 1.001], release.sensitivity, rtol=1e-5)
    np.testing.assert_allclose(moved[lengths < 0.9], lengths[lengths < 0.9] ** 2, rtol=0.1, atol=1e-5)


def test_noise_has_the_claimed_scale_in_every_entry_that_is_released(monkeypatch):
    sigma, num_features = 2.5, 60
    release = first_release(sigma, 16, num_features)
    seen, as_matrix = [], moments.as_matrix
    monkeypatch.setattr(moments, "as_matrix", lambda vector, count: seen.append(vector) or as_matrix(vector, count))
    sums = release.collect(examples(torch.zeros(16, num_features)))
    release.release(sums, Stream(bytes(32)))
    (noise,) = seen
    assert len(noise) == num_features * (num_features + 1) // 2
    for part in (noise[:num_features], noise[num_features:]):  # the diagonal, and sqrt(2) times what lies above
        assert float(part.std()) == pytest.approx(sigma * release.sensitivity, rel=4 / len(part) ** 0.5)


def test_no_label_is_looked_at():
    features, release = random_features(16)[0], first_release()
    one, other = (release.collect(examples(features, torch.full((16,), label)))["moments"] for label in (0, 3))
    assert torch.equal(one, other)


@pytest.mark.parametrize("sigma", [0.0, 1.0, 1000.0])
def test_no_gradient_becomes_longer_whatever_the_noise_is(sigma):
    release = first_release(sigma, 200, 20)
    features = torch.nn.functional.normalize(random_features(200, 20)[0] + 2)
    straight = release.release(release.collect(examples(features)), Stream(bytes(32)))
    values = torch.linalg.eigvalsh(straight.double())
    assert values.min() > 0 and values.max() <= 1 + 1e-6
    top = torch.nn.functional.normalize(features.mean(0), dim=0)
    if sigma == 0:  # the direction that all share is held back most
        assert float((straight @ top).norm()) < 0.05


def test_the_ledger_has_one_first_release_and_epsilon_is_that_of_both_together(tmp_path):
    result = sfumato.train(RECIPE, tmp_path / "run")
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


@pytest.fixture(scope="module")
def begun(tmp_path_factory):
    """Killed when the first release's line was on disk, whole, and nothing of it was released."""
    home = tmp_path_factory.mktemp("runs")
    died = faults.run(["train", str(written(home)), "--output", str(home / "begun")], die_at=("ledger", 3, 1.0))
    assert died == -signal.SIGKILL and steps_of(home / "begun") == [0]
    assert claim_of(home / "begun")["first_release_noise"] is not None
    return home / "begun"


@pytest.fixture(scope="module")
def finished(begun, tmp_path_factory):
    folder = tmp_path_factory.mktemp("runs") / "finished"
    shutil.copytree(begun, folder)
    assert faults.run(["resume", str(folder)]) == 0
    return folder


@pytest.mark.parametrize(
    "die_at", [("ledger", 1, 0.5), ("ledger", 6, 0.0), ("file", 3, 0.3), ("file", 5, 1.0)], ids=str
)
def test_killed_inside_a_write_it_ends_as_if_nothing_had_happened(begun, finished, tmp_path, die_at):
    folder, log = tmp_path / "run", tmp_path / "log"
    shutil.copytree(begun, folder)
    assert faults.run(["resume", str(folder)], die_at=die_at) == -signal.SIGKILL
    assert faults.run(["resume", str(folder)], log=log) == 0, log.read_text()
    assert steps_of(folder) == steps_of(finished) == list(range(STEPS + 1))
    one, other = (load_file(run / "model.safetensors") for run in (folder, finished))
    assert all(torch.equal(one[name], other[name]) for name in other)
    assert claim_of(folder) == claim_of(finished)


@pytest.mark.parametrize("has_target", [True, False])
def test_second_moments_that_do_not_repeat_are_not_released_again_under_one_noise(tmp_path, monkeypatch, has_target):
    """A killed run whose features come out otherwise: with a target the budget has paid for one release, and the run
    goes on without; without a target it is drawn afresh, and counts twice.
    """
    privacy = "target_epsilon = 2.0" if has_target else "noise_multiplier = 2.0\nfirst_release_noise = 8.0"
    folder = tmp_path / "run"
    arguments = ["train", str(written(tmp_path, privacy)), "--output", str(folder)]
    assert faults.run(arguments, die_at=("ledger", 3, 1.0)) == -signal.SIGKILL
    planned = claim_of(folder)
    bounded = moments.bounded
    monkeypatch.setattr(moments, "bounded", lambda features, bits: bounded(features * 0.999, bits))
    said = []
    result = sfumato.resume(folder, progress=Progress(message=said.append))
    assert any("does not repeat bit for bit" in line for line in said)
    assert steps_of(folder).count(0) == (1 if has_target else 2)
    assert any("going on without them" in line for line in said) == has_target
    if has_target:
        assert result.epsilon == planned["epsilon"] <= 2.0
    else:
        assert result.first_release_noise == pytest.approx(8 / 2**0.5)
        assert result.epsilon > planned["epsilon"]
    spent = Mechanism(
        result.num_examples, 128, result.noise_multiplier, STEPS, first_release_noise=result.first_release_noise
    )
    assert result.epsilon == epsilon(spent, 1e-5).epsilon


def test_a_run_without_a_target_needs_the_noise_of_the_release(tmp_path):
    recipe = {**RECIPE, "privacy": {"noise_multiplier": 2.0, "delta": 1e-5}}
    with pytest.raises(InputError, match="privacy.first_release_noise"):
        sfumato.train(recipe, tmp_path / "run")


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"model": {"classifier": "sgd"}, "privacy": {"first_release_noise": 3.0}}, "first_release_noise"),
        ({"model": {"trainable": "all"}}, "model.trainable"),
        ({"augmentation": {"augmult": 2}}, "augmult"),
        ({"privacy": {"selected_from": 5.0}}, "first release"),
        ({"privacy": {"unit": "person", "max_images_per_person": 2, "person_sampling": "persons"}}, "dp_fc"),
    ],
    ids=["sgd", "all", "views", "selected", "people"],
)
def test_what_does_not_go_together_is_refused_by_name(tmp_path, changes, named):
    recipe = {section: {**RECIPE.get(section, {}), **changes.get(section, {})} for section in {**RECIPE, **changes}}
    with pytest.raises(InputError, match=named):
        sfumato.train(recipe, tmp_path / "run")
    assert not (tmp_path / "run").exists()


def test_without_privacy_second_moments_straighten_too_and_nothing_is_counted(tmp_path):
    result = sfumato.train({**RECIPE, "run": {"seed": 0}}, tmp_path / "run", non_private=True)
    assert not result.private and result.first_release_noise is None and steps_of(tmp_path / "run") == []


def test_all_images_of_a_person_are_covered(tmp_path):
    """In closed form: batches are of all images here."""
    privacy = {**RECIPE["privacy"], "unit": "person", "max_images_per_person": 3}
    recipe = {**RECIPE, "privacy": privacy, "training": {"num_steps": STEPS}}
    result = sfumato.train(recipe, tmp_path / "run")
    mu = 3 * math.hypot(math.sqrt(STEPS) / result.noise_multiplier, 1 / result.first_release_noise)
    exact = truth.epsilon_of_gaussian(mu, 1e-5)
    assert exact <= result.epsilon <= min(2.0, exact * (1 + 1e-6))


@pytest.mark.parametrize(
    ("command", "kind"),
    [("search", "dp_fc"), ("search", "least_squares"), ("simulate", "dp_fc"), ("simulate", "least_squares")]
    + [("sweep", "dp_fc")],  # least squares is one update of all images, which adds up as any
)
def test_what_counts_updates_alone_refuses_what_releases_more(tmp_path, kind, command):
    values = {"data": {"name": "digits"}, "model": {"trainable": "classifier", "classifier": kind}}
    recipe = values | {"privacy": {"target_epsilon": 2.0, "delta": 1e-5}}
    folder = tmp_path / "out"
    calls = {
        "search": lambda: sfumato.search(recipe, 3, output=folder),
        "simulate": lambda: sfumato.simulate(recipe, 16, output=folder),
        "sweep": lambda: sfumato.sweep(recipe, {"optimizer.learning_rate": [0.5, 1.0]}, output=folder),
    }
    with pytest.raises(InputError, match=f'{command} knows of updates alone, and model.classifier = "{kind}"'):
        calls[command]()
    assert not folder.exists()


def test_second_moments_alone_train_nothing():
    recipe = {"data": {"name": "digits"}, "model": {"trainable": "classifier", "classifier": "dp_fc"}}
    recipe |= {"privacy": {"target_epsilon": 2.0, "delta": 1e-5}, "training": {"num_steps": 0}}
    with pytest.raises(InputError, match="would spend on second moments and train nothing"):
        resolve(config.parse(recipe), Facts(1437, 10, 8, 1))
