"""`sfumato audit` as others rely on it: keys, exit status, one line or one JSON object."""

import json
import os
import signal
import threading
import time

import jsonschema
import numpy as np
import pytest

import sfumato
from sfumato.auditing import toy_task
from tests.auditing.test_membership import made_up_task
from tests.cli.test_cli import call, json_of, refused
from tests.training import faults

KEYS = {"epsilon_lower_bound", "bounds", "confidence", "nominal_epsilon", "num_games", "auc", "violated"}
KEYS |= {"advantage", "advantage_upper_bound"}
CANARY = ["audit", "canary", "--epsilon", "8", "--delta", "1e-5", "--num-steps", "2", "--num-games", "1000"]


def write_scores(path, scores, members, header="score,member"):
    rows = [f"{score},{member}" for score, member in zip(scores, members, strict=True)]
    path.write_text("\n".join([header, *rows, ""]), encoding="utf-8")
    return path


def schema(capsys, name):
    return json.loads(call(capsys, "schema", name)[1])


@pytest.fixture
def table(tmp_path):
    rng = np.random.default_rng(0)
    members = np.arange(2000) % 2
    return write_scores(tmp_path / "scores.csv", rng.normal(size=2000) + 3 * members, members)


def test_bounds_of_a_table_are_those_of_the_library_and_keep_their_schema(capsys, table):
    found = json_of(capsys, "audit", "bounds", table, "--delta", "0.01", "--epsilon", "1")
    assert KEYS <= found.keys()
    jsonschema.validate(found, schema(capsys, "audit"))
    columns = np.loadtxt(table, delimiter=",", skiprows=1)
    result = sfumato.audit_scores(
        columns[:, 0], columns[:, 1], delta=0.01, nominal_epsilon=1.0, split_seed=found["split_seed"]
    )
    assert found == result.as_json()
    assert found["violated"] is True and found["epsilon_lower_bound"] > 1


def test_without_a_claim_nothing_is_refuted_and_what_shows_nothing_is_zero(capsys, tmp_path, table):
    found = json_of(capsys, "audit", "bounds", table, "--delta", "0.01")
    assert found["violated"] is found["nominal_epsilon"] is found["advantage_upper_bound"] is None
    assert found["power"]["perfect"] > found["epsilon_lower_bound"]
    path = write_scores(tmp_path / "same.csv", [0.0] * 400, [0, 1] * 200)
    found = json_of(capsys, "audit", "bounds", path, "--delta", "0.01", "--epsilon", "1")
    assert found["epsilon_lower_bound"] == 0 and found["violated"] is False


def test_every_audit_says_what_it_assumes_what_it_could_have_shown_and_whether_the_claim_holds(capsys, table):
    words = ["audit", "bounds", table, "--delta", "0.01", "--confidence", "0.999", "--epsilon"]
    status, out, _ = call(capsys, *words, "8")
    assert status == 0
    assert "assumes nothing" in out and "is that of a Gaussian mechanism" in out and "99.9 %" in out
    assert out.count("power:") == 3 and "is not refuted; that is no proof of it" in out
    status, out, _ = call(capsys, *words, "1")
    assert status == 0 and "VIOLATED: the claim of epsilon 1 is refuted" in out


def test_a_page_is_written_beside_what_is_printed(capsys, tmp_path, table):
    words = ["audit", "bounds", table, "--delta", "0.01", "--epsilon", "1"]
    found = json_of(capsys, *words, "--page", tmp_path / "audit.html")
    assert found.keys() == json_of(capsys, *words).keys()
    assert (tmp_path / "audit.html").read_text().count("<figure") == 2
    assert "ends in .html" in refused(capsys, *words, "--page", tmp_path / "audit.png")


def test_a_canary_audit_states_what_it_ran_and_keeps_its_schema(capsys):
    found = json_of(capsys, *CANARY, "--confidence", "0.9")
    assert KEYS | {"noise_multiplier", "num_runs", "games_per_run", "sampling_prob", "num_steps"} <= found.keys()
    jsonschema.validate(found, schema(capsys, "canary-audit"))
    assert found["confidence"] == 0.9 and found["num_games"] >= 1000 and found["sampling_prob"] == 0.1
    assert [bound["name"] for bound in found["bounds"]] == ["clopper-pearson", "gaussian", "trade-off"]
    status, out, _ = call(capsys, *CANARY)
    assert status == 0 and "trade-off" in out and "canaries" in out


def test_a_membership_audit_states_what_it_ran_keeps_its_schema_and_goes_on(capsys, tmp_path, monkeypatch):
    """On made-up digits: MNIST need not be here."""
    monkeypatch.setattr(toy_task, "mnist", lambda num_examples, data_root: made_up_task(side=28))
    membership = ["audit", "membership", "--epsilon", "8", "--num-models", "24", "--confidence", "0.9"]
    found = json_of(capsys, *membership, "--output", tmp_path / "audit")
    assert KEYS | {"noise_multiplier", "winner", "seconds", "models_per_second"} <= found.keys()
    jsonschema.validate(found, schema(capsys, "membership-audit"))
    assert found["delta"] == 0.01 and found["num_games"] == 48 and found["violated"] is False
    again = json_of(capsys, *membership, "--output", tmp_path / "audit", "--page", tmp_path / "audit.html")
    assert "loss on the example" in (tmp_path / "audit.html").read_text()
    assert again["bounds"] == found["bounds"]
    for option, value in (("delta", "0.02"), ("num_steps", "3")):
        other = [f"--{option.replace('_', '-')}", value]
        said = refused(capsys, *membership, "--output", tmp_path / "audit", *other)
        assert f"other settings ({option})" in said
    assert json_of(capsys, *membership, "--num-steps", "3")["winner"]["num_steps"] == 3
    status, out, _ = call(capsys, *membership, "--output", tmp_path / "fixed", "--fixed-batches")
    assert status == 0 and "without amplification by sampling" in out and "2 x 24 models" in out


