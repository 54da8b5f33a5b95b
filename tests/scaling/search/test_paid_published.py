"""What a paid search publishes, with real runs: the same files whatever the number of trials was, and no exact number of private images."""

import itertools
import json
import shutil
import stat

import pytest
import torch

from sfumato import randomness
from sfumato.accounting.ledger import spent_mechanism
from sfumato.accounting.selection import Selection
from sfumato.run_folder import Ledger
from sfumato.scaling.search import paid
from sfumato.training import evaluation
from sfumato.training.trained import load_run
from tests.scaling.search.test_command import call, refused, write_digits, write_recipe

SETTINGS = ("training.num_steps=2", "training.batch_size=64", "training.engine=reference", "training.microbatch_size=64", "ema.decay=0.5")
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


@pytest.mark.parametrize("scored", ["private", "public"])
def test_what_is_published_is_the_same_for_one_trial_and_for_twenty(capsys, monkeypatch, tmp_path, one_setting, scored):
    """All are real runs with keys of their own; the one that is selected has the same key in both searches, and stands at another place."""
    words = [*SEARCH, "--space", one_setting]
    if scored == "public":
        write_digits(tmp_path / "images", per_class=20)
        words = ["search", write_recipe(tmp_path, batch_size=64, num_steps=2), *words[2:], "--data", "digits"]
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
            forced.setattr(evaluation, "judged_right", lambda logits, images: next(scores))
            forced.setattr(paid, "_gaussian", lambda stream: 0.25)
            status, out, err = call(capsys, *words)
        assert status == 0, err
        assert next(scores, None) is None  # as many trials as wanted
        return listed(tmp_path / name / "search"), out, [line for line in err.splitlines() if "images" not in line]

    one, many = search("one", 1, 0), search("many", 20, 13)
    assert one == many
    files = one[0]
    names = {"ledger.jsonl", "metrics.jsonl", "model.safetensors", "privacy.json", "recipe.toml", "report.html", "result.json"}
    assert set(files) == {".", "paid-search.json", "selected", *(f"selected/{name}" for name in names)}
    assert {shown[-1] for shown, _ in files.values()} == {0}  # one time for all, which is the start's
    assert files["."][0][0] == oct(stat.S_IFDIR | 0o700)  # what the kernel keeps of each file is behind it
