"""The command line as others rely on it: names, exit status, one line or one JSON object."""

import json
import re
import shutil
import subprocess
import sys

import jsonschema
import numpy as np
import pytest
import typer
from PIL import Image
from typer.main import get_command

import sfumato
from sfumato import cli, config, recipes
from sfumato.cli.app import app
from sfumato.cli.output import interruptible
from sfumato.errors import InputError
from sfumato.models import registry
from sfumato.reporting.page import write_report
from sfumato.studies import figures
from sfumato.training.process import Stopped
from tests.accounting.tables import TAN_MISPRINTS, TAN_ROWS

TABLE_12 = ("plan --num-examples 50000 --delta 1e-5 --batch-size 4096 --noise-multiplier 3 --num-steps 2468").split()


def call(capsys, *arguments):
    """Runs a command in this process: (status, stdout, stderr)."""
    status = cli.run([str(argument) for argument in arguments])
    captured = capsys.readouterr()
    return status, captured.out, captured.err


def json_of(capsys, *arguments):
    status, out, err = call(capsys, *arguments, "--json")
    assert status == 0, err

    def refuse(constant):
        raise AssertionError(f"{constant} is no JSON")

    assert out.count("\n") == 1
    return json.loads(out, parse_constant=refuse)


def refused(capsys, *arguments, status=2):
    """Expects one clear line on stderr, nothing on stdout."""
    found, out, err = call(capsys, *arguments)
    errors = [line for line in err.splitlines() if line.startswith("error: ")]
    assert found == status and out == "" and len(errors) == 1, (found, out, err)
    assert "Traceback" not in err and err.splitlines()[-1] == errors[0]
    return errors[0]


def settings(values):
    """--set for each key."""
    return [word for key, value in values.items() for word in ("--set", f"{key}={value}")]


def test_plan_solves_for_the_fourth_of_batch_steps_noise_and_epsilon(capsys):
    facts = json_of(capsys, *TABLE_12)
    assert facts["epsilon_rdp"] == pytest.approx(7.05, abs=0.005)
    assert facts["epsilon"] == facts["epsilon_pld"] <= facts["epsilon_rdp"]
    assert set("epsilon_tan delta sampling_prob snr overcharge warnings".split()) <= set(facts)
    assert facts["num_epochs"] == pytest.approx(2468 * 4096 / 50000)
    assert facts["snr_per_step"] == pytest.approx(4096 / 50000 / (2**0.5 * 3))
    epsilon, base = facts["epsilon"], {"batch_size": 4096, "num_steps": 2468, "noise_multiplier": 3}
    for key, value in base.items():
        given = [f"--{other.replace('_', '-')}={number}" for other, number in base.items() if other != key]
        solved = json_of(capsys, "plan", "--num-examples", 50000, "--delta", 1e-5, *given, "--epsilon", epsilon)
        assert solved["epsilon"] <= epsilon and solved[key] == pytest.approx(value, rel=2e-3)


SMALL = "plan --num-examples 1000 --batch-size 20"
DIGITS = "train demo/digits"
OF_A_RUN = ("evaluate", "calibrate", "epsilon", "report", "audit one-run", "export --output away")


