"""A training problem whose private gradients are known in closed form.

The model is a product of the left half of an image with weights, plus a bias, and the
loss is its output, so an example's gradient is (left half, 1) and depends on nothing
else. The canary's left half is bright in the first pixel and its mirror image dim in the
second: clipping before averaging the views gives another answer than clipping after.
"""

import dataclasses
import itertools

import numpy as np
import torch
from torch import nn

from sfumato.accounting.mechanism import Mechanism
from sfumato.clipping import clipped_grad, pure
from sfumato.data.images import ImageSet
from sfumato.data.sampling import poisson_batch
from sfumato.data.views import Views
from sfumato.randomness import Streams
from sfumato.training.step import PrivateStep, draw

HEIGHT, WIDTH = 8, 16
NUM_EXAMPLES, BATCH_SIZE, SIGMA, CLIPPING_NORM, AUGMULT = 64, 16, 0.4, 0.5, 4
CANARY = 0
BRIGHT, DIM = 250, 1
CANARY_PIXEL, OTHERS_PIXEL = 0, WIDTH // 2  # in the flattened left half
USED_PIXELS = [0, 1, OTHERS_PIXEL]


class LeftHalf(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(HEIGHT * WIDTH // 2))
        self.bias = nn.Parameter(torch.zeros(1))

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        return images[..., : WIDTH // 2].flatten(1) @ self.weight + self.bias


def images() -> ImageSet:
    pixels = torch.zeros(NUM_EXAMPLES, 1, HEIGHT, WIDTH, dtype=torch.uint8)
    pixels[CANARY, 0, 0, 0] = BRIGHT
    pixels[CANARY, 0, 0, WIDTH - 2] = DIM  # mirrored, it is the second pixel
    pixels[1:, 0, 1, [0, WIDTH - 1]] = BRIGHT  # all others: their own mirror image
    return ImageSet(
        stored=pixels,
        labels=torch.zeros(NUM_EXAMPLES, dtype=torch.int64),
        readable=torch.ones(NUM_EXAMPLES, dtype=torch.bool),
        mean=(0.0,),
        std=(1 / 255,),  # gradients in units of pixel values, far above the clipping norm
    )


def canary_contribution() -> float:
    """Expectation of the canary's clipped gradient / C at its pixel, over the flips of its views."""
    total = 0.0
    for flips in itertools.product([0, 1], repeat=AUGMULT):
        share = 1 - np.mean(flips)
        gradient = np.array([share * BRIGHT, (1 - share) * DIM, 1.0])
        total += gradient[0] / max(np.linalg.norm(gradient), CLIPPING_NORM)
    return total / 2**AUGMULT


def others_contribution() -> tuple[float, float]:
    """One other example's clipped gradient / C, at its pixel and at the bias."""
    norm = float(np.hypot(BRIGHT, 1))
    return BRIGHT / norm, 1 / norm


@dataclasses.dataclass
class Observed:
    """What an adversary who knows who was drawn sees over T updates."""

    included: np.ndarray  # (T, N), bool
    weight: np.ndarray  # (T, d)
    bias: np.ndarray  # (T,)


def mechanism_of(num_steps: int) -> Mechanism:
    return Mechanism(NUM_EXAMPLES, BATCH_SIZE, SIGMA, num_steps)


def prepared_step(step_class=PrivateStep):
    """A step of the closed-form problem whose engine is settled."""
    grad_fn = clipped_grad(
        LeftHalf(),
        pure(lambda outputs, labels: outputs),
        clipping_norm=CLIPPING_NORM,
        augmult=AUGMULT,
        microbatch_size=12,
    )
    grad_fn.prepare(torch.zeros(1, AUGMULT, 1, HEIGHT, WIDTH), torch.zeros(1, dtype=torch.int64))
    return step_class(grad_fn, mechanism_of(1), Views("flip", AUGMULT, 0))


def observe(num_steps: int, streams: Streams, *, sampler=None, step=None, noise_step=lambda number: number) -> Observed:
    """Takes updates of the real step on the closed-form problem; the arguments plant faults."""
    step = step or prepared_step()
    mechanism, views = mechanism_of(num_steps), step.views
    data, parameters = images(), dict(LeftHalf().named_parameters())
    sampler = sampler or (lambda number: poisson_batch(mechanism, streams.stream("sampling", number)))
    included = np.zeros((num_steps, NUM_EXAMPLES), dtype=bool)
    weight, bias = [], []
    for number in range(1, num_steps + 1):
        randomness = draw(
            mechanism, sampler(number), views, streams.stream("augmentation", number), streams.stream("model", number)
        )
        grad_sum, _ = step.collect(data, parameters, randomness)
        private_grad = step.release(grad_sum, streams.stream("noise", noise_step(number)))
        included[number - 1, randomness.indices] = True
        weight.append(private_grad["weight"].numpy())
        bias.append(private_grad["bias"].item())
    return Observed(included, np.array(weight, dtype=np.float64), np.array(bias))


def violations(seen: Observed) -> set[str]:
    """The laws of Eq. 3 that the observations break, each tested at 5 standard errors."""
    num_steps = len(seen.weight)
    drawn = seen.included
    q, limit = BATCH_SIZE / NUM_EXAMPLES, 5.0
    noise_stddev = SIGMA / BATCH_SIZE
    broken = set()

    def test(law: str, value: float, truth: float, standard_error: float) -> None:
        if not abs(value - truth) <= limit * standard_error:
            broken.add(law)

    # Sampling: each example alone, with probability q, independent of the others and of other steps.
    counts = drawn.sum(1)
    test("inclusion probability", counts.mean(), BATCH_SIZE, np.sqrt(NUM_EXAMPLES * q * (1 - q) / num_steps))
    variance = NUM_EXAMPLES * q * (1 - q)
    test("batch size variance", counts.var(), variance, variance * np.sqrt(2 / num_steps))
    again = (drawn[1:] & drawn[:-1]).mean()
    test("steps drawn independently", again, q * q, np.sqrt(q * q * (1 - q * q) / (num_steps * NUM_EXAMPLES)) * 2)

    # The canary: a shift of 1/B in the updates that include it, q/B over all.
    contribution = canary_contribution() / BATCH_SIZE
    at_canary = seen.weight[:, CANARY_PIXEL]
    member = drawn[:, CANARY]
    spread = np.sqrt(noise_stddev**2 + 0.25 / BATCH_SIZE**2)
    shift = at_canary[member].mean() - at_canary[~member].mean()
    test("shift given inclusion", shift, contribution, spread * np.sqrt(1 / member.sum() + 1 / (~member).sum()))
    test(
        "mean shift",
        at_canary.mean(),
        q * contribution,
        np.sqrt(spread**2 + q * (1 - q) / BATCH_SIZE**2) / np.sqrt(num_steps),
    )

    # The others: n - 1 or n unit vectors over the constant B, whatever n was.
    pixel, bias = others_contribution()
    others = drawn[:, 1:].sum(1)
    residual = seen.weight[:, OTHERS_PIXEL] - others * pixel / BATCH_SIZE
    slope = np.polyfit(others, seen.weight[:, OTHERS_PIXEL], 1)[0]
    test("sum of the others", residual.mean(), 0, noise_stddev / np.sqrt(num_steps))
    test("constant divisor", slope, pixel / BATCH_SIZE, noise_stddev / np.sqrt(num_steps) / others.std())
    test(
        "bias clipped with the rest",
        seen.bias.mean(),
        bias * BATCH_SIZE / BATCH_SIZE,
        noise_stddev / np.sqrt(num_steps) + 1 / BATCH_SIZE / np.sqrt(num_steps),
    )

    # The noise: sigma/B in every coordinate, in empty batches too, and new at every step.
    silent = np.delete(seen.weight, USED_PIXELS, axis=1)
    test("noise scale", silent.std() / noise_stddev, 1, np.sqrt(0.5 / silent.size))
    kurtosis = (silent**4).mean() / noise_stddev**4
    test("noise is Gaussian", kurtosis, 3, np.sqrt(96 / silent.size))
    repeated = (silent[1:] * silent[:-1]).mean() / noise_stddev**2
    test("noise new at each step", repeated, 0, np.sqrt(1 / silent[1:].size))
    halves = (silent[num_steps // 2 : 2 * (num_steps // 2)] * silent[: num_steps // 2]).mean() / noise_stddev**2
    test("noise new after a resume", halves, 0, np.sqrt(2 / silent.size))
    return broken
