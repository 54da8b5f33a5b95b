"""Images that may have several labels, of which some are unknown: from the table to predictions."""

import csv
import json
import re
import shlex
import shutil
import subprocess
import sys

import numpy as np
import pytest
import torch
from PIL import Image
from sklearn.metrics import roc_auc_score
from torch.nn import functional as F

import sfumato
from sfumato import cli
from sfumato.clipping import clipped_grad
from sfumato.config import DataConfig
from sfumato.data import layouts, objects
from sfumato.errors import InputError
from sfumato.evaluation.augtest import decide_together
from sfumato.evaluation.calibration import uncalibrated
from sfumato.evaluation.evaluate import calibrate
from sfumato.evaluation.evaluators import Outcome, auroc_of_each, confusion, intervals, reliability
from sfumato.evaluation.scores import Objective, score
from sfumato.exporting.verify import check
from sfumato.models import registry
from tests.data.conftest import refused

LABELS = ["left", "right", "dot"]
SETTINGS = {
    "data.classes": LABELS,
    "data.image_size": 12,
    "data.channels": 1,
    "model.name": "small_cnn",
    "privacy.noise_multiplier": 0.2,
    "privacy.delta": 1e-4,
    "training.batch_size": 48,
    "training.num_steps": 20,
}


def pictures(count, seed):
    """Bars at the left and at the right, and a dot in the middle, and which of them there are: (N, 3)."""
    rng = np.random.default_rng(seed)
    labels, images = rng.integers(0, 2, (count, 3)), rng.integers(0, 90, (count, 12, 12), dtype=np.uint8)
    images[labels[:, 0] == 1, :, 1:3] = 255
    images[labels[:, 1] == 1, :, 9:11] = 255
    images[labels[:, 2] == 1, 5:7, 5:7] = 255
    return images, labels


def write(root, header, rows, name="labels.csv"):
    with (root / name).open("w", newline="") as file:
        csv.writer(file).writerows([header, *rows])


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """240 images to train on, a third of whose labels are unknown, and 80 others."""
    root, rows, rng = tmp_path_factory.mktemp("several"), [], np.random.default_rng(2)
    for part, count in (("train", 240), ("test", 80)):
        (root / part).mkdir()
        for place, (image, labels) in enumerate(zip(*pictures(count, len(part)), strict=True)):
            name = f"{part}/{place:03}.png"
            Image.fromarray(image).save(root / name)
            cells = [str(cell) if rng.random() > (part == "train") / 3 else rng.choice(["", "-1"]) for cell in labels]
            rows.append([name, *cells])
    write(root, ["file", *LABELS], rows)
    return root


@pytest.fixture(scope="module")
def run(folder, tmp_path_factory):
    place = tmp_path_factory.mktemp("runs") / "run"
    sfumato.train("image-folder", place, settings=SETTINGS, data_root=folder)
    return place


def test_a_run_learns_every_label_though_a_third_of_them_is_unknown(run, folder):
    result = json.loads((run / "result.json").read_text())
    assert result["auroc"] > 0.9 and len(result["per_class"]) == 3 and result["accuracy"] > result["majority_rate"]
    assert 'task = "multilabel"' in (run / "recipe.toml").read_text()
    found = sfumato.evaluate(run)
    assert found.accuracy == result["accuracy"] and found.auroc == result["auroc"] and found.is_multilabel
    images, labels = pictures(80, len("test"))
    predictions = sfumato.predict(run, [folder / "test" / f"{place:03}.png" for place in range(80)])
    named = np.array([[name in each.labels for name in LABELS] for each in predictions])
    assert found.accuracy == pytest.approx((named == labels).mean()) and predictions[0].class_name is None
    shares = np.array([list(each.probabilities.values()) for each in predictions])
    assert np.array_equal(shares > 0.5, named) and list(predictions[0].probabilities) == LABELS
    assert found.auroc_per_class == pytest.approx(list(roc_auc_score(labels, shares, average=None)))
    assert found.auroc == pytest.approx(roc_auc_score(labels, shares))
    cells = [2 * own + to for own, to in zip(labels.T, named.T, strict=True)]
    assert found.confusion == [np.bincount(each, minlength=4).tolist() for each in cells]
    low, high = found.intervals.auroc
    assert low <= found.auroc <= high and len(found.intervals.auroc_per_class) == 3


