"""What is handed on decides as the run does, tells what the run's public files tell, and nothing else of it."""

import dataclasses
import itertools
import json
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import safetensors.torch
import timm
import torch
import yaml

import sfumato
from sfumato import config
from sfumato.errors import InputError
from sfumato.evaluation.calibration import Calibration
from sfumato.evaluation.scores import Objective
from sfumato.evaluation.trained import Trained, load
from sfumato.exporting import cards, timm_folder
from sfumato.exporting.deployed import Deployed, folded, trial_images
from sfumato.exporting.export import MADE, OF_THE_RUN
from sfumato.models import WeightStandardizedConv2d, build
from sfumato.run_folder import record
from sfumato.run_folder.record import CalibrationFacts, Threshold
from tests.exporting.conftest import ABOUT


def alone(folder: Path, files) -> list[list[str]]:
    """What predict.py prints, in a process that finds nothing of Sfumato's."""
    command = [sys.executable, "-I", folder / "predict.py", *files]
    done = subprocess.run(command, check=True, capture_output=True, text=True, cwd="/")
    return [line.split("\t") for line in done.stdout.splitlines()]


def test_an_export_decides_as_its_run_does(run, exported, images, tmp_path):
    files = sorted(images.rglob("*.png"))
    found = sfumato.load(run).predict(files)
    assert len({one.class_name for one in found}) == 2
    assert sfumato.load(exported).predict(files) == found
    (tmp_path / "cut.png").write_bytes(files[0].read_bytes()[:-100])
    *lines, cut = alone(exported, [*files, tmp_path / "cut.png"])
    assert cut[1].startswith("unreadable")
    for one, (path, name, *shares) in zip(found, lines, strict=True):
        told = {share.rpartition(" ")[0]: float(share.rpartition(" ")[2]) for share in shares}
        assert (one.image, one.class_name) == (path, name)
        assert told == pytest.approx(one.probabilities, abs=1e-5)


def test_public_files_alone_enter_and_no_path_of_the_machine(run, exported):
    (run / "notes.txt").write_text("of the owner")
    there = {path.name for path in exported.iterdir()}
    assert there <= {*OF_THE_RUN, *MADE} and {"model.onnx", "predict.py", "README.md", "PRIVACY.md"} <= there
    public = {name for name in OF_THE_RUN if (run / name).exists()}
    assert public <= there and (run / "owner").is_dir()
    for name in public - {"result.json"}:
        assert (exported / name).read_bytes() == (run / name).read_bytes()
    places = [str(run.parent), str(Path(sfumato.__file__).parent), sys.prefix, str(Path.home())]
    for path in exported.iterdir():
        assert not [place for place in places if place.encode() in path.read_bytes()], path.name
    done = subprocess.run(["sha256sum", "-c", "SHA256SUMS"], cwd=exported, capture_output=True, text=True)
    assert done.returncode == 0 and done.stdout.count(": OK") == len(there) - 1


def test_nothing_is_written_over_and_nothing_is_left_of_an_export_that_fails(run, exported, tmp_path, monkeypatch):
    with pytest.raises(InputError, match="is there already"):
        sfumato.export(run, exported)
    monkeypatch.setattr(cards, "write", lambda *args, **keys: (_ for _ in ()).throw(KeyboardInterrupt))
    with pytest.raises(KeyboardInterrupt):
        sfumato.export(run, tmp_path / "new")
    assert not any(tmp_path.iterdir())
    with pytest.raises(InputError, match="there is no folder"):
        sfumato.export(tmp_path / "nothing", tmp_path / "new")
    with pytest.raises(InputError, match="lies in the run's folder"):
        sfumato.export(run, run / "new")


def test_both_cards_tell_what_the_files_tell_and_no_name_becomes_markup(run, exported):
    text = (exported / "README.md").read_text()
    head = yaml.safe_load(text.split("---\n")[1])
    certificate = record.read(run / "privacy.json", record.Certificate)
    assert head["license"] == "cc-by-4.0" and head["library_name"] == "onnx"
    assert head["differential_privacy"] == {"epsilon": certificate.epsilon, "delta": 1e-4, "unit": "one image"}
    result, tested = (json.loads((run / name).read_text()) for name in ("result.json", "evaluation.json"))
    told = [each["metrics"][0]["value"] for each in head["model-index"][0]["results"]]
    assert told == [result["accuracy"], tested["accuracy"]]
    for card in (text, (exported / "PRIVACY.md").read_text()):
        assert ABOUT.data is not None and "Drawn \\| by a \\*program\\*." in card
        assert "<checks>" not in card and all(line in card for line in certificate.not_covered)
    assert "&lt;checks&gt;" in text


@pytest.mark.parametrize(
    "change",
    [
        {"private": False, "why_not_private": "its seed is public", "epsilon": None},
        {"unit": "one person, with up to 3 images", "max_images_per_person": 3, "person_groups": "as told"},
        {"max_images_per_person": 3, "epsilon_person": 20.0},
    ],
)
def test_cards_can_be_written_of_every_kind_of_run(run, tmp_path, change):
    certificate = record.read(run / "privacy.json", record.Certificate).model_copy(update=change)
    for name in ("recipe.toml", "result.json"):
        shutil.copy(run / name, tmp_path)
    record.write(tmp_path / "privacy.json", certificate)
    cards.write(tmp_path, dataclasses.replace(load(run), calibration=None), cards.About(), None, "x")
    text = (tmp_path / "PRIVACY.md").read_text()
    assert ("There is no guarantee: its seed is public." in text) == (not certificate.private)
    assert (certificate.unit in text.lower()) == certificate.private or "None" not in text
    yaml.safe_load((tmp_path / "README.md").read_text().split("---\n")[1])