@pytest.mark.parametrize(
    "words, names",
    [
        (" ".join(TABLE_12) + " --epsilon 8", "one is solved for and left out, not none"),
        (" ".join(TABLE_12[:-2]), "--num-steps"),
        ("plan --num-examples 1000 --batch-size 2000 --noise-multiplier 1 --num-steps 1", "batch"),
        (f"{SMALL} --epsilon 1 --num-steps 1 --delta 1", "delta"),
        (f"{SMALL} --epsilon 1 --noise-multiplier 0.3", "noise"),
        ("plan --num-examples many", "--num-examples"),
        ("plan --recipe demo/digits --epsilon 1", "--recipe"),
        ("plan --recipe image-folder", "image-folder"),
        ("plann", "plann"),
        ("train", "Missing argument"),
        (f"{DIGITS} --epsilon nan", "target_epsilon"),
        (f"{DIGITS} --set model.name=small_cnm", "small_cnn"),
        (f"{DIGITS} --set model.name=wide_resnet --set model.options.deepth=16", "depth"),
        (f"{DIGITS} --set training.batch_size=5000", "batch_size"),
        (f"{DIGITS} --set augmentation.kind=rrc", "augmentation.augmult"),  # the recipe says 0
        (f"{DIGITS} --device gpu7", "gpu7"),
        (f"{DIGITS} --device mps", 'Use "auto", "cpu", "cuda" or "cuda:N"'),
        (f"{DIGITS} --set training.precision=tf32 --device cpu", "CUDA"),
        ("resume no-such-run", "no-such-run"),
        (f"{DIGITS} --resume", "unfinished"),
        ("train no-such.toml", "no-such.toml"),
        ("train image-folder --epsilon 3", "--data-root"),
        ("train image-folder --data-root . --output ../run", "epsilon"),
        ("predict no-such-run image.png", "no-such-run"),
        ("check no_package:factory", "no_package"),
        ("recipes show demo", "demo/digits"),
        ("norms no-such-run", "no-such-run"),
        *((f"{words} no-such-run", "there is no folder no-such-run. Name") for words in OF_A_RUN),
        ("train mnist-eps-1 --set data.group_by=person", "does not fit data set mnist, which has none"),
    ],
)
def test_a_wrong_input_gets_one_line_that_names_it_and_status_2(capsys, tmp_path, monkeypatch, words, names):
    monkeypatch.chdir(tmp_path)
    if "--data-root" in words:
        for name in ("a", "b"):
            (tmp_path / name).mkdir()
            for number in range(12):
                Image.new("RGB", (9, 9)).save(tmp_path / name / f"{number}.png")
    before = sorted(tmp_path.rglob("*"))
    assert names in refused(capsys, *words.split())
    assert sorted(tmp_path.rglob("*")) == before  # nothing was written


def test_a_recipe_with_a_value_in_place_of_a_section_is_refused(capsys, tmp_path):
    for text, option in (("data = 3", "--data-root"), ('privacy = 3\n[data]\nname = "digits"', "--epsilon")):
        (tmp_path / "odd.toml").write_text(text)
        assert text.partition(" ")[0] in refused(capsys, "train", tmp_path / "odd.toml", option, "3")


def test_a_model_with_batch_norm_is_refused_before_anything_is_written(capsys, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "mine.py").write_text(
        "from torch import nn\n"
        "def net(num_classes): return nn.Sequential(nn.Conv2d(1, 4, 3), nn.BatchNorm2d(4), nn.Flatten(), "
        "nn.Linear(144, num_classes))\n"
    )
    monkeypatch.syspath_prepend(str(tmp_path))
    line = refused(capsys, "train", "demo/digits", "--set", "model.name=mine:net")
    assert "BatchNorm2d at '1'" in line and "groupnorm" in line and not (tmp_path / "runs").exists()
    facts = json_of(capsys, "check", "mine:net", "--image-size", 8, "--channels", 1)
    assert not facts["compatible"] and facts["findings"][0]["module"] == "1"
    assert facts["uses"] == [] and facts["engine"] is None
    fixed = json_of(capsys, "check", "mine:net", "--image-size", 8, "--channels", 1, "--fix", "groupnorm")
    assert fixed["compatible"] and "BatchNorm2d" in fixed["replaced"][0]


def test_check_says_how_every_weight_s_gradients_are_had(capsys):
    facts = json_of(capsys, "check", "wide_resnet", "--image-size", 8)
    model = registry.build("wide_resnet", image_size=8, channels=3, num_classes=10, options={}, seed=0)
    assert {name for use in facts["uses"] for name in use["parameters"]} == {*dict(model.named_parameters())}
    assert facts["engine"] == "graph" and facts["engine_refusal"] is None
    first = facts["uses"][0]
    assert (first["operation"], first["argument"], first["kind"]) == ("conv2d", "weight", "standardized")


