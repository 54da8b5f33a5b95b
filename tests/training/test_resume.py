"""Killed at any moment: never more noise than the ledger counts, never more than the plan, and little is lost."""

import json
import os
import random
import shutil
import signal
import time
from unittest.mock import Mock

import pytest
import torch
from safetensors.torch import load_file

import sfumato
from sfumato.errors import MachineError
from sfumato.run_folder import ledger
from sfumato.run_folder.checkpoint import Checkpoints
from sfumato.run_folder.verification import verify_run
from sfumato.training import step, writer
from tests.data.conftest import refused as says_no
from tests.training import faults

STEPS, EVERY = 30, 4
SETTINGS = {
    "training.num_steps": STEPS,
    "training.checkpoint_every": EVERY,
    "training.evaluate_every": 10,
    "training.batch_size": 64,
    "training.microbatch_size": 32,
    "model.options.width": 4,
    "privacy.accountant": "rdp",
}


def words(settings):
    return [word for key, value in settings.items() for word in ("--set", f"{key}={value}")]


def command(folder, *more, **changes):
    settings = {**SETTINGS, **{key.replace("__", "."): value for key, value in changes.items()}}
    return ["train", "demo/digits", *words(settings), "--output", str(folder), *more]


def lines(folder):
    return ledger.read(folder / ledger.LEDGER_FILE)


def num_lines(folder):
    path = folder / ledger.LEDGER_FILE
    return path.read_bytes().count(b"\n") if path.exists() else 0


def read(folder, name):
    return json.loads((folder / name).read_text())


def checkpoint(folder):
    return Checkpoints(folder / "owner" / "checkpoints").newest()


def assert_counted(folder, watch):
    """At any moment: draws <= lines <= plan, and a certificate states the plan's epsilon."""
    counted = lines(folder).num_releases if (folder / "ledger.jsonl").exists() else 0
    draws = len(list(watch.iterdir())) if watch.exists() else 0
    assert draws <= counted <= STEPS
    if (folder / "privacy.json").exists():
        claim = read(folder, "privacy.json")
        whole = sfumato.epsilon(lines(folder).run.mechanism, claim["delta"], "rdp").epsilon
        assert claim["num_steps"] == STEPS and claim["epsilon_rdp"] in (None, whole)


def assert_finished(folder, watch):
    claim, counted = read(folder, "privacy.json"), lines(folder)
    assert counted.num_releases == STEPS == claim["num_steps"] == claim["num_lost"] + claim["num_applied"]
    assert len(list(watch.iterdir())) <= STEPS
    assert claim["status"] == "complete" and claim["private"]
    whole = sfumato.epsilon(counted.run.mechanism, claim["delta"], "rdp").epsilon
    assert claim["epsilon"] == claim["epsilon_so_far"] == whole
    assert read(folder, "result.json")["num_lost"] == claim["num_lost"]
    steps = [line.step for line in counted.releases]
    assert steps[-1] >= claim["num_applied"] and all(b - a <= 1 for a, b in zip([0, *steps], steps, strict=False))
    assert verify_run(folder)[1].num_lost == claim["num_lost"]
    assert not list((folder / "owner" / "checkpoints").glob(".next*"))


@pytest.fixture(scope="module")
def killed_once(tmp_path_factory):
    """A private run that was killed amid update 15: three updates after its newest checkpoint."""
    folder = tmp_path_factory.mktemp("runs") / "killed"
    assert faults.run(command(folder), die_at=("ledger", 16, 1.0), watch=folder.parent / "watch") == -signal.SIGKILL
    assert lines(folder).num_releases == 15 and checkpoint(folder).num_releases == 12
    return folder


@pytest.fixture(scope="module")
def finished(tmp_path_factory):
    folder = tmp_path_factory.mktemp("runs") / "finished"
    assert faults.run(command(folder)) == 0
    return folder


@pytest.fixture
def interrupted(killed_once, tmp_path):
    return shutil.copytree(killed_once, tmp_path / "run")


@pytest.fixture
def complete(finished, tmp_path):
    return shutil.copytree(finished, tmp_path / "run")


