"""One noise never meets two sums, and one sample of images never two releases: copies of one folder, finished under two
versions of a model.
"""

import json
import os
import shutil
import signal

import pytest
import torch
from safetensors.torch import load_file

from sfumato.run_folder.ledger import Ledger
from tests.training import faults
from tests.training.test_resume import wait_for_step

STEPS, SAVED, RECORDED, SIGMA = 14, 8, 10, 4.0
MODEL = '''"""Somebody's own network, which also looks at a file beside it."""

from pathlib import Path

import torch
from torch import nn


class Network(nn.Module):
    def __init__(self, num_classes):
        super().__init__()
        self.features = nn.Conv2d(1, 8, 3)
        self.head = nn.Linear(8 * 36, num_classes)

    def forward(self, images):
        return self.head(torch.tanh(self.features(images)).flatten(1)) * {scale} * {beside}


def make(num_classes):
    return Network(num_classes)
'''
BESIDE = 'float((Path(__file__).parent / "scale.txt").read_text())'


def modules(folder, scale="1.0", beside="1.0", content="1.0"):
    folder.mkdir()
    (folder / "own_network.py").write_text(MODEL.format(scale=scale, beside=beside))
    (folder / "scale.txt").write_text(content)
    return folder


RECIPE = """
[data]
name = "digits"
[model]
name = "own_network:make"
[augmentation]
kind = "none"
augmult = 0
[privacy]
{budget}
delta = 1e-4
accountant = "rdp"
[optimizer]
learning_rate = 2.0
[training]
batch_size = 512
num_steps = {steps}
checkpoint_every = 4
evaluate_every = {steps}
engine = "{engine}"
microbatch_size = 64
"""


def command(folder, engine, budget=f"noise_multiplier = {SIGMA}"):
    recipe = folder.parent / "recipe.toml"
    recipe.write_text(RECIPE.format(budget=budget, steps=STEPS, engine=engine))
    return ["train", str(recipe), "--trust", "own_network", "--output", str(folder)]


def interrupted(tmp_path, engine, **version):
    """Two copies of a run that was killed when some updates after its last checkpoint were on the ledger, and its
    code.
    """
    folder, log, code = tmp_path / "begun", tmp_path / "log", modules(tmp_path / "code", **version)
    status = faults.run(command(folder, engine), die_at=("ledger", 2 + RECORDED, 1.0), modules=code, log=log)
    assert status == -signal.SIGKILL, log.read_text()
    shutil.copytree(folder, tmp_path / "copy")
    return folder, tmp_path / "copy", code


def finish(folder, engine, code, tmp_path):
    """Finishes a run; returns what each of its updates was made of, by session and step, and what the run said."""
    watched, log = tmp_path / f"watched-{folder.name}", tmp_path / f"log-{folder.name}"
    assert faults.run([*command(folder, engine), "--resume"], modules=code, watch=watched, log=log) == 0, (
        log.read_text()
    )
    return [load_file(path) for path in sorted(watched.iterdir())], log.read_text()


def lines_of(folder):
    return [
        (line["session"], line["step"]) for line in Ledger.open(folder / "ledger.jsonl").lines if line["kind"] == "step"
    ]


def correlation(a, b):
    return float(torch.corrcoef(torch.stack([a.double(), b.double()]))[0, 1])


def assert_noise_of_two(first, second):
    """Two releases whose difference is that of two noises, of the scale that each must have."""
    noises = [each["released"] - each["sum"] for each in (first, second)]
    scale = (noises[0] - noises[1]).double().std() / (SIGMA * 2**0.5)
    assert abs(float(scale) - 1) < 0.1
    assert abs(correlation(*noises)) < 0.15
    # With one noise, the difference of the releases is the difference of the sums, bare.
    difference = first["sum"] - second["sum"]
    assert float(difference.abs().max()) > 0
    assert abs(correlation(first["released"] - second["released"], difference)) < 0.5


def overlap(first, second):
    """The share of one sample that is in the other."""
    return float(torch.isin(first["sample"], second["sample"]).double().mean())