def test_recipes_are_listed_shown_and_verified_against_the_papers_epsilons(capsys):
    rows = {row["name"]: row for row in json_of(capsys, "recipes", "verify")["recipes"]}
    assert {"demo/digits", "image-folder"} <= rows.keys()
    spent = {e: rows[f"de2022/cifar10-wrn-16-4-eps-{e}"] for e in (1, 2, 3, 4, 6, 8)}
    assert spent[1]["epsilon_rdp"] == pytest.approx(0.988, abs=5e-4)
    assert spent[8]["epsilon_rdp"] == pytest.approx(7.05, abs=5e-3)
    assert [row["status"] for row in spent.values()] == ["within"] * 5 + ["under"]
    assert all(row["epsilon_pld"] < row["epsilon_rdp"] for row in spent.values())
    # Misprints of Sander et al., and rows of De et al. whose sigma is printed with one decimal.
    rounded = {name for name in rows if "imagenet32-" in name and name.endswith(("-eps-2", "-eps-4"))}
    assert len(rounded) == 10
    over, under = ({name for name, row in rows.items() if row["status"] == status} for status in ("over", "under"))
    assert over == rounded | {f"sander2022/{name}" for name in TAN_MISPRINTS}
    carried_over = {name for name in rows if name.startswith("de2022/cifar10-wrn-40-4-cifar100-")}  # Table 19
    assert len(carried_over) == 7 and under == carried_over | {"de2022/cifar10-wrn-16-4-eps-8"}
    within = [rows[f"sander2022/{row.recipe}"]["status"] for row in TAN_ROWS if row.recipe not in TAN_MISPRINTS]
    assert set(within) == {"within"}
    status, out, _ = call(capsys, "recipes", "show", "demo/digits")
    assert status == 0 and "target_epsilon = 3.0" in out


