"""The public centre of features: it follows from weights and textures alone, and what is published computes with it."""

import copy

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import nn
from torch.nn import functional as F

import sfumato
from sfumato import config
from sfumato.data.loading import load
from sfumato.evaluation.trained import load as load_trained
from sfumato.models import build
from sfumato.models.textures import textures_for
from sfumato.models.trainable import Backbone, centre_features, classifier_name, scale_features
from sfumato.training import network as network_of_a_run
from sfumato.training.logs import Progress
from tests.data.conftest import cache_home, refused  # noqa: F401  (a fixture for all)

SHAPE = {"image_size": 32, "channels": 1, "num_classes": 10}


def network(seed=0, name="timm:test_resnet"):
    """With statistics as of some images."""
    model = build(name, **SHAPE, seed=seed).train()
    with torch.no_grad():
        model(torch.randn(64, 1, 32, 32, generator=torch.Generator().manual_seed(seed)))
    return model.eval()


def centred_network(name="timm:test_resnet"):
    model = network(name=name)
    head = classifier_name(model, 10)
    scale_features(model, head)
    centre_features(model, head, textures_for(32, 1))
    return model, head


def recipe_of(folder, **model):
    save_file(network().state_dict(), folder / "weights.safetensors")
    given = {"init_from": str(folder / "weights.safetensors"), "pretrained_on": "noise"}
    return {
        "data": {"name": "digits", "image_size": 32},
        "model": {"name": "timm:test_resnet", "trainable": "classifier", **given, **model},
        "privacy": {"target_epsilon": 30.0, "delta": 1e-5},
        "training": {"num_steps": 5},
    }


def test_it_is_the_mean_over_textures_that_batch_normalisations_see_by_their_own_statistics_and_changes_nothing_else():
    model, head = centred_network()
    plain = network().train()
    seen = []
    plain.get_submodule(head).register_forward_pre_hook(lambda _, given: seen.append(given[0]))
    with torch.no_grad():
        plain(textures_for(32, 1))
    centre = model.state_dict()[f"{head}.centre"]
    torch.testing.assert_close(centre, F.normalize(seen[0]).mean(0))
    assert 0.1 < centre.norm() < 1
    before, after = network().state_dict(), model.state_dict()
    assert all(torch.equal(value, after[name]) for name, value in before.items())
    assert not model.training and all(module.running_mean is not None for module in norms_of(model))


def norms_of(model):
    return [module for module in model.modules() if isinstance(module, nn.modules.batchnorm._BatchNorm)]


def test_without_batch_normalisation_there_is_none():
    model = build("small_cnn", **SHAPE, seed=0)
    head = classifier_name(model, 10)
    scale_features(model, head)
    centre_features(model, head, textures_for(32, 1))
    assert not model.state_dict()[f"{head}.centre"].any()


def test_features_have_it_taken_off_and_length_1():
    model, head = centred_network()
    plain, images = copy.deepcopy(model), torch.randn(20, 1, 32, 32)
    plain.get_submodule(head).centre.zero_()
    backbones = [Backbone(each, head, images[:1]) for each in (model, plain)]
    with torch.no_grad():
        features, whole = (backbone(images) for backbone in backbones)
    expected = F.normalize(whole - model.state_dict()[f"{head}.centre"])
    torch.testing.assert_close(features, expected)


def test_the_published_network_computes_on_images_what_the_run_learned_on_centred_features(tmp_path):
    """Its logits are those of the plain formula, by the published numbers alone."""
    run = tmp_path / "run"
    result = sfumato.train(recipe_of(tmp_path), run)
    trained, tensors = load_trained(run), load_file(run / "model.safetensors")
    (head,) = {name.removesuffix(".centre") for name in tensors if name.endswith(".centre")}
    images = load(config.DataConfig(name="digits", image_size=32), None, print).held_out
    seen = []
    trained.model.get_submodule(head).register_forward_pre_hook(lambda _, given: seen.append(given[0]))
    with torch.no_grad():
        logits = trained.model(images.batch(torch.arange(len(images))))
    rows = F.normalize(F.normalize(seen[0].double()) - tensors[f"{head}.centre"].double())
    expected = rows @ tensors[f"{head}.weight"].double().T + 0.1 * tensors[f"{head}.bias"].double()
    torch.testing.assert_close(logits.double(), expected, rtol=1e-4, atol=1e-5)
    assert tensors[f"{head}.centre"].any()
    assert float((logits.argmax(1) == images.labels).float().mean()) == pytest.approx(result.accuracy, abs=0.003)


def test_it_comes_with_its_classifier_which_is_no_start_for_other_features(tmp_path):
    recipe = recipe_of(tmp_path)
    sfumato.train(recipe, tmp_path / "run")
    first = load_file(tmp_path / "run" / "model.safetensors")
    for features in ("unit", "raw"):
        said, folder = [], tmp_path / features
        given = {"init_from": str(tmp_path / "run"), "features": features}
        again = {**recipe, "model": {**recipe["model"], **given}, "training": {"num_steps": 0}}
        sfumato.train(again, folder, progress=Progress(message=said.append))
        found = load_file(folder / "model.safetensors")
        is_new = any("the classifier is new, and starts at zero" in line for line in said)
        assert is_new == (features == "raw")
        assert all(torch.equal(found[name], first[name]) for name in found) == (features == "unit")


def test_images_that_the_network_does_not_take_are_refused_as_elsewhere(tmp_path, monkeypatch):
    """It is the first to see an image."""
    recipe = recipe_of(tmp_path)
    monkeypatch.setattr(network_of_a_run, "textures_for", lambda image_size, channels: torch.zeros(8, 5, 32, 32))
    refused("the model fails on images of shape", sfumato.train, recipe, tmp_path / "run")