def test_it_is_calibrated_and_told_of_in_words_and_in_the_report(run, folder, tmp_path, capsys):
    own, others, rows = shutil.copytree(run, tmp_path / "run"), tmp_path / "others", []
    others.mkdir()
    for place, (image, labels) in enumerate(zip(*pictures(60, 9), strict=True)):
        Image.fromarray(image).save(others / f"{place}.png")
        rows.append([f"{place}.png", "|".join(name for name, has in zip(LABELS, labels, strict=True) if has)])
    write(others, ["file", "label"], rows)
    calibrate(own)
    assert sfumato.evaluate(own).num_fitted_on == 80  # held out, not what lies beside them
    assert calibrate(own, others).is_multilabel and sfumato.load(own).is_calibrated
    assert cli.run(["evaluate", str(own), str(others), "--report"]) == 0
    told = capsys.readouterr().out
    assert all(f"  {name}" in told for name in LABELS) and "AUROC" in told and "taken for" not in told
    assert ">label<" in (own / "report.html").read_text()
    assert cli.run(["predict", str(own), str(folder / "test" / "000.png"), "--format", "csv"]) == 0
    assert capsys.readouterr().out.splitlines()[0] == "image,class,probability,why,left,right,dot"


def test_each_label_has_a_threshold_of_its_own_which_every_answer_takes(run, tmp_path, capsys):
    """Of the command, evaluation, the model's answers and its export; one that few images tell of has none."""
    own, others, rows = shutil.copytree(run, tmp_path / "run"), tmp_path / "others", []
    others.mkdir()
    images, labels = pictures(120, 5)
    labels[::6] = 1 - labels[::6]  # so that no threshold tells all apart
    for place, (image, cells) in enumerate(zip(images, labels, strict=True)):
        Image.fromarray(image).save(others / f"{place:03}.png")
        rows.append([f"{place:03}.png", "ABC"[place % 3], *cells[:2], cells[2] if place < 15 else -1])
    write(others, ["file", "ward", *LABELS], rows)
    assert cli.run(["calibrate", str(own), str(others), "--sensitivity", "0.9"]) == 0
    told = capsys.readouterr()
    assert "left from probability" in told.out and "few to find a sensitivity for dot" in told.err
    left, right, dot = sfumato.load(own).trained.calibration.thresholds
    assert (left.positive, right.positive, dot) == ("left", "right", None)
    found = sfumato.evaluate(own, others, by="ward", publish=True)
    files = [others / f"{place:03}.png" for place in range(120)]
    answers = sfumato.predict(own, files)
    shares = np.array([list(each.probabilities.values()) for each in answers])
    expected = shares >= np.array([left.probability, right.probability, np.nextafter(0.5, 1)])
    named = np.array([[name in each.labels for name in LABELS] for each in answers])
    assert np.array_equal(named, expected) and not np.array_equal(named, shares > 0.5)
    for place, decision in enumerate(found.decisions):
        known = np.arange(120) < (15 if place == 2 else 120)
        has, says = labels[known, place] == 1, named[known, place]
        assert decision.sensitivity == pytest.approx(says[has].mean()) and (place == 2 or decision.sensitivity >= 0.9)
        assert decision.specificity == pytest.approx((~says[~has]).mean())
        low, high = decision.specificity_interval
        assert low <= decision.specificity <= high
    for group in found.groups:
        inside = np.arange(120) % 3 == "ABC".index(group.value)
        right_of = [
            named[inside & mask, at] == labels[inside & mask, at] for at, mask in enumerate([True, True, known])
        ]
        assert group.accuracy == pytest.approx(np.concatenate(right_of).mean()) and group.auroc is not None
    copy = shutil.copytree(own, tmp_path / "copy", ignore=shutil.ignore_patterns("owner", "calibration.json"))
    assert "each label is named from 0.5 on" in sfumato.evaluation.classifier.Classifier(copy).missing_threshold
    assert sfumato.evaluation.classifier.Classifier(own).missing_threshold is None
    assert cli.run(["export", str(own), "--output", str(tmp_path / "export")]) == 0
    assert check(tmp_path / "export").valid
    card = (tmp_path / "export" / "README.md").read_text()
    assert "of each of 3 labels" in card
    words = " ".join(card.split())
    assert "its labels, and probabilities. Any" in words and "`class` (of each label 1 or 0) and" in words
    assert re.search(r"would reach [\d.]+ %\. AUROC 0\.\d{4}\.", words)
    head = card.index("| label | known of | AUROC, 95 % | named from |")
    table = card[head:].splitlines()[:5]
    assert {line.count("|") for line in table} == {8} and table[1].startswith("| --- | --- |")
    assert [line.split("|")[1].strip() for line in table[2:]] == LABELS
    told = subprocess.run(
        [sys.executable, "predict.py", *map(str, files)], cwd=tmp_path / "export", capture_output=True, text=True
    )
    lines = [line.split("\t")[1] for line in told.stdout.splitlines()]
    assert lines == ["|".join(each.labels) for each in answers], told.stderr


