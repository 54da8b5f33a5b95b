"""`training.verify_every`: a model that begins to compute otherwise stops the run."""

from sfumato.run_folder.ledger import Ledger
from tests.training import faults

MODEL = """
from torch import nn


class Network(nn.Module):
    calls = 0

    def __init__(self, num_classes):
        super().__init__()
        self.layer = nn.Linear(64, num_classes)

    def forward(self, images):
        Network.calls += 1
        return self.layer(images.flatten(1)) * (1 if Network.calls <= {turns} else -1)


def make(num_classes):
    return Network(num_classes)
"""
RECIPE = """
[data]
name = "digits"
[model]
name = "own_network:make"
[augmentation]
kind = "none"
augmult = 0
[privacy]
noise_multiplier = 4.0
delta = 1e-4
accountant = "rdp"
[training]
batch_size = 64
num_steps = 40
evaluate_every = 40
engine = "graph"
verify_every = 4
"""


def run(tmp_path, turns):
    (tmp_path / "own_network.py").write_text(MODEL.format(turns=turns))
    (tmp_path / "recipe.toml").write_text(RECIPE)
    words = ["train", str(tmp_path / "recipe.toml"), "--trust", "own_network", "--output", str(tmp_path / "run")]
    return faults.run(words, modules=tmp_path, log=tmp_path / "log"), (tmp_path / "log").read_text()


def test_a_model_that_stays_what_it_is_trains(tmp_path):
    status, said = run(tmp_path, 10**9)
    assert status == 0, said


def test_a_model_that_turns_stops_the_run_in_one_line(tmp_path):
    status, said = run(tmp_path, 60)
    errors = [line for line in said.splitlines() if line.startswith("error: ")]
    assert status == 2 and len(errors) == 1 and "Traceback" not in said
    found = (
        "gives other gradients",
        "it keeps something of them",
        "other outputs than the image alone",
    )  # by where it turns
    assert any(words in errors[0] for words in found)
    steps = [line for line in Ledger.open(tmp_path / "run" / "ledger.jsonl").lines if line["kind"] == "step"]
    assert 4 <= len(steps) < 40 and not (tmp_path / "run" / "result.json").exists()
