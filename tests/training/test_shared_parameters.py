"""Models whose parameters have several names, as people write them: they train, go on and are published whole."""

import sys

import pytest
import torch
from safetensors.torch import load_file

from tests.cli.test_cli import call, json_of, refused

NETS = """
import torch
from torch import nn

class Tied(nn.Module):
    def __init__(self, num_classes):
        super().__init__()
        self.first, self.second = nn.Linear(64, 16), nn.Linear(16, num_classes)
        self.layers = nn.Sequential(nn.Flatten(), self.first, nn.ReLU(), self.second)
        self.register_buffer("one", torch.ones(1).expand(8))
        self.frozen = nn.Parameter(torch.ones(1).expand(24), requires_grad=False)
        scale = torch.ones(3).expand(3)
        self.register_buffer("scale", scale)
        self.register_buffer("again", scale)
    def forward(self, images):
        return self.layers(images) * self.one[0] * self.again[0] * self.frozen[0]

class Extra(nn.Linear):
    def get_extra_state(self):
        return {"calls": 0}
    def set_extra_state(self, state):
        pass

def tied(num_classes):
    return Tied(num_classes)

def extra(num_classes):
    return nn.Sequential(nn.Flatten(), Extra(64, num_classes))
"""
SHORT = ("--set", "training.num_steps=6", "--set", "training.batch_size=64", "--set", "ema.decay=0.99")


@pytest.fixture
def nets(tmp_path, monkeypatch):
    (tmp_path / "tied_nets.py").write_text(NETS)
    monkeypatch.syspath_prepend(str(tmp_path))
    yield
    sys.modules.pop("tied_nets", None)


def test_every_name_of_a_shared_parameter_has_its_average(nets, capsys, tmp_path):
    run = tmp_path / "run"
    words = ("train", "demo/digits", *SHORT, "--set", "model.name=tied_nets:tied", "--output", run)
    result = json_of(capsys, *words)
    weights = load_file(run / "model.safetensors")
    for one, other in (("first", "layers.1"), ("second", "layers.3")):
        assert torch.equal(weights[f"{one}.weight"], weights[f"{other}.weight"])
    assert json_of(capsys, "evaluate", run, "--trust", "tied_nets")["accuracy"] == result["accuracy"]
    again = json_of(capsys, *words, "--resume")
    assert again["accuracy"] == result["accuracy"]


def test_state_that_no_checkpoint_holds_is_refused_before_the_run_begins(nets, capsys, tmp_path):
    line = refused(
        capsys, "train", "demo/digits", *SHORT, "--set", "model.name=tied_nets:extra", "--output", tmp_path / "run"
    )
    assert "get_extra_state" in line and not (tmp_path / "run").exists()


def test_a_run_s_name_that_its_files_could_not_state_is_refused(capsys, tmp_path):
    status, _, err = call(capsys, "train", "demo/digits", *SHORT, "--output", f"{tmp_path}/run_\udce9")
    assert status == 2 and "not UTF-8" in err and len(list(tmp_path.iterdir())) == 0