def test_views_of_an_image_decide_each_label_together(folder, tmp_path):
    settings = SETTINGS | {"augmentation.kind": "crop", "augmentation.test_views": 3, "training.num_steps": 4}
    result = sfumato.train("image-folder", tmp_path / "run", settings=settings, data_root=folder)
    assert 0 < result.accuracy_augtest_vote <= 1 and result.test_views == 3
    logits = torch.tensor([[[2.0, -1.0], [-1.0, -1.0], [-0.5, 0.5]], [[0.1, 3.0], [0.1, -1.0], [-9.0, -1.0]]])
    vote, mean = decide_together(logits, uncalibrated(is_multilabel=True))
    assert vote.tolist() == [[0, 0], [1, 0]]
    assert mean.tolist() == (logits.sigmoid().mean(1) > 0.5).long().tolist()
    even = decide_together(torch.tensor([[[3.0, -3.0], [-1.0, 1.0]]]), uncalibrated(is_multilabel=True))
    assert even[0].tolist() == even[1].tolist() == [[1, 0]]  # as many for it as against it: the mean decides


def test_arrays_give_what_the_table_gives(folder, tmp_path):
    lines = (folder / "labels.csv").read_text().splitlines()
    rows = {row["file"]: row for row in csv.DictReader(lines)}
    given = {}
    for key, part, count in (("data", "train", 240), ("test", "test", 80)):
        images, _ = pictures(count, len(part))
        of = [[int(rows[f"{part}/{place:03}.png"][name] or -1) for name in LABELS] for place in range(count)]
        given[key] = images, np.array(of)
    settings, of_arrays = SETTINGS | {"run.seed": 1, "training.num_steps": 3}, tmp_path / "arrays"
    asked = settings | {"data.task": "multilabel"}
    one = sfumato.train("image-folder", of_arrays, settings=asked, **given)
    other = sfumato.train("image-folder", tmp_path / "folder", settings=settings, data_root=folder)
    assert (one.auroc, one.accuracy) == (other.auroc, other.accuracy)
    assert sfumato.evaluate(of_arrays, given["test"]).auroc == one.auroc
    part = objects._Part([(None, [])], "data")
    assert part.findings([], LABELS, "data[0]") == (0, 0, 0)  # the names that it has: none
    refused("Give 3 numbers", part.findings, np.zeros(0), LABELS, "data[0]")
    wrong = given["data"][0], given["data"][1] + 2
    refused("Give 3 numbers", sfumato.train, "image-folder", tmp_path / "wrong", settings=asked, data=wrong)


