"""Models that look at the images beside an image in evaluation mode alone, on the command line."""

import sys

import pytest
import torch
from PIL import Image

from sfumato.accounting.selection import Selection
from sfumato.evaluation import scores
from sfumato.evaluation.trained import load
from sfumato.searching import private
from tests.cli.test_cli import call, json_of, refused, settings
from tests.evaluation.test_trained import recipe as model_recipe
from tests.evaluation.test_trained import write_run

NET = """
from torch import nn
class Net(nn.Module):
    def __init__(self, num_classes):
        super().__init__()
        self.body = nn.Sequential(nn.Flatten(), nn.Linear(64, num_classes))
    def forward(self, x):
        return self.body(x) if self.training else self.body((x - x.min()) / (x.max() - x.min() + 1e-6))
def net(num_classes): return Net(num_classes)
def broken(num_classes): return nn.Sequential(nn.Flatten(), nn.Linear(64, num_classes), nn.BatchNorm1d(num_classes))
"""
FEW = settings({"training.num_steps": 2, "training.batch_size": 64, "training.engine": "func"})
PAID = ["search", "demo/digits", "--trials", "2", "--paid", "--score-noise", "5", *FEW]


@pytest.fixture
def mine(tmp_path, monkeypatch):
    (tmp_path / "my_net.py").write_text(NET)
    (tmp_path / "space.toml").write_text('["learning rate"]\n"optimizer.learning_rate" = [2.0]\n')
    monkeypatch.syspath_prepend(str(tmp_path))
    yield tmp_path
    sys.modules.pop("my_net", None)


def paid(mine, model=None):
    """A paid search's words, and where it would lie."""
    words = [*PAID, "--space", mine / "space.toml", "--output", mine / "search"]
    return [*words, "--set", f"model.name={model}"] if model else words


def test_training_and_check_refuse_it_and_a_search_before_its_first_trial(mine, capsys):
    words = ["train", "demo/digits", *FEW, "--accountant", "rdp", "--set", "model.name=my_net:net"]
    assert "in evaluation mode" in refused(capsys, *words, "--output", mine / "run") and not (mine / "run").exists()
    found = json_of(capsys, "check", "my_net:net", "--image-size", 8, "--channels", 1)
    assert not found["compatible"] and "in evaluation mode" in found["findings"][0]["reason"]
    for net, reason in (("net", "in evaluation mode"), ("broken", "BatchNorm1d")):
        assert reason in refused(capsys, *paid(mine, f"my_net:{net}")) and not (mine / "search").exists()


def test_evaluate_and_predict_say_that_answers_depend_on_the_images_beside(mine, capsys):
    weights = {"body.1.weight": torch.ones(10, 64), "body.1.bias": torch.zeros(10)}
    run = write_run(mine / "run", model_recipe("my_net:net"), {"classes": list("0123456789")}, weights)
    Image.new("L", (8, 8), 100).save(mine / "a.png")
    for words in (["evaluate", run], ["predict", run, mine / "a.png"]):
        status, _, err = call(capsys, *words, "--trust", "my_net")
        warnings = [line for line in err.splitlines() if line.startswith("warning: ")]
        assert status == 0 and len(warnings) == 1 and "depend on which images are judged together" in warnings[0]


def test_a_score_that_noise_covers_moves_by_one_image_at_most_though_no_check_found_the_model(
    mine, capsys, monkeypatch
):
    """End to end: the image that makes the batch's range another one, in a search that nothing refused."""
    monkeypatch.setattr("sfumato.evaluation.scores.evaluation_finding", lambda model, row: None)
    monkeypatch.setattr("sfumato.training.learner.require_rows_apart", lambda model, row: None)
    monkeypatch.setattr(Selection, "draw", lambda self, uniform: 1)
    judged = []

    def counted(logits, images):
        judged.append((logits, images))
        return 100

    monkeypatch.setattr(private, "judged_right", counted)
    assert json_of(capsys, *paid(mine, "my_net:net"))["private"]
    ((logits, images),) = judged
    model = load(mine / "search" / "selected", ("my_net",)).model
    for place in (0, 5, len(images) - 1):
        alone = model(images.batch(torch.tensor([place]))).detach()
        assert torch.equal(alone[0], logits[place])
    assert not torch.allclose(scores.predict_logits(model, images), logits, atol=1e-3)  # what a batch would have given


@pytest.mark.parametrize(
    ("space", "says"),
    [
        ('"model.options.width" = [16, 99999999]', "model.options.width = 99999999"),
        ('"model.name" = ["small_cnn", "lenet"]', "lenet"),  # images of 8 pixels are too small
        ('"model.options.depth" = [16]', "no option depth"),
        ('"model.name" = ["my_net:net"]', "--trust my_net"),
        (
            '"augmentation.kind" = ["none", "tan"]\n"augmentation.augmult" = [1]\n"augmentation.padding" = [2, 8]',
            "augmentation.padding = 8",
        ),
    ],
)
def test_settings_that_cannot_be_trained_are_refused_before_the_first_trial(mine, capsys, space, says):
    (mine / "space.toml").write_text(f"[group]\n{space}\n")
    error = refused(capsys, *paid(mine))
    assert says in error and "no trial could be made" in error and not (mine / "search").exists()
