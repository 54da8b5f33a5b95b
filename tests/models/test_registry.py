"""Networks by name: initial weights from the seed alone, and bad names answered with the nearest good one."""

import inspect
import random
import sys

import numpy as np
import pytest
import torch
from torch import nn

from sfumato.errors import InputError
from sfumato.models import build
from sfumato.models.registry import MODELS, Network

SHAPE = {"image_size": 16, "channels": 3, "num_classes": 4}


def weights(seed, name="small_cnn"):
    return nn.utils.parameters_to_vector(build(name, **SHAPE, seed=seed).parameters()).detach()


@pytest.mark.parametrize("name", ["small_cnn", "tanh_cnn", "lenet", "wide_resnet"])
def test_initial_weights_depend_on_the_seed_alone(name):
    torch.manual_seed(1)
    first = weights(7, name)
    torch.manual_seed(2)
    assert torch.equal(first, weights(7, name)) and not torch.equal(first, weights(8, name))


def test_building_leaves_the_global_random_states_as_they_were(package):
    torch_state, numpy_state, python_state = torch.get_rng_state(), np.random.get_state(), random.getstate()
    weights(7)
    build(f"{package}:drawn", **SHAPE, seed=7, trust=(package,))
    with pytest.raises(InputError):
        build(f"{package}:broken", **SHAPE, seed=7, trust=(package,))
    assert torch.equal(torch_state, torch.get_rng_state()) and random.getstate() == python_state
    assert all(np.array_equal(one, other) for one, other in zip(np.random.get_state(), numpy_state, strict=True))


@pytest.fixture
def package(tmp_path, monkeypatch):
    (tmp_path / "their_models.py").write_text(
        "import os, pathlib, random, numpy, torch\n"
        "from os import system\n"
        "from torch import nn\n"
        "pathlib.Path(os.environ['THEIRS_WAS_IMPORTED']).touch()\n"
        "def sized(num_classes, image_size, channels, hidden=5):\n"
        "    return nn.Sequential(nn.Flatten(), nn.Linear(channels * image_size**2, hidden), nn.Linear(hidden, "
        "num_classes))\n"
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
        "def passes_on(num_classes, **options):\n"
        "    return Net(num_classes, **options)\n"
        "def drawn(num_classes, by='all'):\n"
        "    model, source = nn.Linear(2, num_classes), numpy.random.default_rng()\n"
        "    if by == 'attribute':\n"
        "        model.directions = {'first': [torch.from_numpy(source.normal(size=3))]}\n"
        "    elif by == 'parameter':\n"
        "        nn.init.constant_(model.bias, source.normal())\n"
        "    elif by == 'buffer':\n"
        "        model.register_buffer('directions', torch.from_numpy(source.normal(size=3)))\n"
        "    elif by == 'shape':\n"
        "        model.directions = torch.zeros(int(source.integers(1, 10**6)))\n"
        "    else:\n"
        "        model.directions = torch.tensor([numpy.random.randn(), random.random(), float(torch.randn(())), "
        "float('nan')])\n"
        "    return model\n"
        "class Net(nn.Linear):\n"
        "    def __init__(self, num_classes, bias=True):\n"
        "        super().__init__(2, num_classes, bias)\n"
    )
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setenv("THEIRS_WAS_IMPORTED", str(tmp_path / "imported"))
    yield "their_models"
    sys.modules.pop("their_models", None)


def test_any_factory_is_given_what_it_accepts(package):
    sized = build(f"{package}:sized", **SHAPE, options={"hidden": 7}, seed=0, trust=(package,))
    assert sized(torch.randn(2, 3, 16, 16)).shape == (2, 4) and sized[1].out_features == 7
    assert build(f"{package}:classes_only", **SHAPE, seed=0, trust=(package,)).out_features == 4
    assert build(f"{package}:anything", **SHAPE, options={"a": 1}, seed=0, trust=(package,)).options == {
        **SHAPE,
        "a": 1,
    }
    assert build(f"{package}:Net", **SHAPE, seed=0, trust=(package,)).out_features == 4


def test_a_factory_that_takes_any_keyword_is_not_given_what_it_then_refuses(package):
    name, keys = f"{package}:passes_on", {**SHAPE, "seed": 3, "trust": (package,)}
    found = build(name, **keys, options={"bias": False})
    assert found.out_features == 4 and found.bias is None
    assert torch.equal(
        found.weight, build(f"{package}:Net", **keys, options={"bias": False}).weight
    )  # nothing was drawn before
    with pytest.raises(InputError, match="unexpected keyword argument 'colour'"):
        build(name, **keys, options={"colour": 1})


