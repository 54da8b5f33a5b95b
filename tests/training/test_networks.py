"""Networks of somebody's own, as people write them: whatever their outputs, norms and names of parameters, a run ends
with scores, or is refused before anything is spent.
"""

import json
import math
import shutil
import sys

import pytest
import torch
from safetensors.torch import load_file

from sfumato.json_record import finite
from sfumato.run_folder.record import PrivateMetrics, RecordLines, read_lines
from sfumato.training.step import Rows, norm_histogram
from tests.cli.test_cli import call, json_of, refused
from tests.training.test_step import problem, step_of

NETS = """
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

def lazy(num_classes):
    return nn.Sequential(nn.Flatten(), nn.LazyLinear(num_classes))

class Wide(nn.Sequential):
    def __init__(self, num_classes, sizes, kind=""):
        super().__init__(nn.Flatten(), nn.Linear(sizes**2, num_classes))

def Wide64(num_classes):
    return Wide(num_classes, 64)

def chances(num_classes):
    return Wide(num_classes, 8).append(nn.Softmax(1))

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
SHORT = ("--set", "training.num_steps=6", "--set", "training.batch_size=64", "--set", "ema.decay=0.99")


@pytest.fixture(autouse=True)
def nets(tmp_path_factory, monkeypatch):
    folder = tmp_path_factory.mktemp("modules")
    (folder / "nets.py").write_text(NETS)
    monkeypatch.syspath_prepend(folder)
    yield
    sys.modules.pop("nets", None)


@pytest.mark.parametrize("norm, loss", [(3e38, 3e38), (3e38, float("nan")), (float("inf"), 3e38)])
def test_statistics_of_one_image_s_extremes_are_those_of_exact_arithmetic(norm, loss):
    model, _ = problem()
    step = step_of(model)
    norms, losses = torch.tensor([0.35, 1.4, norm, norm]), torch.tensor([2.0, 4.0, loss, loss])
    found = step.statistics(Rows(norms, losses), 1.0, 1, with_norms=False)
    kept = [(float(n), float(v)) for n, v in zip(norms, losses, strict=True) if math.isfinite(n) and math.isfinite(v)]
    count = len(kept)
    assert count == (4 if math.isfinite(norm) and math.isfinite(loss) else 2)
    assert found["loss"] == pytest.approx(sum(v for _, v in kept) / count, rel=1e-12)
    assert found["grad_norm"] == pytest.approx(math.sqrt(sum(n * n for n, _ in kept) / count), rel=1e-12)
    assert found["clipped_fraction"] == (count - 1) / count
    assert found["clipped_square"] == pytest.approx((0.25 + count - 1) / count, rel=1e-6)


def test_what_is_still_not_finite_is_none_and_read_again(tmp_path):
    path = tmp_path / "metrics_private.jsonl"
    norms = norm_histogram(Rows(torch.tensor([1.0]), torch.tensor([1.0])), 1.0, 1e38, 1e-300)
    known = {"clipped_fraction": 0.0, "grad_norm": None, "clipped_square": 0.0, "seconds": 0.1, "phases": {}}
    line = PrivateMetrics(step=1, loss=finite(math.inf), norms=norms, **known)
    assert norms.signal_to_noise is None and line.loss is None
    RecordLines(path, PrivateMetrics).append(line)
    assert read_lines(path, PrivateMetrics) == [line]


EXTREMES = [["model.name=nets:bright", "model.options.brightness=1e20"]]
EXTREMES += [["model.name=nets:deep", f"optimizer.learning_rate={value}"] for value in ("1e3", "1e30")]


@pytest.mark.parametrize("settings", EXTREMES, ids=lambda settings: settings[-1])
@pytest.mark.parametrize("private", [True, False], ids=["private", "ordinary"])
def test_a_run_ends_with_scores_whatever_its_norms_and_losses(capsys, tmp_path, settings, private):
    run = tmp_path / "run"
    few = ["num_steps=4", "batch_size=64", "evaluate_every=1", "engine=reference"]
    few += ["norm_histogram_every=1"] if private else []
    words = [word for setting in [*settings, *(f"training.{each}" for each in few)] for word in ("--set", setting)]
    words += ["--accountant", "rdp", "--output", run, *([] if private else ["--non-private"])]
    result = json_of(capsys, "train", "demo/digits", *words)
    assert result["private"] is private and 0 <= result["test_accuracy"] <= 1 and 0 <= result["test_accuracy_last"] <= 1
    noted = (run / "owner" / "metrics_private.jsonl").read_text().splitlines()
    lines = [json.loads(line, parse_constant=pytest.fail) for line in noted]
    assert [line["step"] for line in lines] == [1, 2, 3, 4]
    assert all({"loss", "clipped_fraction", "grad_norm", "clipped_square"} <= line.keys() for line in lines)
    if private:
        assert call(capsys, "norms", run, "--plot", tmp_path / "norms.svg")[0] == 0
    assert json_of(capsys, "evaluate", run, "--trust", "nets")["num_images"] == 360


def test_what_is_wrong_with_a_network_is_said_with_what_would_work(capsys, tmp_path):
    def trained(name, *more):
        words = ("--set", f"model.name={name}", *more, "--output", tmp_path / "run")
        return call(capsys, "train", "demo/digits", *SHORT, *words)

    status, _, err = trained("nets:chances", "--non-private")
    assert status == 0 and "warning: the model ends in a softmax" in err
    shutil.rmtree(tmp_path / "run")
    assert "It takes model.options: kind, sizes; each" in trained("nets:Wide")[2]
    assert "--set data.image_size=PIXELS and --set data.channels" in trained("nets:Wide64")[2]
    line = refused(capsys, "check", "nets:Wide64", "--channels", 1)
    assert "mat1" in line and line.endswith("It takes --image-size 64.")


def test_every_name_of_a_shared_parameter_has_its_average(capsys, tmp_path):
    run = tmp_path / "run"
    words = ("train", "demo/digits", *SHORT, "--set", "model.name=nets:tied", "--output", run)
    result = json_of(capsys, *words)
    weights = load_file(run / "model.safetensors")
    for one, other in (("first", "layers.1"), ("second", "layers.3")):
        assert torch.equal(weights[f"{one}.weight"], weights[f"{other}.weight"])
    assert json_of(capsys, "evaluate", run, "--trust", "nets")["accuracy"] == result["accuracy"]
    assert json_of(capsys, *words, "--resume")["accuracy"] == result["accuracy"]


@pytest.mark.parametrize(("factory", "says"), [("extra", "get_extra_state"), ("lazy", "shape from the first images")])
def test_state_that_no_checkpoint_holds_is_refused_before_the_run_begins(capsys, tmp_path, factory, says):
    words = ("train", "demo/digits", *SHORT, "--set", f"model.name=nets:{factory}", "--output", tmp_path / "run")
    assert says in refused(capsys, *words) and not (tmp_path / "run").exists()


def test_a_run_s_name_that_its_files_could_not_state_is_refused(capsys, tmp_path):
    status, _, err = call(capsys, "train", "demo/digits", *SHORT, "--output", f"{tmp_path}/run_\udce9")
    assert status == 2 and "not UTF-8" in err and len(list(tmp_path.iterdir())) == 0


def words_of(tmp_path, private, *settings):
    given = ["model.name=nets:Net", "training.num_steps=2", "training.batch_size=64", *settings]
    words = [word for setting in given for word in ("--set", setting)]
    return ["train", "demo/digits", "--output", tmp_path / "out", *words, *([] if private else ["--non-private"])]


@pytest.mark.parametrize(
    ("kind", "gives"), [("one", "(2, 1)"), ("dict", "dict"), ("tuple", "tuple"), ("deep", "(2, 10, 1)")]
)
def test_other_outputs_than_one_for_each_class_are_refused(capsys, tmp_path, kind, gives):
    said = refused(capsys, *words_of(tmp_path, kind in ("one", "dict"), f"model.options.kind={kind}"))
    assert f"the model gives {gives} for 2 images, not (2, 10)" in said and "internal" not in said
    assert not (tmp_path / "out").exists()


def test_a_layer_that_takes_no_part_is_no_fault_of_ordinary_training(capsys, tmp_path):
    assert json_of(capsys, *words_of(tmp_path, False))["private"] is False


def test_what_a_factory_froze_does_not_train(capsys, tmp_path):
    words = words_of(tmp_path, True, "model.options.kind=frozen", 'model.trainable=["layer.*"]')
    assert "holds layer.bias, layer.weight fixed" in refused(capsys, *words)
