import shutil
from pathlib import Path

import pytest

import sfumato
from sfumato.evaluation.evaluate import calibrate, evaluate
from sfumato.exporting.cards import About
from tests.cli.test_cli import photos

FEW = {"data.image_size": 16, "data.channels": 1, "training.num_steps": 6, "training.batch_size": 60}
ABOUT = About("To tell <checks> from stripes.", "Drawn | by a *program*.", "cc-by-4.0")


@pytest.fixture(scope="session")
def images(tmp_path_factory) -> Path:
    return photos(tmp_path_factory.mktemp("photos") / "of-nobody", 200, seed=0)


@pytest.fixture(scope="session")
def run(images, tmp_path_factory) -> Path:
    """Calibrated, with a threshold."""
    folder = tmp_path_factory.mktemp("runs") / "photos"
    sfumato.train("image-folder", folder, data_root=str(images), epsilon=8, settings=FEW)
    more = photos(folder.parent / "more", 120, seed=3)
    calibrate(folder, more, positive="checks", sensitivity=0.9)
    evaluate(folder, more, publish=True)
    return folder


@pytest.fixture(scope="session")
def exported(run, tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("exports") / "model"
    found = sfumato.export(run, folder, about=ABOUT)
    assert sorted(found.files) == sorted(path.name for path in folder.iterdir())
    return folder


@pytest.fixture
def received(exported, tmp_path) -> Path:
    """A copy that may be written to."""
    return shutil.copytree(exported, tmp_path / "received" / "model")
