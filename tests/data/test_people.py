"""People as examples: each image has its label and its weight, and a person's gradient is the mean of their images'."""

import dataclasses
import json
import signal

import numpy as np
import pytest
import torch
from PIL import Image
from torch import nn

import sfumato
from sfumato import config
from sfumato.accounting.accountants import epsilon
from sfumato.accounting.mechanism import Mechanism
from sfumato.clipping import clipped_grad
from sfumato.data.catalogue import Facts
from sfumato.data.examples import FeatureSet
from sfumato.data.images import ImageSet
from sfumato.data.views import People, Views
from sfumato.evaluation.scores import Objective, predict_logits
from sfumato.planning.resolve import resolve, resolve_without_privacy
from sfumato.training.step import PrivateStep, Randomness
from tests.data.conftest import refused
from tests.training import faults

CLASSES = 3
COUNTS = [1, 2, 3, 4, 5, 0, 2]  # of each person; the sixth has none that can be read
LIMIT = 4


def images_of(counts, seed=0, channels=2, side=6):
    generator = torch.Generator().manual_seed(seed)
    groups = [f"p{person}" for person, count in enumerate(counts) for _ in range(max(count, 1))]
    total = len(groups)
    readable = torch.tensor([counts[int(group[1:])] > 0 for group in groups])
    order = torch.randperm(total, generator=generator).tolist()  # a person's images need not lie together
    stored = torch.randint(0, 256, (total, channels, side, side), generator=generator, dtype=torch.uint8)
    labels, groups = torch.randint(CLASSES, (total,), generator=generator), [groups[place] for place in order]
    return ImageSet(stored, labels, readable[order], (0.5,) * channels, (0.25,) * channels, groups=groups)


def network(channels=2, side=6, seed=0):
    torch.manual_seed(seed)
    return nn.Sequential(nn.Conv2d(channels, 4, 3), nn.GroupNorm(2, 4), nn.Tanh(), nn.Flatten(), nn.Linear(64, CLASSES))


def summed(model, images, objective, clipping_norm, drawn=None, **speed):
    people, keys = People(images, LIMIT), {"clipping_norm": clipping_norm, "augmult": LIMIT, "per_view": True}
    grad_fn = clipped_grad(model, objective.loss, **keys, **speed)
    step = PrivateStep(grad_fn, Mechanism(len(people), len(people), 1.0, 1), Views("none", 0, 0))
    indices = np.arange(len(people)) if drawn is None else np.array(drawn)
    randomness = Randomness(indices, np.zeros((len(people), 0), np.uint32), bytes(32))
    return step.collect(people, dict(model.named_parameters()), randomness)[0], grad_fn


def by_hand(model, images, objective, clipping_norm):
    """A loop over people with plain autograd."""
    total = {name: torch.zeros_like(value) for name, value in model.named_parameters()}
    for person in sorted(set(images.groups)):
        own = [i for i, group in enumerate(images.groups) if group == person and images.readable[i]][:LIMIT]
        if not own:
            continue
        model.zero_grad()
        objective.loss(model(images.batch(torch.tensor(own))), images.labels[own]).mean().backward()
        norm = torch.stack([value.grad.norm() for value in model.parameters()]).norm()
        for name, value in model.named_parameters():
            total[name] += value.grad / clipping_norm * (clipping_norm / norm).clamp(max=1)
    model.zero_grad()
    return total


def far(one, other):
    return float(sum((one[name] - other[name]).square().sum() for name in one).sqrt())


OBJECTIVES = [Objective(), Objective((0.5, 0.3, 0.2)), Objective(None, 0.1)]


@pytest.mark.parametrize(("row", "engine"), list(enumerate(["graph", "func", "reference"])))
@pytest.mark.parametrize(("column", "objective"), list(enumerate(OBJECTIVES)))
def test_a_person_s_gradient_is_the_mean_of_their_images_clipped_once(row, engine, column, objective):
    """Where all are clipped and where none is, by turns."""
    clipping_norm = (0.05, 100.0)[(row + column) % 2]
    images, model = images_of(COUNTS), network()
    found, grad_fn = summed(model, images, objective, clipping_norm, engine=engine, microbatch_size=3)
    expected = by_hand(model, images, objective, clipping_norm)
    size = far(expected, dict.fromkeys(expected, 0.0))
    assert grad_fn.engine == engine and far(found, expected) < 1e-5 * (1 + size)


