"""Sweeps of small runs on the digits, from beginning to end."""

import csv
import hashlib
import io
import json
import stat

import numpy as np
import pytest
import torch
from PIL import Image

import sfumato
from sfumato.accounting.accountants import epsilon
from sfumato.errors import InputError
from sfumato.models import registry
from sfumato.run_folder.record import PRIVATE_METRICS_FILE
from sfumato.training.state import State
from tests.cli.test_cli import json_of
from tests.cli.test_cli import settings as given
from tests.studies.test_kills import releases

TINY = {
    "model.name": "small_cnn",
    "model.options.width": 8,
    "data.split": "train",
    "privacy.target_epsilon": None,
    "privacy.noise_multiplier": 1.0,
    "training.batch_size": 32,
    "training.num_steps": 3,
}


def sweep(folder, grid, settings=TINY, recipe="demo/digits", **options):
    return sfumato.sweep(recipe, grid, settings=settings, output=folder, report=lambda line: None, **options)


@pytest.fixture(scope="module")
def private(tmp_path_factory):
    """Two private cells of two runs each, and their folder."""
    folder = tmp_path_factory.mktemp("private") / "sweep"
    return sweep(folder, {"optimizer.learning_rate": [1.0, 2.0]}, seeds=2), folder


def test_a_private_sweep_has_runs_with_keys_of_their_own_whose_updates_add_up(private):
    found, folder = private
    assert [cell.settings for cell in found.cells] == [{"optimizer.learning_rate": rate} for rate in (1.0, 2.0)]
    claims = [json.loads((folder / run.run / "privacy.json").read_text()) for c in found.cells for run in c.runs]
    assert len({claim["run_id"] for claim in claims}) == 4
    assert sum(releases(folder).values()) == found.updates_together == 12
    certificate = json.loads((folder / "cell-1/run-1/privacy.json").read_text())
    mechanism = sfumato.Mechanism(1150, 32, 1.0, 3)
    assert found.private
    assert found.cells[0].epsilon == certificate["epsilon"] == epsilon(mechanism, 1e-5).epsilon
    assert found.epsilon_together == epsilon(mechanism.replace(num_steps=12), 1e-5).epsilon > found.cells[0].epsilon
    assert not any("choosing among these cells" in line for line in found.not_covered)
    own = [json.loads((folder / run.run / "result.json").read_text())["accuracy"] for run in found.cells[0].runs]
    assert [run.accuracy for run in found.cells[0].runs] == own and found.cells[0].mean == np.mean(own)


def test_accuracy_on_training_images_is_for_the_owner_alone(private):
    found, folder = private
    path = folder / "sweep_private.json"
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    of_owner = json.loads(path.read_text())
    assert of_owner["private"] is False
    shown = [value for cell in of_owner["cells"] for value in cell["runs"]]
    assert all(0 <= value <= 1 and 1150 * value == pytest.approx(round(1150 * value), abs=1e-9) for value in shown)
    assert stat.S_IMODE((folder / "cell-1/run-1" / PRIVATE_METRICS_FILE).stat().st_mode) == 0o600
    public = [*folder.glob("*.json"), *folder.glob("*.csv"), *folder.glob("*.html"), *folder.rglob("result.json")]
    public += [*folder.rglob("metrics.jsonl"), *folder.rglob("report.html"), *folder.rglob("privacy.json")]
    text = "".join(path.read_text() for path in public if path.name != "sweep_private.json")
    assert "train_accuracy" not in text
    # 0.2 may stand anywhere; a number of many digits is what it looks like.
    assert not any(str(value) in text for value in shown if len(str(value)) > 8)


def test_the_files_of_a_sweep_say_what_it_returned(private):
    found, folder = private

    def refuse(name):
        raise AssertionError(name)

    read = json.loads((folder / "sweep.json").read_text(), parse_constant=refuse)
    assert read == found.as_json()
    rows = list(csv.DictReader(io.StringIO((folder / "sweep.csv").read_text())))
    assert [float(row["optimizer.learning_rate"]) for row in rows] == [1.0, 2.0]
    assert [float(row["mean"]) for row in rows] == [cell.mean for cell in found.cells]
    page = (folder / "sweep.html").read_text()
    assert page.count("<figure") == 1
    assert f"{100 * found.cells[1].mean:.2f} %" in page
    assert "covers all runs together" in page
    assert "http" not in page.replace("http-equiv", "")


def test_records_are_flat_and_one_for_each_run(private):
    found, _ = private
    assert len(found.records) == 4
    assert all(type(value) in (int, float, str, type(None)) for record in found.records for value in record.values())
    assert [record["accuracy"] for record in found.records] == [run.accuracy for c in found.cells for run in c.runs]
    figure = found.plot()
    assert figure.axes[0].get_xlabel() == "optimizer.learning_rate"


