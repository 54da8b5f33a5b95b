"""Using what was trained: answers for images as people have them, calibration, the library's two lines, resume."""

import csv
import io
import json
import shutil
import signal
import tarfile
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

import sfumato
from sfumato.errors import InputError
from sfumato.evaluation.evaluate import _trained_on
from sfumato.evaluation.scores import wilson
from sfumato.evaluation.trained import load
from sfumato.reporting.page import write_report
from sfumato.reporting.tested import in_words
from sfumato.reporting.wording import who_guesses
from sfumato.run_folder.files import DATA_ROOT_FILE
from sfumato.run_folder.record import Certificate
from sfumato.run_folder.verification import verify_run
from tests.cli.test_cli import call, json_of, photos, refused
from tests.cli.test_cli import settings as given
from tests.training import faults
from tests.training.test_resume import wait_for_release

QUICK = {"data.image_size": 16, "data.channels": 1, "training.num_steps": 20, "training.batch_size": 120}


@pytest.fixture(scope="module")
def images(tmp_path_factory):
    return photos(tmp_path_factory.mktemp("photos") / "own", 200, seed=0)


@pytest.fixture(scope="module")
def unseen(tmp_path_factory):
    return photos(tmp_path_factory.mktemp("photos") / "unseen", 300, seed=1)


@pytest.fixture(scope="module")
def run(images, tmp_path_factory):
    folder = tmp_path_factory.mktemp("runs") / "photos"
    result = sfumato.train("image-folder", folder, data_root=str(images), epsilon=8, settings=QUICK)
    assert result.epsilon <= 8 and result.private
    return folder


@pytest.fixture
def own(run, tmp_path):
    """A copy that may be written to."""
    return shutil.copytree(run, tmp_path / "photos")


def test_two_lines_answer_for_an_image(run, unseen):
    classifier = sfumato.load(str(run))
    answer = classifier.predict(str(unseen / "checks/0.png"))
    assert answer.class_name in classifier.classes == ("checks", "stripes") and 0.5 <= answer.probability <= 1
    assert isinstance(classifier.certificate, Certificate) and classifier.certificate.epsilon <= 8
    paths = [unseen / "checks/0.png", unseen / "stripes/1.png"]
    rows = classifier.predict_proba(paths)
    assert rows.shape == (2, 2) and np.allclose(rows.sum(1), 1)
    assert [row.probabilities["checks"] for row in classifier.predict(paths)] == rows[:, 0].tolist()
    with pytest.raises(InputError, match="is a folder"):
        classifier.predict(unseen)


def test_an_image_in_memory_is_what_its_file_is(run, unseen):
    classifier, path = sfumato.load(run), unseen / "checks/0.png"
    truth = classifier.predict(path)
    opened = Image.open(path)
    array = np.asarray(opened)
    tensor = torch.from_numpy(array.copy())
    tensor = tensor.movedim(-1, 0) if tensor.ndim == 3 else tensor
    for image in (opened, array, tensor, tensor / 255):
        found = classifier.predict(image)
        assert (found.class_name, found.probabilities) == (truth.class_name, truth.probabilities)
    both = classifier.predict([path, opened])
    assert [row.image for row in both] == [str(path), "image 1"]
    for image in (3, np.zeros((4, 4)), torch.full((3, 4, 4), 2.0), None):
        with pytest.raises(InputError, match="is no image: give a file, a PIL image"):
            classifier.predict(image)
    for mode in ("PA", "RGBa", "RGBX", "CMYK"):
        assert classifier.predict(Image.new(mode, (8, 8))).class_name
    with pytest.raises(InputError, match="cannot be written as PNG.* Give it in mode L, I;16, RGB or RGBA"):
        classifier.predict(Image.new("F", (8, 8)))
    noise = Image.fromarray(np.random.default_rng(0).integers(0, 256, (99, 99), dtype=np.uint8))
    noise.save(whole := io.BytesIO(), "JPEG")
    with pytest.raises(InputError, match=r"image 0 cannot be decoded: .*truncated.* whole\.$"):
        classifier.predict(Image.open(io.BytesIO(whole.getvalue()[:2000])))