@pytest.mark.parametrize(("engine", "augmult"), [("graph", 0), ("graph", 3), ("func", 3), ("reference", 0)])
def test_each_image_is_clipped_as_a_whole_by_the_mean_over_what_is_known_of_it(engine, augmult):
    torch.manual_seed(0)
    model = registry.build("small_cnn", image_size=8, channels=1, num_classes=4, options={}, seed=0).double()
    inputs = torch.randn(5, *([augmult] if augmult else []), 1, 8, 8, dtype=torch.float64)
    labels = torch.tensor([[1, 0, -1, 1], [-1, -1, -1, -1], [0, 0, 0, 0], [-1, 1, -1, -1], [1, 1, 1, 0]])
    loss = Objective(is_multilabel=True).loss
    grad_fn = clipped_grad(model, loss, clipping_norm=0.1, augmult=augmult, engine=engine, microbatch_size=2)
    found, total = grad_fn(inputs, labels), {name: 0.0 for name, _ in model.named_parameters()}
    for image, row in zip(inputs, labels, strict=True):
        known = row >= 0
        if not known.any():
            continue
        views = image if augmult else image[None]
        each = F.binary_cross_entropy_with_logits(
            model(views)[:, known], row[known].double().expand(len(views), -1), reduction="none"
        )
        grads = torch.autograd.grad(each.mean(1).mean(), list(model.parameters()))
        norm = torch.stack([grad.norm() for grad in grads]).norm()
        for name, grad in zip(total, grads, strict=True):
            total[name] = total[name] + grad / max(norm, 0.1)
    assert grad_fn.engine == engine and found.grad_norms[1] < 1e-100
    for name, value in total.items():
        torch.testing.assert_close(found.grad_sum[name], value, rtol=1e-6, atol=1e-9)


def test_what_is_unknown_counts_nowhere():
    generator = torch.Generator().manual_seed(0)
    logits, labels = torch.randn(90, 3, generator=generator), torch.randint(2, (90, 3), generator=generator)
    hidden = labels.clone()
    hidden[torch.rand(90, 3, generator=generator) < 0.4] = -1
    found = score(logits, hidden)
    known = [hidden[:, place] >= 0 for place in range(3)]
    right = [((logits[:, place] > 0) == labels[:, place])[mask].double().mean() for place, mask in enumerate(known)]
    assert found.per_class == pytest.approx([float(value) for value in right])
    areas = [roc_auc_score(labels[mask, place], logits[mask, place]) for place, mask in enumerate(known)]
    outcome = Outcome(logits.double(), hidden, LABELS)
    assert dict(auroc_of_each(outcome))["auroc_per_class"] == pytest.approx(areas)
    assert found.auroc == pytest.approx(np.mean(areas))
    assert [sum(row) for row in dict(confusion(outcome))["confusion"]] == [int(mask.sum()) for mask in known]
    told = dict(reliability(outcome))
    assert sum(part.num_images for part in told["reliability"]) == int((hidden >= 0).sum())
    never = hidden.clone()
    never[:, 1] = -1
    told = dict(intervals(Outcome(logits.double(), never, LABELS)))["intervals"]
    assert score(logits, never).per_class[1] is None and told.auroc_per_class[1] is None and told.auroc


