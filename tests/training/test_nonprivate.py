"""Ordinary training: the mean gradient, nothing counted, and runs that survive interruption as private ones do."""

import json
import signal

import numpy as np
import pytest
import torch

from sfumato.clipping.protocol import Speed
from sfumato.data.views import Views
from sfumato.evaluation.scores import Objective
from sfumato.run_folder import ledger
from sfumato.training.step import OrdinaryStep, Randomness
from tests.training import faults
from tests.training.test_step import one_by_one, problem

SETTINGS = ["--non-private", "--set", "training.num_steps=20", "--set", "training.checkpoint_every=3"]


def gradient_of(model, images, indices, augmult=0, microbatch_size=4, max_grad_norm=None):
    views = Views("flip" if augmult else "none", augmult, 0)
    step = OrdinaryStep(model, Objective(None), views, microbatch_size, max_grad_norm, Speed())
    assert step.model is model  # not compiled unless that is asked for
    bits = np.random.default_rng(0).integers(0, 2**32, (len(images), augmult), dtype=np.uint32)
    randomness = Randomness(np.array(indices, dtype=np.int64), bits, bytes(32))
    gradient, rows = step.collect(images, dict(model.named_parameters()), randomness)
    flat = torch.cat([value.flatten() for value in gradient.values()])
    norm = float(flat.norm())
    return step.scaled(flat, float), step.statistics(rows, norm, len(flat), with_norms=False), views, bits


@pytest.mark.parametrize("augmult", [0, 3])
def test_an_update_is_the_mean_gradient_of_all_views_one_by_one(augmult):
    model, images = problem(unreadable=[2])
    indices = [1, 2, 5, 7, 11, 20, 3]
    readable = [index for index in indices if index != 2]
    gradient, statistics, views, bits = gradient_of(model, images, indices, augmult)
    gradients, losses = one_by_one(model, images, readable, views, bits)
    assert torch.allclose(gradient, gradients.mean(0), atol=1e-6)
    assert statistics["loss"] == pytest.approx(np.mean(losses), rel=1e-5)
    assert statistics["grad_norm"] == pytest.approx(float(gradient.norm()), rel=1e-5)


def test_the_microbatch_size_changes_nothing_but_rounding():
    model, images = problem()
    one, other = (gradient_of(model, images, range(17), 2, size)[0] for size in (1, 24))
    assert torch.allclose(one, other, atol=1e-6)


@pytest.mark.parametrize("factor", [0.5, 2.0])
def test_a_largest_norm_scales_the_mean_gradient_as_clipping_scales_an_example_s(factor):
    model, images = problem()
    plain, statistics, *_ = gradient_of(model, images, range(9))
    limit = factor * statistics["grad_norm"]
    scaled = gradient_of(model, images, range(9), max_grad_norm=limit)[0]
    assert torch.allclose(scaled, plain * min(1 / limit, 1 / statistics["grad_norm"]), atol=1e-6)


def test_its_updates_are_counted_and_its_claims_are_none_though_it_was_killed_and_went_on(tmp_path):
    run = tmp_path / "run"
    words = ["train", "demo/digits", *SETTINGS, "--output", str(run)]
    assert faults.run(words, die_at=("ledger", 9, 0.5)) == -signal.SIGKILL
    assert faults.run([*words, "--resume"]) == 0
    lines = ledger.read(run / "ledger.jsonl")
    assert lines.run.unit is None and lines.num_releases == 20
    claims = json.loads((run / "privacy.json").read_text())
    assert claims["private"] is False and claims["epsilon"] is None and claims["num_steps"] == 20
    assert (claims["num_lost"], claims["num_applied"], claims["epsilon_so_far"]) == (0, 20, None)
    result = json.loads((run / "result.json").read_text())
    assert result["test_accuracy"] > 0.85 and result["epsilon"] is None
