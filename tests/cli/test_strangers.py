"""Files of somebody else on the command line: whose code runs, what reaches the terminal, what lies in files for
sharing.
"""

import ast
import json
import os
import shlex
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

import sfumato
from sfumato import cli
from sfumato.models import build
from tests.cli.test_cli import call, json_of, refused, settings
from tests.evaluation.test_trained import RESOLVED, THEIR_NET, write_run
from tests.evaluation.test_trained import recipe as model_recipe
from tests.training import faults
from tests.training.test_resume import wait_for_release

FEW = {"training.num_steps": 2, "training.batch_size": 32, "training.engine": "func"}
SHORT = [*settings(FEW), "--accountant", "rdp"]


@pytest.fixture
def theirs(tmp_path, monkeypatch):
    (tmp_path / "their_net.py").write_text(THEIR_NET)
    text = (Path(sfumato.__file__).parent / "recipes/demo/digits.toml").read_text()
    (tmp_path / "theirs.toml").write_text(text.replace('"small_cnn"', '"their_net:net"'))
    monkeypatch.setenv("PYTHONPATH", f"{tmp_path}{os.pathsep}{os.environ.get('PYTHONPATH', '')}")
    monkeypatch.syspath_prepend(str(tmp_path))
    yield tmp_path
    sys.modules.pop("their_net", None)


def test_a_recipe_file_is_not_the_users_word_and_a_typed_name_is(theirs, capsys):
    recipe, run = theirs / "theirs.toml", theirs / "run"
    commands = [
        ["train", recipe, *SHORT, "--output", run],
        ["train", recipe, *SHORT, "--dry-run"],
        ["train", recipe, *SHORT, "--output", run, "--trust", "their"],
        ["simulate", recipe, *SHORT[:-2], "--batch-size", 8, "--output", run],
    ]
    for command in commands:
        assert refused(capsys, *command).endswith("add --trust their_net")
        assert not (theirs / "ran").exists() and not run.exists()
    status, out, err = call(capsys, "train", recipe, *SHORT, "--output", run, "--trust", "their_net")
    assert status == 0 and f"sfumato predict {run} --trust their_net IMAGE" in out, err
    typed = ["demo/digits", *SHORT, "--set", "model.name=their_net:net", "--output", theirs / "typed"]
    assert json_of(capsys, "train", *typed)["private"]
    for words in (["evaluate", run], ["predict", run, theirs], ["check", run]):
        sys.modules.pop("their_net", None)
        (theirs / "ran").unlink(missing_ok=True)
        assert refused(capsys, *words).endswith("add --trust their_net") and not (theirs / "ran").exists()
    assert json_of(capsys, "evaluate", run, "--trust", "their_net")["num_images"] == 360
    assert json_of(capsys, "check", run, "--trust", "their_net")["compatible"]
    assert json_of(capsys, "check", "their_net:net", "--image-size", 8, "--channels", 1)["compatible"]


def test_resuming_a_folder_needs_trust_too_and_an_interrupt_says_so(theirs, capsys):
    run, log = theirs / "run", theirs / "log"
    steps = [*settings({"training.num_steps": 4000, "training.batch_size": 32}), "--accountant", "rdp"]
    words = ["train", str(theirs / "theirs.toml"), *steps, "--output", str(run), "--trust", "their_net"]
    process = faults.start(words, log=log)
    while not (run / "ledger.jsonl").exists():
        assert process.is_alive(), log.read_text()
        time.sleep(0.05)
    wait_for_release(run, 2)
    os.kill(process.pid, signal.SIGTERM)
    process.join(60)
    assert process.exitcode == 1
    again = next(line for line in log.read_text().splitlines() if "Go on with: " in line).partition("Go on with: ")[2]
    assert shlex.split(again) == ["sfumato", "resume", str(run), "--trust", "their_net"]
    (theirs / "ran").unlink()
    sys.modules.pop("their_net", None)
    without = [word for word in shlex.split(again)[1:] if word not in ("--trust", "their_net")]
    assert refused(capsys, *without).endswith("add --trust their_net")
    assert refused(capsys, "train", run / "recipe.toml", "--output", run, "--resume").endswith("add --trust their_net")
    assert not (theirs / "ran").exists()


