"""Networks by name: initial weights from the seed alone, and bad names answered with the nearest good one."""

import sys

import pytest
import torch
from torch import nn

from sfumato.errors import InputError
from sfumato.models import build

SHAPE = {"image_size": 16, "channels": 3, "num_classes": 4}


def weights(seed, name="small_cnn"):
    return nn.utils.parameters_to_vector(build(name, **SHAPE, seed=seed).parameters()).detach()


@pytest.mark.parametrize("name", ["small_cnn", "tanh_cnn", "lenet", "wide_resnet"])
def test_initial_weights_depend_on_the_seed_alone(name):
    torch.manual_seed(1)
    first = weights(7, name)
    torch.manual_seed(2)
    assert torch.equal(first, weights(7, name)) and not torch.equal(first, weights(8, name))


def test_building_leaves_the_global_random_state_as_it_was():
    state = torch.get_rng_state()
    weights(7)
    assert torch.equal(state, torch.get_rng_state())


@pytest.fixture
def package(tmp_path, monkeypatch):
    (tmp_path / "their_models.py").write_text(
        "from torch import nn\n"
        "def sized(num_classes, image_size, channels, hidden=5):\n"
        "    return nn.Sequential(nn.Flatten(), nn.Linear(channels * image_size**2, hidden), nn.Linear(hidden, num_classes))\n"
        "def classes_only(*, num_classes):\n"
        "    return nn.LazyLinear(num_classes)\n"
        "def anything(**options):\n"
        "    model = nn.Identity()\n"
        "    model.options = options\n"
        "    return model\n"
        "def no_module(num_classes):\n"
        "    return 3\n"
        "def broken(num_classes):\n"
        "    raise ValueError('no such thing')\n"
        "class Net(nn.Linear):\n"
        "    def __init__(self, num_classes):\n"
        "        super().__init__(2, num_classes)\n"
    )
    monkeypatch.syspath_prepend(str(tmp_path))
    yield "their_models"
    sys.modules.pop("their_models", None)


def test_any_factory_is_given_what_it_accepts(package):
    sized = build(f"{package}:sized", **SHAPE, options={"hidden": 7}, seed=0)
    assert sized(torch.randn(2, 3, 16, 16)).shape == (2, 4) and sized[1].out_features == 7
    assert build(f"{package}:classes_only", **SHAPE, seed=0).out_features == 4
    assert build(f"{package}:anything", **SHAPE, options={"a": 1}, seed=0).options == {**SHAPE, "a": 1}
    assert build(f"{package}:Net", **SHAPE, seed=0).out_features == 4


@pytest.mark.parametrize(
    ("name", "options", "message"),
    [
        ("smal_cnn", {}, "Did you mean small_cnn?"),
        ("zzz", {}, "Known are small_cnn, tanh_cnn, lenet, wide_resnet"),
        ("nf_resnet50", {}, "model nf_resnet50 cannot be built by this version"),
        ("wide_resnet", {"widht": 4}, "no option widht. Did you mean width?"),
        ("tanh_cnn", {"width": 4}, "no option width. It has none."),
        ("wide_resnet", {"num_classes": 4}, "num_classes follows from the data"),
        ("wide_resnet", {"depth": "deep"}, "cannot be built"),
        ("no_such_package:net", {}, "No module named 'no_such_package'"),
        ("their_models:size", {}, "Did you mean sized?"),
        ("their_models:sized", {"hiden": 3}, "Did you mean hidden?"),
        ("their_models:no_module", {}, "gave a int, not a torch.nn.Module"),
        ("their_models:broken", {}, "cannot be built: no such thing"),
    ],
)
def test_bad_names_and_options_are_refused_with_the_nearest_good_one(package, name, options, message):
    with pytest.raises(InputError) as caught:
        build(name, **SHAPE, options=options, seed=0)
    assert message in str(caught.value) and "\n" not in str(caught.value)