def test_one_bad_file_stops_no_other_and_says_why(run, unseen, tmp_path, capsys, monkeypatch):
    bad = tmp_path / "bad.png"
    bad.write_bytes(b"\x89PNG broken")
    note = tmp_path / "notes.docx"
    note.write_text("x")
    good = [unseen / "checks/0.png", unseen / "stripes/0.png"]
    words = [good[0], bad, tmp_path / "gone.png", note, good[1]]
    rows = json_of(capsys, "predict", run, *words)["predictions"]
    assert [row["image"] for row in rows] == [str(word) for word in words]
    for key, unread in (("class", True), ("why", False)):
        assert [(row[key] is None) is unread for row in rows] == [False, True, True, True, False]
    assert "does not exist" in rows[2]["why"]
    status, out, err = call(capsys, "predict", run, *words)
    assert status == 0 and out.count("unreadable") == 3 and err.count("cannot be read") == 3
    status, out, _ = call(capsys, "predict", run, *words, "--format", "csv")
    table = list(csv.DictReader(io.StringIO(out)))
    assert [row["image"] for row in table] == [str(word) for word in words]
    assert float(table[0]["checks"]) + float(table[0]["stripes"]) == pytest.approx(1) and table[1]["checks"] == ""
    status, out, _ = call(capsys, "predict", run, *words, "--format", "jsonl")
    assert [json.loads(line) for line in out.splitlines()] == rows
    monkeypatch.setattr("sys.stdin", io.StringIO("".join(f"{word}\n" for word in words)))
    assert json_of(capsys, "predict", run, "-")["predictions"] == rows
    assert "does not exist" in refused(capsys, "predict", run, tmp_path / "gone.png")
    inbox = tmp_path / "inbox"
    inbox.mkdir()
    for path in (good[0], note):
        (inbox / path.name).write_bytes(path.read_bytes())
    rows = json_of(capsys, "predict", run, inbox)["predictions"]
    assert [row["class"] is None for row in rows] == [False, True] and "no known kind" in rows[1]["why"]


