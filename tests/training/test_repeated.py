"""The same recipe several times: private runs add up, seeded ones compare, and what was made is not made again."""

import json
import signal

import pytest

import sfumato
from tests.cli.test_cli import call, json_of, refused
from tests.training import faults

TINY = {"training.num_steps": 3, "training.batch_size": 64, "model.options.width": 2}
WORDS = ["train", "demo/digits", *(word for key, value in TINY.items() for word in ("--set", f"{key}={value}"))]


def test_private_runs_have_keys_of_their_own_and_their_updates_add_up(tmp_path, capsys):
    found = json_of(capsys, *WORDS, "--repeat", 3, "--output", tmp_path / "runs")
    runs = found["runs"]
    assert [run["run"] for run in runs] == [str(tmp_path / "runs" / f"run-{number}") for number in (1, 2, 3)]
    assert len({run["run_id"] for run in runs}) == 3 and all(run["private"] for run in runs)
    one = runs[0]
    mechanism = sfumato.Mechanism(one["num_examples"], 64, one["noise_multiplier"], 9)
    assert found["epsilon_together"] == sfumato.epsilon(mechanism, one["delta"]).epsilon > one["epsilon"]
    asked = json_of(capsys, "epsilon", *(run["run"] for run in runs))
    assert asked["epsilon"] == found["epsilon_together"] and asked["delta"] == one["delta"]
    parts = [mechanism.replace(num_steps=3)] * 3
    assert sfumato.epsilon(parts, one["delta"]).epsilon == found["epsilon_together"]
    assert json_of(capsys, "epsilon", runs[0]["run"], "--delta", 1e-3)["epsilon"] < one["epsilon"]
    sfumato.train("demo/digits", tmp_path / "fewer", settings={**TINY, "data.split": "train"})  # of fewer images
    capsys.readouterr()
    both = json_of(capsys, "epsilon", runs[0]["run"], tmp_path / "fewer")["epsilon"]
    fewer = json_of(capsys, "epsilon", tmp_path / "fewer", "--delta", one["delta"])["epsilon"]
    assert max(one["epsilon"], fewer) < both <= one["epsilon"] + fewer
    accuracies = [run["accuracy"] for run in runs]
    assert found["accuracy"] == pytest.approx(sum(accuracies) / 3)
    spread = (sum((each - found["accuracy"]) ** 2 for each in accuracies) / 2) ** 0.5
    assert found["accuracy_spread"] == pytest.approx(spread)
    again = json_of(capsys, *WORDS, "--repeat", 3, "--output", tmp_path / "runs")
    assert again == found  # nothing is made again
    status, out, _ = call(capsys, *WORDS, "--repeat", 4, "--output", tmp_path / "runs")
    assert status == 0 and "of all 4 together" in out and "run-4" in out


def test_seeded_runs_are_private_of_nobody_and_the_same_each_time(tmp_path, capsys):
    found = json_of(capsys, *WORDS, "--seeds", "0..2", "--output", tmp_path / "runs")
    assert [run["private"] for run in found["runs"]] == [False] * 3 and found["epsilon_together"] is None
    assert "not private" in refused(capsys, "epsilon", found["runs"][0]["run"])
    one = sfumato.train("demo/digits", tmp_path / "one", settings={**TINY, "run.seed": 2})
    assert found["runs"][2]["accuracy"] == one.accuracy
    status, out, _ = call(capsys, *WORDS, "--seeds", "0..2", "--output", tmp_path / "runs")
    assert status == 0 and "not private" in out and "standard deviation" in out


def test_after_kill_9_the_same_command_goes_on(tmp_path, capsys):
    folder, log = tmp_path / "runs", tmp_path / "log"
    words = [*WORDS, "--set", "training.checkpoint_every=1", "--repeat", "2", "--output", str(folder)]
    assert faults.run(words, die_at=("ledger", 4, 1.0), log=log) == -signal.SIGKILL
    assert not (folder / "run-1" / "result.json").exists()
    assert faults.run(words, log=log) == 0, log.read_text()
    claims = [json.loads((folder / f"run-{number}" / "privacy.json").read_text()) for number in (1, 2)]
    assert [claim["num_steps"] for claim in claims] == [3, 3]


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (["--repeat", "2", "--seeds", "1"], "Give --repeat or --seeds"),
        (["--seeds", "1,1"], "each seed once"),
        (["--seeds", "a..b"], "whole numbers"),
        (["--repeat", "2", "--resume"], "without --resume"),
        (["--repeat", "2", "--set", "run.seed=1"], "equal seeds give equal runs"),
        (["--repeat", "2", "--set", "privacy.selected_from=10"], "each selected from others"),
    ],
)
def test_what_cannot_be_repeated_is_one_line(tmp_path, capsys, words, says):
    assert says in refused(capsys, *WORDS, *words, "--output", tmp_path / "runs")
    assert not (tmp_path / "runs").exists()


def test_a_run_s_own_folder_takes_no_others(tmp_path, capsys):
    sfumato.train("demo/digits", tmp_path / "run", settings=TINY)
    assert "is a run's folder" in refused(capsys, *WORDS, "--repeat", 2, "--output", tmp_path / "run")


def test_fewer_runs_than_a_folder_holds_are_no_series(tmp_path, capsys):
    """The whole cost of what the folder shows is stated, or nothing."""
    assert call(capsys, *WORDS, "--repeat", 2, "--output", tmp_path / "runs")[0] == 0
    assert "holds run-2 too" in refused(capsys, *WORDS, "--repeat", 1, "--output", tmp_path / "runs")


def test_a_series_is_no_unfinished_run(tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert call(capsys, *WORDS, "--repeat", 1)[0] == 0
    assert "no unfinished run" in refused(capsys, *WORDS, "--resume")
