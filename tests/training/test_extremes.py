"""Numbers as large as float32 holds, and none at all: no image and no rate of learning decides whether a run ends."""

import json
import math
import sys

import pytest
import torch

from sfumato.json_record import finite
from sfumato.run_folder.record import PrivateMetrics, RecordLines, read_lines
from sfumato.training.step import norm_histogram
from tests.cli.test_cli import call, json_of
from tests.training.test_step import problem, step_of

NET = """
import torch
from torch import nn

class Bright(nn.Module):
    def __init__(self, brightness):
        super().__init__()
        self.brightness = brightness
    def forward(self, images):
        return images.flatten(1) * self.brightness

def bright(num_classes, brightness=1.0):
    return nn.Sequential(Bright(brightness), nn.Linear(64, num_classes))

def deep(num_classes):
    layers = [layer for _ in range(12) for layer in (nn.Linear(64, 64), nn.ReLU())]
    return nn.Sequential(nn.Flatten(), *layers, nn.Linear(64, num_classes))
"""


@pytest.mark.parametrize("norm, loss", [(1e19, 1.0), (3e38, 3e38), (3e38, float("nan")), (float("inf"), 3e38)])
def test_statistics_of_one_image_s_extremes_are_those_of_exact_arithmetic(norm, loss):
    model, _ = problem()
    step = step_of(model)
    norms, losses = torch.tensor([0.35, 1.4, norm, norm]), torch.tensor([2.0, 4.0, loss, loss])
    found = step._statistics(norms, losses)
    kept = [(float(n), float(v)) for n, v in zip(norms, losses, strict=True) if math.isfinite(n) and math.isfinite(v)]
    count = len(kept)
    assert count == (4 if math.isfinite(norm) and math.isfinite(loss) else 2)
    assert found.loss == pytest.approx(sum(v for _, v in kept) / count, rel=1e-12)
    assert found.grad_norm == pytest.approx(math.sqrt(sum(n * n for n, _ in kept) / count), rel=1e-12)
    assert found.clipped_fraction == (count - 1) / count
    assert found.clipped_square == pytest.approx((0.25 + count - 1) / count, rel=1e-6)


def test_what_is_still_not_finite_is_none_and_read_again(tmp_path):
    path = tmp_path / "metrics_private.jsonl"
    norms = norm_histogram(torch.tensor([1.0]), torch.tensor([1.0]), 1.0, {"w": torch.full((2,), 1e38)}, 1e-300)
    known = {"clipped_fraction": 0.0, "grad_norm": None, "clipped_square": 0.0, "seconds": 0.1, "phases": {}}
    line = PrivateMetrics(step=1, loss=finite(math.inf), norms=norms, **known)
    assert norms.signal_to_noise is None and line.loss is None
    RecordLines(path, PrivateMetrics).append(line)
    assert read_lines(path, PrivateMetrics) == [line]


@pytest.fixture
def nets(tmp_path, monkeypatch):
    (tmp_path / "extreme_nets.py").write_text(NET)
    monkeypatch.syspath_prepend(str(tmp_path))
    yield
    sys.modules.pop("extreme_nets", None)


@pytest.mark.parametrize(
    "settings",
    [
        ["model.name=extreme_nets:bright", "model.options.brightness=1e20"],
        ["model.name=extreme_nets:bright", "model.options.brightness=1e18"],
        ["model.name=extreme_nets:deep", "optimizer.learning_rate=1e3"],
        ["model.name=extreme_nets:deep", "optimizer.learning_rate=1e19"],
        ["model.name=extreme_nets:deep", "optimizer.learning_rate=1e30"],
    ],
    ids=lambda settings: settings[-1],
)
@pytest.mark.parametrize("private", [True, False], ids=["private", "ordinary"])
def test_a_run_ends_with_scores_whatever_its_norms_and_losses(nets, capsys, tmp_path, settings, private):
    run = tmp_path / "run"
    few = ["num_steps=4", "batch_size=64", "evaluate_every=1", "engine=reference"]
    few += ["norm_histogram_every=1"] if private else []
    words = [word for setting in [*settings, *(f"training.{each}" for each in few)] for word in ("--set", setting)]
    words += ["--accountant", "rdp", "--output", run, *([] if private else ["--non-private"])]
    result = json_of(capsys, "train", "demo/digits", *words)
    assert result["private"] is private and 0 <= result["test_accuracy"] <= 1 and 0 <= result["test_accuracy_last"] <= 1
    noted = (run / "owner" / "metrics_private.jsonl").read_text().splitlines()
    lines = [json.loads(line, parse_constant=refuse) for line in noted]
    assert [line["step"] for line in lines] == [1, 2, 3, 4]
    assert all({"loss", "clipped_fraction", "grad_norm", "clipped_square"} <= line.keys() for line in lines)
    if private:
        assert call(capsys, "norms", run, "--plot", tmp_path / "norms.svg")[0] == 0
    assert json_of(capsys, "evaluate", run, "--trust", "extreme_nets")["num_images"] == 360


def refuse(constant):
    raise AssertionError(f"{constant} is no JSON")
