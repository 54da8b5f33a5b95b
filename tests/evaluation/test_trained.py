"""A model file may be a stranger's: reading it runs no code that it names, and follows no path."""

import json
import sys

import pytest
import torch
from safetensors.torch import save_file

from sfumato.data.pixels import RULES_VERSION
from sfumato.errors import InputError
from sfumato.evaluation.trained import load
from sfumato.models import build

RESOLVED = """[augmentation]
kind = "none"
augmult = 0
padding = 4
[optimizer]
name = "sgd"
learning_rate = 2.0
[training]
batch_size = 16
num_steps = 3
"""
CLAIMS = {"run_id": "0f" * 16, "private": True, "epsilon": 3.0, "delta": 1e-4}
SHAPE = {"mean": [0.5], "std": [0.5], "image_size": 8, "channels": 1}
FACTS = {"format_version": 1, "classes": ["a", "b"], **SHAPE, **CLAIMS}

TRAINS = 'trainable = "all"\nfeatures = "raw"\n'


def recipe(name, data='name = "digits"', **options):
    lines = "".join(f"{key} = {json.dumps(value)}\n" for key, value in options.items())
    return f'[data]\n{data}\n{RESOLVED}[model]\nname = "{name}"\n{TRAINS}[model.options]\n{lines}'


PLAIN = recipe("small_cnn")


def write_run(folder, recipe=None, facts=None, tensors=None, raw=None):
    """model.safetensors as somebody else may have written it."""
    folder.mkdir(exist_ok=True)
    weights = build("small_cnn", image_size=8, channels=1, num_classes=2, seed=0).state_dict()
    metadata = {"sfumato": json.dumps({**FACTS, **(facts or {})}), "recipe": recipe or PLAIN}
    tensors = weights if tensors is None else tensors
    save_file(tensors, folder / "model.safetensors", {**metadata, **(raw or {})})
    return folder


THEIR_NET = """
import pathlib
from torch import nn
pathlib.Path(__file__).with_name("ran").touch()
def net(num_classes):
    return nn.Sequential(nn.Flatten(), nn.Linear(64, num_classes))
"""


@pytest.fixture
def theirs(tmp_path, monkeypatch):
    """A module that notes that it was imported, and a hubconf.py that notes that it was run."""
    folder = tmp_path / "theirs"
    folder.mkdir()
    for name in ("their_net", "hubconf"):
        (folder / f"{name}.py").write_text(THEIR_NET)
    monkeypatch.syspath_prepend(str(folder))
    yield folder
    sys.modules.pop("their_net", None)


def test_a_file_of_our_own_registry_is_read_and_says_what_it_was_trained_with(tmp_path):
    trained = load(write_run(tmp_path / "run"))
    assert trained.classes == ("a", "b") and trained.model(torch.zeros(1, 1, 8, 8)).shape == (1, 2)


def test_images_are_made_squares_as_in_training_by_rules_that_this_version_has(tmp_path):
    run = write_run(tmp_path / "run", recipe("small_cnn", 'name = "folder"\nresize = "pad"'))
    assert load(run).decoding["resize"] == "pad"  # before the version of the rules was noted
    write_run(run, facts={"decoding_rules": RULES_VERSION})
    assert load(run).decoding["resize"] == "crop"
    write_run(run, facts={"decoding_rules": RULES_VERSION + 1})
    with pytest.raises(InputError, match="Use the version that trained it, or train again"):
        load(run)


def test_code_that_a_file_names_is_imported_only_if_it_is_trusted(tmp_path, theirs):
    weights = {"1.weight": torch.ones(2, 64), "1.bias": torch.zeros(2)}
    run = write_run(tmp_path / "run", recipe("their_net:net"), tensors=weights)
    with pytest.raises(InputError, match="add --trust their_net$"):
        load(run)
    assert not (theirs / "ran").exists()
    assert load(run, trust=("their_net",)).model[1].weight.sum() == 128
    assert (theirs / "ran").exists()


def test_a_file_cannot_make_torch_hub_run_a_local_hubconf(tmp_path, theirs):
    run = write_run(tmp_path / "run", recipe("torch.hub:load", repo_or_dir=str(theirs), model="net", source="local"))
    with pytest.raises(InputError, match=r"add --trust torch\.hub$"):
        load(run, trust=("torch", "torch.hub:load", "their_net"))
    assert not (theirs / "ran").exists()


DAMAGES = [
    *({"facts": {"classes": value}} for value in ("ab", ["a"], ["a", 3], ["a", "a"], ["a", "b", "c"])),
    *({"facts": {"image_size": value}} for value in (10**9, -8)),
    *({"facts": {"mean": value}} for value in (["x"], [float("nan")], [0.5, 0.5])),
    *({"facts": {"channels": 2}}, {"facts": {"std": [0.0]}}),
    *({"raw": {"sfumato": value}} for value in ("[", "[" * 100_000, "3")),
    *({"raw": {"recipe": value}} for value in ("x = " + "[" * 100_000, "x = " + "9" * 10_000)),
    {"raw": {"recipe": '[data]\nname = "digits"\n'}},
    {"recipe": recipe("small_cnn").replace("[augmentation]", "class_proportions = [0.2, 0.3, 0.5]\n[augmentation]")},
    *({"recipe": recipe("small_cnn", width=200_000)}, {"recipe": recipe("lenet")}),
    *({"tensors": {}}, {"tensors": {"weight": torch.zeros(1)}}),
]
IMPOSSIBLE = [{"width": 0}, {"width": 1.5}, {"width": True}, {"order": "__import__('os')"}, {"seed": 1}]


@pytest.mark.parametrize("kind", ["facts", "raw", "recipe", "tensors"])
def test_a_file_with_other_contents_than_a_run_writes_is_refused_in_one_line(tmp_path, kind):
    for changes in (changes for changes in DAMAGES if kind in changes):
        with pytest.raises(InputError, match="is damaged|at least|at most"):
            load(write_run(tmp_path / "run", **changes))
    for options in IMPOSSIBLE if kind == "recipe" else []:
        with pytest.raises(InputError):
            load(write_run(tmp_path / "run", recipe("small_cnn", **options)))


def test_where_images_lie_is_not_taken_from_a_file(tmp_path):
    run = write_run(tmp_path / "run", recipe("small_cnn", f'name = "folder"\npath = "{tmp_path}"'))
    assert load(run).recipe.data.path is None


def test_a_folder_that_is_not_there_is_told_apart_from_a_run_that_is_not_finished(tmp_path):
    with pytest.raises(InputError, match="there is no folder"):
        load(tmp_path / "none")
    with pytest.raises(InputError, match="sfumato resume"):
        load(tmp_path)