@pytest.mark.parametrize("engine", ["graph", "func"])
def test_two_versions_of_a_model_share_neither_noise_nor_samples(tmp_path, engine):
    """Its code is part of the environment: as a graph, or as the source of its module."""
    folder, copy, code = interrupted(tmp_path, engine)
    other_code = modules(tmp_path / "other", scale="1.001")
    first, _ = finish(folder, engine, code, tmp_path)
    second, said = finish(copy, engine, other_code, tmp_path)
    assert "bit for bit" not in said  # it is known before anything is computed
    assert {session for session, _ in lines_of(folder)} == {0} and {session for session, _ in lines_of(copy)} == {0, 1}
    assert len(first) == len(second) == STEPS - SAVED
    for one, other in zip(first, second, strict=True):
        assert_noise_of_two(one, other)
        assert overlap(one, other) < 0.55  # 512 of 1,437 are drawn


def test_a_repeated_update_with_another_sum_is_not_released_but_drawn_afresh_and_counted(tmp_path):
    """What no digest can know: the model reads a file, which changed."""
    folder, copy, code = interrupted(tmp_path, "func", beside=BESIDE)
    first, said = finish(folder, "func", code, tmp_path)
    assert lines_of(folder) == [(0, step) for step in range(1, STEPS + 1)] and "bit for bit" not in said
    (code / "scale.txt").write_text("1.001")
    second, said = finish(copy, "func", code, tmp_path)
    assert "update 9 does not repeat bit for bit" in said
    again = [(1, step) for step in range(SAVED + 1, STEPS + 1)]
    assert lines_of(copy) == [(0, step) for step in range(1, RECORDED + 1)] + again
    assert len(second) == STEPS - SAVED  # the sum that was not repeated never met noise
    for one, other in zip(first, second, strict=True):
        assert_noise_of_two(one, other)
        assert overlap(one, other) < 0.55
    claim, whole = (json.loads((run / "privacy.json").read_text()) for run in (copy, folder))
    assert (
        claim["num_steps"] == len(lines_of(copy)) > whole["num_steps"] == STEPS and claim["epsilon"] > whole["epsilon"]
    )
    session = [line for line in Ledger.open(copy / "ledger.jsonl").lines if line["kind"] == "session"][-1]
    assert (session["session"], session["from_session"], session["first_step"]) == (1, 0, SAVED + 1)


def test_going_back_takes_the_state_back_too(tmp_path):
    """The first repetition is the same, the second is not: what follows starts from the checkpoint, not from the update
    in between.
    """
    _, copy, code = interrupted(tmp_path, "func", beside="eval((Path(__file__).parent / 'scale.txt').read_text())")
    watched = tmp_path / "watched-copy"
    (code / "scale.txt").write_text(f"1.5 if any(Path({str(watched)!r}).glob('*')) else 1.0")
    seen, said = finish(copy, "func", code, tmp_path)
    assert "update 10 does not repeat bit for bit" in said
    assert lines_of(copy) == [(0, step) for step in range(1, RECORDED + 1)] + [
        (1, step) for step in range(SAVED + 1, STEPS + 1)
    ]
    assert len(seen) == 1 + STEPS - SAVED
    before, between, after = (
        weights(folder, step) for folder, step in ((tmp_path / "begun", SAVED), (copy, 12), (copy, STEPS))
    )
    assert torch.allclose(after - between, -2.0 / 512 * sum(each["released"] for each in seen[-2:]), atol=1e-5)
    assert torch.allclose(between - before, -2.0 / 512 * sum(each["released"] for each in seen[1:-2]), atol=1e-5)


def weights(folder, step):
    """The parameters of a checkpoint, in the model's order."""
    tensors = load_file(folder / "checkpoints" / f"step-{step:09d}.safetensors")
    return torch.cat(
        [tensors[f"model.{layer}.{kind}"].flatten() for layer in ("features", "head") for kind in ("weight", "bias")]
    )


def test_copies_that_compute_differently_after_the_last_recorded_update_share_one_sample_at_most(tmp_path):
    """Neither can know of the other: the sample that both had drawn meets two sums. Not their noise, and no later
    sample.
    """
    folder, copy, code = tmp_path / "begun", tmp_path / "copy", modules(tmp_path / "code", beside=BESIDE)
    process = faults.start(command(folder, "func"), modules=code)
    wait_for_step(folder, 3)
    os.kill(process.pid, signal.SIGTERM)  # a checkpoint of the last update
    process.join(60)
    assert process.exitcode == 1
    shutil.copytree(folder, copy)
    first, _ = finish(folder, "func", code, tmp_path)
    (code / "scale.txt").write_text("1.001")
    second, _ = finish(copy, "func", code, tmp_path)
    for number, (one, other) in enumerate(zip(first, second, strict=True)):
        assert_noise_of_two(one, other)
        assert overlap(one, other) == 1.0 if number == 0 else overlap(one, other) < 0.55
    assert number > 0