CLASSES = ("a", "b", "c")


def trained(model, shape, classes=CLASSES, calibration=None, proportions=None, **recipe):
    """As if read from a run."""
    decoding = {"mean": (0.4,) * shape[0], "std": (0.3,) * shape[0], "resize_ratio": 1.0, "resize": "crop"}
    parts = {"recipe": recipe.get("recipe"), "objective": Objective(proportions), "classes": classes, "shape": shape}
    return Trained(model=model.eval(), decoding=decoding, calibration=calibration, **parts)


def calibrated(**facts):
    told = CalibrationFacts(temperature=0.3, fitted_on="folder", num_images=60).model_dump() | facts
    return Calibration.model_validate(told)


def above(share):
    return Threshold(positive="b", probability=share, aim="sensitivity", at=0.9)


SHARES = (0.1, 0.6, 0.3)
DECISIONS = {
    "not calibrated": (3, None, None),
    "not calibrated, proportions": (3, None, SHARES),
    "temperature": (3, calibrated(), None),
    "shifts": (3, calibrated(shifts=[0.5, -0.4, -0.1]), None),
    "offsets": (3, calibrated(offsets=Objective(SHARES).offsets, shifts=[0.5, -0.4, -0.1]), SHARES),
    "threshold": (2, calibrated(threshold=above(0.4)), None),
    "threshold and proportions": (2, calibrated(offsets=[0.5, -0.5], threshold=above(0.7)), (0.2, 0.8)),
    "nobody": (2, calibrated(temperature=1e-3, threshold=above(1 + 1e-9)), None),
    "everybody": (2, calibrated(threshold=above(0.0)), None),
}


@pytest.mark.parametrize(("kind", "channels"), [*zip(DECISIONS, itertools.cycle([1, 3]))])
def test_what_is_deployed_decides_as_the_library_does(kind, channels):
    count, calibration, proportions = DECISIONS[kind]
    model = build("small_cnn", image_size=16, channels=channels, num_classes=count, seed=1)
    made = trained(model, (channels, 16, 16), CLASSES[:count], calibration, proportions)
    pixels = trial_images(made, 200)
    assert pixels.dtype == (torch.uint16 if channels == 1 else torch.uint8) and pixels.shape == (200, 16, 16, channels)
    with torch.no_grad():
        classes, shares = Deployed(made)(pixels)
        images = pixels.double() / (65535 if channels == 1 else 255)
        outputs = model(((images - 0.4) / 0.3).float().permute(0, 3, 1, 2))
    logits = made.objective.decision_logits(outputs)
    told = calibration or calibrated(temperature=1.0)
    assert (classes == told.decided(logits, made.classes)).float().mean() > 0.98  # roundings at the edge
    roundings = 1e-5 * max(1.0, 0.1 / told.temperature)
    torch.testing.assert_close(shares, told.probabilities(logits).float(), atol=roundings, rtol=0)
    assert len(classes.unique()) > 1 or kind in ("nobody", "everybody")


def test_standardised_kernels_are_folded_and_the_run_keeps_its_own():
    model = build("wide_resnet", image_size=16, channels=3, num_classes=3, options={"depth": 10, "width": 1}, seed=0)
    plain, images = folded(model), torch.randn(2, 3, 16, 16)
    assert any(isinstance(module, WeightStandardizedConv2d) for module in model.modules())
    assert not any(isinstance(module, WeightStandardizedConv2d) for module in plain.modules())
    torch.testing.assert_close(plain(images), model.eval()(images), atol=1e-6, rtol=1e-6)


@pytest.mark.parametrize(
    ("name", "size", "channels", "change", "why"),
    [
        ("timm:test_resnet", 32, 3, {}, None),
        ("timm:test_vit", 32, 3, {}, None),
        ("timm:test_resnet", 32, 1, {}, None),
        ("timm:test_resnet", 32, 3, {"fix": "groupnorm"}, "normalisation was replaced"),
        ("timm:test_resnet", 32, 3, {"features": "unit"}, "features of length 1"),
        ("small_cnn", 32, 3, {}, "timm has no network small_cnn"),
    ],
)
def test_timm_builds_the_same_network_or_one_line_says_why_not(tmp_path, name, size, channels, change, why):
    model = build(name, image_size=size, channels=channels, num_classes=3, seed=0, fix=change.get("fix"))
    recipe = config.parse({"data": {"name": "folder"}, "model": {"name": name, **change}})
    made = trained(model, (channels, size, size), recipe=recipe)
    safetensors.torch.save_file(model.state_dict(), tmp_path / "model.safetensors")
    said = timm_folder.write(made, tmp_path)
    assert said is None if why is None else why in said
    assert (tmp_path / "config.json").exists() == (why is None)
    assert timm_folder.findings(made, tmp_path) == []
    if why is None:
        theirs = timm.create_model(f"local-dir:{tmp_path}", pretrained=True).eval()
        images = torch.randn(2, channels, size, size)
        assert torch.equal(theirs(images), model(images))
        data = timm.data.resolve_model_data_config(theirs)
        assert (data["mean"], data["std"], data["input_size"]) == ([0.4] * channels, [0.3] * channels, made.shape)
        assert theirs.pretrained_cfg["label_names"] == list(CLASSES)
