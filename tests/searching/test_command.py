"""`sfumato search`, whole: from a recipe to the recipe of the one private run, or to the best of some private runs."""

import json
import re
import stat
import time
from pathlib import Path

import jsonschema
import numpy as np
import pytest
import torch
from PIL import Image
from sklearn.datasets import load_digits

from sfumato import config
from sfumato.accounting.accountants import epsilon
from sfumato.accounting.mechanism import Mechanism
from sfumato.accounting.selection import Selection, epsilon_of_best
from sfumato.data.layouts import is_held_out
from sfumato.evaluation.scores import judged_right
from sfumato.searching import private
from sfumato.training import loop
from tests.cli.test_cli import call, json_of, refused
from tests.training import faults

# The engine that traces nothing: tracing takes longer than such runs.
SHORT = ["training.num_steps=3", "training.batch_size=128", "training.engine=func"]
SHORT = [word for setting in SHORT for word in ("--set", setting)]
SEARCH = ["search", "demo/digits", "--trials", "3", "--batch-size", "8", "--seeds", "0,1", *SHORT]


@pytest.fixture(scope="module")
def space(tmp_path_factory):
    path = tmp_path_factory.mktemp("space") / "space.toml"
    path.write_text('["learning rate"]\n"optimizer.learning_rate" = [0.001, 2.0]\n[averaging]\n"ema.decay" = [0.5]\n')
    return str(path)


@pytest.fixture(scope="module")
def digits(tmp_path_factory):
    """300 of scikit-learn's digits as a folder of images, and a recipe for them."""
    folder = tmp_path_factory.mktemp("digits")
    images, labels = load_digits(return_X_y=True)
    for name in range(10):
        (folder / "images" / str(name)).mkdir(parents=True)
        for number, image in enumerate(images[labels == name][:30]):
            place = folder / "images" / str(name) / f"{number}.png"
            Image.fromarray((image.reshape(8, 8) * 15.9).astype("uint8")).save(place)
    return folder


def recipe_for(folder, batch_size=64, num_steps=3):
    path = folder / f"recipe-{num_steps}.toml"
    classes = f"classes = {list('0123456789')}, image_size = 8, channels = 1"
    path.write_text(
        f"""
        data = {{ name = "folder", path = "{folder / "images"}", {classes} }}
        privacy = {{ target_epsilon = 3.0, delta = 1e-4 }}
        training = {{ batch_size = {batch_size}, num_steps = {num_steps}, engine = "func" }}
        """
    )
    return path


def test_a_search_ends_with_a_recipe_that_train_takes_and_whose_certificate_was_computed_in_advance(
    capsys, tmp_path, space, monkeypatch
):
    """Its simulations are private of nobody, see no test image, and hold sigma / B."""
    folder, seen, real = tmp_path / "search", [], loop.train

    def spy(plan, dataset, *arguments, **options):
        result = real(plan, dataset, *arguments, **options)
        noise = plan.recipe.privacy.noise_multiplier / plan.recipe.training.batch_size
        seen.append((plan.private, result.epsilon, dataset.held_out_name, plan.recipe.data.split, round(noise, 9)))
        return result

    monkeypatch.setattr(loop, "train", spy)
    (folder / "owner" / "left by a kill").mkdir(parents=True)
    views = ["--set", "augmentation.kind=flip", "--set", "augmentation.augmult=2"]
    words = [*SEARCH, *views, "--space", space, "--output", folder]
    found = json_of(capsys, *words)
    assert len({entry[4] for entry in seen}) == 1 and {entry[:4] for entry in seen} == {(False, None, "valid", "train")}
    assert found["search_data"] == "private" and found["epsilon_search_inclusive"] is None
    assert abs(found["augtest_gain"]) <= 1  # reported beside the prediction
    assert {"value", "low", "high"} == set(found["predicted_accuracy"])
    written = json.loads((folder / "search.json").read_text())
    jsonschema.validate(written, json.loads(call(capsys, "schema", "search")[1]))
    assert written == found
    # No weights of simulations.
    assert sorted(path.name for path in folder.iterdir()) == ["recipe.toml", "search.html", "search.json", "study.db"]

    made = len(seen)
    assert json_of(capsys, *words) == found and len(seen) == made  # finished: nothing is made again
    other = tmp_path / "other.toml"
    other.write_text('[averaging]\n"ema.decay" = [0.5]\n')
    assert "another space" in refused(capsys, *words[:-3], other, "--output", folder)

    run = tmp_path / "run"
    trained = json_of(capsys, "train", found["recipe"], "--output", run)
    claim = json.loads((run / "privacy.json").read_text())
    assert trained["private"] is True and trained["num_steps"] == 3
    assert trained["epsilon"] == found["epsilon_final"] <= 3.0
    assert claim["epsilon_search_inclusive"] is None
    assert any(line.startswith("the search on the private data is not covered") for line in claim["not_covered"])