def test_intervals_are_of_people_with_all_their_images_and_labels():
    """Copies of an image of one person say no more than one does."""
    generator = torch.Generator().manual_seed(1)
    logits, labels = torch.randn(60, 2, generator=generator), torch.randint(2, (60, 2), generator=generator)
    once = dict(intervals(Outcome(logits.double(), labels, LABELS[:2])))["intervals"]
    people = [str(image) for image in range(60) for _ in range(5)]
    copies = Outcome(logits.double().repeat_interleave(5, 0), labels.repeat_interleave(5, 0), LABELS[:2], people=people)
    again = dict(intervals(copies))["intervals"]
    for one, other in ((once.auroc, again.auroc), *zip(once.auroc_per_class, again.auroc_per_class, strict=True)):
        assert one == pytest.approx(other, abs=0.03)
    assert once.accuracy == pytest.approx(again.accuracy, abs=0.02)


JOINED = [["a.png", "left|dot"], ["b.png", "No Finding"], ["c.png", ""], ["d.png", "right; dot"], ["e.png", "left"]]


@pytest.fixture
def five(tmp_path):
    for image, _ in JOINED:
        Image.new("L", (12, 12)).save(tmp_path / image)
    return tmp_path


def listed(root, **settings):
    config = DataConfig(name="folder", classes=LABELS, **settings)
    files = layouts.list_images(config, root, lambda line: None)
    layouts.classes_of(config, root, files)
    return {file.name: file.findings for file in files}


def test_labels_with_signs_between_are_read_where_that_is_asked_for(five):
    write(five, ["file", "label"], JOINED)
    found = listed(five, task="multilabel")
    assert found == {
        "a.png": (1, 0, 1),
        "b.png": (0, 0, 0),
        "c.png": (0, 0, 0),
        "d.png": (0, 1, 1),
        "e.png": (1, 0, 0),
    }


def test_a_column_for_each_label_is_read_as_spreadsheets_write_it(five):
    cells = [["1", "0", ""], ["1.0", "0.0", "-1.0"], ["", "", ""], ["0", "-1", "1"], ["0", "0", "0"]]
    rows = [[image, *own] for (image, _), own in zip(JOINED, cells, strict=True)]
    write(five, ["file", "right", "left", "dot"], rows)
    found = listed(five)
    assert list(found.values()) == [(0, 1, -1), (0, 1, -1), (-1, -1, -1), (-1, 0, 1), (0, 0, 0)]


def test_a_table_with_a_class_for_each_image_is_of_classes_though_it_has_a_column_for_each_too(five):
    rows = [[image, "left", "1", "0", "1"] for image, _ in JOINED]
    write(five, ["file", "label", *LABELS], rows)
    assert set(listed(five).values()) == {None} and set(listed(five, task="multilabel").values()) == {(1, 0, 1)}


def test_json_says_labels_in_every_way_that_json_has_and_what_says_none_is_refused(five):
    def write_json(cells):
        lines = [json.dumps({"file_name": image, **cells}) for image, _ in JOINED]
        (five / "metadata.jsonl").write_text("\n".join(lines))

    for cells, means in (
        ({"left": 1, "right": 0, "dot": None}, (1, 0, -1)),
        ({"left": True, "right": False, "dot": -1}, (1, 0, -1)),
        ({"left": 1.0, "right": 0.0, "dot": "1"}, (1, 0, 1)),  # as tables write what has gaps
        ({"label": ["left", "dot"]}, (1, 0, 1)),
        ({"label": []}, (0, 0, 0)),
    ):
        write_json(cells)
        assert set(listed(five, task="multilabel").values()) == {means}
    for cell in (0.5, {"a": 1}, [1, 0]):
        write_json({"left": 1, "right": 0, "dot": cell})
        refused("line 1: dot is .*Write a text or a whole number", listed, five)