def test_no_cell_of_a_table_is_a_formula(run, unseen, tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for name in ("=1+1.png", "-a.png", "b=1.png"):
        Path(name).write_bytes((unseen / "checks/0.png").read_bytes())
    _, out, _ = call(capsys, "predict", run, "--format", "csv", "--", "=1+1.png", "-a.png", "b=1.png")
    assert [row["image"] for row in csv.DictReader(io.StringIO(out))] == ["'=1+1.png", "'-a.png", "b=1.png"]


def test_patterns_and_folders_are_images(run, unseen, capsys):
    by_pattern = json_of(capsys, "predict", run, unseen / "checks" / "1*.png")["predictions"]
    assert len(by_pattern) == 1 + 10 + 100 and all(row["class"] for row in by_pattern)
    assert len(json_of(capsys, "predict", run, unseen)["predictions"]) == 600
    assert "does not exist" in refused(capsys, "predict", run, unseen / "nothing*.png")


def test_probabilities_are_calibrated_or_not_shown(own, unseen, capsys):
    found = json_of(capsys, "evaluate", own, unseen)
    assert found["calibration"]["fitted_on"] == "held-out" and found["calibration_error"] < 0.1
    told = json_of(capsys, "calibrate", own, unseen, "--positive", "checks", "--sensitivity", 0.9)
    assert told["fitted_on"] == "folder" and told["num_images"] == 600 and told["threshold"]["positive"] == "checks"
    again = json_of(capsys, "evaluate", own, unseen, "--prevalence", 0.1)
    assert again["decision"]["sensitivity"] >= 0.9 and again["decision"]["prevalence"] == 0.1
    assert again["calibration_error"] <= 0.05 and again["auroc"] == pytest.approx(found["auroc"])
    rows = json_of(capsys, "predict", own, unseen / "checks")["predictions"]
    assert sum(row["class"] == "checks" for row in rows) >= 270
    status, out, _ = call(capsys, "evaluate", own, unseen)
    assert status == 0 and "false alarms" in out and "sensitivity" in out
    (own / "calibration.json").write_text("{}")
    assert "is damaged" in refused(capsys, "predict", own, unseen / "checks")


def test_a_threshold_travels_with_the_weights_if_its_owner_says_so_and_is_missed_aloud(own, unseen, tmp_path, capsys):
    def copied(name):
        (tmp_path / name).mkdir()
        shutil.copy(own / "model.safetensors", tmp_path / name)
        return tmp_path / name

    before, (certificate, _) = (own / "model.safetensors").read_bytes(), verify_run(own)
    asked = "calibrate", own, unseen, "--positive", "checks", "--sensitivity", 1.0
    json_of(capsys, *asked)
    assert (own / "model.safetensors").read_bytes() == before
    status, _, err = call(capsys, "predict", copied("plain"), unseen / "checks/0.png")
    assert status == 0 and "warning: no threshold came with" in err and "--publish" in err
    with pytest.warns(UserWarning, match="no threshold came with"):
        sfumato.load(tmp_path / "plain")
    threshold = json_of(capsys, *asked, "--publish")["threshold"]
    assert verify_run(own)[0] == certificate  # its digest is of the tensors alone
    assert sfumato.load(copied("published")).trained.calibration.threshold.model_dump() == threshold
    status, _, err = call(capsys, "predict", tmp_path / "published", unseen / "checks/0.png")
    assert "is named from probability" in err and "no threshold" not in err
    both = [json_of(capsys, "predict", run, unseen)["predictions"] for run in (own, tmp_path / "published")]
    assert both[0] == both[1]


def test_a_run_that_held_out_few_images_shows_no_probability_until_it_is_calibrated(tmp_path, unseen, capsys):
    images, run = photos(tmp_path / "few", 40, seed=2), tmp_path / "run"
    sfumato.train("image-folder", run, data_root=images, epsilon=8, settings={**QUICK, "training.batch_size": 40})
    status, out, err = call(capsys, "predict", run, unseen / "checks/0.png")
    assert status == 0 and "%" not in out and "sfumato calibrate" in err
    assert json_of(capsys, "predict", run, unseen / "checks/0.png")["predictions"][0]["probabilities"] is None
    with pytest.raises(InputError, match="not calibrated"):
        sfumato.load(run).predict_proba(unseen / "checks/0.png")
    assert "too few" in refused(capsys, "calibrate", run)
    json_of(capsys, "calibrate", run, unseen)
    assert json_of(capsys, "predict", run, unseen / "checks/0.png")["predictions"][0]["probability"] >= 0.5


def test_wrong_calibrations_are_refused(run, unseen, capsys):
    words = ["calibrate", run, unseen]
    assert "one of them" in refused(capsys, *words, "--sensitivity", 0.9, "--specificity", 0.9)
    assert "--sensitivity or --specificity" in refused(capsys, *words, "--positive", "checks")
    assert "no class 'dots'" in refused(capsys, *words, "--positive", "dots", "--sensitivity", 0.9)
    assert not (run / "calibration.json").exists()


def test_a_run_goes_on_by_its_folder_alone(images, tmp_path, capsys):
    """Killed, and on SIGINT, with images and weights to start from somewhere on this machine."""
    straight, broken = tmp_path / "straight", tmp_path / "broken"
    steps = {**QUICK, "run.seed": 3, "training.num_steps": 30, "training.checkpoint_every": 5}
    once = steps | {"training.num_steps": 1}
    sfumato.train("image-folder", tmp_path / "start", data_root=images, settings=once, epsilon=8)
    steps |= {"model.init_from": str(tmp_path / "start"), "model.pretrained_on": "stripes"}
    words = given({key: json.dumps(value) for key, value in steps.items()})
    command = ["train", "image-folder", "--data-root", str(images), "--epsilon", "8", *words, "--output"]
    log = tmp_path / "log"
    assert faults.run([*command, str(straight)], log=log) == 0, log.read_text()
    expected = json_of(capsys, "resume", straight)  # finished: its result
    process = faults.start([*command, str(broken)], log=log)
    wait_for_release(broken, 8)
    process.kill()
    process.join()
    assert not (broken / "result.json").exists()
    assert faults.run(["resume", str(broken)], log=log) == 0, log.read_text()
    found = json_of(capsys, "resume", broken)
    assert found["accuracy"] == expected["accuracy"] and found["num_steps"] == 30
    weights = [(run / "model.safetensors").read_bytes()[-10_000:] for run in (straight, broken)]
    assert weights[0] == weights[1]
    assert "no run" in refused(capsys, "resume", tmp_path / "nowhere")


def test_ordinary_training_of_a_recipe_for_persons_goes_on(images, tmp_path):
    """A limit on each person's images belongs to privacy, and the run's folder says nothing of it."""
    words = ["train", "image-folder", "--data-root", images, "--epsilon-per-person", 8, "--images-per-person", 2]
    words += given({**QUICK, "training.checkpoint_every": 5, "data.group_by": r"/(\d\d?)"})
    words += ["--non-private", "--output", tmp_path / "run"]
    log = tmp_path / "log"
    assert faults.run([str(word) for word in words], die_at=("file", 9, 1.0), log=log) == -signal.SIGKILL
    assert faults.run(["resume", str(tmp_path / "run")], log=log) == 0, log.read_text()


def test_images_that_were_trained_on_are_told_and_calibrate_nothing(own, images, unseen, capsys):
    assert "training images lie" in call(capsys, "evaluate", own, images)[2]
    assert "training images lie" in refused(capsys, "calibrate", own, images)
    assert "training images lie" in refused(capsys, "calibrate", own, images.parent)
    assert "training images lie" not in call(capsys, "evaluate", own, unseen)[2]


def test_the_held_out_shard_is_not_what_was_trained_on(images, unseen, tmp_path, capsys):
    shards, run = tmp_path / "shards", tmp_path / "run"
    shards.mkdir()
    for part, source in (("train", images), ("test", unseen)):
        with tarfile.open(shards / f"{part}-0000.tar", "w") as shard:
            for path in sorted(source.rglob("*.png")):
                shard.add(path, f"{path.parent.name}/{path.name}")
    settings = {**QUICK, "training.num_steps": 1, "data.classes": ["checks", "stripes"]}
    sfumato.train("image-folder", run, data_root=shards, epsilon=8, settings=settings)
    assert "training images lie" in refused(capsys, "calibrate", run, shards / "train-0000.tar")
    assert json_of(capsys, "calibrate", run, shards / "test-0000.tar")["num_images"] == 600
    status, _, err = call(capsys, "evaluate", run, shards / "test-0000.tar")
    assert status == 0 and "training images lie" not in err and "600 of these 600 images chose the prob" in err


def test_how_sure_and_how_often_right_are_told_and_drawn(run, unseen, tmp_path, capsys):
    path = tmp_path / "reliability.svg"
    found = json_of(capsys, "evaluate", run, unseen, "--plot", path)
    bins = found["reliability"]
    assert sum(each["num_images"] for each in bins) == found["num_images"] == 600
    gaps = [each["num_images"] * abs(each["right"] - each["probability"]) / 600 for each in bins]
    assert sum(gaps) == pytest.approx(found["calibration_error"])
    assert all(each["interval"][0] <= each["right"] <= each["interval"][1] for each in bins)
    assert path.read_text().startswith("<?xml") and "calibration error" in path.read_text()
    assert ".svg" in refused(capsys, "evaluate", run, unseen, "--plot", tmp_path / "plot.doc")
    assert "no folder" in refused(capsys, "evaluate", run, unseen, "--plot", tmp_path / "none" / "plot.svg")
    (tmp_path / "folder.png").mkdir()
    assert "is a folder" in refused(capsys, "evaluate", run, unseen, "--plot", tmp_path / "folder.png")


def test_a_part_calibrates_where_it_was_not_trained_on(images, tmp_path, capsys):
    root, run = tmp_path / "images", tmp_path / "run"
    for part in ("train", "valid", "test"):
        shutil.copytree(images, root / part)
    sfumato.train("image-folder", run, data_root=root, epsilon=8, settings={**QUICK, "training.num_steps": 1})
    for part in ("train", "valid"):
        assert "training images lie" in refused(capsys, "calibrate", run, root / part)
    assert json_of(capsys, "calibrate", run, root / "test")["num_images"] == 400


def test_accuracy_is_told_for_each_value_of_a_column(run, unseen, tmp_path, capsys):
    folder = shutil.copytree(unseen, tmp_path / "sites")
    names = sorted(path.relative_to(folder).as_posix() for path in folder.rglob("*.png"))
    sites = ["north" if number % 3 else ["south", ""][number % 2] for number in range(len(names))]
    rows = [f"{name},{name.split('/')[0]},{site}" for name, site in zip(names, sites, strict=True)]
    (folder / "labels.csv").write_text("\n".join(["file,label,site", *rows]))
    found = json_of(capsys, "evaluate", run, folder, "--by", "site")
    answers = json_of(capsys, "predict", run, *(folder / name for name in names))["predictions"]
    for group in found["groups"]:
        own = [place for place, site in enumerate(sites) if site == group["value"]]
        right = [answers[place]["class"] == names[place].split("/")[0] for place in own]
        assert (group["num_images"], group["accuracy"]) == (len(own), pytest.approx(sum(right) / len(own)))
        assert group["interval"][0] < group["accuracy"] < group["interval"][1] or group["accuracy"] in (0, 1)
    assert [group["value"] for group in found["groups"]] == ["north", "south", ""] and found["by"] == "site"
    shares = [group["accuracy"] for group in found["groups"]]
    assert found["group_gap"] == pytest.approx(max(shares) - min(shares))
    out = call(capsys, "evaluate", run, folder, "--by", "site")[1]
    assert "(not stated)" in out and "north" in out
    assert "it has file, label, site" in refused(capsys, "evaluate", run, folder, "--by", "hospital")
    assert "different values" in refused(capsys, "evaluate", run, folder, "--by", "file")
    assert "has no table" in refused(capsys, "evaluate", run, unseen, "--by", "site")
    assert "Name the folder" in refused(capsys, "evaluate", run, "--by", "site")


def test_a_recipe_without_a_run_folder_gets_one(images, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    result = sfumato.train("image-folder", data_root=images, epsilon=8, settings={**QUICK, "training.num_steps": 1})
    assert result.run.startswith("runs/image-folder-")
    with pytest.raises(InputError, match="give output"):
        sfumato.train("image-folder", data_root=images, epsilon=8, resume=True)


def test_a_missing_budget_is_noticed_before_an_image_is_decoded(images, tmp_path, capsys, monkeypatch):
    monkeypatch.setattr("sfumato.data.decoding.decode_cached", lambda *args, **kwargs: pytest.fail("decoded"))
    assert "--epsilon" in refused(capsys, "train", "image-folder", "--data-root", images, "--output", tmp_path / "run")


def test_the_version_and_several_plans_are_told(capsys):
    status, out, _ = call(capsys, "--version")
    assert status == 0 and out.startswith("sfumato ")
    plans = json_of(capsys, "plan", "--num-examples", 3_000, "--epsilon", "1,3")["plans"]
    assert [plan["epsilon"] <= target for plan, target in zip(plans, (1, 3), strict=True)] == [True, True]
    assert {(plan["batch_size"], plan["num_steps"]) for plan in plans} == {(750, 150)}  # those of `train`
    single = json_of(capsys, "plan", "--num-examples", 3_000, "--epsilon", 3)
    assert single["noise_multiplier"] == plans[1]["noise_multiplier"]
    for more in (("--throughput", 100), ("--devices", 2)):
        assert "several epsilons" in refused(capsys, "plan", "--num-examples", 3_000, "--epsilon", "1,3", *more)
    assert "--epsilon takes" in refused(capsys, "plan", "--num-examples", 3_000, "--epsilon", "1,x")


def test_a_plan_for_persons_needs_more_noise_and_says_so(capsys):
    words = ["plan", "--num-examples", 3_000, "--epsilon", 3, "--images-per-person", 4]
    found = json_of(capsys, *words)
    assert found["epsilon_image"] < 1 < found["epsilon"] <= 3 and found["unit"].startswith("one person")
    status, out, _ = call(capsys, *words)
    assert status == 0 and "one person with at most 4 images" in out and "by TAN" not in out
    more = json_of(capsys, *words, "--more-data", 2)["more_data"]
    assert more["epsilon_tan"] is None and more["epsilon"] < found["epsilon"]
    sizes = ["plan", "--num-examples", 3_000, "--batch-size", 100, "--num-steps", 9, "--noise-multiplier", 0]
    _, of_persons, _ = call(capsys, *sizes, "--images-per-person", 4)
    _, of_images, _ = call(capsys, *sizes)
    assert "contribution of one person" in of_persons and "one image's contribution" in of_images


def test_a_run_for_persons_leads_with_them(images, tmp_path, capsys):
    words = ["train", "image-folder", "--data-root", images, "--epsilon-per-person", 8, "--images-per-person", 2]
    words += given({**QUICK, "data.group_by": r"/(\d\d?)", "privacy.person_sampling": "images"})
    words += ["--output", tmp_path / "run"]
    status, out, err = call(capsys, *words)
    assert status == 0 and "of one person with at most 2 images" in out and "left out" in err, err
    claim = json.loads((tmp_path / "run" / "privacy.json").read_text())
    assert claim["epsilon"] == claim["epsilon_person"] <= 8 and claim["epsilon_image"] < claim["epsilon"]
    last = (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()[-1]
    assert json.loads(last)["epsilon"] == claim["epsilon"]
    page = (tmp_path / "run" / "report.html").read_text()
    assert "any single person" in page and "one person with at most 2 images" in page
    assert "--images-per-person" in refused(capsys, *words[:4], "--epsilon-per-person", 8)
    assert "Give one of them" in refused(capsys, *words, "--epsilon", 3)


def test_the_report_tells_what_was_fitted_after_training(own, unseen, capsys):
    assert "How it decides" not in (own / "report.html").read_text()
    fitted = json_of(capsys, "calibrate", own, unseen, "--positive", "stripes", "--sensitivity", 0.9)
    page = (own / "report.html").read_text()
    assert "How it decides" in page and "stripes is named from a probability of" in page
    assert (
        f"{100 * fitted['threshold']['probability']:.2f} %" in page and "600 images with labels that its owner" in page
    )
    (own / "calibration.json").write_text('{"temperature": 0}')
    with pytest.raises(InputError, match="calibration.json"):
        write_report(own)


def test_a_test_set_comes_into_the_report_where_its_owner_asks_for_that(own, images, unseen, capsys):
    assert not (own / "evaluation.json").exists()
    sfumato.evaluate(own, unseen)
    with pytest.raises(InputError, match="they are protected"):
        sfumato.evaluate(own, images, publish=True)
    assert not (own / "evaluation.json").exists()
    json_of(capsys, "calibrate", own, unseen, "--positive", "stripes", "--sensitivity", 0.9)
    found = json_of(capsys, "evaluate", own, unseen, "--report", "--prevalence", 0.02)
    kept = json.loads((own / "evaluation.json").read_text())
    assert kept == {key: found[key] for key in kept} and kept["test_set"] == "unseen" and kept["num_people"] is None
    rates = [[1 - found["decision"]["specificity"], found["decision"]["sensitivity"]]]
    assert any(point == pytest.approx(rates[0]) for point in kept["roc"])  # the threshold lies on the curve
    page = (own / "report.html").read_text()
    assert "On the test set unseen" in page and "600 images (unseen)" in page and str(unseen.parent) not in page
    assert str(unseen.parent) not in (own / "evaluation.json").read_text()
    assert all(line in page for line in in_words(sfumato.evaluate(own, unseen, prevalence=0.02)))
    assert json_of(capsys, "evaluate", own, "--report")["test_set"] == "held out: test"
    json_of(capsys, "calibrate", own, unseen)  # decisions are others now
    assert not (own / "evaluation.json").exists() and "On the test set" not in (own / "report.html").read_text()


def test_validation_images_whose_noisy_score_chose_a_run_are_never_told_exactly(own, tmp_path):
    recipe = load(own).recipe.model_copy(update={"data": load(own).recipe.data.model_copy(update={"split": "train"})})
    (own / DATA_ROOT_FILE).write_text(str(tmp_path / "images"))
    assert _trained_on(tmp_path / "images" / "valid", own, recipe) is None
    scored = recipe.model_copy(update={"privacy": recipe.privacy.model_copy(update={"score_noise": 4.0})})
    assert "they are protected" in _trained_on(tmp_path / "images" / "valid", own, scored)
    assert _trained_on(tmp_path / "images" / "test", own, scored) is None


def test_console_and_report_say_in_one_sentence_what_an_attacker_is_right_about(run, capsys):
    sentence = who_guesses(sfumato.load(run).certificate.attacker, of_persons=False)
    assert sentence.endswith(".") and ". " not in sentence
    assert sentence in (run / "report.html").read_text() and sentence in call(capsys, "resume", run)[1]


def test_what_would_help_is_said_once_at_the_dry_run_and_once_at_the_end(run, images, capsys):
    assert call(capsys, "resume", run)[2].count("tip: What would help") == 1
    words = ["train", "image-folder", "--data-root", images, "--epsilon", 1, "--dry-run", *given(QUICK)]
    assert call(capsys, *words)[2].count("What would help") == 1  # in the warning
    planned = json_of(capsys, *words)
    assert planned["tip"] in planned["warnings"][0]


def test_the_certificate_names_the_version_that_made_it_and_another_version_may_read_it(own):
    claim = sfumato.load(own).certificate
    assert claim.software == f"Sfumato {sfumato.__version__}"
    (own / "privacy.json").write_text(claim.model_copy(update={"software": "Sfumato 9"}).model_dump_json())
    assert verify_run(own)[0].software == "Sfumato 9"


def test_intervals_are_of_people_where_the_run_says_who_they_are(images, tmp_path):
    """Each image is there as three of one person: three times the images say nothing more."""
    root, run = tmp_path / "copies", tmp_path / "run"
    for path in sorted(images.rglob("*.png")):
        for copy in "abc":
            into = root / path.parent.name / f"p{path.parent.name}{path.stem}_{copy}.png"
            into.parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(path, into)
    settings = {**QUICK, "training.num_steps": 3, "data.group_by": "/(p.*)_"}
    low, high = sfumato.train("image-folder", run, data_root=root, epsilon=8, settings=settings).accuracy_interval
    judged = sfumato.evaluate(run)
    assert judged.intervals.accuracy == pytest.approx([low, high])
    independent = wilson(round(judged.accuracy * judged.num_images), judged.num_images)
    assert high - low > 1.5 * (independent[1] - independent[0])