def test_a_canary_audit_that_is_stopped_says_so(tmp_path):
    log = tmp_path / "log"
    process = faults.start([*CANARY[:-1], "4000000"], log=log)
    while not (log.exists() and log.read_text()):  # what it will do
        time.sleep(0.02)
    time.sleep(1)
    os.kill(process.pid, signal.SIGINT)
    assert faults.join([process]) == [1]
    assert log.read_text().splitlines()[-1].startswith("interrupted; nothing is kept")


@pytest.mark.parametrize(
    "place, sent",
    [
        ("bounds.audit_scores", signal.SIGINT),
        ("page.render", signal.SIGTERM),
        ("one_run.audit_one_run", signal.SIGTERM),
    ],
)
def test_an_audit_that_is_stopped_while_it_works_or_draws_says_so(capsys, tmp_path, monkeypatch, table, place, sent):
    def stopped(*arguments, **options):
        os.kill(os.getpid(), sent)
        time.sleep(60)

    monkeypatch.setattr(f"sfumato.auditing.{place}", stopped)
    words = ["bounds", table, "--delta", "0.01", "--page", tmp_path / "page.html"]
    status, out, err = call(capsys, "audit", *(["one-run", tmp_path] if place.startswith("one_run") else words))
    assert (status, "epsilon is at least" in out) == (1, place.startswith("page"))
    assert err.startswith("interrupted; ") and "same command: sfumato" in err


@pytest.mark.parametrize("keeps", [True, False])
def test_a_membership_audit_that_is_stopped_says_how_to_go_on(capsys, tmp_path, monkeypatch, keeps):
    monkeypatch.setattr(toy_task, "mnist", lambda num_examples, data_root: made_up_task(side=28))
    before, output = signal.getsignal(signal.SIGTERM), ["--output", tmp_path / "audit"] if keeps else []

    def stop():
        while signal.getsignal(signal.SIGTERM) == before:
            time.sleep(0.05)
        time.sleep(0.5)
        os.kill(os.getpid(), signal.SIGTERM)

    threading.Thread(target=stop).start()
    status, out, err = call(capsys, "audit", "membership", "--epsilon", "8", "--num-models", "5000", *output)
    assert status == 1 and not out
    kept = "what is trained is kept" if keeps else "nothing is kept, so it begins anew"
    assert err.splitlines()[-1].startswith(f"interrupted; {kept}. Go on with the same command: sfumato")


@pytest.mark.parametrize(
    "header, row, words",
    [
        ("score,score,member", "1,2,1", "one column score"),
        ("score,member", "high,1", "line 2: 'high,1' does not fit"),
        ("score,member", "1,yes", "line 2"),
        ("score,member", "1,0.5,1", "line 2"),  # a decimal comma
        ("score,member", "nan,1", "not a number"),
        ("score,member", "1,1", "no games without"),
        ("score,member", "0.5,1\n\n\n0.1,0\nx,1", "line 6: 'x,1'"),
        ("score,member", "x" * 5000 + ",1", "x' does not fit"),
        ("score,member,note", '1,1,"oops\n0,0,a', "no CSV file"),  # a quote that nothing closes
    ],
)
def test_a_table_that_is_none_is_refused_in_one_line(capsys, tmp_path, header, row, words):
    path = tmp_path / "scores.csv"
    path.write_text(f"{header}\n{row}\n", encoding="utf-8")
    assert words in refused(capsys, "audit", "bounds", path, "--delta", "0.01")


def test_a_table_too_large_for_the_memory_is_refused(capsys, tmp_path):
    with (tmp_path / "scores.csv").open("wb") as file:
        file.truncate(2**40)  # a terabyte of zeros, which takes no room
    assert "has more than" in refused(capsys, "audit", "bounds", tmp_path / "scores.csv", "--delta", "0.01")


def test_files_and_settings_that_are_none_are_refused_in_one_line(capsys, tmp_path, table):
    refused(capsys, "audit", "bounds", tmp_path / "absent.csv", "--delta", "0.01")
    refused(capsys, "audit", "bounds", tmp_path, "--delta", "0.01")
    (tmp_path / "binary.csv").write_bytes(b"\xff\xfe\x00\x01" * 9)
    refused(capsys, "audit", "bounds", tmp_path / "binary.csv", "--delta", "0.01")
    refused(capsys, "audit", "bounds", table)
    few = write_scores(tmp_path / "few.csv", [0.0, 1.0], [0, 1])
    assert "Play at least" in refused(capsys, "audit", "bounds", few, "--delta", "0.01")
    few = ["audit", "membership", "--epsilon", "1", "--num-models", "3", "--data-root", tmp_path]
    assert "Play at least" in refused(capsys, *few)
    assert "is missing" in refused(capsys, *few, "--num-models", "100")


def test_a_trade_off_whose_epsilon_pld_does_not_state_is_left_out(capsys):
    words = ["audit", "canary", "--epsilon", "4", "--delta", "1e-15", "--num-games", "2000", "--num-steps", "1"]
    found = json_of(capsys, *words, "--sampling-prob", "0.5")
    assert [bound["name"] for bound in found["bounds"]] == ["clopper-pearson", "gaussian"]