def test_a_search_on_public_images_never_reads_the_private_ones(capsys, tmp_path, space):
    """The private images are a folder that holds names alone: decoding any of them would fail."""
    for name in "0123456789":
        (tmp_path / "images" / name).mkdir(parents=True)
        for number in range(30):
            (tmp_path / "images" / name / f"{number}.png").write_bytes(b"no image")
    words = ["search", recipe_for(tmp_path, 128), *SEARCH[2:8], "--data", "digits", "--space", space]
    found = json_of(capsys, *words, "--output", tmp_path / "search")
    assert found["search_data"] == "digits" and found["epsilon_search_inclusive"] == found["epsilon_final"] <= 3.0
    final = config.parse(config.read(tmp_path / "search" / "recipe.toml"))
    assert (final.data.name, final.privacy.search_data) == ("folder", "public")


def test_public_images_of_other_classes_cannot_compare_trials(capsys, tmp_path, space):
    for name in ("a", "b"):
        (tmp_path / "images" / name).mkdir(parents=True)
        for number in range(150):
            Image.new("L", (8, 8), number).save(tmp_path / "images" / name / f"{number}.png")
    recipe = Path(recipe_for(tmp_path))
    recipe.write_text(recipe.read_text().replace(str(list("0123456789")), '["a", "b"]'))
    words = ["search", recipe, "--trials", "2", "--paid", "--data", "digits", "--space", space]
    line = refused(capsys, *words, "--output", tmp_path / "search")
    assert "digits has 10 classes" in line and "the recipe 2 of" in line and not (tmp_path / "search").exists()


@pytest.mark.parametrize("scored", ["by public images", "by noisy numbers"])
def test_paid_trials_spend_one_budget_and_the_best_is_all_that_is_left(capsys, tmp_path, digits, space, scored):
    noise = None if scored == "by public images" else 2.0
    folder = tmp_path / "search"
    by = ["--data", "digits"] if noise is None else ["--score-noise", noise]
    words = ["search", recipe_for(digits), "--trials", "2", "--paid", *by, "--space", space, "--output", folder]
    shape = 0.0 if noise is None else 1.0
    words += ["--set", f"privacy.selection_shape={shape}"]
    status, out, err = call(capsys, *words, "--json")
    assert status == 0, err
    found = json.loads(out)
    assert found["trials"] is None and found["storage"] is None
    assert "about 2 private runs are expected" in err and not any(word in err for word in ("step ", "accuracy"))
    selected = folder / "selected"
    claim, result = (json.loads((selected / name).read_text()) for name in ("privacy.json", "result.json"))
    numbers = Mechanism(claim["num_examples"], claim["batch_size"], claim["noise_multiplier"], claim["num_steps"])
    of_best = epsilon_of_best(numbers, 1e-4, Selection(2.0, shape, noise))
    assert claim["private"] is True and claim["num_steps"] == 3 and claim["epsilon_pld"] is None
    assert claim["epsilon"] == found["epsilon_search_inclusive"] == of_best <= 3.0
    assert any("how many runs there were" in line for line in claim["not_covered"])
    lines = [json.loads(line) for line in (selected / "metrics.jsonl").read_text().splitlines()]
    assert {line["epsilon"] for line in lines} == {claim["epsilon"]}  # never what one run alone would have spent
    if noise is not None:  # no exact number of the validation images anywhere
        assert result["held_out"] == "test" and isinstance(result["score"], int)
        assert any("validation images" in line for line in claim["not_covered"])
    assert call(capsys, *words, "--json")[1] == out  # finished: told again
    images = ["--data-root", digits / "images"]
    evaluated = json_of(capsys, "evaluate", selected, *images)
    assert (evaluated["accuracy"], evaluated["held_out"]) == (result["accuracy"], result["held_out"])
    again = json_of(capsys, "train", selected / "recipe.toml", *images, "--output", tmp_path / "again")
    assert again["held_out"] == result["held_out"]


