"""Networks from a formula: the same on every machine, less what textures have in common, trained and handed on."""

import json

import numpy as np
import pytest
import torch
from torch.nn import functional as F

from sfumato import config, load
from sfumato.evaluation.trained import load as load_trained
from sfumato.models import build
from sfumato.models.dictionary import Dictionary, windows
from sfumato.models.fixed import textures_for
from sfumato.models.textures import dead_leaves
from sfumato.training.trainer import train
from tests.data.conftest import cache_home  # noqa: F401  (a fixture for all)

TEXTURES = [-0.01617716, 0.48459768]
KERNELS = [0.1420, 0.0315]


def network(name, size=8, channels=1, seed=0, **options):
    return build(name, image_size=size, channels=channels, num_classes=10, options=options, seed=seed).eval()


def features(model, images):
    return torch.cat([part(images) for part in model.parts], 1)


def test_textures_and_dictionary_are_the_same_on_every_machine():
    """What is drawn is pinned by NumPy; the rest is continuous in it, so machines differ by rounding alone."""
    images = dead_leaves(2, 8, 3)
    np.testing.assert_allclose(images[[0, 1], [0, 2], [0, 7], [0, 7]], TEXTURES, rtol=1e-5)
    kernels = Dictionary(8, 3, mirror=True).kernels
    np.testing.assert_allclose(kernels[[0, 799], [0, 2], [0, 7], [0, 7]], KERNELS, rtol=1e-3, atol=1e-5)


def test_a_dictionary_is_what_each_patch_by_itself_gives():
    part, images = Dictionary(32, 3, mirror=True).double(), torch.randn(2, 3, 32, 32, dtype=torch.float64)
    patches = F.unfold(images, 8, stride=2).transpose(1, 2)
    spread = (patches.var(2, correction=0, keepdim=True) + 0.05).sqrt()
    contrast = (patches - patches.mean(2, keepdim=True)) / spread
    similar = (contrast @ part.kernels.flatten(1).T - part.offset.flatten()).transpose(1, 2).view(2, 800, 13, 13)
    maps = torch.cat([(similar - 1).clamp(min=0), (-similar - 1).clamp(min=0)], 1)
    torch.testing.assert_close(part(images).square(), F.adaptive_avg_pool2d(maps, 4))  # a root near 0 is less exact


@pytest.mark.parametrize("size", [10, 33])
def test_windows_are_means_that_reach_every_place(size):
    maps = torch.randn(1, 1, size, size, dtype=torch.float64)
    for places in range(1, 5):
        each = torch.from_numpy(windows(size, places))
        torch.testing.assert_close(each.T @ maps @ each, F.adaptive_avg_pool2d(maps, places))


@pytest.mark.parametrize(("size", "channels"), [(16, 3), (8, 1)])
def test_a_mirror_image_has_the_same_features_if_asked_for(size, channels):
    name, images = "scattering+dictionary", torch.randn(3, channels, size, size)
    plain, mirrored = network(name, size, channels), network(name, size, channels, mirror=True)
    for each in (mirrored.parts, plain.parts):
        is_same = all(torch.allclose(part(images), part(images.flip(3)), atol=1e-5) for part in each)
        assert is_same == (each is mirrored.parts)


def test_large_images_are_seen_as_small_ones_by_a_dictionary():
    small, large, images = Dictionary(40, 1), Dictionary(80, 1), torch.randn(2, 1, 40, 40)
    torch.testing.assert_close(large(images.repeat_interleave(2, 2).repeat_interleave(2, 3)), small(images))


def test_features_are_of_equal_length_and_those_of_textures_lie_about_zero():
    model = network("scattering+dictionary", 16, 3)
    for part in model.parts:
        torch.testing.assert_close(part(torch.randn(5, 3, 16, 16)).norm(dim=1), torch.ones(5))
    mean = features(model, textures_for(16, 3)).mean(0)
    assert mean.norm() < 0.25


def test_no_seed_changes_them_and_a_blank_image_is_finite():
    one, other = (network("scattering+dictionary", seed=seed) for seed in (0, 1))
    for key, value in one.state_dict().items():
        assert torch.equal(value, other.state_dict()[key])
    assert features(one, torch.zeros(1, 1, 8, 8)).isfinite().all()


def test_larger_images_have_more_scales_by_default_and_others_if_asked_for():
    for size, options, maps, side in ((8, {}, 81, 2), (55, {}, 81, 14), (56, {}, 217, 7), (32, {"J": 3}, 217, 4)):
        assert network("scattering", size, **options).classifier.in_features == maps * side**2


def test_a_run_trains_the_classifier_alone_says_so_and_is_handed_on(tmp_path):
    name = "scattering+dictionary"
    values = {
        "data": {"name": "digits"},
        "model": {"name": name},
        "privacy": {"target_epsilon": 8.0},
        "optimizer": {"learning_rate": 1.0},
        "training": {"num_steps": 5},
        "run": {"seed": 3},
    }
    result = train(values, tmp_path / "run")
    model = network(name)
    assert result.num_parameters == model.classifier.weight.numel() + 10 and result.accuracy > 0.5
    certificate = json.loads((tmp_path / "run/privacy.json").read_text())
    assert "pre-training data: none; features follow from a formula and a public seed" in certificate["not_covered"]
    trained = load_trained(tmp_path / "run").model
    for key, value in model.state_dict().items():
        assert torch.equal(value, trained.state_dict()[key]) != key.startswith("classifier.")
    assert load(tmp_path / "run").predict(np.zeros((8, 8), np.uint8)).class_name in tuple("0123456789")


def test_its_name_implies_what_trains_on_which_features():
    for name in ("scattering", "dictionary", "scattering+dictionary"):
        model = config.parse({"data": {"name": "cifar10"}, "model": {"name": name}}).model
        assert (model.trainable, model.features, model.init_from) == ("classifier", "unit", None)
    given = {"name": name, "init_from": "run", "pretrained_on": "digits", "features": "raw"}
    model = config.parse({"data": {"name": "cifar10"}, "model": given}).model
    assert (model.pretrained_on, model.features) == ("digits", "raw")
