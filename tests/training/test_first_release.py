"""What is released before the updates, second moments or the mean of features, is released once, counted once beside
the updates, and survives any kill.
"""

import json
import math
import shutil
import signal

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

import sfumato
from sfumato import cli, config
from sfumato.accounting.accountants import epsilon
from sfumato.accounting.mechanism import Mechanism
from sfumato.data.catalogue import Facts
from sfumato.data.loading import load
from sfumato.errors import InputError
from sfumato.evaluation.trained import load as load_trained
from sfumato.planning.resolve import resolve
from sfumato.randomness import Stream
from sfumato.run_folder.ledger import Ledger
from sfumato.training import moments
from sfumato.training.first_release import MeanFeatures, SecondMoments
from sfumato.training.learner import build_learner
from sfumato.training.loop import Progress
from tests.accounting import truth
from tests.training import faults
from tests.training.test_least_squares import CPU, examples, own_cache, random_features

__all__ = ["own_cache"]
STEPS = 8
RECIPE = {
    "data": {"name": "digits"},
    "model": {"trainable": "classifier", "options": {"width": 4}},
    "privacy": {"target_epsilon": 2.0, "delta": 1e-5},
    "training": {"batch_size": 128, "num_steps": STEPS, "checkpoint_every": 3, "evaluate_every": 4},
}
KINDS = {"dp_fc": {"classifier": "dp_fc"}, "centred": {"features": "centred"}}
ASKED = {
    "dp_fc": 'model.classifier = "dp_fc"',
    "least_squares": 'model.classifier = "least_squares"',
    "centred": 'model.features = "centred"',
}
BOTH = pytest.mark.parametrize("kind", KINDS)


def recipe_of(kind, **changes):
    recipe = {**RECIPE, "model": {**RECIPE["model"], **KINDS[kind]}}
    return {section: {**recipe.get(section, {}), **changes.get(section, {})} for section in {**recipe, **changes}}