def test_all_images_of_one_person_move_the_sum_by_the_sensitivity_at_most():
    images, model = images_of(COUNTS), network()
    whole, grad_fn = summed(model, images, Objective(), 0.01)
    for person, count in enumerate(COUNTS):
        gone = torch.tensor([group != f"p{person}" for group in images.groups])
        without, _ = summed(model, dataclasses.replace(images, readable=images.readable & gone), Objective(), 0.01)
        moved = far(whole, without)
        assert moved <= 1.001 * grad_fn.sensitivity and (moved > 0.99 * grad_fn.sensitivity) == (count > 0)


def test_neither_order_nor_company_matters_and_images_above_the_limit_do_not_count():
    images, model = images_of(COUNTS), network()
    whole, _ = summed(model, images, Objective(), 0.01)
    parts = [summed(model, images, Objective(), 0.01, drawn=[person])[0] for person in range(len(COUNTS))]
    assert far(whole, {name: sum(part[name] for part in parts) for name in whole}) < 1e-5
    fifth = [i for i, group in enumerate(images.groups) if group == "p4"][LIMIT]
    stored = images.stored.clone()
    stored[fifth] = 255 - stored[fifth]
    other, _ = summed(model, dataclasses.replace(images, stored=stored), Objective(), 0.01)
    assert far(whole, other) < 1e-5 < 0.5 < far(whole, parts[4])


def test_features_are_taken_as_images_are():
    torch.manual_seed(0)
    labels, readable, groups = torch.tensor([0, 1, 2, 1, 0]), torch.ones(5, dtype=torch.bool), list("ababb")
    features, linear = FeatureSet(torch.randn(5, 7), labels, readable, groups), nn.Linear(7, CLASSES)
    found, _ = summed(linear, features, Objective(), 0.1)
    assert far(found, by_hand(linear, features, Objective(), 0.1)) < 1e-5


@pytest.mark.parametrize("count", [1, 3, 7])
def test_the_mean_over_a_person_s_images_is_not_rounded_in_bf16(count):
    images, model = images_of([count]), network()
    own = torch.arange(count)
    people = People(images, 7)
    keys = {"clipping_norm": 1e4, "precision": "bf16"}
    together = clipped_grad(model, Objective().loss, augmult=7, per_view=True, microbatch_size=1, **keys)
    alone = clipped_grad(model, Objective().loss, microbatch_size=count, **keys)
    found = together(*people.together(torch.tensor([0]), torch.device("cpu")))
    expected = alone(images.batch(own), images.labels)
    assert float(found.losses[0]) == pytest.approx(float(expected.losses.mean()), rel=1e-4)


def test_a_model_that_folds_channels_into_rows_is_taken_for_people_as_for_images():
    class PerChannel(nn.Module):
        def __init__(self):
            super().__init__()
            self.own, self.last = nn.Conv2d(1, 4, 3), nn.Linear(4 * 16 * 2, CLASSES)

        def forward(self, rows):
            count, channels, height, width = rows.shape
            return self.last(torch.tanh(self.own(rows.view(count * channels, 1, height, width))).view(count, -1))

    images, model = images_of(COUNTS), PerChannel()
    found, _ = summed(model, images, Objective(), 1.0)
    assert far(found, by_hand(model, images, Objective(), 1.0)) < 1e-5
    assert predict_logits(model, images).shape == (len(images), CLASSES)


PRIVACY = {"target_epsilon": 3.0, "unit": "person", "max_images_per_person": 4, "delta": 1e-5}
VALUES = {"data": {"name": "folder", "group_by": "group"}, "privacy": PRIVACY | {"person_sampling": "persons"}}
FACTS = Facts(3_000, 2, 32, 1, num_people=1_000)


def test_people_are_drawn_where_they_can_be():
    """By public numbers alone: views or nobody who says who is who mean that images are drawn."""
    values = {**VALUES, "privacy": PRIVACY}
    plan = resolve(config.parse(values), FACTS)
    assert plan.recipe.budget.person_sampling == "persons" and plan.mechanism.num_examples == 1_000
    assert resolve(plan.recipe, FACTS).recipe == plan.recipe
    with_views = resolve(config.parse({**values, "augmentation": {"augmult": 2}}), FACTS)
    assert with_views.recipe.budget.person_sampling == "images"
    assert (with_views.mechanism.num_examples, with_views.mechanism.images_per_unit) == (3_000, 4)


