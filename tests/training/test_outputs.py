"""A network whose outputs are not one for each class is refused before anything is spent."""

import json

import pytest

from sfumato import cli

MODULE = """
import torch
from torch import nn

class Net(nn.Module):
    def __init__(self, num_classes, kind="right"):
        super().__init__()
        self.layer, self.kind = nn.Linear(64, {"ten": 10, "one": 1}.get(kind, num_classes)), kind
        self.unused = nn.Linear(3, 3)
        if kind == "frozen":
            self.layer.requires_grad_(False)

    def forward(self, images):
        outputs = self.layer(images.flatten(1))
        return {"dict": {"out": outputs}, "tuple": (outputs, None), "deep": outputs[..., None]}.get(self.kind, outputs)
"""


@pytest.fixture
def run(tmp_path, monkeypatch, capsys):
    (tmp_path / "somebodys.py").write_text(MODULE)
    monkeypatch.syspath_prepend(tmp_path)

    def run(*settings, private=True):
        budget = [] if private else ["--non-private"]
        given = [part for setting in settings for part in ("--set", setting)]
        given += ["--set", "model.name=somebodys:Net", "--trust", "somebodys"]
        given += ["--set", "training.num_steps=2", "--set", "training.batch_size=64"]
        code = cli.run(["train", "demo/digits", "--output", str(tmp_path / "out"), "--json", *budget, *given])
        return code, capsys.readouterr()

    return run


@pytest.mark.parametrize("private", [True, False])
@pytest.mark.parametrize(
    ("kind", "gives"), [("one", "(2, 1)"), ("dict", "dict"), ("tuple", "tuple"), ("deep", "(2, 10, 1)")]
)
def test_other_outputs_are_refused_before_the_folder_is_made(run, tmp_path, kind, gives, private):
    code, out = run(f"model.options.kind={kind}", private=private)
    assert code == 2 and not (tmp_path / "out").exists()
    assert f"the model gives {gives} for 2 images, not (2, 10)" in out.err and "internal" not in out.err


def test_a_layer_that_takes_no_part_is_no_fault_of_ordinary_training(run):
    code, out = run(private=False)
    assert code == 0 and json.loads(out.out)["private"] is False


@pytest.mark.parametrize("private", [True, False])
def test_what_a_factory_froze_does_not_train(run, private):
    code, out = run("model.options.kind=frozen", 'model.trainable=["layer.*"]', private=private)
    assert code == 2 and "holds layer.bias, layer.weight fixed" in out.err