@pytest.mark.parametrize(
    ("die_at", "most_lost"),
    [
        (("ledger", 11, 0.5), 2),  # torn: no noise was drawn
        (("ledger", 12, 1.0), 3),  # whole: counts, whether noise was drawn or not
        pytest.param(("ledger", STEPS + 1, 1.0), 2, marks=pytest.mark.slow),  # the last line of all
        pytest.param(("file", 9, 0.5), EVERY, marks=pytest.mark.slow),
        (("file", 9, 1.0), EVERY),  # a checkpoint that is whole, but not yet under its name
    ],
    ids=str,
)
def test_killed_in_a_write_a_private_run_ends_with_every_release_counted(tmp_path, die_at, most_lost):
    folder, watch, log = tmp_path / "run", tmp_path / "watch", tmp_path / "log"
    assert faults.run(command(folder), die_at=die_at, watch=watch) == -signal.SIGKILL
    assert_counted(folder, watch)
    lost = lines(folder).num_releases - checkpoint(folder).num_releases
    assert faults.run(command(folder, "--resume"), watch=watch, log=log) == 0, log.read_text()
    assert_finished(folder, watch)
    assert read(folder, "privacy.json")["num_lost"] == lost <= most_lost
    assert (f"{lost} update(s) since the last checkpoint are lost" in log.read_text()) == (lost > 0)


@pytest.mark.parametrize("number", [pytest.param(1, marks=pytest.mark.slow), 3, 5, 6])
def test_a_start_that_was_killed_in_any_write_begins_again(tmp_path, number):
    """Recipe, digest of the images, checkpoint 0, certificate; and the ledger's first line."""
    folder, log, few = tmp_path / "run", tmp_path / "log", {"training__num_steps": 2, "model__options__width": 2}
    die_at = ("ledger", number - 5, 0.7) if number > 5 else ("file", number, 0.5)
    assert faults.run(command(folder, **few), die_at=die_at) == -signal.SIGKILL
    assert faults.run(command(folder, "--resume", **few), log=log) == 0, log.read_text()
    assert lines(folder).num_releases == 2


ADAM = {"optimizer.name": "adam", "optimizer.learning_rate": 0.01}
ON_FEATURES = {"model.trainable": "classifier", "model.features": "raw"}


@pytest.mark.parametrize(
    ("settings", "die_at"),
    [
        ({"optimizer.momentum": 0.9}, ("file", 9, 1.0)),
        (ADAM, ("ledger", 11, 0.5)),
        pytest.param(ON_FEATURES, ("file", 9, 1.0), marks=pytest.mark.slow),
    ],
    ids=str,
)
def test_a_run_of_a_public_seed_ends_bit_equal_whatever_kills_it(tmp_path, die_at, settings):
    more, whole, folder = words({"run.seed": 3, **settings}), tmp_path / "whole", tmp_path / "run"
    assert faults.run(command(whole, *more)) == 0
    assert faults.run(command(folder, *more), die_at=die_at) == -signal.SIGKILL
    assert faults.run(command(folder, *more, "--resume"), die_at=("ledger", 8, 1.0)) == -signal.SIGKILL
    assert faults.run(command(folder, *more, "--resume")) == 0
    assert_same_bits(folder, whole)


def assert_same_bits(folder, whole):
    weights, expected = load_file(folder / "model.safetensors"), load_file(whole / "model.safetensors")
    assert weights.keys() == expected.keys() and all(weights[name].equal(expected[name]) for name in expected)
    assert [line.step for line in lines(folder).releases] == list(range(1, STEPS + 1))
    torch.testing.assert_close(checkpoint(folder).state, checkpoint(whole).state, rtol=0, atol=0)
    assert (folder / "metrics.jsonl").read_bytes() == (whole / "metrics.jsonl").read_bytes()
    assert read(folder, "privacy.json")["num_lost"] == 0 and not read(folder, "privacy.json")["private"]


@pytest.mark.parametrize(
    "full_at",
    [("full ledger", 9, 0.5), ("full ledger", 12, 1.0), ("full file", 9, 0.5), ("full room", 4, 0.0)],
    ids=str,
)
def test_a_full_disk_ends_with_one_line_and_loses_no_count(tmp_path, full_at):
    folder, watch, log = tmp_path / "run", tmp_path / "watch", tmp_path / "log"
    assert faults.run(command(folder), die_at=full_at, log=log, watch=watch) == 1
    said = log.read_text()
    assert said.count("No space left") == 1 and "Traceback" not in said
    assert_counted(folder, watch)
    # The state before is kept in the room that was held; a whole line may count though nothing was released.
    assert lines(folder).num_releases - checkpoint(folder).num_releases == (full_at[2] == 1.0)
    assert faults.run(command(folder, "--resume"), watch=watch, log=log) == 0, log.read_text()
    assert_finished(folder, watch)


