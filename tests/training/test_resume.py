"""Interrupt a run at any moment: --resume ends in the same weights and counts every update once."""

import json
import os
import random
import re
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from safetensors import safe_open
from safetensors.torch import load_file, save_file

import sfumato
from sfumato.randomness import run_id, subkey
from sfumato.run_folder.ledger import Ledger
from sfumato.run_folder.tensor_mac import tensor_mac
from tests.training import faults

STEPS = 30
SETTINGS = [
    "--set",
    f"training.num_steps={STEPS}",
    "--set",
    "training.checkpoint_every=4",
    "--set",
    "training.evaluate_every=10",
    "--set",
    "training.batch_size=64",
    "--set",
    "training.microbatch_size=32",
    "--set",
    "model.options.width=4",
    "--accountant",
    "rdp",
]


def command(folder, *more):
    return ["train", "demo/digits", *SETTINGS, "--output", str(folder), *more]


@pytest.fixture(scope="module")
def begun(tmp_path_factory):
    """A private run that was killed right after its first checkpoint: key, recipe and data are settled."""
    folder = tmp_path_factory.mktemp("runs") / "begun"
    for count in range(1, 20):
        shutil.rmtree(folder, ignore_errors=True)
        faults.run(command(folder), die_at=("ledger", count, 0.0))
        ledger = Ledger.open(folder / "ledger.jsonl") if folder.exists() else None
        if ledger and len(ledger.lines) == 4:
            return folder
    raise AssertionError("no run was begun")


@pytest.fixture(scope="module")
def finished(begun, tmp_path_factory):
    """The same run, never interrupted again."""
    folder = tmp_path_factory.mktemp("runs") / "finished"
    shutil.copytree(begun, folder)
    assert faults.run(command(folder, "--resume")) == 0
    return folder


def resume_to_the_end(folder, tmp_path):
    log = tmp_path / "log"
    assert faults.run(command(folder, "--resume"), log=log) == 0, log.read_text()


def assert_same_run(folder, finished):
    weights, expected = load_file(folder / "model.safetensors"), load_file(finished / "model.safetensors")
    assert weights.keys() == expected.keys()
    assert all(weights[name].equal(expected[name]) for name in expected)
    lines = Ledger.open(folder / "ledger.jsonl").lines
    assert lines == Ledger.open(finished / "ledger.jsonl").lines
    assert [line["step"] for line in lines if line["kind"] == "step"] == list(range(1, STEPS + 1))
    claims = [json.loads((run / "privacy.json").read_text()) for run in (folder, finished)]
    assert claims[0] == claims[1] and claims[0]["private"] and claims[0]["num_steps"] == STEPS
    # Epsilon aside: while updates are repeated, those already spent count.
    metrics = [
        [{**json.loads(line), "epsilon": 0} for line in (run / "metrics.jsonl").read_text().splitlines()]
        for run in (folder, finished)
    ]
    assert metrics[0] == metrics[1]
    assert not (folder / "key").exists()


def killed(begun, folder, die_at):
    shutil.copytree(begun, folder)
    assert faults.run(command(folder, "--resume"), die_at=die_at) == -signal.SIGKILL


@pytest.mark.parametrize(
    "die_at",
    [
        ("ledger", 7, 0.0),  # only the head's file has the line
        ("ledger", 18, 0.5),
        ("ledger", STEPS - 4, 1.0),
        *[("file", number, 0.3) for number in (3, 7, 11)],
        *[("file", number, 1.0) for number in (6, 8, 9, 10)],  # whole, but not yet under its name
    ],
    ids=lambda spec: "-".join(map(str, spec)),
)
def test_killed_inside_a_write_it_ends_as_if_nothing_had_happened(begun, finished, tmp_path, die_at):
    folder = tmp_path / "run"
    killed(begun, folder, die_at)
    resume_to_the_end(folder, tmp_path)
    assert_same_run(folder, finished)


