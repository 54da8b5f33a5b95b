"""What a paid search publishes, with real runs: the same files whatever the number of trials was, and no exact number
of private images.
"""

import contextlib
import itertools
import json
import shutil
import stat

import numpy as np
import pytest
import torch
from PIL import Image

from sfumato import randomness
from sfumato.accounting.selection import Selection
from sfumato.data.splitting import is_held_out
from sfumato.evaluation.scores import judged_right
from sfumato.run_folder.entries import spent_mechanism
from sfumato.run_folder.ledger import Ledger
from sfumato.scaling.search import private_search
from sfumato.scaling.search import private_selection as paid
from sfumato.training import loop
from tests.scaling.search.made_up_trials import PUBLISHED
from tests.scaling.search.test_command import call, write_digits, write_recipe

SETTINGS = (
    "training.num_steps=2",
    "training.batch_size=16",
    "training.engine=reference",
    "training.microbatch_size=16",
    "ema.decay=0.5",
)
SEARCH = ["search", "demo/digits", "--trials", "4", "--paid", "--score-noise", "20", "--output", "search", "--json"]
SEARCH += [word for setting in SETTINGS for word in ("--set", setting)]


@pytest.fixture
def one_setting(tmp_path):
    path = tmp_path / "space.toml"
    path.write_text('["learning rate"]\n"optimizer.learning_rate" = [2.0]\n')
    return str(path)


def listed(folder):
    """All that a listing shows of a folder and what it holds, times counted from the search's start, and all bytes."""
    start = (folder / "paid-search.json").stat().st_mtime_ns
    found = {}
    for path in (folder, *folder.rglob("*")):
        status = path.lstat()
        shown = (oct(status.st_mode), status.st_size, status.st_nlink, status.st_uid, status.st_mtime_ns - start)
        found[str(path.relative_to(folder))] = (shown, path.read_bytes() if path.is_file() else None)
    return found


@pytest.mark.parametrize(("scored", "most"), [("private", 20), ("public", 6)])
def test_what_is_published_is_the_same_for_one_trial_and_for_many(
    capsys, monkeypatch, tmp_path, one_setting, scored, most
):
    """All are real runs with keys of their own; the one that is selected has the same key in both searches, and stands
    at another place.
    """
    write_digits(tmp_path / "images", per_class=20)
    words = ["search", write_recipe(tmp_path, batch_size=16, num_steps=2), *SEARCH[2:], "--space", one_setting]
    if scored == "public":
        words += ["--data", "digits"]
        at = words.index("--score-noise")
        del words[at : at + 2]

    def search(name, num_trials, selected):
        (tmp_path / name).mkdir()
        monkeypatch.chdir(tmp_path / name)
        drawn = (bytes([1 if number == selected else 100 + number] * 32) for number in itertools.count(-1))
        scores = itertools.chain([100 * (number == selected) for number in range(num_trials)])
        with monkeypatch.context() as forced:
            forced.setattr(Selection, "draw", lambda self, uniform: num_trials)
            forced.setattr(randomness, "new_key", lambda: next(drawn))
            forced.setattr(private_search, "judged_right", lambda logits, images: next(scores))
            forced.setattr(paid, "_gaussian", lambda stream: 0.25)
            status, out, err = call(capsys, *words)
        assert status == 0, err
        assert next(scores, None) is None  # as many trials as wanted
        return listed(tmp_path / name / "search"), out, [line for line in err.splitlines() if "images" not in line]

    one, many = search("one", 1, 0), search("many", most, most - 4)
    assert one == many
    files = one[0]
    assert set(files) == {".", "paid-search.json", "selected", *(f"selected/{name}" for name in PUBLISHED)}
    assert {shown[-1] for shown, _ in files.values()} == {0}  # one time for all, which is the start's
    assert files["."][0][0] == oct(stat.S_IFDIR | 0o700)  # what the kernel keeps of each file is behind it


def test_what_is_published_does_not_tell_that_the_search_was_interrupted(capsys, monkeypatch, tmp_path, one_setting):
    monkeypatch.setattr(Selection, "draw", lambda self, uniform: 1)
    monkeypatch.setattr(randomness, "new_key", lambda: bytes([7] * 32))

    @contextlib.contextmanager
    def at_once():
        yield lambda: True

    found = []
    for name, interrupts in (("whole", 0), ("interrupted", 2)):
        (tmp_path / name).mkdir()
        monkeypatch.chdir(tmp_path / name)
        for _ in range(interrupts):
            with monkeypatch.context() as patch:
                patch.setattr(loop, "watch_for_interrupts", at_once)
                assert call(capsys, *SEARCH, "--space", one_setting)[0] == 1
        status, out, _ = call(capsys, *SEARCH, "--space", one_setting)
        assert status == 0
        found.append((listed(tmp_path / name / "search"), out))
    assert found[0] == found[1]