def written(folder, kind, privacy="target_epsilon = 2.0"):
    path = folder / f"{kind}.toml"
    ((key, value),) = KINDS[kind].items()
    path.write_text(
        f'[data]\nname = "digits"\n[model]\ntrainable = "classifier"\n{key} = "{value}"\noptions = {{ width = 4 }}\n'
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
    return SecondMoments(mechanism, (num_features,), CPU)


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


def mean_of_features(sigma=0.0, num_examples=16):
    return MeanFeatures(Mechanism(num_examples, 4, 1.0, 5, first_release_noise=sigma or None), CPU)


def test_no_image_moves_the_sum_of_features_by_more_than_the_sensitivity_and_every_one_of_full_length_does():
    release = mean_of_features()
    features = torch.cat([random_features(300)[0], torch.eye(4), torch.full((1, 4), 9.0)])
    moved = np.array([float(release.collect(examples(row[None]))["features"].norm()) for row in features])
    assert (moved <= release.sensitivity).all()
    lengths = features.norm(dim=1).numpy()
    np.testing.assert_allclose(moved[lengths > 1.001], release.sensitivity, rtol=1e-5)
    np.testing.assert_allclose(moved[lengths < 0.9], lengths[lengths < 0.9], rtol=0.1, atol=1e-5)
    one, other = (release.collect(examples(features, torch.full((305,), label)))["features"] for label in (0, 3))
    assert torch.equal(one, other)  # no label is looked at
    assert torch.equal(one, release.collect(examples(features.flip(0)))["features"])


def test_the_mean_is_the_mean_and_its_noise_has_the_claimed_scale_over_the_public_number_of_images():
    features = torch.nn.functional.normalize(random_features(1000, 6)[0])
    exact = mean_of_features(0.0, 1000).release(mean_of_features(0.0, 1000).collect(examples(features)), None)
    torch.testing.assert_close(exact, features.mean(0), rtol=0, atol=1e-4)
    release = mean_of_features(2.5, 20)
    noise = release.release(release.collect(examples(torch.zeros(16, 4000))), Stream(bytes(32)))
    assert float(noise.std()) * 20 == pytest.approx(2.5, rel=4 / 4000**0.5)


def test_the_published_network_computes_on_images_what_the_run_learned_on_centred_features(tmp_path):
    """Its logits are those of the plain formula, by the published numbers alone."""
    run = tmp_path / "run"
    result = sfumato.train(recipe_of("centred", privacy={"target_epsilon": 30.0}), run)
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
    sfumato.train(recipe_of("centred"), tmp_path / "run")
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


def test_plan_refuses_a_recipe_whose_run_would_release_first(tmp_path, capsys):
    path = tmp_path / "r.toml"
    path.write_text(
        '[data]\nname = "digits"\n[model]\ntrainable = "classifier"\n[privacy]\ntarget_epsilon = 2.0\ndelta = 1e-5\n'
    )
    assert cli.run(["plan", "--recipe", str(path)]) == 2
    assert 'plan knows of updates alone, and model.features = "centred" releases more' in capsys.readouterr().err


def test_an_earlier_state_has_its_own_features_again(tmp_path):
    plan = resolve(config.parse(recipe_of("centred")), Facts(1437, 10, 8, 1))
    learner = build_learner(plan, load(config.DataConfig(name="digits"), None, print), CPU, None)
    learner.initialise(np.zeros(1, np.uint64))
    unit, before = learner.train.batch(torch.arange(50)), learner.state.tensors()
    before = {name: value.clone() for name, value in before.items()}
    assert learner.lacks_first_release
    learner.take_first_release(learner.first_release.collect(learner.train), Stream(bytes(32)))
    once = learner.train.batch(torch.arange(50))
    centre = next(value for name, value in learner.state.tensors().items() if name.endswith(".centre"))
    torch.testing.assert_close(once, torch.nn.functional.normalize(unit - centre))
    after = {name: value.clone() for name, value in learner.state.tensors().items()}
    for state, rows in ((after, once), (before, unit), (after, once), (before, unit)):
        learner.state.load(state)
        for _ in range(2):
            learner.centre()
            assert torch.equal(learner.drawn_from.batch(torch.arange(50)), rows)
        assert learner.lacks_first_release == (state is before)


@BOTH
def test_the_ledger_has_one_first_release_and_epsilon_is_that_of_both_together(tmp_path, kind):
    result = sfumato.train(recipe_of(kind), tmp_path / "run")
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


@pytest.fixture(scope="module", params=KINDS)
def begun(tmp_path_factory, request):
    """Killed when the first release's line was on disk, whole, and nothing of it was released."""
    home = tmp_path_factory.mktemp("runs")
    died = faults.run(
        ["train", str(written(home, request.param)), "--output", str(home / "begun")], die_at=("ledger", 3, 1.0)
    )
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
@BOTH
def test_sums_that_do_not_repeat_are_not_released_again_under_one_noise(tmp_path, monkeypatch, has_target, kind):
    """A killed run whose features come out otherwise: with a target the budget has paid for one release, and the run
    goes on without; without a target it is drawn afresh, and counts twice.
    """
    privacy = "target_epsilon = 2.0" if has_target else "noise_multiplier = 2.0\nfirst_release_noise = 8.0"
    folder = tmp_path / "run"
    arguments = ["train", str(written(tmp_path, kind, privacy)), "--output", str(folder)]
    assert faults.run(arguments, die_at=("ledger", 3, 1.0)) == -signal.SIGKILL
    planned = claim_of(folder)
    bounded = moments.bounded
    monkeypatch.setattr(moments, "bounded", lambda features, bits: bounded(features * 0.999, bits))
    said = []
    result = sfumato.resume(folder, progress=Progress(message=said.append))
    assert any("does not repeat bit for bit" in line for line in said)
    assert steps_of(folder).count(0) == (1 if has_target else 2)
    assert any("going on without" in line for line in said) == has_target
    if has_target:
        assert result.epsilon == planned["epsilon"] <= 2.0
    else:
        assert result.first_release_noise == pytest.approx(8 / 2**0.5)
        assert result.epsilon > planned["epsilon"]
    spent = Mechanism(
        result.num_examples, 128, result.noise_multiplier, STEPS, first_release_noise=result.first_release_noise
    )
    assert result.epsilon == epsilon(spent, 1e-5).epsilon


@BOTH
def test_a_run_without_a_target_needs_the_noise_of_the_release(tmp_path, kind):
    recipe = {**recipe_of(kind), "privacy": {"noise_multiplier": 2.0, "delta": 1e-5}}
    with pytest.raises(InputError, match="privacy.first_release_noise"):
        sfumato.train(recipe, tmp_path / "run")


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        (
            {"model": {"classifier": "sgd", "features": "unit"}, "privacy": {"first_release_noise": 3.0}},
            "_release_noise",
        ),
        ({"model": {"trainable": "all"}}, "model.trainable"),
        ({"augmentation": {"augmult": 2}}, "augmult"),
        ({"privacy": {"selected_from": 5.0}}, "first release"),
        ({"privacy": {"unit": "person", "max_images_per_person": 2, "person_sampling": "persons"}}, "adds up images"),
    ],
    ids=["sgd", "all", "views", "selected", "people"],
)
@BOTH
def test_what_does_not_go_together_is_refused_by_name(tmp_path, changes, named, kind):
    with pytest.raises(InputError, match=named):
        sfumato.train(recipe_of(kind, **changes), tmp_path / "run")
    assert not (tmp_path / "run").exists()