def test_searches_import_nothing_that_a_space_names(theirs, capsys):
    (theirs / "space.toml").write_text('[model]\n"model.name" = ["their_net:net"]\n')
    search = ["search", "demo/digits", "--space", theirs / "space.toml", *SHORT[:-2], "--output", theirs / "search"]
    call(capsys, *search, "--trials", 2, "--batch-size", 8, "--seeds", "0")
    assert not (theirs / "ran").exists()
    paid = [*search[:-1], theirs / "paid", "--trials", 1, "--paid", "--score-noise", 3]
    assert refused(capsys, *paid).endswith("add --trust their_net") and not (theirs / "ran").exists()


ESCAPES = "\nepsilon 0.1\x1b]0;owned\x07\x1b[2J\u202egnp\x9b31m\r"


def test_no_name_of_a_stranger_steers_the_terminal(tmp_path, capsys):
    ten = build("small_cnn", image_size=8, channels=1, num_classes=10, seed=0).state_dict()
    classes = [f"cat {number}{ESCAPES}" for number in range(10)]
    run = write_run(tmp_path / "run", facts={"classes": classes}, tensors=ten)
    Image.new("L", (8, 8)).save(tmp_path / f"x{ESCAPES}.png")
    name = tmp_path / f"gone{ESCAPES}"
    bad = write_run(tmp_path / "bad", model_recipe("small_cnn").replace("small_cnn", "x\\u001b[2J:net"))
    image = tmp_path / f"x{ESCAPES}.png"
    for command, *words in (("evaluate", run), ("predict", run, image), ("evaluate", name), ("check", bad)):
        status, out, err = call(capsys, command, *words)
        assert status in (0, 2) and not set("\x1b\x07\x9b\u202e\r") & set(out + err), (out, err)
    _, out, _ = call(capsys, "predict", run, image)
    assert out.count("\n") == 1 and "  cat " in out and out.count("\\nepsilon 0.1\\x1b]0;owned\\x07") == 2


def test_every_command_prints_through_what_spells_escapes_out():
    for path in sorted(Path(cli.__file__).parent.glob("*.py")):
        calls = [node for node in ast.walk(ast.parse(path.read_text())) if isinstance(node, ast.Call)]
        prints = [node.lineno for node in calls if isinstance(node.func, ast.Name) and node.func.id == "print"]
        assert path.name in ("output.py", "__init__.py") or not prints, (path, prints)


@pytest.fixture(scope="module")
def owned(tmp_path_factory):
    """A run on a folder whose place is nobody else's business."""
    home = tmp_path_factory.mktemp("home-of-alice")
    images = home / "xrays-of-alice"
    source = np.random.default_rng(0)
    for name in ("cat", "dog"):
        (images / name).mkdir(parents=True)
        for number in range(30):
            Image.fromarray(source.integers(0, 256, (8, 8)).astype(np.uint8)).save(images / name / f"{number}.png")
    run = home.parent / "published"
    words = ["train", "image-folder", "--data-root", str(images), "--epsilon", "8", "--output", str(run), *SHORT]
    words += settings({"data.image_size": 8, "data.channels": 1, "data.class_proportions": [0.5, 0.5]})
    assert cli.run(words) == 0
    return run, images


def test_where_the_images_lie_stands_in_a_file_for_the_owner_alone(owned, capsys, tmp_path):
    run, images = owned
    shared = [path for path in run.rglob("*") if path.is_file() and "owner" not in path.relative_to(run).parts]
    files = "recipe.toml privacy.json model.safetensors result.json report.html ledger.jsonl"
    assert set(files.split()) <= {path.name for path in shared}
    for path in shared:
        assert b"of-alice" not in path.read_bytes(), path
    note = run / "owner" / "data_root"
    assert oct(note.stat().st_mode)[-3:] == "600" and note.read_text() == str(images)
    assert json_of(capsys, "evaluate", run)["classes"] == ["cat", "dog"]
    copy = tmp_path / "shared"
    copy.mkdir()
    (copy / "model.safetensors").write_bytes((run / "model.safetensors").read_bytes())
    assert "--data-root" in refused(capsys, "evaluate", copy)
    assert json_of(capsys, "evaluate", copy, "--data-root", images)["classes"] == ["cat", "dog"]
    status, out, err = call(capsys, "train", run / "recipe.toml", "--resume", "--output", run, "--json")
    assert status == 0 and json.loads(out)["private"], err