@pytest.mark.parametrize("engine", ["graph", "func"])
def test_the_same_code_elsewhere_repeats_every_bit_and_spends_nothing(tmp_path, engine):
    """Other folders, another process: what is computed is the same, so are noise and samples."""
    folder, copy, code = interrupted(tmp_path, engine)
    elsewhere = tmp_path / "elsewhere"
    shutil.copytree(code, elsewhere)
    first, _ = finish(folder, engine, code, tmp_path)
    second, _ = finish(copy, engine, elsewhere, tmp_path)
    assert lines_of(folder) == lines_of(copy) == [(0, step) for step in range(1, STEPS + 1)]
    assert all(one[name].equal(other[name]) for one, other in zip(first, second, strict=True) for name in one)


@pytest.mark.parametrize("budget", ["target_epsilon = 3.0", f"noise_multiplier = {SIGMA}"])
def test_wherever_it_dies_while_it_draws_afresh_no_certificate_is_below_what_was_spent(tmp_path, budget):
    """Under a target the run then ends earlier, at the same epsilon."""
    folder, code = tmp_path / "run", modules(tmp_path / "code", beside=BESIDE)
    words = command(folder, "func", budget)
    assert faults.run(words, die_at=("ledger", 2 + RECORDED, 1.0), modules=code) == -signal.SIGKILL
    (code / "scale.txt").write_text("1.001")
    for number in (1, 2, 3):  # the line of the session, and the first two of its updates
        assert faults.run([*words, "--resume"], die_at=("ledger", number, 0.0), modules=code) == -signal.SIGKILL
        claim, head = (json.loads((folder / name).read_text()) for name in ("privacy.json", "ledger.head"))
        assert (
            claim["num_steps"] >= len(lines_of(folder)) + (head["line"]["kind"] == "step")
            and claim["status"] == "running"
        )
    assert faults.run([*words, "--resume"], modules=code) == 0
    claim, lines = json.loads((folder / "privacy.json").read_text()), lines_of(folder)
    last = max(step for session, step in lines if session == 1)
    assert claim["num_steps"] == len(lines) == RECORDED + last - SAVED
    assert (len(lines), claim["epsilon"] <= 3.0) == (STEPS, True) if "target" in budget else last == STEPS


def test_two_copies_that_begin_a_session_each_have_nothing_in_common(tmp_path):
    """Both in the same new environment, which computes the same."""
    folder, copy, code = interrupted(tmp_path, "func")
    other_code = modules(tmp_path / "other", scale="1.001")
    first, _ = finish(folder, "func", other_code, tmp_path)
    second, _ = finish(copy, "func", other_code, tmp_path)
    assert lines_of(folder) == lines_of(copy)
    for one, other in zip(first, second, strict=True):
        assert overlap(one, other) < 0.55
        assert abs(correlation(one["released"] - one["sum"], other["released"] - other["sum"])) < 0.15


@pytest.mark.parametrize("engine", ["graph", "func"])
def test_a_model_that_draws_random_numbers_repeats_bit_for_bit_after_kills(tmp_path, engine):
    """Its masks come from the run's key, by step, image and view."""
    beside = "nn.functional.dropout(torch.ones_like(images[:, 0, 0, :1]), 0.5)"
    one, other, code = interrupted(tmp_path, engine, beside=beside)
    assert faults.run([*command(other, engine), "--resume"], modules=code, die_at=("ledger", 3, 1.0)) == -signal.SIGKILL
    for folder in (one, other):
        finish(folder, engine, code, tmp_path)
    weights = [load_file(folder / "model.safetensors") for folder in (one, other)]
    assert all(torch.equal(weights[0][name], weights[1][name]) for name in weights[0])
    assert lines_of(one) == lines_of(other) == [(0, step) for step in range(1, STEPS + 1)]