def photos(root, count, seed, contrast=90, noise=60):
    """A folder of stripes against checks."""
    source = np.random.default_rng(seed)
    for label, name in enumerate(["checks", "stripes"]):
        (root / name).mkdir(parents=True)
        for number in range(count):
            rows, columns = np.mgrid[:20, :20]
            pattern = (rows // 3) % 2 if label else (rows // 3 + columns // 3) % 2
            pixels = np.clip(pattern * contrast + source.normal(80, noise, (20, 20)), 0, 255).astype(np.uint8)
            Image.fromarray(pixels).save(root / name / f"{number}.png")
    return root


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A person's folder: stripes against checks, 60 of each, with a colour photograph and a broken one among them."""
    root = photos(tmp_path_factory.mktemp("photos"), 60, seed=0, contrast=150, noise=30)
    Image.open(root / "checks" / "7.png").convert("RGB").save(root / "checks" / "7.png")
    (root / "stripes" / "0.png").write_bytes(b"\x89PNG broken")
    return root


@pytest.fixture(scope="module")
def trained(folder, tmp_path_factory):
    run = tmp_path_factory.mktemp("run") / "photos"
    words = (
        f"train image-folder --data-root {folder} --epsilon 8 --delta 1e-3 --output {run} --accountant rdp --json "
        "--set data.image_size=16 --set data.channels=1 --set training.num_steps=15 --set training.batch_size=40"
    )
    command = [sys.executable, "-m", "sfumato", *words.split()]
    done = subprocess.run(command, capture_output=True, text=True, timeout=200)
    assert done.returncode == 0, done.stderr
    return run, json.loads(done.stdout), done.stderr


def test_a_folder_is_trained_on_and_every_file_of_the_run_is_there(trained):
    run, result, log = trained
    keys = (
        "run private epsilon epsilon_rdp epsilon_pld delta noise_multiplier batch_size num_steps num_examples "
        "test_accuracy test_accuracy_last test_accuracy_top5 images_per_second seconds"
    )
    assert set(keys.split()) <= set(result) and result["private"] and 0 < result["epsilon"] <= 8
    assert result["test_accuracy_top5"] is None and result["balanced_accuracy"] is not None
    files = set("recipe.toml privacy.json ledger.jsonl metrics.jsonl model.safetensors report.html owner".split())
    assert files <= {path.name for path in run.iterdir()}
    assert oct((run / "owner" / "metrics_private.jsonl").stat().st_mode)[-3:] == "600"
    assert "0.png" in log and "chosen: " in log
    claim = json.loads((run / "privacy.json").read_text())
    keys = (
        "private epsilon epsilon_rdp epsilon_pld delta accountant relation unit sampling noise_multiplier "
        "sampling_prob batch_size num_examples num_steps clipping_norm ledger_lines ledger_sha256 not_covered"
    )
    assert set(keys.split()) <= set(claim) and claim["epsilon"] == result["epsilon"]
    for line in (run / "metrics.jsonl").read_text().splitlines():
        # no time, no throughput: they show the batch
        assert set(json.loads(line)) == {"step", "epsilon", "accuracy", "accuracy_last"}


def test_the_trained_model_evaluates_to_what_training_said_and_predicts_files_and_folders(trained, folder, capsys):
    run, result, _ = trained
    again = json_of(capsys, "evaluate", run, "--data-root", folder)
    assert again["accuracy"] == pytest.approx(result["accuracy"])
    rows = json_of(capsys, "predict", run, folder / "checks")["predictions"]
    assert len(rows) == 60 and {row["class"] for row in rows} <= {"stripes", "checks"}
    assert all(row["probabilities"] is None for row in rows)  # 23 held-out images are too few to calibrate by
    broken = json_of(capsys, "predict", run, folder / "stripes" / "0.png")["predictions"]
    assert broken[0]["class"] is None
    assert json_of(capsys, "check", run)["compatible"]


def test_a_dry_run_of_several_is_of_the_runs_that_would_be(capsys):
    """Public seeds void the guarantee, and what the runs refuse is refused."""
    words = ["train", "demo/digits", "--dry-run"]
    seeded = json_of(capsys, *words, "--seeds", "0-1")
    assert seeded["epsilon"] is None and seeded["private"] is False
    assert "canaries" in refused(capsys, *words, "--seeds", "0..1", "--set", "audit.canaries=75")
    assert "each seed once" in refused(capsys, *words, "--seeds", "1-0")
    assert "each seed once" in refused(capsys, *words, "--seeds", "1,1")
    assert "run.seed" in refused(capsys, *words, "--repeat", "2", "--set", "run.seed=1")
    assert json_of(capsys, *words, "--repeat", "2")["private"] is True
    assert "each of 2 runs: their epsilons add up" in call(capsys, *words, "--repeat", "2")[1]


def test_minutes_of_a_dry_run_have_those_of_evaluations(capsys, monkeypatch):
    monkeypatch.setattr("sfumato.training.trainer._seconds_of_one", lambda network, blank: 1.0)
    seconds = json_of(capsys, "train", "demo/digits", "--dry-run", "--set", "training.evaluate_every=20")
    assert 3 * 2 * 360 < seconds["expected_seconds"] < 3 * 2 * 360 + 300


def test_a_dry_run_shows_every_choice_and_writes_nothing(folder, trained, capsys, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    looked = []
    monkeypatch.setattr("sfumato.data.folders.Listing.report_first", lambda listing: looked.append(listing.root))
    words = ["train", "image-folder", "--data-root", folder, "--epsilon", 2, "--dry-run", "--accountant", "rdp"]
    facts = json_of(capsys, *words)
    assert looked == [folder]
    assert facts["epsilon"] <= 2 and facts["expected_seconds"] > 0 and facts["delta"] in (1e-2, 1e-3)
    run, result, _ = trained
    assert facts["classes"] == result["classes"] == ["checks", "stripes"] and facts["held_out"] == "test"
    public = json.loads((run / "privacy.json").read_text("utf-8"))["public_inputs"]
    assert facts["num_held_out"] == public["num_held_out"] > 0
    chosen = {row["key"] for row in facts["choices"]}
    assert {"model.name", "training.batch_size", "optimizer.learning_rate", "privacy.noise_multiplier"} <= chosen
    assert not list(tmp_path.iterdir())


def test_no_run_is_written_among_the_images(folder, capsys, tmp_path, monkeypatch):
    words = ["image-folder", "--epsilon", 2, "--set", "privacy.accountant=rdp"]
    before = sorted(folder.rglob("*"))
    (tmp_path / "link").symlink_to(folder)
    monkeypatch.chdir(folder)
    for root, output in ((".", None), (folder, "stripes/run"), (tmp_path / "link", folder / "run")):
        where = ["--data-root", root, *(["--output", output] if output else [])]
        for command in (["train"], ["simulate", "--batch-size", 8], ["search", "--trials", 1]):
            line = refused(capsys, command[0], *words, *command[1:], *where)
            assert "lies in the folder of images" in line and "--output" in line
        assert sorted(folder.rglob("*")) == before
    with pytest.raises(InputError, match="lies in the folder of images"):
        sfumato.train({"data": {"name": "folder"}, "privacy": {"target_epsilon": 2.0}}, "run", data_root=".")
    assert sorted(folder.rglob("*")) == before


def test_a_second_interrupt_still_names_the_run_and_how_to_go_on(capsys, tmp_path):
    command = ["sfumato", "resume", str(tmp_path), "--trust", "mynet"]
    with pytest.raises(KeyboardInterrupt), interruptible(command=command, kept="everything is kept"):
        raise Stopped  # nothing has begun
    (tmp_path / "recipe.toml").touch()
    with pytest.raises(typer.Exit), interruptible(command=command, kept="everything is kept"):
        raise Stopped
    said = f"interrupted; the last checkpoint is kept. Go on with: sfumato resume {tmp_path} --trust mynet"
    assert capsys.readouterr().err.splitlines() == [said]


SHORT = [*settings({"training.num_steps": 3, "training.batch_size": 32}), "--accountant", "rdp"]


def test_a_test_with_views_stands_beside_the_plain_accuracy_and_comes_out_the_same_again(capsys, tmp_path):
    run, views = tmp_path / "run", {"kind": "tan", "augmult": 2, "test_views": 3}
    words = [*SHORT, *settings({f"augmentation.{key}": value for key, value in views.items()})]
    status, out, err = call(capsys, "train", "demo/digits", "--output", run, *words)
    assert status == 0 and "chosen: augmentation.padding = 1 " in err
    assert "testing with 3 views of each held-out image" in err
    result = json.loads((run / "result.json").read_text())
    vote, mean = result["accuracy_augtest_vote"], result["accuracy_augtest_mean"]
    assert result["test_views"] == 3 and 0 < vote < 1 and 0 < mean < 1
    lines = out.splitlines()
    assert lines[0].startswith(f"held-out accuracy {100 * result['test_accuracy']:.2f} % (")
    shares = f"{100 * vote:.2f} % by majority, {100 * mean:.2f} % by mean probability"
    assert lines[1] == f"with 3 random views of each image: {shares}"
    keys = ("test_views", "accuracy_augtest_vote", "accuracy_augtest_mean")
    again = json_of(capsys, "evaluate", run)
    assert [again[key] for key in keys] == [3, vote, mean] and again["accuracy"] == result["accuracy"]
    assert json_of(capsys, "evaluate", run, "--test-views", 0)["accuracy_augtest_vote"] is None
    one = json_of(capsys, "evaluate", run, "--test-views", 1)
    assert one["test_views"] == 1 and one["accuracy_augtest_vote"] == one["accuracy_augtest_mean"]
    assert "--test-views" in refused(capsys, "evaluate", run, "--test-views", -1)


@pytest.mark.parametrize(("setting", "reason"), [("run.seed=3", "seed"), ("privacy.sampling=shuffled", "shuffled")])
def test_a_run_that_is_not_private_never_claims_an_epsilon(capsys, tmp_path, setting, reason):
    result = json_of(capsys, "train", "demo/digits", "--output", tmp_path / "run", *SHORT, "--set", setting)
    assert result["private"] is False and result["epsilon"] is None and result["epsilon_rdp"] is None
    assert 0 < result["epsilon_if_private"] <= 3 and reason in result["why_not_private"]
    claim = json.loads((tmp_path / "run" / "privacy.json").read_text())
    assert claim["private"] is False and claim["epsilon"] is None


@pytest.fixture(scope="module")
def watched(tmp_path_factory):
    """A private run of Adam that noted its gradient norms."""
    run = tmp_path_factory.mktemp("run") / "watched"
    words = {"optimizer.name": "adam", "optimizer.learning_rate": 0.01, "training.norm_histogram_every": 2}
    command = ["train", "demo/digits", "--output", str(run), *SHORT, *settings(words | {"training.evaluate_every": 3})]
    assert cli.run(command) == 0
    return run


def test_gradient_norms_are_shown_to_the_owner_at_the_chosen_steps(watched, capsys, tmp_path):
    facts = json_of(capsys, "norms", watched, "--plot", tmp_path / "norms.svg")
    assert [row["step"] for row in facts["histograms"]] == [1, 2] and facts["private"] is False
    for row in facts["histograms"]:
        assert sum(row["counts"]) > 0 and 0 <= row["clipped_fraction"] <= 1 and row["signal_to_noise"] > 0
    assert oct((tmp_path / "norms.svg").stat().st_mode)[-3:] == "600"
    status, out, _ = call(capsys, "norms", watched)
    assert status == 0 and out.startswith("not private") and "owner" in out.splitlines()[0]
    assert "root mean square norm of the noise" in out


def test_no_file_but_the_private_one_holds_anything_of_the_norms(watched):
    lines = [json.loads(line) for line in (watched / "owner" / "metrics_private.jsonl").read_text().splitlines()]
    norms = [line["norms"] for line in lines if "norms" in line]
    assert len(norms) == 2 and oct((watched / "owner" / "metrics_private.jsonl").stat().st_mode)[-3:] == "600"
    numbers = [str(value) for found in norms for value in (found["median"], found["signal_to_noise"])]
    counts = [json.dumps(found["counts"])[1:-1] for found in norms]
    secrets = ["signal_to_noise", "not_finite", '"counts"', '"norms"', "median", *numbers, *counts]
    public = [path for path in watched.rglob("*") if path.is_file() and "owner" not in path.relative_to(watched).parts]
    files = "recipe.toml privacy.json metrics.jsonl result.json report.html ledger.jsonl"
    assert set(files.split()) <= {path.name for path in public}
    for path in public:
        content = path.read_bytes().decode(errors="replace")
        assert not [secret for secret in secrets if secret in content], path


def test_the_library_takes_paths_as_text_too(tmp_path):
    recipe = {"data": {"name": "digits"}, "model": {"name": "small_cnn", "options": {"width": 2}}}
    recipe |= {"training": {"num_steps": 1, "batch_size": 8}, "run": {"seed": 0}}
    result = sfumato.train(recipe, str(tmp_path / "run"), data_root=str(tmp_path))
    assert recipe["run"] == {"seed": 0} and "privacy" not in recipe  # the caller's own is left alone
    assert sfumato.train(recipe, str(tmp_path / "run"), resume=True) == result
    assert sfumato.load(str(tmp_path / "run")).classes == tuple("0123456789")
    page = tmp_path / "run" / "report.html"
    assert page.exists() and write_report(str(tmp_path / "run")) == page


@pytest.mark.parametrize("recipe", ["demo/digits", "image-folder"])
def test_non_private_training_shows_the_price_of_privacy_and_needs_no_budget(recipe, folder, capsys, tmp_path):
    steps = "training.num_steps=15"  # after three, one run in thirty knows no more than chance
    of_recipe = SHORT if recipe == "demo/digits" else ["--data-root", folder]
    words = ["train", recipe, *of_recipe, "--set", steps, "--non-private"]
    result = json_of(capsys, *words, "--output", tmp_path / "run")
    assert result["private"] is False and result["epsilon"] is result["delta"] is None
    assert result["accuracy"] > 0.4 or recipe != "demo/digits"
    facts = json_of(capsys, *words, "--dry-run")
    assert facts["epsilon"] is None and not [row for row in facts["choices"] if row["key"].startswith("privacy.")]
    with_budget = json_of(capsys, *words, "--epsilon", 0.5, "--delta", 1e-3, "--dry-run")
    assert facts["recipe"] == with_budget["recipe"] and facts["recipe"]["optimizer"]["max_grad_norm"] == 1.0


def test_every_key_is_told_with_type_and_meaning_and_a_foreign_name_finds_its_own(capsys):
    rows = json_of(capsys, "keys")["keys"]
    assert {row["key"] for row in rows} == {key for key in config.known_keys() if "." in key}
    assert all(row["type"] and row["means"] for row in rows)
    means = {row["key"]: row["means"] for row in rows}
    assert "stands for slashes" in means["data.exclude"].replace("\n", " ")
    status, out, _ = call(capsys, "keys", "privacy")
    assert status == 0 and "privacy.clipping_norm (number" in out and "optimizer." not in out
    (row,) = json_of(capsys, "keys", "optimizer.learning_rate")["keys"]
    assert row["key"] == "optimizer.learning_rate" and row["means"]
    assert "Did you mean privacy?" in refused(capsys, "keys", "privacies")
    steps = "training.num_steps = epochs x N / training.batch_size"
    for key, meant in (("optimizer.lr", "optimizer.learning_rate"), ("training.epochs", steps)):
        said = refused(capsys, "train", "demo/digits", "--set", f"{key}=3")
        assert f"{meant} is meant" in said and refused(capsys, "keys", key) == said
        assert f"{meant} is meant" in refused(capsys, "keys", key.partition(".")[2])


def test_every_network_is_told_with_its_options(capsys):
    rows = {row["name"]: row for row in json_of(capsys, "models")["models"]}
    assert rows.keys() == registry.MODELS.keys() and rows["small_cnn"]["options"] == ["width", "order"]
    status, out, _ = call(capsys, "models")
    assert status == 0 and "small_cnn: images of 8 pixels or more; options width, order" in out and "timm:NAME" in out


_PLACE = "--data-root --device --trust --json"
SURFACE = {
    "train": "--epsilon --epsilon-per-person --images-per-person --delta --set --output --accountant --calibrate "
    f"--non-private --dry-run --resume --max-lost --budget --repeat --seeds --no-cache {_PLACE}",
    "plan": "--num-examples --delta --batch-size --num-steps --noise-multiplier --epsilon --images-per-person --recipe "
    "--accountant --table --throughput --devices --bandwidth --reading --price --more-data --plot --trust --json",
    "simulate": f"--batch-size --seeds --epsilon --delta --set --output {_PLACE}",
    "search": "--trials --space --sampler --prune --paid --score-noise --batch-size --seeds --data --epsilon --delta "
    f"--set --storage --worker --output --budget {_PLACE}",
    "sweep": f"--grid --cells --seeds --paired --workers --epsilon --delta --set --output --budget {_PLACE}",
    "scaling-law": "--predict-batch-size --plot --page --json",
    "report": "--output --json",
    "evaluate": "--data-root --test-views --specificity --prevalence --by --plot --report --trust --json",
    "predict": "--format --trust --json",
    "calibrate": "--positive --sensitivity --specificity --publish --data-root --trust --json",
    "resume": f"--max-lost --budget --no-cache {_PLACE}",
    "audit bounds": "--delta --epsilon --confidence --page --json",
    "audit canary": "--epsilon --delta --num-steps --sampling-prob --num-games --confidence --page --json",
    "audit membership": "--epsilon --num-models --num-examples --delta --data-root --fixed-batches --augmult "
    "--num-steps --confidence --output --device --page --json",
    "audit one-run": "--confidence --trust --json",
    "check": "--fix --image-size --channels --num-classes --trust --json",
    "norms": "--plot --json",
    "epsilon": "--delta --json",
    "keys": "--json",
    "models": "--json",
    "recipes list": "--data-root --json",
    "recipes show": "--calibrate --json",
    "recipes verify": "--json",
    "figures list": "--json",
    "figures run": "--scale --train --seeds --paired --workers --output --data-root --device --json",
    "schema": "",
    "budget new": "--epsilon --delta --recipe --set --data-root --json",
    "budget show": "--json",
    "cache list": "--json",
    "cache clear": "--json",
}


def test_a_group_without_a_command_tells_its_commands_and_does_nothing(capsys):
    for group in {command.split()[0] for command in SURFACE if " " in command}:
        status, out, err = call(capsys, group)
        assert (status, out) == (2, "")
        assert all(command.split()[1] in err for command in SURFACE if group + " " in command), group


def test_a_folder_in_place_of_a_recipe_is_told_how_to_be_trained_on(tmp_path, capsys):
    (tmp_path / "my xrays").mkdir()
    line = refused(capsys, "train", tmp_path / "my xrays", "--epsilon", 8)
    assert f"sfumato train image-folder --data-root '{tmp_path / 'my xrays'}'" in line


def test_heavy_libraries_are_not_imported_for_help_plan_and_recipes():
    code = (
        "import sys; from sfumato import cli\n"
        f"for words in (['--help'], ['recipes', 'list'], {TABLE_12}): cli.run(words)\n"
        "print(sorted({'torch', 'torchvision', 'matplotlib', 'sklearn', 'PIL'} & set(sys.modules)), file=sys.stderr)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.stderr.splitlines()[-1] == "[]", done.stderr


def test_the_surface_is_what_the_contract_says_and_every_help_ends_with_an_example_that_can_be_typed(capsys):
    status, out, _ = call(capsys, "--help")
    assert status == 0 and all(name.split()[0] in out for name in SURFACE)
    for name, options in SURFACE.items():
        status, out, _ = call(capsys, *name.split(), "--help")
        found = set(re.findall(r"^  (--[\w-]+)", out, re.MULTILINE)) - {"--help"}
        assert status == 0 and found == set(options.split()), name
        _, example = " ".join(out.split()).split("Example: ")
        assert re.match(rf"sfumato {name}\b", example), name
        assert {word for word in example.split() if word.startswith("--")} <= found, name
        named = {word for word in example.split() if word.startswith(("cifar10", "de2022", "demo/"))}
        assert named <= {*recipes.names(), *figures.names()}, name


def test_every_argument_and_option_is_explained():
    groups = [group := get_command(app), *(each for each in group.commands.values() if hasattr(each, "commands"))]
    params = [param for group in groups for each in group.commands.values() for param in each.params]
    assert len(params) > 150 and not [param.name for param in params if not param.help]


def test_what_a_run_leaves_is_what_the_schemas_say(capsys, tmp_path):
    run = tmp_path / "run"
    steps = {"training.num_steps": 4, "training.evaluate_every": 2, "training.norm_histogram_every": 2}
    json_of(capsys, "train", "demo/digits", *settings(steps), "--output", run)
    lines = {"metrics": "metrics.jsonl", "private-metrics": "owner/metrics_private.jsonl", "ledger": "ledger.jsonl"}
    for name, file in {"certificate": "privacy.json", "result": "result.json", **lines}.items():
        _, out, _ = call(capsys, "schema", name)
        validator = jsonschema.Draft202012Validator(json.loads(out))
        validator.check_schema(validator.schema)
        texts = (run / file).read_text().splitlines() if name in lines else [(run / file).read_text()]
        for text in texts:
            validator.validate(json.loads(text))
        with pytest.raises(jsonschema.ValidationError):
            validator.validate({**json.loads(texts[0]), "another": 1})
    assert "there is no schema" in refused(capsys, "schema", "certificat")


def test_a_folder_of_other_images_is_scored_whole(trained, folder, capsys, tmp_path):
    run, *_ = trained
    rows = json_of(capsys, "predict", run, folder / "checks")["predictions"]
    right = sum(row["class"] == "checks" for row in rows if row["class"])
    (tmp_path / "more").mkdir()
    shutil.copytree(folder / "checks", tmp_path / "more" / "checks")
    (tmp_path / "more" / "stripes").mkdir()
    shutil.copy(folder / "stripes" / "1.png", tmp_path / "more" / "stripes" / "1.png")
    found = json_of(capsys, "evaluate", run, tmp_path / "more", "--specificity", "0.5")
    assert found["held_out"] == "folder" and found["confusion"][0] == [right, found["num_images"] - 1 - right]
    assert found["specificity"] == 0.5 and found["intervals"]["accuracy"][0] <= found["accuracy"]
    assert cli.run(["evaluate", str(run), str(folder), "--data-root", str(folder)]) == 2
    assert "give one of them" in capsys.readouterr().err
    (tmp_path / "more" / "dots").mkdir()
    shutil.copy(next((folder / "checks").glob("*.png")), tmp_path / "more" / "dots" / "1.png")
    assert cli.run(["evaluate", str(run), str(tmp_path / "more")]) == 2
    assert "dots" in capsys.readouterr().err


def test_what_is_kept_on_disk_is_listed_removed_and_switched_off(folder, capsys, tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "kept"))
    few = ["--epsilon", "8", "--set", "training.num_steps=2", "--set", "data.image_size=16"]
    train = ["train", "image-folder", "--data-root", folder, *few]
    json_of(capsys, *train, "--no-cache", "--output", tmp_path / "one")
    assert json_of(capsys, "cache", "list") == {"entries": []}
    assert "nothing is kept in" in call(capsys, "cache", "list")[1]
    json_of(capsys, *train, "--output", tmp_path / "two")
    (entry,) = json_of(capsys, "cache", "list")["entries"]
    assert (entry["kind"], entry["root"]) == ("images", str(folder.resolve())) and entry["num_bytes"] > 1000
    assert str(folder.resolve()) in call(capsys, "cache", "list")[1]
    assert len(json_of(capsys, "cache", "clear")["entries"]) == 1
    assert json_of(capsys, "cache", "list") == {"entries": []} and not list((tmp_path / "kept/sfumato").iterdir())
    assert json.loads((tmp_path / "one/privacy.json").read_text())["epsilon"] <= 8