@pytest.mark.parametrize(
    ("grid", "options", "says"),
    [
        ({"optimizer.learning_rate": [1.0, 4.0]}, {"seeds": 2}, "its cells"),
        ({"optimizer.learning_rate": [1.0, 2.0]}, {"seeds": 3}, "its seeds"),
        ({"optimizer.learning_rate": [1.0, 2.0]}, {"seeds": 2, "paired": True}, "its recipe|its paired"),
    ],
)
def test_another_sweep_in_the_same_folder_is_refused(private, grid, options, says):
    _, folder = private
    with pytest.raises(InputError, match=f"holds another sweep: ({says})"):
        sweep(folder, grid, **options)


def test_a_folder_with_anything_else_is_refused(private, tmp_path):
    _, folder = private
    with pytest.raises(InputError, match="holds no sweep"):
        sweep(folder / "cell-1/run-1", {"ema.decay": [0.5]})
    assert not (folder / "cell-1/run-1/plan.json").exists()


@pytest.fixture
def weights(monkeypatch):
    """Digests of all that an update changes, by the number of its step, of whatever is trained."""
    seen, update = [], State.update

    def watched(self, gradient, release, step):
        update(self, gradient, release, step)
        memory = [kept for each in self.optimizer.state.values() for kept in each.values() if kept is not None]
        tensors = [*self.model.state_dict().values(), *self.ema.averages[0].values(), *memory]
        seen.append((step, hashlib.sha256(b"".join(t.numpy().tobytes() for t in tensors)).hexdigest()))

    monkeypatch.setattr(State, "update", watched)
    return seen


def test_a_shorter_cell_of_a_shared_run_is_a_run_of_that_length_bit_for_bit(weights, tmp_path):
    settings = {**TINY, "optimizer.momentum": 0.5, "optimizer.warmup_steps": 2}
    shared = sweep(tmp_path / "shared", {"training.num_steps": [2, 5]}, settings, paired=True)
    long = dict(weights)
    weights.clear()
    alone = sweep(tmp_path / "alone", {"training.num_steps": [2]}, settings, paired=True)
    assert len(weights) == 2
    assert dict(weights).items() <= long.items()
    assert len(set(long.values())) == 5
    assert shared.cells[0].runs[0].run == shared.cells[1].runs[0].run
    assert shared.cells[0].shares_runs
    for key in ("accuracy", "accuracy_last"):
        assert getattr(shared.cells[0].runs[0], key) == getattr(alone.cells[0].runs[0], key)
    assert [cell.epsilon_if_private for cell in shared.cells] == [
        epsilon(sfumato.Mechanism(1150, 32, 1.0, steps), 1e-5).epsilon for steps in (2, 5)
    ]
    of_owner = (json.loads((tmp_path / name / "sweep_private.json").read_text()) for name in ("shared", "alone"))
    one, other = (values["cells"][0]["runs"] for values in of_owner)
    assert one == other


def test_looking_at_training_images_changes_no_update(weights, tmp_path):
    paired = sweep(tmp_path / "sweep", {"optimizer.learning_rate": [1.0]}, paired=True)
    looked_at = list(weights)
    weights.clear()
    settings = {**TINY, "run.seed": 0, "optimizer.learning_rate": 1.0}
    result = sfumato.train("demo/digits", tmp_path / "run", settings=settings)
    assert weights == looked_at
    assert result.accuracy == paired.cells[0].runs[0].accuracy
    assert "train_accuracy" not in (tmp_path / "run" / PRIVATE_METRICS_FILE).read_text()


def test_a_pair_shares_its_noise_and_differs_from_other_seeds(tmp_path):
    found = sweep(tmp_path / "sweep", {"ema.decay": [0.9, 0.5]}, paired=True, seeds=2)
    assert not found.private
    assert found.epsilon_together is None
    assert [record["seed"] for record in found.records] == [0, 1, 0, 1]
    last = np.array([[run.accuracy_last for run in cell.runs] for cell in found.cells])
    assert (last[0] == last[1]).all()  # averaging changes no update
    assert found.cells[0].paired is None
    assert found.cells[1].paired.difference == pytest.approx(found.cells[1].mean - found.cells[0].mean)
    assert any("not every one is private" in line for line in found.not_covered)


def test_two_workers_make_each_cell_once(tmp_path):
    grid = {"optimizer.learning_rate": [1.0, 2.0], "ema.decay": [0.5, 0.9]}
    found = sweep(tmp_path / "two", grid, paired=True, workers=2)
    assert releases(tmp_path / "two") == {f"cell-{number}/seed-0": 3 for number in (1, 2, 3, 4)}
    json.dumps(found.as_json(), allow_nan=False)