@BOTH
def test_without_privacy_sums_are_exact_and_nothing_is_counted(tmp_path, kind):
    result = sfumato.train(recipe_of(kind, run={"seed": 0}), tmp_path / "run", non_private=True)
    assert not result.private and result.first_release_noise is None and steps_of(tmp_path / "run") == []


@BOTH
def test_all_images_of_a_person_are_covered(tmp_path, kind):
    """In closed form: batches are of all images here."""
    privacy = {**RECIPE["privacy"], "unit": "person", "max_images_per_person": 3}
    recipe = {**recipe_of(kind), "privacy": privacy, "training": {"num_steps": STEPS}}
    result = sfumato.train(recipe, tmp_path / "run")
    mu = 3 * math.hypot(math.sqrt(STEPS) / result.noise_multiplier, 1 / result.first_release_noise)
    exact = truth.epsilon_of_gaussian(mu, 1e-5)
    assert exact <= result.epsilon <= min(2.0, exact * (1 + 1e-6))


@pytest.mark.parametrize(
    ("command", "kind"),
    [(command, kind) for command in ("search", "simulate", "sweep") for kind in ("dp_fc", "centred")]
    + [("search", "least_squares"), ("simulate", "least_squares")],  # to a sweep it is one update, which adds up as any
)
def test_what_counts_updates_alone_refuses_what_releases_more(tmp_path, kind, command):
    model = KINDS.get(kind, {"classifier": kind})
    values = {"data": {"name": "digits"}, "model": {"trainable": "classifier", **model}}
    recipe = values | {"privacy": {"target_epsilon": 2.0, "delta": 1e-5}}
    folder = tmp_path / "out"
    calls = {
        "search": lambda: sfumato.search(recipe, 3, output=folder),
        "simulate": lambda: sfumato.simulate(recipe, 16, output=folder),
        "sweep": lambda: sfumato.sweep(recipe, {"optimizer.learning_rate": [0.5, 1.0]}, output=folder),
    }
    with pytest.raises(InputError, match=f"{command} knows of updates alone, and {ASKED[kind]}"):
        calls[command]()
    assert not folder.exists()


@BOTH
def test_a_first_release_alone_trains_nothing(kind):
    recipe = recipe_of(kind, training={"num_steps": 0})
    with pytest.raises(InputError, match="would spend on what is released first and train nothing"):
        resolve(config.parse(recipe), Facts(1437, 10, 8, 1))
