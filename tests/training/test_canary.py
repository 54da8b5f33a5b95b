"""The canary self-test: the real step keeps the laws of Eq. 3, and the test sees each way of breaking them."""

import dataclasses
import math
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from sfumato import randomness
from sfumato.clipping import GradFn
from sfumato.clipping import clipped_grad as module_of_grad  # noqa: F401  (imported before its parts are patched)
from sfumato.clipping.graph.engine import GraphEngine
from sfumato.data.sampling import Shuffling
from sfumato.training import step as step_module
from sfumato.training.noise import add_noise
from sfumato.training.step import PrivateStep
from tests.training import canary

STEPS = 500


def streams(session: int = 0) -> randomness.Streams:
    return randomness.Streams(randomness.new_key(), {}, {"number": session})


def test_the_real_step_keeps_every_law():
    assert canary.violations(canary.observe(2000, streams())) == set()


def test_noise_over_root_two_is_caught(monkeypatch):
    monkeypatch.setattr(
        step_module, "add_noise", lambda total, stddev, stream: add_noise(total, stddev / math.sqrt(2), stream)
    )
    assert "noise scale" in canary.violations(canary.observe(STEPS, streams()))


def test_noise_five_per_cent_off_either_way_is_caught(monkeypatch):
    for factor in (0.95, 1.05):
        monkeypatch.setattr(
            step_module,
            "add_noise",
            lambda total, stddev, stream, factor=factor: add_noise(total, stddev * factor, stream),
        )
        assert "noise scale" in canary.violations(canary.observe(STEPS, streams()))


def test_noise_for_every_microbatch_is_caught(monkeypatch):
    def noisy(engine, coefficient, batch, whole=GraphEngine.clipped_sum):
        out = whole(engine, coefficient, batch)
        noised = add_noise(out.grad_sum, canary.SIGMA, streams().stream("again"))
        return dataclasses.replace(out, grad_sum=noised)

    step = canary.prepared_step(PrivateStep)
    monkeypatch.setattr(GraphEngine, "clipped_sum", noisy)
    assert "noise scale" in canary.violations(canary.observe(STEPS, streams(), step=step))


def test_dividing_by_the_realised_count_is_caught():
    class RealisedCount(PrivateStep):
        def collect(self, images, parameters, randomness, **others):
            self.count = len(randomness.indices)
            return super().collect(images, parameters, randomness, **others)

        def release(self, grad_sum, noise):
            scale = self.mechanism.batch_size / max(self.count, 1)
            return {name: value * scale for name, value in super().release(grad_sum, noise).items()}

    assert "constant divisor" in canary.violations(
        canary.observe(STEPS, streams(), step=canary.prepared_step(RealisedCount))
    )


def test_clipping_before_averaging_the_views_is_caught():
    class ClipEachView(PrivateStep):
        def __init__(self, grad_fn, mechanism, views):
            super().__init__(
                SimpleNamespace(
                    sum_over=self._of_each_view, sensitivity=grad_fn.sensitivity, clipping_norm=grad_fn.clipping_norm
                ),
                mechanism,
                views,
            )
            self.real = grad_fn

        def _of_each_view(self, indices, load, key, is_fresh):
            def one_view(j):
                def of_rows(rows):
                    inputs, labels = load(rows)
                    return inputs[:, [j] * inputs.shape[1]], labels

                return self.real.sum_over(indices, of_rows, key=key)

            parts = [one_view(j) for j in range(canary.AUGMULT)]
            mean = {name: sum(part.grad_sum[name] for part in parts) / len(parts) for name in parts[0].grad_sum}
            return dataclasses.replace(parts[0], grad_sum=mean)

    # 6.5 standard errors at 500 updates, where one in fifteen runs would pass; 9 at 1,000.
    assert "shift given inclusion" in canary.violations(
        canary.observe(2 * STEPS, streams(), step=canary.prepared_step(ClipEachView))
    )


def test_an_unclipped_bias_is_caught():
    class UnclippedBias(PrivateStep):
        def collect(self, images, parameters, randomness, **others):
            grad_sum, statistics = super().collect(images, parameters, randomness, **others)
            # Every example's bias gradient is 1; its clipped part is replaced by the whole of it.
            unclipped = len(randomness.indices) * (1 - canary.others_contribution()[1])
            return {**grad_sum, "bias": grad_sum["bias"] + unclipped}, statistics

    assert "bias clipped with the rest" in canary.violations(
        canary.observe(STEPS, streams(), step=canary.prepared_step(UnclippedBias))
    )


def test_a_norm_that_leaves_out_the_bias_is_caught(monkeypatch):
    """With the bias alone, every example's gradient would keep its whole length in that direction."""
    monkeypatch.setattr(GradFn, "_coefficient", lambda grad_fn, norms: torch.full_like(norms, 1 / canary.CLIPPING_NORM))
    assert {"shift given inclusion", "sum of the others"} <= canary.violations(canary.observe(STEPS, streams()))


def test_a_shuffled_sampler_that_claims_poisson_is_caught():
    mechanism, source = canary.mechanism_of(STEPS), streams()
    shuffling = Shuffling(mechanism.num_examples, lambda epoch: source.stream("shuffling", epoch))
    seen = canary.observe(STEPS, source, sampler=lambda number: np.sort(shuffling.batch(mechanism.batch_size, number)))
    assert {"batch size variance", "steps drawn independently"} <= canary.violations(seen)


def test_noise_reused_at_the_next_step_is_caught():
    assert "noise new at each step" in canary.violations(
        canary.observe(STEPS, streams(), noise_step=lambda number: number // 2)
    )


def test_noise_reused_after_a_resume_is_caught():
    """As when a session in another environment repeats steps under the streams of the first."""
    seen = canary.observe(STEPS, streams(), noise_step=lambda number: (number - 1) % (STEPS // 2))
    assert "noise new after a resume" in canary.violations(seen)


@pytest.mark.parametrize("change", ["session", "data", "recipe", "environment"])
def test_a_change_of_session_data_recipe_or_environment_changes_every_bit_of_noise(change):
    key = randomness.new_key()
    context, session = {"recipe": "r", "data": "d"}, {"number": 0, "environment": "e"}
    other_context = {**context, change: "other"} if change in context else context
    other_session = (
        {**session, "number": 1}
        if change == "session"
        else {**session, change: "other"}
        if change in session
        else session
    )
    a = randomness.Streams(key, context, session).stream("noise", 3).uint64(4096)
    b = randomness.Streams(key, other_context, other_session).stream("noise", 3).uint64(4096)
    flipped = np.unpackbits((a ^ b).view(np.uint8)).mean()
    assert abs(flipped - 0.5) < 0.01
