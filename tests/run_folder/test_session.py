"""Which recipes are one run, and how its sessions follow one another."""

import json
import os
import shutil

import pytest
import torch

from sfumato.accounting.mechanism import Mechanism
from sfumato.config import DataConfig, parse
from sfumato.data import loading as datasets
from sfumato.data.views import Views
from sfumato.errors import InputError
from sfumato.planning.resolve import resolve
from sfumato.run_folder import session as sessions
from sfumato.run_folder.entries import first_session_line, run_line, spent_mechanism
from sfumato.run_folder.ledger import GENESIS, Ledger, chained_line
from sfumato.run_folder.session import recipe_digest
from sfumato.training.draws import Draws


def recipe(optimizer):
    budget = {"noise_multiplier": 2.0, "delta": 1e-4}
    views = {"padding": 4}  # as resolved recipes have it
    training = {"batch_size": 512, "num_steps": 60}
    return parse(
        {
            "data": {"name": "digits"},
            "privacy": budget,
            "optimizer": optimizer,
            "augmentation": views,
            "training": training,
        }
    )


def test_recipes_that_release_something_else_have_other_digests():
    adam = {"name": "adam", "learning_rate": 0.01, "beta1": 0.9, "beta2": 0.999, "adam_epsilon": 1e-8}
    optimizers = [
        {"learning_rate": 0.01},
        {"learning_rate": 0.01, "weight_decay": 0.1},
        adam,
        {**adam, "name": "adamw"},
        {**adam, "beta1": 0.0},
        {**adam, "beta2": 0.99},
        {**adam, "adam_epsilon": 1e-6},
        {**adam, "weight_decay": 0.1},
    ]
    assert len({recipe_digest(recipe(optimizer)) for optimizer in optimizers}) == len(optimizers)


def test_what_is_noted_for_the_owner_does_not_make_another_run():
    plain = recipe({"learning_rate": 2.0})
    watched = plain.model_copy(update={"training": plain.training.model_copy(update={"norm_histogram_every": 5})})
    assert recipe_digest(watched) == recipe_digest(plain)


@pytest.fixture(scope="module")
def digits():
    dataset = datasets.load(DataConfig(name="digits"), None, lambda text: None)
    return resolve(recipe({"learning_rate": 2.0}), dataset.facts), dataset


class Run:
    """A run folder whose processes come and go."""

    def __init__(self, folder, digits):
        self.folder, (self.plan, self.dataset) = folder, digits
        folder.mkdir()
        (folder / "checkpoints").mkdir()

    def process(self, environment, *steps, saves=None, begins=False):
        """One process: goes on, releases some steps, writes a checkpoint of one of them perhaps, and is gone."""
        go = sessions.begin if begins else sessions.resume
        session = go(self.folder, self.plan, self.dataset, {"host": environment})
        draws = Draws(session.key, session.context, session.ledger, is_public=False, is_accounted=True)
        try:
            for step in steps:
                draws.of_step(step, self.plan.mechanism, Views("none", 0, 0))
                draws.record(step, {"w": torch.tensor([float(step)])})
                if step == saves:
                    session.save({"w": torch.zeros(1)}, step, 0.0)
            if saves == 0:
                session.save({"w": torch.zeros(1)}, 0, 0.0)
        finally:
            session.ledger.close()
        return session

    @property
    def lines(self):
        return Ledger.open(self.folder / "ledger.jsonl").lines

    @property
    def sessions(self):
        keys = ("session", "from_session", "first_step")
        return [tuple(line[key] for key in keys) for line in self.lines if line["kind"] == "session"]


def test_sessions_are_numbered_from_0_by_1_and_say_where_they_begin(tmp_path, digits):
    run = Run(tmp_path / "run", digits)
    run.process("a", begins=True)
    assert run.sessions == [(0, None, 1)] and run.lines[0]["kind"] == "run"
    run.process("a")  # the start was cut short
    assert run.sessions == [(0, None, 1)]
    run.process("b")  # and is finished elsewhere
    assert run.sessions == [(0, None, 1), (1, None, 1)]
    run.process("b", 1, 2, 3, 4, saves=3)
    run.process("b", 4, 5)
    assert run.sessions[2:] == []
    run.process("a")
    assert run.sessions[2:] == [(2, 1, 4)]
    run.process("a", 4)  # nothing of the new session was lost: it is gone on with
    assert run.sessions[3:] == []
    run.process("b", 4, 5, 6, saves=6)
    assert run.sessions[3:] == [(3, 1, 4)]
    run.process("b", 7)
    assert run.sessions[4:] == []
    run.process("a", 7)
    assert run.sessions[4:] == [(4, 3, 7)]
    (tmp_path / "run" / "checkpoints" / "step-000000006.safetensors").unlink()
    run.process("a", 4)  # an older checkpoint, which is not where this session began
    assert run.sessions[5:] == [(5, 1, 4)]
    releases = [(line["session"], line["step"]) for line in run.lines if line["kind"] == "step"]
    assert len(releases) == len(set(releases)) == spent_mechanism(run.lines).num_steps


