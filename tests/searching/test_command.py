"""`sfumato search`, whole: from a recipe to the recipe of the one private run, or to the best of some private runs."""

import json
import os
import signal
import stat
import subprocess
import sys
import time

import jsonschema
import pytest

from sfumato import config
from sfumato.accounting.mechanism import Mechanism
from sfumato.accounting.selection import Selection, epsilon_of_best
from sfumato.cli import run as sfumato

# The engine that traces nothing: tracing takes longer than such runs.
SHORT = [
    "--set",
    "training.num_steps=3",
    "--set",
    "training.batch_size=128",
    "--set",
    "training.engine=reference",
    "--set",
    "training.microbatch_size=8",
]
SEARCH = ["search", "demo/digits", "--trials", "3", "--batch-size", "8", "--seeds", "0,1", *SHORT]


@pytest.fixture(scope="module")
def space(tmp_path_factory):
    path = tmp_path_factory.mktemp("space") / "space.toml"
    path.write_text('["learning rate"]\n"optimizer.learning_rate" = [0.001, 2.0]\n[averaging]\n"ema.decay" = [0.5]\n')
    return str(path)


def call(capsys, *words):
    capsys.readouterr()
    status = sfumato([str(word) for word in words])
    out, err = capsys.readouterr()
    return status, out, err


def write_digits(folder, per_class):
    """Some of scikit-learn's digits as a folder of images."""
    from PIL import Image
    from sklearn.datasets import load_digits

    images, labels = load_digits(return_X_y=True)
    for name in range(10):
        (folder / str(name)).mkdir(parents=True)
        for number, image in enumerate(images[labels == name][:per_class]):
            Image.fromarray((image.reshape(8, 8) * 15.9).astype("uint8")).save(folder / str(name) / f"{number}.png")


def write_recipe(folder, batch_size, num_steps):
    """For the images in that folder's images/."""
    path = folder / "private.toml"
    path.write_text(
        f"""
        [data]
        name = "folder"
        path = "{folder / "images"}"
        classes = {list("0123456789")}
        image_size = 8
        channels = 1
        [privacy]
        target_epsilon = 3.0
        delta = 1e-4
        [training]
        batch_size = {batch_size}
        num_steps = {num_steps}
        engine = "reference"
        microbatch_size = 8
        """
    )
    return path


def refused(capsys, *words):
    status, out, err = call(capsys, *words)
    assert (status, out) == (2, "") and err.strip().count("\n") == 0 and err.startswith("error: "), err
    return err


def test_a_search_ends_with_a_recipe_that_train_takes_and_whose_certificate_was_computed_in_advance(
    capsys, tmp_path, space
):
    folder = tmp_path / "search"
    (folder / ".sfumato-trials" / "trial-7-seed-0-killed").mkdir(parents=True)
    words = [*SEARCH, "--space", space, "--output", folder, "--json"]
    status, out, err = call(capsys, *words)
    assert status == 0, err
    found = json.loads(out)
    assert {
        "best",
        "trials",
        "recipe",
        "storage",
        "search_data",
        "epsilon_final",
        "epsilon_search_inclusive",
        "predicted_accuracy",
        "cost",
    } <= set(found)
    assert (
        found["search_data"] == "private"
        and found["epsilon_search_inclusive"] is None
        and found["augtest_gain"] is None
    )
    assert {"value", "low", "high"} == set(found["predicted_accuracy"])
    written = json.loads((folder / "search.json").read_text())
    jsonschema.validate(written, json.loads(call(capsys, "schema", "search")[1]))
    assert written == found
    assert sorted(path.name for path in folder.iterdir()) == [
        "recipe.toml",
        "search.json",
        "study.db",
    ]  # no weights of simulations

    begun = time.time()
    again = call(capsys, *words)  # finished: nothing is made again
    assert json.loads(again[1]) == found and "%" not in again[2]
    assert (folder / "study.db").stat().st_mtime < begun

    run = tmp_path / "run"
    status, out, err = call(capsys, "train", found["recipe"], "--output", run, "--json")
    assert status == 0, err
    trained, claim = json.loads(out), json.loads((run / "privacy.json").read_text())
    assert trained["private"] is True and trained["num_steps"] == 3
    assert trained["epsilon"] == found["epsilon_final"] <= 3.0
    assert claim["epsilon_search_inclusive"] is None
    assert any(line.startswith("the search on the private data is not covered") for line in claim["not_covered"])