@pytest.fixture
def images(tmp_path):
    """Two folders of images with the same names."""
    rng = np.random.default_rng(0)
    for place in ("one/cat", "one/dog", "other/cat", "other/dog"):
        (tmp_path / place).mkdir(parents=True)
        for number in range(20):
            image = rng.integers(0, 256, (12, 12), dtype=np.uint8)
            Image.fromarray(image).save(tmp_path / place / f"{number}.png")
    return tmp_path


OF_FOLDER = {
    "privacy.noise_multiplier": 1.0,
    "model.name": "small_cnn",
    "model.options.width": 8,
    "data.image_size": 12,
    "data.channels": 1,
    "training.batch_size": 8,
    "training.num_steps": 2,
}


def of_folder(root, folder, grid=None, settings=OF_FOLDER):
    grid = grid or {"optimizer.learning_rate": [1.0, 2.0]}
    return sweep(folder, grid, settings, "image-folder", data_root=root, paired=True)


def test_a_finished_sweep_does_not_answer_for_other_images(images):
    found = of_folder(images / "one", images / "sweep")
    assert of_folder(images / "one", images / "sweep") == found
    with pytest.raises(InputError, match="was begun with other images"):
        of_folder(images / "other", images / "sweep")
    (images / "one/cat/3.png").write_bytes((images / "other/cat/3.png").read_bytes())
    with pytest.raises(InputError, match="was begun with other images"):
        of_folder(images / "one", images / "sweep")


def test_nothing_of_a_sweep_is_written_among_its_images(images):
    before = sorted(images.rglob("*"))
    with pytest.raises(InputError, match="lies in the folder of images"):
        of_folder(images / "one", images / "one" / "sweep")
    assert sorted(images.rglob("*")) == before


def test_cells_start_from_the_weights_that_the_sweep_was_begun_with(images):
    path, others = images / "deep/home/weights.pth", images / "others.pth"
    path.parent.mkdir(parents=True)
    for seed, file in enumerate((path, others)):
        options = {"image_size": 12, "channels": 1, "num_classes": 2, "options": {"width": 8}}
        torch.save(registry.build("small_cnn", **options, seed=seed).state_dict(), file)
    grid = {"model.init_from": [str(path), None]}
    settings = {**OF_FOLDER, "model.pretrained_on": "nothing"}
    found = of_folder(images / "one", images / "sweep", grid, settings)
    assert found.cells[0].settings == {"model.init_from": "weights.pth"}
    shared = [images / "sweep" / name for name in ("plan.json", "sweep.json", "sweep.csv", "sweep.html")]
    assert not any(b"deep/home" in file.read_bytes() for file in shared)
    path.write_bytes(others.read_bytes())
    with pytest.raises(InputError, match="holds another sweep: its weights is another"):
        of_folder(images / "one", images / "sweep", grid, settings)


@pytest.mark.parametrize(
    ("grid", "says"),
    [
        ({"model.name": ["small_cnn", "nope"]}, 'the cell model.name=nope cannot be: model "nope" is unknown'),
        ({"model.options.width": [8, -1]}, "the cell model.options.width=-1 cannot be: small_cnn: width must be"),
        ({"model.init_from": [None, "nowhere.pth"]}, "there is no such file"),
    ],
)
def test_a_cell_that_cannot_be_is_named_before_anything_runs(tmp_path, grid, says):
    settings = {**TINY, "model.options.width": None} if "model.name" in grid else TINY
    with pytest.raises(InputError, match=says):
        sweep(tmp_path / "sweep", grid, {**settings, "model.pretrained_on": "nothing"})
    assert not (tmp_path / "sweep").exists()


def test_the_command_prints_one_strict_object_and_its_csv_and_page_lie_beside(capsys, tmp_path):
    cells = tmp_path / "cells.toml"
    cells.write_text("[[cell]]\n[cell.ema]\ndecay = 0.5\n")
    tiny = {"model.options.width": 8, "training.num_steps": 2, "training.batch_size": 32, "data.split": "train"}
    chosen = given(tiny | {"privacy.target_epsilon": "", "privacy.noise_multiplier": 1.0})
    folder, grid = tmp_path / "sweep", ["--grid", "optimizer.learning_rate=1.0", "--paired"]
    found = json_of(capsys, "sweep", "demo/digits", *chosen, "--cells", cells, *grid, "--output", folder)
    [cell] = found["cells"]
    assert cell["settings"] == {"ema.decay": 0.5, "optimizer.learning_rate": 1.0}
    assert {"seeds", "median", "mean", "std", "standard_error", "runs"} <= cell.keys()
    assert (cell["seeds"], cell["std"], cell["standard_error"]) == (1, None, None)
    assert cell["private"] is found["private"] is False
    assert cell["epsilon"] is found["epsilon_together"] is None
    assert {"sweep.json", "sweep.csv", "sweep.html", "sweep_private.json"} <= {path.name for path in folder.iterdir()}