def test_a_path_of_another_table_means_the_image_whose_whole_path_it_ends_in_or_that_ends_in_it(tmp_path):
    def image_of(*rows):
        write(tmp_path, ["Path", "Finding Label"], [[row, "left"] for row in rows], "Data.csv")
        return [*listed(tmp_path, tables=["Data.csv"])]

    def add(folder):
        (tmp_path / folder).mkdir()
        Image.new("L", (12, 12)).save(tmp_path / folder / "a.png")

    add("p1")
    # Folders that the table does not tell, or that are not here.
    for row in ("a.png", "p1/a.png", "archive/v1/p1/a.png", "p1\\a.png"):
        assert image_of(row) == ["p1/a.png"]
    for row in ("p2/a.png", "archive/p2/a.png"):  # another image of the same name
        refused("a.png is not in .*Data.csv", image_of, row)
    add("p2")  # of two that it may mean neither is meant
    refused("p2/a.png is not in .*Data.csv", image_of, "a.png", "p1/a.png")


@pytest.mark.parametrize("unknown", ["train", "test"])
def test_a_part_of_which_no_label_is_known_is_refused_before_anything_is_written(folder, tmp_path, unknown):
    root = shutil.copytree(folder, tmp_path / "images")
    header, *rows = csv.reader((root / "labels.csv").read_text().splitlines())
    write(root, header, [[row[0], "", "", "-1"] if row[0].startswith(unknown) else row for row in rows])
    how = {"settings": SETTINGS, "data_root": root}
    refused("not one label is known of the", sfumato.train, "image-folder", tmp_path / "run", **how)
    assert not (tmp_path / "run").exists()


def test_images_of_which_no_label_is_known_judge_nothing(run, folder, tmp_path):
    others, rows = tmp_path / "others", []
    others.mkdir()
    for place, ward in enumerate("AABB"):
        shutil.copy(folder / "test" / f"{place:03}.png", others / f"{place}.png")
        rows.append([f"{place}.png", ward, *(["1", "0", ""] if ward == "A" else ["", "-1", ""])])
    write(others, ["file", "ward", *LABELS], rows)
    assert [group.value for group in sfumato.evaluate(run, others, by="ward").groups] == ["A"]
    write(others, ["file", "ward", *LABELS], [[*row[:2], "", "", ""] for row in rows])
    refused("not one label is known of these images", sfumato.evaluate, run, others)


def test_an_interval_is_of_the_number_that_it_stands_beside():
    """A label that is known of many images and one that is known of few."""
    labels = torch.full((1000, 2), -1)
    labels[:, 0], labels[:50, 1] = 1, 1
    logits = torch.ones(1000, 2, dtype=torch.float64)
    logits[::2, 0] = -1
    outcome = Outcome(logits, labels, LABELS[:2])
    low, high = outcome.interval()
    assert low < score(logits, labels).accuracy < high


def test_what_cannot_be_meant_is_refused(tmp_path):
    Image.new("L", (12, 12)).save(tmp_path / "a.png")
    for columns, cells, settings, why in (
        (["label"], ["left|dot"], {}, "--set data.task=multilabel"),
        (["label"], ["left|dots"], {"task": "multilabel"}, "the label dots, which is not in"),
        (LABELS, ["1", "2", "0"], {}, "right is '2'. Write 1, 0"),
        (["left", "right"], ["1", "0"], {}, "one for each of data.classes: there is none for dot"),
        (LABELS, ["1", "0", "0"], {"task": "classes"}, "needs one column 'file'.* 'label'"),
    ):
        write(tmp_path, ["file", *columns], [["a.png", *cells]])
        refused(why, listed, tmp_path, **settings)


def test_what_is_for_single_classes_is_refused(folder, tmp_path):
    for own in ({"data.class_proportions": [0.2, 0.3, 0.5]}, {"training.label_smoothing": 0.1}, {"audit.canaries": 10}):
        how = {"settings": SETTINGS | own, "data_root": folder}
        refused("these have several labels", sfumato.train, "image-folder", tmp_path / "run", **how)


