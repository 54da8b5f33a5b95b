"""Networks by name: initial weights from the seed alone, and bad names answered with the nearest good one."""

import inspect
import sys

import pytest
import torch
from torch import nn

from sfumato.errors import InputError
from sfumato.models import build
from sfumato.models.registry import MODELS, Network

SHAPE = {"image_size": 16, "channels": 3, "num_classes": 4}
THEIRS = """
import os, pathlib, torch
from os import system
from torch import nn
pathlib.Path(os.environ["THEIRS_WAS_IMPORTED"]).touch()
def sized(num_classes, image_size, channels, hidden=5):
    return nn.Sequential(nn.Flatten(), nn.Linear(channels * image_size**2, hidden), nn.Linear(hidden, num_classes))
def anything(**options):
    model = nn.Linear(2, options["num_classes"])
    model.options = options
    return model
def no_module(num_classes):
    return 3
def broken(num_classes):
    raise ValueError("no such thing")
class Net(nn.Linear):
    def __init__(self, *, num_classes, bias=True):
        super().__init__(2, num_classes, bias)
"""


@pytest.fixture
def package(tmp_path, monkeypatch):
    (tmp_path / "their_models.py").write_text(THEIRS)
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setenv("THEIRS_WAS_IMPORTED", str(tmp_path / "imported"))
    yield "their_models"
    sys.modules.pop("their_models", None)


@pytest.mark.parametrize("name", ["wide_resnet", "their_models:Net"])
def test_initial_weights_depend_on_the_seed_alone_and_the_global_state_stays(name, package):
    def weights(seed):
        model = build(name, **SHAPE, seed=seed, trust=(package,))
        return nn.utils.parameters_to_vector(model.parameters()).detach()

    torch.manual_seed(1)
    first, state = weights(7), torch.get_rng_state()
    torch.manual_seed(1)
    assert torch.equal(torch.get_rng_state(), state)
    torch.manual_seed(2)
    assert torch.equal(first, weights(7)) and not torch.equal(first, weights(8))


def test_any_factory_is_given_what_it_names(package):
    given = {**SHAPE, "seed": 0, "trust": (package,)}
    sized = build(f"{package}:sized", **given, options={"hidden": 7})
    assert sized(torch.randn(2, 3, 16, 16)).shape == (2, 4) and sized[1].out_features == 7
    assert build(f"{package}:anything", **given, options={"a": 1}).options == {"num_classes": 4, "a": 1}
    assert build(f"{package}:Net", **given, options={"bias": False}).bias is None


@pytest.mark.parametrize(
    ("name", "options", "message"),
    [
        ("smal_cnn", {}, "Did you mean small_cnn?"),
        ("wide_resnet", {"widht": 4}, "no option widht. Did you mean width?"),
        ("tanh_cnn", {"width": 4}, "no option width. It has none."),
        ("wide_resnet", {"num_classes": 4}, "num_classes follows from the data"),
        ("wide_resnet", {"depth": "deep"}, "cannot be built"),
        ("wide_resnet", {"depth": 10**9}, "at most 1000"),
        ("scattering", {"mirror": "False"}, "mirror = 'False' is not possible: it is true or false"),
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


def test_nothing_is_imported_from_a_module_that_is_not_trusted_by_its_own_name(package, tmp_path):
    for trust in ((), "", ("their",), ("their_models.x",), ("their_models:sized",), "their_models_", ("",)):
        with pytest.raises(InputError, match="If you trust .* add --trust their_models$"):
            build("their_models:sized", **SHAPE, seed=0, trust=trust)
    assert not (tmp_path / "imported").exists() and "their_models" not in sys.modules
    build("their_models:sized", **SHAPE, seed=0, trust="their_models")
    assert (tmp_path / "imported").exists()


def test_what_is_no_plain_name_of_a_module_and_its_factory_is_refused_unimported(package, tmp_path):
    for name in (
        *("their_models:Net.__init__", "their_models:nn:Linear", "their_models .x:sized", " their_models:sized"),
        *("their_models:sized\n", "their_models\u200b:sized", "their_m\u043edels:sized", ".their_models:sized"),
        *("their_models::sized", "../their_models:sized", "their_models/x:sized", "their_models:", ":sized"),
    ):
        module = name.rpartition(":")[0]
        with pytest.raises(InputError, match="is unknown"):
            build(name, **SHAPE, seed=0, trust=(package, module, name, module.strip()))
    assert not (tmp_path / "imported").exists()


def test_what_a_trusted_module_only_imported_for_itself_is_not_called(package, tmp_path):
    with pytest.raises(InputError, match=r"comes from the module (posix|nt), not from their_models.*--trust"):
        options = {"command": f"touch {tmp_path / 'ran'}"}
        build("their_models:system", **SHAPE, options=options, seed=0, trust=(package,))
    assert not (tmp_path / "ran").exists()


def test_a_network_of_the_registry_takes_numbers_of_its_architecture_and_nothing_else(monkeypatch):
    def factory(num_classes, width=1, checkpoint_path=None, **overlay):
        raise AssertionError("called")

    for name, network in MODELS.items():
        taken = set(inspect.signature(network.factory).parameters) - {"num_classes", "image_size", "channels"}
        assert set(network.options) == taken, name
    monkeypatch.setitem(MODELS, "with_weights", Network(factory, 1, ("width",)))
    for option in ("checkpoint_path", "pretrained_cfg_overlay", "pretrained"):
        with pytest.raises(InputError, match=f"has no option {option}"):
            build("with_weights", **SHAPE, options={option: "weights.pth"}, seed=0, trust=("sfumato",))