@pytest.mark.parametrize(
    "die_at",
    [
        *[("file", number, share) for number in (1, 2, 3, 4, 5, 6) for share in (0.5, 1.0)],
        *[("ledger", number, 0.3) for number in (1, 2, 3)],
    ],
    ids=str,
)
def test_a_start_that_was_killed_anywhere_is_finished_by_resume(tmp_path, die_at):
    """Recipe, key, the ledger's first lines and their heads, the certificate, the first checkpoint."""
    folder, log = tmp_path / "run", tmp_path / "log"
    words = ["--set", "training.num_steps=3", "--set", "training.evaluate_every=3", "--set", "model.options.width=2"]
    assert faults.run(command(folder, *words), die_at=die_at) == -signal.SIGKILL
    assert faults.run(command(folder, *words, "--resume"), log=log) == 0, log.read_text()
    lines = Ledger.open(folder / "ledger.jsonl").lines
    assert [line["step"] for line in lines if line["kind"] == "step"] == [1, 2, 3]  # each once, in whichever session
    assert json.loads((folder / "privacy.json").read_text())["num_steps"] == 3 and not (folder / "key").exists()


def test_the_certificate_of_an_unfinished_run_counts_every_update_that_is_planned(begun):
    """It is shown as it is where the run never ends."""
    claim = json.loads((begun / "privacy.json").read_text())
    assert (claim["status"], claim["num_steps"]) == ("running", STEPS) and len(
        Ledger.open(begun / "ledger.jsonl").lines
    ) < STEPS


@pytest.mark.parametrize(
    "full_at",
    [("full ledger", 9, 0.5), ("full ledger", 12, 0.0), *[("full file", number, 0.5) for number in (5, 6, 7, 12)]],
    ids=str,
)
def test_a_full_disk_ends_with_one_line_and_the_run_goes_on_when_there_is_room(begun, finished, tmp_path, full_at):
    folder, log = tmp_path / "run", tmp_path / "log"
    shutil.copytree(begun, folder)
    assert faults.run(command(folder, "--resume"), die_at=full_at, log=log) == 1
    assert (
        len([line for line in log.read_text().splitlines() if "No space left" in line]) == 1
        and "Traceback" not in log.read_text()
    )
    resume_to_the_end(folder, tmp_path)
    assert_same_run(folder, finished)