def test_simulations_are_private_of_nobody_and_see_no_test_image(capsys, tmp_path, space, monkeypatch):
    from sfumato.training import loop

    seen = []
    real = loop.train

    def spy(plan, dataset, folder, **options):
        result = real(plan, dataset, folder, **options)
        seen.append(
            (
                plan.private,
                result.epsilon,
                dataset.held_out_name,
                plan.recipe.data.split,
                plan.recipe.privacy.noise_multiplier / 8,
            )
        )
        return result

    monkeypatch.setattr(loop, "train", spy)
    views = ["--set", "augmentation.kind=flip", "--set", "augmentation.augmult=2"]
    status, out, err = call(
        capsys,
        *SEARCH[:2],
        "--trials",
        "1",
        *SEARCH[4:],
        *views,
        "--space",
        space,
        "--output",
        tmp_path / "search",
        "--json",
    )
    assert status == 0, err
    assert abs(json.loads(out)["augtest_gain"]) <= 1  # reported beside the prediction
    assert {entry[:4] for entry in seen} == {(False, None, "valid", "train")}


def test_a_search_on_public_images_never_reads_the_private_ones(capsys, tmp_path, space):
    """The private images are a folder that holds names alone: decoding any of them would fail."""
    for name in "0123456789":
        (tmp_path / "images" / name).mkdir(parents=True)
        for number in range(30):
            (tmp_path / "images" / name / f"{number}.png").write_bytes(b"no image")
    recipe = write_recipe(tmp_path, batch_size=128, num_steps=3)
    words = [
        "search",
        recipe,
        "--trials",
        "2",
        "--batch-size",
        "8",
        "--seeds",
        "0,1",
        "--data",
        "digits",
        "--space",
        space,
    ]
    status, out, err = call(capsys, *words, "--output", tmp_path / "search", "--json")
    assert status == 0, err
    found = json.loads(out)
    assert found["search_data"] == "digits" and found["epsilon_search_inclusive"] == found["epsilon_final"] <= 3.0
    final = config.parse(config.read(tmp_path / "search" / "recipe.toml"))
    assert (final.data.name, final.privacy.search_data) == ("folder", "public")


def paid_words(recipe, space, folder):
    words = ["search", recipe, "--trials", "2", "--paid", "--data", "digits"]
    return [*words, "--space", space, "--output", folder]


def test_paid_trials_spend_one_budget_and_the_best_is_all_that_is_left(capsys, tmp_path, space):
    write_digits(tmp_path / "images", per_class=30)
    recipe = write_recipe(tmp_path, batch_size=64, num_steps=4)
    folder = tmp_path / "search"
    words = [*paid_words(recipe, space, folder), "--json"]
    status, out, err = call(capsys, *words)
    assert status == 0, err
    found = json.loads(out)
    assert found["trials"] is None and found["storage"] is None
    assert not any(word in err for word in ("step ", "accuracy"))
    assert sorted(path.name for path in folder.iterdir()) == ["paid-search.json", "selected"]
    claim = json.loads((folder / "selected" / "privacy.json").read_text())
    numbers = Mechanism(claim["num_examples"], claim["batch_size"], claim["noise_multiplier"], claim["num_steps"])
    assert claim["private"] is True and claim["num_steps"] == 4
    assert (
        claim["epsilon"]
        == found["epsilon_search_inclusive"]
        == epsilon_of_best(numbers, 1e-4, Selection(2.0, 0.0))
        <= 3.0
    )
    assert claim["epsilon_pld"] is None
    assert any("how many runs there were" in line for line in claim["not_covered"])
    for line in (folder / "selected" / "metrics.jsonl").read_text().splitlines():
        assert json.loads(line)["epsilon"] == claim["epsilon"]  # never what one run alone would have spent
    assert call(capsys, *words)[1] == out  # finished: told again


def test_paid_trials_that_private_images_judge_are_charged_for_it_and_publish_one_noisy_score(capsys, tmp_path, space):
    write_digits(tmp_path / "images", per_class=30)
    recipe, folder = write_recipe(tmp_path, batch_size=64, num_steps=4), tmp_path / "search"
    status, out, err = call(
        capsys,
        "search",
        recipe,
        "--trials",
        "2",
        "--paid",
        "--score-noise",
        "2",
        "--space",
        space,
        "--output",
        folder,
        "--json",
    )
    assert status == 0, err
    found, claim = json.loads(out), json.loads((folder / "selected" / "privacy.json").read_text())
    numbers = Mechanism(claim["num_examples"], claim["batch_size"], claim["noise_multiplier"], claim["num_steps"])
    assert claim["num_examples"] < 240  # 300 images, less a fifth for tests, less the validation images
    assert (
        claim["epsilon"]
        == found["epsilon_search_inclusive"]
        == epsilon_of_best(numbers, 1e-4, Selection(2.0, 0.0, 2.0))
        <= 3.0
    )
    assert any("validation images" in line for line in claim["not_covered"])
    result = json.loads((folder / "selected" / "result.json").read_text())
    assert result["held_out"] == "test" and isinstance(
        result["score"], int
    )  # no exact number of the validation images anywhere
    assert {
        json.loads(line)["accuracy"] for line in (folder / "selected" / "metrics.jsonl").read_text().splitlines()
    } >= {result["accuracy"]}