def test_the_divisor_is_the_number_of_files_whether_they_can_be_read_or_not(
    capsys, monkeypatch, tmp_path, digits, space
):
    looked_at = []

    def counted(logits, images):
        looked_at.append(images)
        return judged_right(logits, images)

    monkeypatch.setattr(private, "judged_right", counted)
    monkeypatch.setattr(Selection, "draw", lambda self, uniform: 1)
    words = ["search", recipe_for(digits), "--trials", "2", "--paid", "--score-noise", "20", "--space", space]
    names = [f"{digit}/{number}.png" for digit in range(10) for number in range(30)]
    valid = [name for name in names if not is_held_out("test", name) and is_held_out("valid", name)]
    damaged = digits / "images" / valid[3]
    whole = damaged.read_bytes()
    for number, content in enumerate((whole, b"")):
        damaged.write_bytes(content)
        found = json_of(capsys, *words, "--output", tmp_path / str(number))
        score = json.loads((tmp_path / str(number) / "selected" / "result.json").read_text())["score"]
        assert found["best"]["accuracy"] == min(max(score / len(valid), 0.0), 1.0)
    damaged.write_bytes(whole)
    all_read, one_less = looked_at
    others = one_less.readable
    assert len(all_read) == len(one_less) == len(valid) and others.sum() == len(valid) - 1
    assert torch.equal(all_read.integers()[others], one_less.integers()[others])  # in their places


@pytest.mark.parametrize("part", ["train", "valid", "test"])
def test_a_paid_search_does_not_go_on_with_one_image_altered(capsys, monkeypatch, tmp_path, digits, space, part):
    def killed(*arguments, **options):
        raise KeyboardInterrupt

    words = ["search", recipe_for(digits), "--trials", "2", "--paid", "--score-noise", "20", "--space", space]
    words += ["--output", tmp_path / "search"]
    with monkeypatch.context() as patch:
        patch.setattr(loop, "train", killed)
        assert call(capsys, *words)[0] == 1
    names = [f"{digit}/{number}.png" for digit in range(10) for number in range(30)]
    split = {name: next((one for one in ("test", "valid") if is_held_out(one, name)), "train") for name in names}
    path = digits / "images" / next(name for name in names if split[name] == part)
    before = path.read_bytes()
    Image.fromarray(255 - np.array(Image.open(path))).save(path)
    status, _, err = call(capsys, *words)
    path.write_bytes(before)
    assert status == 2 and "the images changed since this search began" in err.splitlines()[-1]


def test_a_paid_search_that_is_stopped_goes_on_where_it_was(tmp_path, digits, space):
    folder = tmp_path / "search"
    words = ["search", recipe_for(digits, num_steps=400), "--trials", "2", "--paid", "--data", "digits"]
    words, log = [*map(str, words), "--space", space, "--output", str(folder)], tmp_path / "log"
    process = faults.start(words, log=log)
    while not [path for path in folder.glob("owner/trials/*/ledger.jsonl") if path.read_text().count("\n") > 5]:
        assert process.is_alive(), log.read_text()
        time.sleep(0.05)
    process.terminate()
    assert faults.join([process]) == [1]
    err = log.read_text()
    assert "Go on with the same command" in err
    assert stat.S_IMODE((folder / "owner").stat().st_mode) == 0o700
    [trial] = folder.glob("owner/trials/*")
    assert trial.name not in err and "step 1 " not in err
    assert json.loads((folder / "owner" / "progress.json").read_text()) == {"scores": {}, "stopped": trial.name}