@pytest.mark.parametrize("signal_number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_ends_with_a_checkpoint_and_the_command_that_goes_on(begun, finished, tmp_path, signal_number):
    folder, log = tmp_path / "run", tmp_path / "log"
    shutil.copytree(begun, folder)
    process = faults.start(command(folder, "--resume"), log=log)
    wait_for_step(folder, 8)
    os.kill(process.pid, signal_number)
    process.join(60)
    assert process.exitcode == 1
    assert f"sfumato resume {folder}" in log.read_text() and "Traceback" not in log.read_text()
    resume_to_the_end(folder, tmp_path)
    assert_same_run(folder, finished)


@pytest.mark.parametrize(
    "optimizer",
    [
        ["name=sgd", "momentum=0.9", "dampening=0.9"],
        ["name=adam", "learning_rate=0.01", "weight_decay=0.1"],
        ["name=adamw", "learning_rate=0.01"],
    ],
    ids=lambda settings: settings[0],
)
def test_what_an_optimizer_remembers_survives_a_kill_bit_for_bit(tmp_path, optimizer):
    """A public seed gives the run that is never interrupted the same randomness. Noting gradient norms changes
    nothing.
    """
    settings = ["training.num_steps=10", "run.seed=3", *(f"optimizer.{setting}" for setting in optimizer)]
    more = [word for setting in settings for word in ("--set", setting)]
    whole, folder = tmp_path / "whole", tmp_path / "run"
    assert faults.run(command(whole, *more)) == 0
    more += ["--set", "training.norm_histogram_every=3"]
    assert faults.run(command(folder, *more), die_at=("ledger", 10, 0.5)) == -signal.SIGKILL
    assert max(path.name for path in (folder / "checkpoints").iterdir()) == "step-000000004.safetensors"
    assert faults.run(command(folder, *more, "--resume")) == 0
    last = "checkpoints/step-000000010.safetensors"
    tensors, expected = load_file(folder / last), load_file(whole / last)
    assert tensors.keys() == expected.keys() and all(tensors[name].equal(expected[name]) for name in expected)
    remembered = {name.partition(".")[0] for name in expected} - {"model", "ema"}
    assert remembered == ({"momentum"} if "name=sgd" in optimizer else {"first_moment", "second_moment", "updates"})
    assert all(float(value) == 10 for name, value in tensors.items() if name.startswith("updates."))
    noted = [json.loads(line) for line in (folder / "metrics_private.jsonl").read_text().splitlines()]
    assert [line["step"] for line in noted if "norms" in line] == [1, 3, 6, 9]


def wait_for_step(folder, step):
    deadline = time.monotonic() + 60
    while time.monotonic() < deadline:
        ledger = folder / "ledger.jsonl"
        if ledger.exists() and ledger.read_bytes().count(b'"kind": "step"') >= step:
            return
        time.sleep(0.005)
    raise AssertionError("the run takes no steps")


@pytest.mark.slow
def test_killed_at_twenty_moments_uniform_over_the_run_it_always_ends_bit_equal(begun, finished, tmp_path):
    start = time.monotonic()
    reference = tmp_path / "timed"
    shutil.copytree(begun, reference)
    assert faults.run(command(reference, "--resume")) == 0
    duration = time.monotonic() - start
    source = random.Random()
    for number in range(20):
        folder = tmp_path / f"run-{number}"
        if number < 5:
            killed(
                begun,
                folder,
                [
                    ("ledger", source.randint(1, STEPS - 4), source.random()),
                    ("file", source.randint(1, 10), source.random()),
                ][number % 2],
            )
        else:
            shutil.copytree(begun, folder)
            process = faults.start(command(folder, "--resume"))
            time.sleep(duration * source.random())
            process.kill()
            process.join()
        resume_to_the_end(folder, tmp_path)
        assert_same_run(folder, finished)


@pytest.mark.slow
def test_a_compiled_run_that_was_killed_ends_bit_equal(tmp_path):
    """Each process compiles for itself, or finds what another one compiled."""

    def run(folder, *more, die_at=None):
        training = {"compile": "true", "num_steps": 8, "checkpoint_every": 2, "evaluate_every": 8}
        overrides = [
            "--set",
            "model.options.width=2",
            *(part for key, value in training.items() for part in ("--set", f"training.{key}={value}")),
        ]
        arguments = ["train", "demo/digits", *overrides, "--accountant", "rdp", "--output", str(folder), *more]
        process = faults.start(arguments, die_at=die_at, log=tmp_path / "log")
        process.join(900)
        return process.exitcode

    begun, straight, killed = (tmp_path / name for name in ("begun", "straight", "killed"))
    assert run(begun, die_at=("ledger", 5, 0.5)) == -signal.SIGKILL
    for folder in (straight, killed):
        shutil.copytree(begun, folder)
    assert run(straight, "--resume") == 0, (tmp_path / "log").read_text()
    assert run(killed, "--resume", die_at=("ledger", 4, 1.0)) == -signal.SIGKILL
    assert run(killed, "--resume") == 0, (tmp_path / "log").read_text()
    weights, expected = load_file(killed / "model.safetensors"), load_file(straight / "model.safetensors")
    assert all(weights[name].equal(expected[name]) for name in expected)
    lines = Ledger.open(killed / "ledger.jsonl").lines
    assert [line["step"] for line in lines if line["kind"] == "step"] == list(range(1, 9))
    assert lines == Ledger.open(straight / "ledger.jsonl").lines


def test_a_finished_run_prints_its_result_again_and_changes_nothing(finished, tmp_path):
    folder, log = tmp_path / "run", tmp_path / "log"
    shutil.copytree(finished, folder)
    before = (folder / "ledger.jsonl").read_bytes()
    assert faults.run(command(folder, "--resume", "--json"), log=log) == 0
    printed = json.loads(log.read_text().splitlines()[-1])
    assert printed["run"] == str(folder)  # where it lies now
    assert printed["accuracy"] == json.loads((finished / "result.json").read_text())["accuracy"]
    assert (folder / "ledger.jsonl").read_bytes() == before


@pytest.mark.parametrize("file", ["ledger.jsonl", "privacy.json", "result.json", "model.safetensors"])
def test_a_finished_run_with_another_run_s_file_is_refused_though_its_key_is_gone(finished, tmp_path, file):
    other, folder, log = tmp_path / "other", tmp_path / "run", tmp_path / "log"
    shutil.copytree(finished, folder)
    settings = ["--set", "training.num_steps=2", "--set", "training.evaluate_every=2"]
    assert faults.run(["train", "demo/digits", *settings, "--accountant", "rdp", "--output", str(other)], log=log) == 0
    shutil.copy2(other / file, folder / file)
    log.unlink()
    assert faults.run(command(folder, "--resume"), log=log) == 2
    assert "another" in log.read_text() and "Traceback" not in log.read_text()


@pytest.mark.parametrize("altered", ["num_steps", "epsilon", "noise_multiplier", "ledger_lines", "run_id"])
def test_an_altered_certificate_of_a_finished_run_is_refused(finished, tmp_path, altered):
    folder, log = tmp_path / "run", tmp_path / "log"
    shutil.copytree(finished, folder)
    claim = json.loads((folder / "privacy.json").read_text())
    claim[altered] = "0" * 32 if altered == "run_id" else type(claim[altered])(claim[altered] / 2)
    (folder / "privacy.json").write_text(json.dumps(claim))
    assert faults.run(command(folder, "--resume"), log=log) == 2 and "states another" in log.read_text()


@pytest.mark.parametrize(("factor", "status"), [(1 + 1e-9, 0), (1 - 1e-5, 2), (1 + 1e-5, 2)])
def test_a_finished_run_s_epsilon_may_differ_in_its_last_digits_alone(finished, tmp_path, factor, status):
    """Another machine's logarithms may round otherwise."""
    folder, log = tmp_path / "run", tmp_path / "log"
    shutil.copytree(finished, folder)
    alter(folder / "privacy.json", epsilon=json.loads((folder / "privacy.json").read_text())["epsilon"] * factor)
    assert faults.run(command(folder, "--resume"), log=log) == status, log.read_text()


def alter(path, **changes):
    path.write_text(json.dumps({**json.loads(path.read_text()), **changes}))


def alter_weights(path, **changes):
    with safe_open(path, framework="pt") as file:
        tensors, metadata = {name: file.get_tensor(name) for name in file.keys()}, file.metadata()  # noqa: SIM118
    save_file(tensors, path, {**metadata, "sfumato": json.dumps({**json.loads(metadata["sfumato"]), **changes})})


@pytest.mark.parametrize(
    "altered", ["all alike", "rdp", "relation", "not_covered", "unit", "person", "delta", "metadata"]
)
def test_a_finished_run_claims_what_its_ledger_and_recipe_give_or_is_refused(finished, tmp_path, altered):
    """Nobody needs a key to edit these; what they must be is computed anew."""
    folder = tmp_path / "run"
    shutil.copytree(finished, folder)
    privacy, result, weights = (folder / name for name in ("privacy.json", "result.json", "model.safetensors"))
    if altered in ("all alike", "delta"):
        changes = {"epsilon": 0.01} if altered == "all alike" else {"delta": 1e-9}
        alter(privacy, **changes)
        alter(result, **changes)
        alter_weights(weights, **changes)
    elif altered == "rdp":
        alter(result, epsilon_rdp=0.01)
    elif altered == "person":
        alter(privacy, epsilon_person=0.5, max_images_per_person=6, person_groups="checked")
    elif altered == "metadata":
        alter_weights(weights, epsilon=0.01)
    else:
        alter(privacy, **{altered: [] if altered == "not_covered" else "all images of everybody"})
    assert "states another" in refused(folder, tmp_path, "--resume")


def forged(folder, donor, steps):
    """As somebody without the key would: another run's result, its numbers fitted to the first lines of this one's
    ledger.
    """
    path = folder / "ledger.jsonl"
    lines = path.read_bytes().splitlines(keepends=True)[: 2 + steps]
    path.write_bytes(b"".join(lines))
    ledger = Ledger.open(path)
    steps = sum(line["kind"] == "step" for line in ledger.lines)
    of_run = {
        "run_id": ledger.lines[0]["run_id"],
        "num_steps": steps,
        "epsilon": 0.01,
        "epsilon_rdp": 0.01,
        "epsilon_pld": 0.01,
    }
    heads = {"ledger_lines": len(ledger.lines), "ledger_head": ledger.head}
    for name in ("privacy.json", "result.json", "model.safetensors"):
        shutil.copy2(donor / name, folder / name)
    alter(folder / "privacy.json", **of_run, **heads)
    alter(folder / "result.json", **of_run)
    alter_weights(folder / "model.safetensors", run_id=of_run["run_id"], epsilon=0.01, **heads)


@pytest.mark.parametrize("steps", [1, 99])
def test_a_result_put_into_an_unfinished_run_does_not_end_it(interrupted, finished, tmp_path, steps):
    forged(interrupted, finished, steps)
    refused(interrupted, tmp_path, "--resume")  # nothing is written, the key is there


def test_honest_claims_of_another_run_s_weights_do_not_delete_the_key(begun, another, tmp_path):
    """The run is complete and its key still there, as after a crash: the weights must be the last checkpoint's."""
    folder, log = tmp_path / "run", tmp_path / "log"
    shutil.copytree(begun, folder)
    assert faults.run(command(folder, "--resume", "--set", "run.keep_key=true"), log=log) == 0, log.read_text()
    log.unlink()
    weights = folder / "model.safetensors"
    honest = weights.read_bytes()
    with safe_open(weights, framework="pt") as file:
        tensors, metadata = {name: file.get_tensor(name) for name in file.keys()}, file.metadata()  # noqa: SIM118
    save_file({name: value + 1 for name, value in tensors.items()}, weights, metadata)
    assert "other weights" in refused(folder, tmp_path, "--resume")
    weights.write_bytes(honest)
    log.unlink()
    assert faults.run(command(folder, "--resume"), log=log) == 0, log.read_text()
    assert not (folder / "key").exists()


def test_without_a_key_the_head_s_file_still_counts_the_lines(finished, tmp_path):
    folder = tmp_path / "run"
    shutil.copytree(finished, folder)
    forged(folder, finished, 5)
    assert "ledger.head" in refused(folder, tmp_path, "--resume")


@pytest.mark.parametrize("file", ["result.json", "privacy.json", "metrics.jsonl", "ledger.jsonl", "ledger.head"])
@pytest.mark.parametrize(
    "content",
    ["[" * 200_000 + "\n", "[]\n", "1\n2\n", "{}\n", "null\n"],
    ids=["deep", "list", "numbers", "empty", "null"],
)
def test_a_damaged_file_of_a_finished_run_is_one_line(finished, tmp_path, file, content):
    folder = tmp_path / "run"
    shutil.copytree(finished, folder)
    (folder / file).write_text(content)
    assert file in refused(folder, tmp_path, "--resume")


@pytest.mark.parametrize(
    "changes", [{"test_accuracy": None}, {"test_accuracy": "x"}, {"per_class": []}, {"held_out": 5}], ids=str
)
def test_a_measurement_of_another_type_is_one_line(finished, tmp_path, changes):
    folder = tmp_path / "run"
    shutil.copytree(finished, folder)
    alter(folder / "result.json", **changes)
    assert "is damaged" in refused(folder, tmp_path, "--resume")


def test_a_key_whose_file_a_crash_left_overwritten_is_no_key(finished, tmp_path):
    folder, log = tmp_path / "run", tmp_path / "log"
    shutil.copytree(finished, folder)
    (folder / "key").write_text("0" * 65)
    assert faults.run(command(folder, "--resume"), log=log) == 0, log.read_text()
    assert not (folder / "key").exists()


def test_a_reworded_help_text_repeats_every_bit_and_spends_nothing(begun, finished, tmp_path):
    """A copy of the package, in which nothing but words for people differ."""
    package, folder = tmp_path / "package", tmp_path / "run"
    shutil.copytree(Path(sfumato.__file__).parent, package / "sfumato", ignore=shutil.ignore_patterns("__pycache__"))
    text = package / "sfumato" / "cli" / "train.py"
    assert "Goes on with" in text.read_text()
    text.write_text(text.read_text().replace("Goes on with", "Continues"))
    shutil.copytree(begun, folder)
    words = [
        "-c",
        f"import sys; sys.path.insert(0, {str(package)!r}); import torch; torch.set_num_threads(1); from sfumato "
        "import cli; "
        "assert cli.__file__.startswith(sys.path[0]); sys.exit(cli.run(sys.argv[1:]))",
    ]
    done = subprocess.run([sys.executable, *words, *command(folder, "--resume")], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert_same_run(folder, finished)


def refused(folder, tmp_path, *more):
    """Runs and expects status 2 with one line; returns it."""
    log = tmp_path / "log"
    before = {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()}
    assert faults.run(command(folder, *more), log=log) == 2, log.read_text()
    lines = [line for line in log.read_text().splitlines() if line.startswith("error:")]
    assert len(lines) == 1 and "Traceback" not in log.read_text()
    assert {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()} == before
    return lines[0]


@pytest.fixture
def interrupted(begun, tmp_path):
    folder = tmp_path / "run"
    killed(begun, folder, ("ledger", 17, 0.5))
    return folder


@pytest.mark.parametrize(
    "names",
    [
        ["notes.txt"],
        ["recipe.toml"],
        ["checkpoints/notes.txt"],
        ["privacy.json"],
        ["ledger.jsonl", "privacy.json"],
        ["privacy.json", "model.safetensors", "recipe.toml"],
        ["ledger.jsonl", "metrics.jsonl"],
        [".hidden"],
    ],
    ids="+".join,
)
def test_resuming_begins_no_run_among_other_files(tmp_path, names):
    folder = tmp_path / "run"
    for name in names:
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).touch()
    assert "nothing to resume" in refused(folder, tmp_path, "--resume")


def test_resuming_begins_no_run_over_what_another_has_published(begun, finished, tmp_path):
    def logs(name):
        (tmp_path / name).mkdir(exist_ok=True)
        return tmp_path / name

    published, start = tmp_path / "published", tmp_path / "start"
    published.mkdir()
    for name in ("privacy.json", "model.safetensors"):
        shutil.copy(finished / name, published / name)
    assert "nothing to resume" in refused(published, logs("stranger's"), "--resume")
    assert (
        faults.run(command(start), die_at=("file", 5, 0.5)) == -signal.SIGKILL
    )  # key, head and two lines, no certificate yet
    assert (start / "key").exists() and not (start / "privacy.json").exists()
    shutil.copy(finished / "privacy.json", start)
    assert "privacy.json" in refused(start, logs("another's"), "--resume")
    (start / "privacy.json").write_text("[]")
    assert "privacy.json" in refused(start, logs("nobody's"), "--resume")


def test_an_empty_folder_is_what_the_earliest_kill_leaves(tmp_path):
    for number, names in enumerate(([], ["checkpoints"])):
        folder = tmp_path / str(number)
        for name in ["", *names]:
            (folder / name).mkdir(parents=True)
        assert (
            faults.run(command(folder, "--set", "training.num_steps=1", "--set", "model.options.width=2", "--resume"))
            == 0
        )


def test_an_existing_run_is_not_overwritten(interrupted, tmp_path):
    assert "--resume" in refused(interrupted, tmp_path)


@pytest.mark.parametrize(
    "change",
    [
        "optimizer.learning_rate=1.5",
        "optimizer.weight_decay=0.1",
        "privacy.target_epsilon=4.0",
        "privacy.clipping_norm=2.0",
        "ema.decay=0.5",
    ],
)
def test_a_changed_recipe_is_refused_naming_the_key(interrupted, tmp_path, change):
    key = "privacy.noise_multiplier" if "epsilon" in change else change.partition("=")[0]
    assert key in refused(interrupted, tmp_path, "--resume", "--set", change)


@pytest.mark.parametrize(
    "change", ["optimizer.learning_rate=1.5", "privacy.clipping_norm=2.0", "privacy.target_epsilon=50.0"]
)
def test_a_changed_recipe_is_refused_by_the_ledger_even_where_recipe_toml_is_gone(interrupted, tmp_path, change):
    (interrupted / "recipe.toml").unlink()
    assert "ledger.jsonl" in refused(interrupted, tmp_path, "--resume", "--set", change)


@pytest.mark.parametrize("change", ["optimizer.learning_rate=1.5", "privacy.clipping_norm=2.0"])
def test_a_changed_recipe_is_refused_by_the_ledger_even_where_recipe_toml_was_edited_alike(
    interrupted, tmp_path, change
):
    name, _, value = change.partition(".")[2].partition("=")
    path = interrupted / "recipe.toml"
    edited, count = re.subn(rf"(?m)^{name} = .*$", f"{name} = {value}", path.read_text())
    assert count == 1
    path.write_text(edited)
    assert "ledger.jsonl" in refused(interrupted, tmp_path, "--resume", "--set", change)


def test_a_shortened_ledger_is_refused(interrupted, tmp_path):
    path = interrupted / "ledger.jsonl"
    path.write_bytes(b"".join(path.read_bytes().splitlines(keepends=True)[:5]))
    assert "ledger" in refused(interrupted, tmp_path, "--resume")


def test_lines_cut_back_to_the_checkpoint_are_missed_in_whatever_environment(interrupted, tmp_path):
    """Their releases would not be counted."""
    path, checkpoint = interrupted / "ledger.jsonl", max((interrupted / "checkpoints").glob("*.safetensors"))
    with safe_open(checkpoint, framework="pt") as file:
        facts = json.loads(file.metadata()["facts"])
    lines = path.read_bytes().splitlines(keepends=True)
    assert facts["ledger_lines"] < len(lines) - 1
    path.write_bytes(b"".join(lines[: facts["ledger_lines"]]))
    assert "lines were removed" in refused(interrupted, tmp_path, "--resume", "--set", "training.microbatch_size=50")
    (interrupted / "ledger.head").unlink()
    (tmp_path / "log").unlink()
    assert "ledger.head is missing" in refused(
        interrupted, tmp_path, "--resume", "--set", "training.microbatch_size=50"
    )


@pytest.fixture(scope="module")
def another(tmp_path_factory):
    """A second run of the same recipe and data, with a key of its own."""
    folder = tmp_path_factory.mktemp("runs") / "another"
    assert faults.run(command(folder), die_at=("ledger", 15, 1.0)) == -signal.SIGKILL
    return folder


@pytest.mark.parametrize(
    "files",
    [
        ["key"],
        ["ledger.jsonl"],
        ["ledger.head"],
        ["checkpoints"],
        ["key", "checkpoints"],
        ["key", "ledger.head"],
        ["key", "ledger.head", "checkpoints"],
        ["ledger.jsonl", "ledger.head"],
        ["ledger.jsonl", "ledger.head", "checkpoints"],
        ["key", "ledger.jsonl", "ledger.head"],
    ],
    ids=" ".join,
)
def test_files_of_another_run_are_refused(interrupted, another, tmp_path, files):
    """Updates would be made under a key, and counted on a ledger, that do not belong together."""
    for name in files:
        if (interrupted / name).is_dir():
            shutil.rmtree(interrupted / name)
            shutil.copytree(another / name, interrupted / name)
        else:
            shutil.copy2(another / name, interrupted / name)
    said = refused(interrupted, tmp_path, "--resume")
    assert "are of two runs" in said or ("key" in files) == ("ledger.jsonl" in files)


@pytest.mark.parametrize("change", ["weights", "facts"])
def test_an_altered_checkpoint_is_refused_whatever_digest_it_states(interrupted, tmp_path, change):
    """Without the key nobody can make a code of other weights: they would go on under the noise of these."""
    path = max((interrupted / "checkpoints").glob("*.safetensors"))
    with safe_open(path, framework="pt") as file:
        facts, tensors = json.loads(file.metadata()["facts"]), {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
    if change == "weights":
        tensors["model.0.weight" if "model.0.weight" in tensors else min(tensors)].flatten()[0] += 1e-6
    else:
        facts["seconds"] += 1.0
    facts["mac"] = tensor_mac(
        subkey(bytes(32), "checkpoint"),
        {key: value for key, value in facts.items() if key != "mac"},
        dict(sorted(tensors.items())),
    )
    save_file(tensors, path, {"facts": json.dumps(facts)})
    assert path.name in refused(interrupted, tmp_path, "--resume")


def test_every_file_of_a_run_names_it(begun, finished):
    name = run_id(bytes.fromhex((begun / "key").read_text()))
    assert Ledger.open(finished / "ledger.jsonl").lines[0]["run_id"] == name
    assert all(json.loads((finished / file).read_text())["run_id"] == name for file in ("privacy.json", "result.json"))
    with safe_open(finished / "model.safetensors", framework="pt") as file:
        assert json.loads(file.metadata()["sfumato"])["run_id"] == name
    for checkpoint in (finished / "checkpoints").iterdir():
        with safe_open(checkpoint, framework="pt") as file:
            assert json.loads(file.metadata()["facts"])["run_id"] == name


def test_an_altered_ledger_is_refused(interrupted, tmp_path):
    path = interrupted / "ledger.jsonl"
    path.write_bytes(path.read_bytes().replace(b'"noise_multiplier": ', b'"noise_multiplier": 9', 1))
    assert "ledger" in refused(interrupted, tmp_path, "--resume")


@pytest.mark.parametrize("damage", ["cut", "flip"])
def test_a_damaged_checkpoint_is_refused_by_name_and_without_it_the_older_one_serves(
    interrupted, finished, tmp_path, damage
):
    newest = max((interrupted / "checkpoints").glob("*.safetensors"))
    content = bytearray(newest.read_bytes())
    if damage == "cut":
        del content[-100:]
    else:
        content[-100] ^= 1
    newest.write_bytes(content)
    assert newest.name in refused(interrupted, tmp_path, "--resume")
    newest.unlink()
    resume_to_the_end(interrupted, tmp_path)
    assert_same_run(interrupted, finished)


def test_a_missing_key_is_refused(interrupted, tmp_path):
    (interrupted / "key").unlink()
    assert "key" in refused(interrupted, tmp_path, "--resume")


def test_another_microbatch_draws_updates_afresh_and_counts_them_again(interrupted, finished, tmp_path):
    """In another environment the noise of repeated updates must differ, so the budget ends the run early."""
    recorded = json.loads((interrupted / "ledger.head").read_text())["line"][
        "step"
    ]  # its line is half on the ledger: it counts
    saved = max(int(path.stem.removeprefix("step-")) for path in (interrupted / "checkpoints").glob("*.safetensors"))
    wasted = recorded - saved
    assert wasted > 0
    log = tmp_path / "log"
    assert faults.run(command(interrupted, "--resume", "--set", "training.microbatch_size=50"), log=log) == 0, (
        log.read_text()
    )
    lines = [line for line in Ledger.open(interrupted / "ledger.jsonl").lines if line["kind"] == "step"]
    assert {line["session"] for line in lines} == {0, 1}
    assert len(lines) == STEPS and max(line["step"] for line in lines) == STEPS - wasted
    claim, full = (json.loads((run / "privacy.json").read_text()) for run in (interrupted, finished))
    assert claim["num_steps"] == STEPS and claim["epsilon"] == full["epsilon"]


def test_no_artefact_of_a_run_holds_the_key(begun, tmp_path):
    folder, log = tmp_path / "run", tmp_path / "log"
    shutil.copytree(begun, folder)
    key = bytes.fromhex((folder / "key").read_text())
    killed_at = faults.run(command(folder, "--resume"), die_at=("ledger", 20, 1.0), log=log)
    assert killed_at == -signal.SIGKILL
    partly = {path: path.read_bytes() for path in folder.rglob("*") if path.is_file() and path.name != "key"}
    assert faults.run(command(folder, "--resume"), log=log) == 0
    everything = [
        *partly.values(),
        *(path.read_bytes() for path in folder.rglob("*") if path.is_file()),
        log.read_bytes(),
    ]
    for content in everything:
        assert key not in content and key.hex().encode() not in content.lower()