@pytest.fixture
def folder_of_images(tmp_path, monkeypatch, one_setting):
    """A search on 300 images, each part by the hash of its names: its words, and the names of every part."""
    write_digits(tmp_path / "images", per_class=30)
    recipe = write_recipe(tmp_path, batch_size=16, num_steps=2)
    monkeypatch.chdir(tmp_path)
    names = [f"{digit}/{number}.png" for digit in range(10) for number in range(30)]
    test = [name for name in names if is_held_out("test", name)]
    valid = [name for name in names if name not in test and is_held_out("valid", name)]
    parts = {"test": test, "valid": valid, "train": [name for name in names if name not in test + valid]}
    return [recipe if word == "demo/digits" else word for word in [*SEARCH, "--space", one_setting]], parts


def test_the_divisor_is_the_number_of_files_whether_they_can_be_read_or_not(
    capsys, monkeypatch, tmp_path, folder_of_images
):
    words, parts = folder_of_images
    looked_at = []

    def counted(logits, images):
        looked_at.append(images)
        return judged_right(logits, images)

    monkeypatch.setattr(private_search, "judged_right", counted)
    monkeypatch.setattr(Selection, "draw", lambda self, uniform: 1)
    for damaged in (None, parts["valid"][3]):
        if damaged:
            (tmp_path / "images" / damaged).write_bytes(b"")
        status, out, err = call(capsys, *words)
        assert status == 0, err
        score = json.loads((tmp_path / "search" / "selected" / "result.json").read_text())["score"]
        assert json.loads(out)["best"]["accuracy"] == min(max(score / len(parts["valid"]), 0.0), 1.0)
        shutil.rmtree(tmp_path / "search")
    whole, one_less = looked_at
    others = one_less.readable
    assert len(whole) == len(one_less) == len(parts["valid"]) and others.sum() == len(whole) - 1
    assert torch.equal(whole.integers()[others], one_less.integers()[others])  # in their places


@pytest.mark.parametrize("part", ["train", "valid", "test"])
def test_a_search_does_not_go_on_with_one_image_altered(capsys, monkeypatch, tmp_path, folder_of_images, part):
    words, parts = folder_of_images
    monkeypatch.setattr(Selection, "draw", lambda self, uniform: 2)
    trained, seen = loop.train, []

    def killed_in_the_second(*arguments, **options):
        if seen:
            raise KeyboardInterrupt
        seen.append(1)
        return trained(*arguments, **options)

    with monkeypatch.context() as patch:
        patch.setattr(loop, "train", killed_in_the_second)
        assert call(capsys, *words)[0] == 1
    path = tmp_path / "images" / parts[part][0]
    before = path.read_bytes()
    Image.fromarray(255 - np.array(Image.open(path))).save(path)
    status, out, err = call(capsys, *words)
    assert (status, out) == (2, "") and "the images changed since this search began" in err.splitlines()[-1]
    assert not (tmp_path / "search" / "selected").exists()
    path.write_bytes(before)
    assert call(capsys, *words)[0] == 0


def test_a_trial_that_went_on_in_another_environment_is_made_anew(capsys, monkeypatch, tmp_path, one_setting):
    """It would be the only one with more releases, and tell when the search was moved."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(Selection, "draw", lambda self, uniform: 1)

    @contextlib.contextmanager
    def at_once():
        yield lambda: True

    with monkeypatch.context() as patch:
        patch.setattr(loop, "watch_for_interrupts", at_once)
        assert call(capsys, *SEARCH, "--space", one_setting)[0] == 1
    threads = torch.get_num_threads()
    try:
        torch.set_num_threads(threads + 1)
        assert call(capsys, *SEARCH, "--space", one_setting)[0] == 0
    finally:
        torch.set_num_threads(threads)
    lines = Ledger.open(tmp_path / "search" / "selected" / "ledger.jsonl").lines
    assert [(line["session"], line["environment"]) for line in lines if line["kind"] == "session"] == [(0, {})]
    claim = json.loads((tmp_path / "search" / "selected" / "privacy.json").read_text())
    assert spent_mechanism(lines).num_steps == claim["num_steps"] == 2


def test_what_is_published_is_used_like_any_run(capsys, monkeypatch, tmp_path, one_setting):
    monkeypatch.chdir(tmp_path)
    assert call(capsys, *SEARCH, "--space", one_setting)[0] == 0
    result = json.loads((tmp_path / "search" / "selected" / "result.json").read_text())
    status, out, err = call(capsys, "evaluate", tmp_path / "search" / "selected", "--json")
    assert status == 0, err
    assert json.loads(out)["accuracy"] == result["accuracy"]
    assert (
        json.loads(out)["held_out"] == "test"
    )  # an exact accuracy on the validation images would undo the noise of the score
    again = ["train", tmp_path / "search" / "selected" / "recipe.toml", "--output", "again", "--json"]
    status, out, err = call(capsys, *again)
    assert status == 0 and json.loads(out)["held_out"] == "test", err
    again = [
        "simulate",
        tmp_path / "search" / "selected" / "recipe.toml",
        "--batch-size",
        "16",
        "--output",
        "simulated",
        "--json",
    ]
    status, out, err = call(capsys, *again)
    assert status == 0 and json.loads(out)["private"] is False, err