@pytest.mark.parametrize("content", [b"relative/folder", b"/a\0b"])
def test_a_note_of_where_images_lie_that_no_run_wrote_is_not_followed(tmp_path, capsys, content):
    recipe = f'[data]\nname = "folder"\n{RESOLVED}[model]\nname = "small_cnn"\ntrainable = "all"\nfeatures = "raw"\n'
    run = write_run(tmp_path / "run", recipe)
    (run / "owner").mkdir()
    (run / "owner" / "data_root").write_bytes(content)
    assert "--data-root" in refused(capsys, "evaluate", run)
    (run / "owner" / "data_root").unlink()
    (run / "owner" / "data_root").symlink_to("/etc/hostname")
    assert "--data-root" in refused(capsys, "evaluate", run)


def test_the_certificate_and_the_report_list_what_was_taken_to_be_public(owned):
    run, _ = owned
    claim = json.loads((run / "privacy.json").read_text())
    inputs = claim["public_inputs"]
    assert inputs["classes"] == ["cat", "dog"] and inputs["classes_from"] == "the names of the class folders"
    assert inputs["class_proportions"] == [0.5, 0.5] and (inputs["image_size"], inputs["channels"]) == (8, 1)
    assert inputs["mean"] == [0.5] and inputs["std"] == [0.5] and inputs["num_examples"] == claim["num_examples"]
    assert any(line.startswith("the public inputs") for line in claim["not_covered"])
    page = (run / "report.html").read_text()
    assert "Public inputs" in page and "the names of the class folders" in page and "class proportions 0.5, 0.5" in page


@pytest.mark.parametrize("name", ["ledger.jsonl", "owner/checkpoints/000000001.safetensors"])
def test_going_on_with_a_strangers_folder_never_writes_where_a_link_leads(owned, capsys, tmp_path, name):
    run, images = owned
    mine = tmp_path / "mine"
    mine.write_text("precious\n")
    folder = tmp_path / "theirs"
    (folder / "owner" / "checkpoints").mkdir(parents=True)
    for file in ("recipe.toml", "result.json"):
        (folder / file).write_bytes((run / file).read_bytes())
    (folder / name).symlink_to(mine)
    line = refused(capsys, "train", run / "recipe.toml", "--data-root", images, "--resume", "--output", folder)
    assert str(folder) in line and mine.read_text() == "precious\n"


def test_a_dry_run_leaves_out_as_many_images_of_a_person_as_the_run_does(owned, capsys, tmp_path):
    _, images = owned
    words = ["train", "image-folder", "--data-root", images, "--epsilon", 8, *SHORT]
    words += settings({"data.group_by": r"/(\d)", "data.image_size": 8})
    said = []
    for rest in (["--dry-run"], ["--output", tmp_path / "run"]):
        status, _, err = call(capsys, *words, "--images-per-person", 3, *rest)
        assert status == 0
        said.append([line for line in err.splitlines() if "left out" in line])
    assert said[0] == said[1] and len(said[0]) == 1 and "beyond privacy.max_images_per_person = 3" in said[0][0]
    facts = json_of(capsys, *words, "--images-per-person", 22, "--dry-run")
    assert facts["person_groups"].startswith("as the owner states")


def predict_apart(run, folder, **environment):
    """In a process of its own that works in that folder."""
    environment = {**os.environ, "PYTHONPATH": str(Path(sfumato.__file__).parent.parent), **environment}
    words = [sys.executable, "-m", "sfumato", "predict", str(run), "none.png"]
    return subprocess.run(words, cwd=folder, env=environment, capture_output=True, text=True)


def test_a_module_in_the_working_folder_does_not_run(tmp_path):
    (tmp_path / "safetensors.py").write_text("import pathlib\npathlib.Path(__file__).with_name('ran').touch()\n")
    predict_apart(write_run(tmp_path / "run"), tmp_path)
    assert not (tmp_path / "ran").exists()


def test_a_console_that_cannot_show_a_name_shows_it_spelled_out(tmp_path):
    done = predict_apart(tmp_path / "\u732b", tmp_path, PYTHONIOENCODING="ascii")
    assert done.returncode == 2 and "\\u732b" in done.stderr and "Traceback" not in done.stderr


@pytest.mark.parametrize(
    "words",
    [
        "train demo/digits --dry-run --epsilon 1e-300",
        "train demo/digits --dry-run --set privacy.noise_multiplier=1e-310",
        "search demo/digits --paid --trials 4 --output never --score-noise 1e300",
        "search demo/digits --paid --trials 99999999999999999999 --output never --score-noise 3",
    ],
)
def test_numbers_that_cannot_be_computed_with_are_one_line(tmp_path, capsys, monkeypatch, words):
    monkeypatch.chdir(tmp_path)
    refused(capsys, *words.split())
    assert not (tmp_path / "never").exists()
