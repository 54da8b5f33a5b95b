"""Runs that train low-rank updates: what moves, what is published and handed on, and how they go on."""

import signal

import numpy as np
import pytest
import torch
from PIL import Image
from safetensors.torch import load_file

import sfumato
from sfumato import config
from sfumato.data.catalogue import Facts
from sfumato.evaluation.trained import load as load_trained
from sfumato.models import build
from sfumato.models.lora import add_low_rank
from sfumato.planning.resolve import resolve
from sfumato.scaling.cost import num_trainable
from tests.data.conftest import refused
from tests.training import faults
from tests.training.test_resume import checkpoint

RANK, STEPS = 2, 3
LAYERS = ["layer2.0.downsample.1", *(f"layer3.0.{name}" for name in ("conv1", "conv3", "downsample.1"))]
LAYERS += ["layer4.0.downsample.1"]


def network():
    return build("timm:test_resnet", image_size=32, channels=1, num_classes=10, seed=0)


def recipe(folder, **model):
    given = {"init_from": str(folder / "given.pth"), "pretrained_on": "nothing"}
    return {
        "data": {"name": "digits", "image_size": 32},
        "model": {"name": "timm:test_resnet", "trainable": "lora", "lora_rank": RANK, **given, **model},
        "privacy": {"noise_multiplier": 1.0, "accountant": "rdp"},
        "training": {"batch_size": 64, "num_steps": STEPS, "engine": "graph", "checkpoint_every": 1},
        "ema": {"decay": 0.5},
        "run": {"seed": 3},
    }


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    folder = tmp_path_factory.mktemp("runs")
    torch.save(network().state_dict(), folder / "given.pth")
    sfumato.train(recipe(folder), folder / "run")
    return folder / "run"


def test_what_is_frozen_does_not_move_and_no_update_is_of_a_higher_rank(run):
    given, left = network().state_dict(), load_file(run / "model.safetensors")
    assert given.keys() == left.keys()
    updated = {f"{layer}.weight" for layer in LAYERS}
    assert {name for name in given if not given[name].equal(left[name])} == updated | {"fc.weight", "fc.bias"}
    for name in updated:
        lengths = torch.linalg.svdvals((left[name] - given[name]).flatten(1).double())
        assert lengths[RANK - 1] > 1e-3 * lengths[0] and lengths[RANK] < 1e-3 * lengths[0]


@torch.no_grad()
def test_published_weights_decide_as_the_averages_of_both_factors_do(run):
    images, state = torch.randn(4, 1, 32, 32, generator=torch.Generator().manual_seed(0)), checkpoint(run).state
    model = network()
    assert add_low_rank(model, RANK, "fc", images[:1], seed=9) == LAYERS
    model.load_state_dict(state["model"] | state["averages"][0])
    expected = model.eval()(images)
    torch.testing.assert_close(load_trained(run).model(images), expected, rtol=1e-4, atol=1e-5)
    model.load_state_dict(state["model"])
    assert not torch.allclose(model(images), expected, rtol=1e-2)


@pytest.mark.slow
def test_a_run_that_was_killed_goes_on_from_both_factors(run, tmp_path):
    folder, path = tmp_path / "run", tmp_path / "recipe.toml"
    path.write_text(config.to_toml(config.parse(recipe(run.parent))))
    words = ["train", str(path), "--output", str(folder)]
    assert faults.run(words, die_at=("ledger", STEPS + 1, 0.5)) == -signal.SIGKILL
    before = checkpoint(folder).state["averages"][0]
    assert all(before[f"{layer}.lora_{key}"].abs().sum() > 0 for layer in LAYERS for key in "AB")
    sfumato.train(path, folder, resume=True)
    whole, left = load_file(run / "model.safetensors"), load_file(folder / "model.safetensors")
    assert whole.keys() == left.keys() and all(whole[name].equal(left[name]) for name in whole)


@pytest.mark.slow
def test_an_export_decides_as_the_run(run, tmp_path):
    pixels = np.random.default_rng(0).integers(0, 256, (6, 32, 32), dtype=np.uint8)
    files = [tmp_path / f"{number}.png" for number in range(len(pixels))]
    for path, image in zip(files, pixels, strict=True):
        Image.fromarray(image).save(path)
    sfumato.export(run, tmp_path / "export")
    assert sfumato.load(tmp_path / "export").predict(files) == sfumato.load(run).predict(files)


def test_parameters_are_counted_without_memory_and_rank_four_is_the_default(tmp_path):
    facts, values = Facts(1000, 10, 32, 1), recipe(tmp_path)
    plan = resolve(config.parse(values | {"model": values["model"] | {"lora_rank": None}}), facts)
    assert plan.recipe.model.lora_rank == 4 and resolve(config.parse(values), facts).recipe.model.lora_rank == RANK
    state = network().state_dict()
    expected = sum(4 * sum(state[f"{layer}.weight"].shape[:2]) for layer in LAYERS)
    assert num_trainable(plan.recipe, facts) == expected + state["fc.weight"].numel() + state["fc.bias"].numel()


def test_what_cannot_be_updated_is_refused_in_one_line(tmp_path):
    from_scratch = recipe(tmp_path, init_from=None)
    refused(r"weights that are given, and none are: .* model.init_from=", sfumato.train, from_scratch, tmp_path / "run")
    refused('is for model.trainable = "lora"', config.parse, recipe(tmp_path, trainable="norms"))
    assert not (tmp_path / "run").exists()