def test_everything_counts_people():
    plan = resolve(config.parse(VALUES | {"model": {"name": "small_cnn"}}), FACTS)
    assert (plan.mechanism.num_examples, plan.mechanism.batch_size) == (1_000, 256)
    spent = epsilon(Mechanism(1_000, 256, plan.mechanism.noise_multiplier, plan.mechanism.num_steps), 1e-5).epsilon
    assert 2.9 < spent <= 3.0 and plan.mechanism.images_per_unit == 1
    for accountant in ("pld", "rdp"):
        privacy = VALUES["privacy"] | {"accountant": accountant}
        plain = resolve_without_privacy(config.parse(VALUES | {"privacy": privacy}), FACTS)
        assert plain.mechanism.num_examples == 3_000 and plain.recipe.privacy is None


@pytest.mark.parametrize(
    ("changes", "facts", "says"),
    [
        ({}, dataclasses.replace(FACTS, num_people=None), "data.group_by"),
        ({"augmentation": {"augmult": 2}}, FACTS, "takes each image as it is"),
        ({"augmentation": {"kind": "flip"}}, FACTS, "takes each image as it is"),
        ({"privacy": {**VALUES["privacy"], "max_images_per_person": 257}}, FACTS, "at most 256 images of each person"),
        ({"training": {"batch_size": 1_001}}, FACTS, "at most num_examples = 1000"),
        ({"privacy": {"person_sampling": "persons", "target_epsilon": 3.0}}, FACTS, 'privacy.unit = "person"'),
    ],
)
def test_people_who_cannot_be_drawn_are_refused(changes, facts, says):
    refused(says, lambda: resolve(config.parse({**VALUES, **changes}), facts))


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    root, source = tmp_path_factory.mktemp("people"), np.random.default_rng(0)
    for person in range(150):
        for number in range(1 + person % 6):
            label = ["low", "high"][(person + (number == 2)) % 2]  # some people have images of both classes
            (root / label).mkdir(exist_ok=True)
            level = 80 if label == "low" else 160
            pixels = np.clip(source.normal(level, 40, (12, 12)), 0, 255).astype(np.uint8)
            Image.fromarray(pixels).save(root / label / f"p{person:03}-{number}.png")
    return root


WORDS = [
    *("--epsilon-per-person", "8", "--images-per-person", "4", "--set", r"data.group_by=/(p\d+)-"),
    *("--set", "data.channels=1", "--set", "data.image_size=12"),
    *("--set", "training.num_steps=12", "--set", "training.batch_size=40", "--set", "training.checkpoint_every=3"),
]


@pytest.mark.parametrize("trainable", ["all", "classifier"])  # on images, and on features
def test_a_run_that_draws_people_says_so_and_learns_and_goes_on_after_kill_9(folder, tmp_path, trainable):
    begun, log = tmp_path / "begun", tmp_path / "log"
    words = ["train", "image-folder", "--data-root", str(folder), *WORDS, "--output", str(begun)]
    words += ["--set", f"model.trainable={trainable}"]
    assert faults.run(words, die_at=("ledger", 9, 1.0), log=log) == -signal.SIGKILL, log.read_text()
    assert faults.run(["resume", str(begun)], log=log) == 0, log.read_text()
    claim = json.loads((begun / "privacy.json").read_text())
    assert (claim["num_lost"], claim["num_applied"]) == (2, 10)  # it was killed amid the ninth line
    people = claim["public_inputs"]["num_people"]
    assert claim["num_examples"] == people < claim["public_inputs"]["num_examples"] and claim["drawn"] == "people"
    assert claim["unit"] == "one person with at most 4 images" and claim["num_steps"] == 12
    assert claim["epsilon"] == claim["epsilon_person"] <= 8 and claim["epsilon_image"] is None
    mechanism = Mechanism(people, 40, claim["noise_multiplier"], 12)
    assert claim["epsilon"] == epsilon(mechanism, claim["delta"]).epsilon
    assert any("one image more or less of a person" in line for line in claim["not_covered"])
    result = json.loads((begun / "result.json").read_text())
    assert result["balanced_accuracy"] > 0.7 or trainable == "classifier"
    page = (begun / "report.html").read_text()
    assert "people with training images is drawn" in page and "one person can contribute" in page
    assert sfumato.load(begun).certificate.drawn == "people"