def clinic(root, kind):
    """CheXpert's and NIH's folders as they unpack, generated: (settings that name persons, findings of the first)."""
    rng = np.random.default_rng(0)

    def image(name):
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        Image.fromarray(rng.integers(0, 255, (12, 12), dtype=np.uint8)).save(path)

    if kind == "chexpert":
        columns = ["Path", "Sex", "Age", "Frontal/Lateral", "AP/PA", "No Finding", "Cardiomegaly", "Edema"]
        for part, people in (("train", range(1, 13)), ("valid", range(64541, 64545))):
            rows = []
            for person in people:
                for view in ("view1_frontal.jpg", "view2_lateral.jpg"):
                    name = f"{part}/patient{person:05}/study1/{view}"
                    image(name)
                    cells = ["Female", 68, view[6:-4].title(), "AP", *rng.choice(["", "0.0", "1.0", "-1.0"], 3)]
                    rows.append([f"CheXpert-v1.0-small/{name}", *cells])
            write(root, columns, rows, f"{part}.csv")
        return "(patient[0-9]+)"
    columns = ["Image Index", "Finding Labels", "Follow-up #", "Patient ID", "Patient Age"]
    labels = ["No Finding", "Cardiomegaly|Edema", "Edema", "Cardiomegaly", "No Finding"]
    rows = []
    for person in range(40):
        rows += [[f"{person:08}_{view:03}.png", labels[person % 5], view, person, 58] for view in (0, 1)]
    for place, row in enumerate(rows[:-2]):  # a part of the archives is there
        image(f"images_00{1 + place % 2}/images/{row[0]}")
    write(root, columns, rows, "Data_Entry_2017.csv")
    (root / "test_list.txt").write_text("00000001_000.png\n")
    (root / "README_CHESTXRAY.pdf").write_bytes(b"%PDF")
    return "Patient ID"


@pytest.mark.parametrize("kind", ["chexpert", "nih"])
def test_folders_of_clinics_are_read_as_they_unpack_after_one_remedy(tmp_path, kind):
    root = tmp_path / "images"
    person = clinic(root, kind)
    settings = {key: value for key, value in SETTINGS.items() if key != "data.classes"} | {"training.num_steps": 1}
    settings["training.batch_size"] = 8
    settings |= {"data.group_by": person, "privacy.unit": "person", "privacy.max_images_per_person": 2}
    with pytest.raises(InputError) as refusal:
        sfumato.train("image-folder", tmp_path / "run", settings=settings, data_root=root)
    words = shlex.split(str(refusal.value).partition("as it is: ")[2])
    remedy = dict(word.split("=", 1) for word in words[1::2])
    said = {key: json.loads(value) if value.startswith("[") else value for key, value in remedy.items()}
    assert words[::2] == ["--set"] * len(remedy) and {"Cardiomegaly", "Edema"} <= set(said["data.classes"])
    result = sfumato.train("image-folder", tmp_path / "run", settings=settings | said, data_root=root)
    assert "one person" in result.unit and (tmp_path / "run" / "model.safetensors").exists()
    if kind != "chexpert":  # in one table
        facts = json.loads((tmp_path / "run" / "privacy.json").read_text())["public_inputs"]
        assert facts["num_people"] + facts["num_held_out"] / 2 == 39
        groups = sfumato.evaluate(tmp_path / "run", root, by="Follow-up #").groups
        assert [(group.value, group.num_images) for group in groups] == [("0", 39), ("1", 39)]


def test_a_table_of_one_finding_each_or_none_is_of_several_labels_by_its_remedy(tmp_path):
    rows = [["a.png", "dot"], ["b.png", "No Finding"], ["c.png", "left"]]
    for name, _ in rows:
        Image.new("L", (12, 12)).save(tmp_path / name)
    write(tmp_path, ["Image Index", "Finding Labels"], rows, "Data_Entry.csv")
    refused('"dot", "left".*--set data.task=multilabel$', listed, tmp_path)
    assert listed(tmp_path, tables=["Data_Entry.csv"], task="multilabel")["b.png"] == (0, 0, 0)