def test_while_paid_trials_run_all_is_secret(tmp_path, space):
    write_digits(tmp_path / "images", per_class=30)
    recipe = write_recipe(tmp_path, batch_size=64, num_steps=400)
    folder = tmp_path / "search"
    words = [str(word) for word in paid_words(recipe, space, folder)]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": os.pathsep.join(sys.path)}
    with subprocess.Popen(
        [sys.executable, "-m", "sfumato", *words], stderr=subprocess.PIPE, text=True, env=environment
    ) as process:
        deadline = time.monotonic() + 120
        while (
            not list(folder.glob("secret/trials/*/ledger.jsonl"))
            and time.monotonic() < deadline
            and process.poll() is None
        ):
            time.sleep(0.05)
        process.send_signal(signal.SIGTERM)
        _, err = process.communicate(timeout=120)
        assert process.returncode == 1 and "Go on with the same command" in err, err
    assert stat.S_IMODE((folder / "secret").stat().st_mode) == 0o700
    trial = next(folder.glob("secret/trials/*/ledger.jsonl")).parent.name
    assert trial not in err and "step" not in err


def test_searches_that_cannot_be_are_one_line(capsys, tmp_path, space):
    out = ["--output", tmp_path / "search"]
    for words, says in [
        ([*SEARCH, "--worker"], "--storage"),
        ([*SEARCH, "--data", "digits"], "private images themselves"),
        ([*SEARCH, "--data", "nothing"], "data.name"),
        ([*SEARCH, "--sampler", "best"], "greedy, tpe, random"),
        ([*SEARCH, "--prune"], "--prune"),
        ([*SEARCH, "--space", tmp_path / "none.toml"], "cannot be read"),
        ([*SEARCH, "--storage", "postgresql://me:secret@127.0.0.1:1/none"], "cannot be reached"),
        ([*SEARCH[:2], "--trials", "0"], "--trials"),
        ([*SEARCH[:4], "--paid"], "score"),
        ([*SEARCH[:4], "--paid", "--data", "mnist", "--prune"], "--prune"),
        ([*SEARCH[:4], "--paid", "--data", "mnist", "--sampler", "tpe"], "tpe"),
        ([*SEARCH[:4], "--paid", "--data", "mnist", "--sampler", "greedy"], "greedy"),
        ([*SEARCH[:4], "--paid", "--data", "mnist", "--storage", "sqlite:///x.db"], "--storage"),
        ([*SEARCH[:4], "--paid", "--data", "digits"], "private images themselves"),
        ([*SEARCH[:4], "--paid", "--data", "mnist", "--score-noise", "2"], "--score-noise"),
        ([*SEARCH[:4], "--paid", "--score-noise", "0"], "--score-noise"),
        ([*SEARCH[:4], "--score-noise", "2"], "--score-noise"),
        (["train", "demo/digits", "--set", "privacy.score_noise=2"], "privacy.score_noise"),
        (["train", "demo/digits", "--set", "privacy.selected_from=2", "--set", "privacy.score_noise=2"], "data.split"),
        (
            [
                "search",
                "demo/digits",
                "--trials",
                "2",
                "--set",
                "privacy.noise_multiplier=0",
                "--set",
                "privacy.target_epsilon=3",
            ],
            "noise_multiplier 0",
        ),
    ]:
        line = refused(capsys, *words, *out)
        assert says in line and "secret" not in line, (words, line)
    assert not (tmp_path / "search" / "recipe.toml").exists()


def test_a_search_begun_otherwise_is_not_mixed_with_this_one(capsys, tmp_path, space):
    words = [*SEARCH[:2], "--trials", "1", *SEARCH[4:], "--output", tmp_path / "search", "--space"]
    assert call(capsys, *words, space)[0] == 0
    other = tmp_path / "other.toml"
    other.write_text('[averaging]\n"ema.decay" = [0.5]\n')
    assert "another space" in refused(capsys, *words, other)