def test_what_a_factory_draws_by_the_global_generators_depends_on_the_seed_alone(package):
    draws = [
        build(f"{package}:drawn", **SHAPE, seed=seed, trust=(package,)).directions[:3] for seed in (7, 7, 8, 2**63 - 1)
    ]
    assert torch.equal(draws[0], draws[1])
    assert all(bool((one != other).all()) for i, one in enumerate(draws[1:]) for other in draws[i + 2 :])


@pytest.mark.parametrize("by", ["attribute", "parameter", "buffer", "shape"])
def test_a_factory_that_draws_from_elsewhere_is_refused_in_one_line(package, by):
    with pytest.raises(
        InputError, match=r"model their_models:drawn: (directions|bias) is another each time .* Draw it by torch"
    ):
        build(f"{package}:drawn", **SHAPE, options={"by": by}, seed=7, trust=(package,))


@pytest.mark.parametrize(
    ("name", "options", "message"),
    [
        ("smal_cnn", {}, "Did you mean small_cnn?"),
        ("zzz", {}, "Known are small_cnn, tanh_cnn, lenet, wide_resnet"),
        ("nf_resnet51", {}, "Did you mean nf_resnet50?"),
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
        build(name, **SHAPE, options=options, seed=0, trust=("no_such_package", package))
    assert message in str(caught.value) and "\n" not in str(caught.value)


@pytest.mark.parametrize(
    "trust",
    [(), "", ("their",), ("their_models.x",), ("their_models:sized",), "their_models_", ("Their_models",), ("",)],
)
def test_nothing_is_imported_from_a_module_that_is_not_trusted_by_its_own_name(package, tmp_path, trust):
    with pytest.raises(InputError, match="If you trust .* add --trust their_models$"):
        build("their_models:sized", **SHAPE, seed=0, trust=trust)
    assert not (tmp_path / "imported").exists() and "their_models" not in sys.modules
    build("their_models:sized", **SHAPE, seed=0, trust="their_models")
    assert (tmp_path / "imported").exists()


def test_trust_in_a_package_is_not_trust_in_its_modules(tmp_path):
    (tmp_path / "hubconf.py").write_text(
        "import pathlib\npathlib.Path(__file__).with_name('ran').touch()\ndef net(**options): return None\n"
    )
    options = {"repo_or_dir": str(tmp_path), "model": "net", "source": "local"}
    with pytest.raises(InputError, match=r"add --trust torch\.hub$"):
        build("torch.hub:load", **SHAPE, options=options, seed=0, trust=("torch", "torch.nn"))
    assert not (tmp_path / "ran").exists()


@pytest.mark.parametrize(
    "name",
    [
        "their_models:Net.__init__",
        "their_models:os.system",
        "their_models:nn:Linear",
        "their_models .x:sized",
        " their_models:sized",
        "their_models:sized\n",
        "their_models\n:sized",
        "their_models\u200b:sized",
        "their_m\u043edels:sized",
        ".their_models:sized",
        "their_models.:sized",
        "their_models::sized",
        "../their_models:sized",
        "their_models/x:sized",
        "their_models:",
        ":sized",
    ],
)
def test_what_is_no_plain_name_of_a_module_and_its_factory_is_refused_unimported(package, tmp_path, name):
    module = name.rpartition(":")[0]
    with pytest.raises(InputError, match="is unknown"):
        build(name, **SHAPE, seed=0, trust=(package, module, name, module.strip()))
    assert not (tmp_path / "imported").exists()


def test_what_a_trusted_module_only_imported_for_itself_is_not_called(package, tmp_path):
    with pytest.raises(InputError, match=r"comes from the module (posix|nt), not from their_models.*--trust"):
        build(
            "their_models:system", **SHAPE, options={"command": f"touch {tmp_path / 'ran'}"}, seed=0, trust=(package,)
        )
    with pytest.raises(InputError, match="comes from the module builtins"):
        build("their_models:__class__", **SHAPE, seed=0, trust=(package,))
    assert not (tmp_path / "ran").exists()


def test_a_network_of_the_registry_takes_numbers_of_its_architecture_and_nothing_else(monkeypatch):
    def factory(num_classes, width=1, checkpoint_path=None, **overlay):
        raise AssertionError("called")

    monkeypatch.setitem(MODELS, "with_weights", Network(factory, 1, ("width",)))
    for option in ("checkpoint_path", "pretrained_cfg_overlay", "pretrained"):
        with pytest.raises(InputError, match=f"has no option {option}"):
            build("with_weights", **SHAPE, options={option: "weights.pth"}, seed=0, trust=("sfumato",))
    for name, network in MODELS.items():
        if name != "with_weights":
            assert set(network.options) == set(inspect.signature(network.factory).parameters) - {
                "num_classes",
                "image_size",
                "channels",
            }