def test_a_paid_search_reserves_once_what_all_its_trials_spend_and_tells_of_it(capsys, tmp_path, digits, space):
    """The composed sum: the search's epsilon at its delta, and the other run's at what is left of the budget's."""
    path, folder, recipe = tmp_path / "budget", tmp_path / "search", recipe_for(digits)
    begin = ["budget", "new", path, "--recipe", recipe, "--epsilon", "7", "--delta", "3e-4"]
    json_of(capsys, *begin)
    words = ["search", recipe, "--trials", "2", "--paid", "--data", "digits", "--space", space, "--budget", path]
    found = json_of(capsys, *words, "--output", folder)
    [line] = json_of(capsys, "budget", "show", path)["runs"]
    claim = json.loads((folder / "selected" / "privacy.json").read_text())
    assert claim["budget"]["epsilon_reserved"] == line["epsilon_reserved"] == found["epsilon_final"] == claim["epsilon"]
    assert not [text for text in claim["not_covered"] if text.startswith("other runs")]
    assert line["run_id"] != claim["run_id"]  # of no trial
    assert json_of(capsys, "verify", folder / "selected")["findings"] == []
    ended = path.read_bytes()
    assert json_of(capsys, *words, "--output", folder) == found and path.read_bytes() == ended
    assert "another recipe or space" in call(capsys, *words[:-2], "--output", folder)[2]
    more = json_of(capsys, "train", recipe, "--budget", path, "--output", tmp_path / "run")
    alone = json.loads((tmp_path / "run" / "privacy.json").read_text())
    numbers = Mechanism(alone["num_examples"], alone["batch_size"], alone["noise_multiplier"], alone["num_steps"])
    both = epsilon(numbers, 3e-4 - 1e-4).epsilon + claim["epsilon"]
    assert alone["budget"]["epsilon_reserved"] == pytest.approx(both, rel=1e-12) and both < more["epsilon"] + 3
    before = path.read_bytes()
    for settings, why in (([], "and .* with 1 more"), (["--set", "privacy.delta=3e-4"], "a part of the budget's")):
        status, _, err = call(capsys, *words, *settings, "--output", tmp_path / "other")
        assert status == 2 and re.search(why, err), err
    assert path.read_bytes() == before and not (tmp_path / "other").exists()


def test_trials_of_a_paid_search_that_is_stopped_share_one_reservation(tmp_path, digits, space, capsys, monkeypatch):
    path, folder, recipe = tmp_path / "budget", tmp_path / "search", recipe_for(digits)
    json_of(capsys, "budget", "new", path, "--recipe", recipe, "--epsilon", "7", "--delta", "3e-4")
    words = ["search", recipe, "--trials", "2", "--paid", "--data", "digits", "--space", space, "--budget", path]

    def stop(*_arguments, **_options):
        assert len(json_of(capsys, "budget", "show", path)["runs"]) == 1  # before the first trial
        raise KeyboardInterrupt

    with monkeypatch.context() as patched:
        patched.setattr(loop, "train", stop)
        assert call(capsys, *words, "--output", folder)[0] != 0
    reserved = path.read_bytes()
    json_of(capsys, *words, "--output", folder)
    assert path.read_bytes() == reserved


@pytest.mark.parametrize(
    ("words", "says"),
    [
        ([*SEARCH, "--worker"], "--storage"),
        ([*SEARCH, "--data", "digits"], "private images themselves"),
        ([*SEARCH[:2], "--trials", "0"], "--trials"),
        ([*SEARCH[:4], "--paid"], "score"),
        ([*SEARCH[:4], "--paid", "--data", "mnist", "--prune"], "--prune"),
        ([*SEARCH[:4], "--paid", "--data", "mnist", "--sampler", "tpe"], "tpe"),
        ([*SEARCH[:4], "--paid", "--data", "mnist", "--score-noise", "2"], "--score-noise"),
        ([*SEARCH[:4], "--score-noise", "2"], "--score-noise"),
        ([*SEARCH[:4], "--paid", "--score-noise", "0"], "--score-noise S above 0"),
        ([*SEARCH[:4], "--budget", "b"], "simulations are not private"),
        (["train", "demo/digits", "--set", "privacy.selected_from=2", "--set", "privacy.score_noise=2"], "data.split"),
    ],
)
def test_searches_that_cannot_be_are_one_line(capsys, tmp_path, words, says):
    line = refused(capsys, *words, "--output", tmp_path / "search")
    assert says in line
    assert not (tmp_path / "search" / "recipe.toml").exists()