def test_no_two_session_lines_of_copies_are_alike_but_the_first(tmp_path, digits):
    run = Run(tmp_path / "run", digits)
    run.process("a", 1, begins=True, saves=1)
    shutil.copytree(run.folder, tmp_path / "copy")
    copy = Run.__new__(Run)
    copy.folder, (copy.plan, copy.dataset) = tmp_path / "copy", digits
    for each in (run, copy):
        each.process("b")
    assert (
        run.lines[:3] == copy.lines[:3]
        and run.lines[3]["salt"] != copy.lines[3]["salt"]
        and run.lines[1]["salt"] is None
    )


def test_a_new_key_is_drawn_only_where_nothing_was_begun(tmp_path, digits):
    run = Run(tmp_path / "run", digits)
    run.process("a", 1, begins=True, saves=1)
    key = (run.folder / "key").read_bytes()
    (run.folder / "key").unlink()
    for left in (["ledger.jsonl"], ["checkpoints/step-000000001.safetensors"], []):
        for name in left:
            (run.folder / name).unlink()
        with pytest.raises(InputError, match="key is missing"):
            run.process("a")
        assert not (run.folder / "key").exists()
    (run.folder / "key").write_bytes(key)
    with pytest.raises(InputError, match="lines were removed"):
        run.process("a")


def test_a_session_is_not_begun_twice_by_a_crash_after_its_line_was_made(tmp_path, digits, monkeypatch):
    run = Run(tmp_path / "run", digits)
    run.process("a", 1, begins=True, saves=1)
    write, written = os.write, []
    monkeypatch.setattr(os, "write", lambda *args: written.append(args) or (_ for _ in ()).throw(KeyboardInterrupt))
    with pytest.raises(KeyboardInterrupt):
        run.process("b")
    monkeypatch.setattr(os, "write", write)
    assert run.sessions == [(0, None, 1)] and written
    run.process("b")
    assert run.sessions == [(0, None, 1), (1, 0, 2)]


def test_the_newest_unfinished_run_is_one_of_that_very_recipe(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(InputError, match="no unfinished run of my"):
        sessions.newest_unfinished("my")
    names = [str(sessions.new_folder(name)) for name in ("my", "my", "my-wide", "[ab]", "a", "de2022/x")]
    for age, name in enumerate(
        [*names, "runs/my-paid-search", "runs/my-20260101T000000Z-00ff-more", "runs/my-20260101T000000Z"]
    ):
        os.makedirs(name)
        os.utime(name, (1e9 + age, 1e9 + age))
    for name, place in (("my", 1), ("my-wide", 2), ("[ab]", 3), ("a", 4), ("de2022/x", 5)):
        assert str(sessions.newest_unfinished(name)) == names[place]
    (tmp_path / names[1] / "result.json").touch()
    assert str(sessions.newest_unfinished("my")) == names[0]
    with pytest.raises(InputError, match="no unfinished run of b"):
        sessions.newest_unfinished("b")


@pytest.mark.parametrize(
    "change",
    [
        {"threads": 0},
        {"threads": "two"},
        {"threads": 10**9},
        {"engine": "fast"},
        {"microbatch_size": -1},
        {"methods": [1]},
    ],
    ids=str,
)
def test_what_a_ledger_s_environment_states_is_not_used_unless_a_run_can_have_it(tmp_path, change):
    environment = {
        "threads": 2,
        "engine": "graph",
        "microbatch_size": 8,
        "methods": {"memory_format": "contiguous"},
        "device": "x",
    }
    for place, stated in ((tmp_path / "true", environment), (tmp_path / "forged", environment | change)):
        place.mkdir()
        first = chained_line(run_line("0f" * 16, Mechanism(9, 3, 1.0, 1), 1.0, "digest"), GENESIS)
        second = chained_line(first_session_line(stated), first["hash"])
        (place / "ledger.jsonl").write_text("".join(json.dumps(line) + "\n" for line in (first, second)))
    assert sessions.recorded_environment(tmp_path / "true") == environment
    with pytest.raises(InputError, match="environment that no run has"):
        sessions.recorded_environment(tmp_path / "forged")