@pytest.mark.parametrize("signal_number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_ends_with_a_checkpoint_and_loses_nothing(tmp_path, signal_number):
    folder, watch, log = tmp_path / "run", tmp_path / "watch", tmp_path / "log"
    process = faults.start(command(folder), log=log, watch=watch)
    wait_for_release(folder, 6)
    os.kill(process.pid, signal_number)
    process.join(60)
    assert process.exitcode == 1
    assert f"sfumato resume {folder}" in log.read_text() and "Traceback" not in log.read_text()
    assert faults.run(["resume", str(folder)], watch=watch) == 0
    assert_finished(folder, watch)
    assert read(folder, "privacy.json")["num_lost"] == 0


def wait_for_release(folder, release):
    deadline = time.monotonic() + 60
    while num_lines(folder) <= release:
        assert time.monotonic() < deadline, "the run takes no updates"
        time.sleep(0.002)


@pytest.mark.slow
@pytest.mark.parametrize("is_seeded", [False, True], ids=["private", "seeded"])
def test_killed_at_twenty_random_moments(tmp_path, is_seeded):
    """Some are killed twice or more. Uniform over the run's time; private runs may lose all that they have."""
    more = words({"run.seed": 3}) if is_seeded else ["--max-lost", "1"]
    whole = tmp_path / "whole"
    start = time.monotonic()
    assert faults.run(command(whole, *more)) == 0
    duration, source = time.monotonic() - start, random.Random(20)
    for number in range(20):
        folder, watch = tmp_path / f"run-{number}", tmp_path / f"watch-{number}"
        kills = 1 + number % 3
        for _ in range(kills):
            process = faults.start(command(folder, *more, "--resume"), watch=watch)
            time.sleep(duration * source.random())
            process.kill()
            process.join()
            if not is_seeded and num_lines(folder):
                assert_counted(folder, watch)
                if (found := checkpoint(folder)) is not None:
                    assert lines(folder).num_releases - found.num_releases <= EVERY
        log = tmp_path / f"log-{number}"
        assert faults.run(command(folder, *more, "--resume"), watch=watch, log=log) == 0, log.read_text()
        if is_seeded:
            assert_same_bits(folder, whole)
        else:
            assert_finished(folder, watch)
            assert read(folder, "privacy.json")["num_lost"] <= kills * EVERY


def test_a_run_that_crashes_too_often_ends_before_another_release_and_goes_on_when_told_to(interrupted, tmp_path):
    log = tmp_path / "log"
    path, last = interrupted / "ledger.jsonl", lines(interrupted).releases[-1]
    with path.open("a") as file:  # as if it had crashed at 24 again and again, before a checkpoint
        for release in range(16, 25):
            file.write(last.model_copy(update={"release": release, "step": release}).model_dump_json() + "\n")
    before = path.read_bytes()
    assert faults.run(command(interrupted, "--resume"), log=log) == 1
    said = log.read_text()
    assert "12 of 30 updates were lost" in said and "--max-lost 0.45" in said and "Traceback" not in said
    assert path.read_bytes() == before
    assert faults.run(["resume", str(interrupted), "--max-lost", "0.45"], log=log) == 0, log.read_text()
    claim = read(interrupted, "privacy.json")
    assert (claim["num_lost"], claim["num_applied"]) == (12, 18)
    assert "12 of 30 updates were lost in crashes" in log.read_text()
    assert "12 of them were lost" in (interrupted / "report.html").read_text()


def test_the_schedule_follows_the_plan_and_the_model_s_clock_its_own_updates(tmp_path, monkeypatch):
    """After a loss learning rates are those of the release's number; the averages' warm-up is of what was applied."""
    from sfumato.training.state import State

    folder, seen = tmp_path / "run", []
    settings = {**SETTINGS, "training.num_steps": 12}
    assert faults.run(command(folder, training__num_steps=12), die_at=("ledger", 8, 1.0)) == -signal.SIGKILL
    real = State.update
    monkeypatch.setattr(State, "update", lambda *given: seen.append(given[2:]) or real(*given))
    sfumato.train("demo/digits", folder, settings=settings, resume=True)
    assert seen == [(release, release - 3) for release in range(8, 13)]


def files(folder):
    return {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def test_a_finished_run_prints_its_result_again_and_changes_nothing(complete, finished, tmp_path):
    log, before = tmp_path / "log", (complete / "ledger.jsonl").read_bytes()
    assert faults.run(command(complete, "--resume", "--json"), log=log) == 0
    printed = json.loads(log.read_text().splitlines()[-1])
    assert printed["run"] == str(complete)  # where it lies now
    assert printed["accuracy"] == read(finished, "result.json")["accuracy"]
    assert (complete / "ledger.jsonl").read_bytes() == before


def refused(folder, tmp_path, *more):
    """Runs and expects one line, and that nothing changed; returns it."""
    log, before = tmp_path / "log", files(folder)
    log.unlink(missing_ok=True)
    assert faults.run(command(folder, *more), log=log) == 2, log.read_text()
    said = [line for line in log.read_text().splitlines() if line.startswith("error:")]
    assert len(said) == 1 and "Traceback" not in log.read_text() and files(folder) == before
    return said[0]


@pytest.mark.parametrize("names", [["notes.txt"], ["recipe.toml", "model.safetensors"]], ids="+".join)
def test_resuming_begins_no_run_among_other_files(tmp_path, names):
    (tmp_path / "run").mkdir()
    for name in names:
        (tmp_path / "run" / name).write_text("")
    assert "nothing to resume" in refused(tmp_path / "run", tmp_path, "--resume")


def test_an_existing_run_is_not_overwritten(interrupted, tmp_path):
    assert "--resume" in refused(interrupted, tmp_path)


@pytest.mark.parametrize(
    ("change", "key"),
    [("optimizer.learning_rate=1.5", "optimizer.learning_rate"), ("training.num_steps=31", "privacy.noise_multiplier")],
)
def test_another_recipe_is_another_run(interrupted, tmp_path, change, key):
    assert key in refused(interrupted, tmp_path, "--resume", "--set", change)
    (interrupted / "recipe.toml").unlink()
    assert "ledger.jsonl" in refused(interrupted, tmp_path, "--resume", "--set", change)


def drop_lines(folder, count):
    path = folder / "ledger.jsonl"
    path.write_bytes(b"".join(path.read_bytes().splitlines(keepends=True)[:count]))


def edit(path, before, after):
    content = path.read_bytes()
    assert before in content
    path.write_bytes(content.replace(before, after, 1))


DAMAGES = {
    "no ledger": lambda folder: (folder / "ledger.jsonl").unlink(),
    "empty": lambda folder: drop_lines(folder, 0),
    "short": lambda folder: drop_lines(folder, 10),  # fewer than the checkpoint
    "gap": lambda folder: edit(folder / "ledger.jsonl", b'"release":3', b'"release":4'),
    "noise": lambda folder: edit(folder / "ledger.jsonl", b'"noise_multiplier":', b'"noise_multiplier":9'),
    "another run's": lambda folder: edit(folder / "ledger.jsonl", b'"run_id":"', b'"run_id":"0'),
    "no checkpoint": lambda folder: shutil.rmtree(folder / "owner" / "checkpoints"),
    "other images": lambda folder: (folder / "owner" / "images_sha256").write_text("0" * 64),
}


@pytest.mark.parametrize("damage", DAMAGES)
def test_parts_that_do_not_fit_are_refused(interrupted, tmp_path, damage):
    DAMAGES[damage](interrupted)
    assert any(word in refused(interrupted, tmp_path, "--resume") for word in ("ledger", "images"))


def test_a_cut_checkpoint_costs_the_updates_since_the_one_before(interrupted, tmp_path):
    path = Checkpoints(interrupted / "owner" / "checkpoints").paths()[-1]
    path.write_bytes(path.read_bytes()[:-100])
    assert faults.run(command(interrupted, "--resume"), watch=tmp_path / "watch") == 0
    assert read(interrupted, "privacy.json")["num_lost"] == 7


def test_two_processes_cannot_go_on_with_one_run(interrupted, tmp_path):
    held = ledger.Ledger(interrupted / "ledger.jsonl")
    assert "another process" in refused(interrupted, tmp_path, "--resume")
    held.close()


def test_another_engine_or_microbatch_is_no_special_case(interrupted, tmp_path):
    more = ["--set", "training.microbatch_size=50", "--set", "training.engine=func"]
    assert faults.run(command(interrupted, "--resume", *more)) == 0
    assert read(interrupted, "privacy.json")["num_lost"] == 3


@pytest.mark.parametrize(
    ("name", "before", "after"),
    [
        ("privacy.json", '"epsilon": ', '"epsilon": 0.0'),
        ("privacy.json", '"unit": "one image"', '"unit": "everybody"'),
        ("privacy.json", '"not_covered": [', '"not_covered": ["nothing", '),
        ("result.json", '"epsilon_rdp": ', '"epsilon_rdp": 0.0'),
        ("ledger.jsonl", '"release":2', '"release":3'),
        ("ledger.jsonl", '"format_version":1', '"format_version":2'),
        ("metrics.jsonl", '"step"', '"stop"'),
        ("model.safetensors", '\\"epsilon\\":', '\\"epsilon\\":0'),
    ],
)
def test_a_finished_run_claims_what_its_ledger_recipe_and_weights_give(complete, tmp_path, name, before, after):
    edit(complete / name, before.encode(), after.encode())
    assert name in refused(complete, tmp_path, "--resume")


def test_a_finished_run_with_another_run_s_file_is_refused(complete, killed_once, tmp_path):
    other = shutil.copytree(killed_once, tmp_path / "other")
    assert faults.run(command(other, "--resume")) == 0
    for name in ("ledger.jsonl", "privacy.json", "result.json", "model.safetensors"):
        own = (complete / name).read_bytes()
        shutil.copy2(other / name, complete / name)
        refused(complete, tmp_path, "--resume")
        (complete / name).write_bytes(own)


def test_what_is_private_lies_in_one_folder_and_no_artefact_tells_what_was_drawn(finished):
    front, own = ({path.name for path in folder.iterdir()} for folder in (finished, finished / "owner"))
    json_files = {"privacy.json", "ledger.jsonl", "metrics.jsonl", "result.json"}
    assert front == json_files | {"recipe.toml", "report.html", "model.safetensors", "owner"}
    assert own == {"checkpoints", "launch", "metrics_private.jsonl", "images_sha256"}
    assert (finished / "owner").stat().st_mode & 0o777 == 0o700
    for line in (finished / "metrics.jsonl").read_text().splitlines():
        assert json.loads(line).keys() == {"step", "epsilon", "accuracy", "accuracy_last"}
    assert set(lines(finished).releases[0].model_dump()) == {"kind", "release", "step", "launch", "launch_id"}


def test_a_run_on_features_goes_on_with_the_network_that_it_began_with(tmp_path):
    """A fixed random network: features of another one would mean nothing to the classifier."""
    folder, log, fixed = tmp_path / "run", tmp_path / "log", {"model__trainable": "classifier"}
    assert faults.run(command(folder, **fixed), die_at=("ledger", 16, 1.0)) == -signal.SIGKILL
    before = checkpoint(folder).state
    assert faults.run(command(folder, "--resume", **fixed), log=log) == 0, log.read_text()
    after = checkpoint(folder).state
    frozen = before["model"].keys() - before["averages"][0].keys()
    assert len(frozen) > 3 and all(before["model"][name].equal(after["model"][name]) for name in frozen)
    assert sfumato.evaluate(folder).accuracy == pytest.approx(read(folder, "result.json")["accuracy"], abs=0.003)


def test_a_second_start_that_waited_while_the_first_began_is_refused(killed_once, tmp_path, monkeypatch):
    """It found nothing begun, and built its model meanwhile: it goes on with nothing that it did not compare."""
    folder = tmp_path / "run"
    began = Mock(side_effect=lambda *args, **options: shutil.copytree(killed_once, folder) and None)
    monkeypatch.setattr("sfumato.training.loop.launch.go_on", began)
    says_no("another start began", sfumato.train, "demo/digits", folder, settings=SETTINGS, resume=True)


def test_every_drawing_of_noise_finds_its_line_on_disk(tmp_path, monkeypatch):
    found, real = [], step.with_noise
    monkeypatch.setattr(step, "with_noise", lambda *given: found.append(num_lines(tmp_path / "run")) or real(*given))
    sfumato.train("demo/digits", tmp_path / "run", settings=SETTINGS)
    assert found == list(range(2, lines(tmp_path / "run").run.num_steps + 2))


@pytest.mark.parametrize("status", ["running", "complete"])
def test_a_start_that_was_frozen_while_it_computed_a_certificate_leaves_none(tmp_path, monkeypatch, status):
    before, real = {}, writer.certificate

    def freezes(plan, claims, stated, *given):
        if stated == status:
            (tmp_path / "run" / "owner" / "launch").write_text("another")
            before.update({path: path.read_bytes() for path in (tmp_path / "run").rglob("*") if path.is_file()})
        return real(plan, claims, stated, *given)

    monkeypatch.setattr(writer, "certificate", freezes)
    with pytest.raises(MachineError, match="another start goes on"):
        sfumato.train("demo/digits", tmp_path / "run", settings={**SETTINGS, "training.num_steps": 2})
    assert before == {path: path.read_bytes() for path in (tmp_path / "run").rglob("*") if path.is_file()}
