"""The strongest attacker of all: sees every update, and has put a worst-case example into the data
(Nasr et al. 2023, white-box with crafted gradients).

What runs is the product's own: clipping, sampler, noise, ledger. Each canary's gradient is longer than
the clipping norm and has a direction of its own, so one run with N canaries is N games that do not
touch each other. A coin decides whether a canary takes part. One that does not contributes zero and
keeps its place, as an unreadable image does: the very relation that the certificate is about.
"""

import contextlib
import functools
import math
import os
import tempfile
import time
from collections.abc import Callable
from fractions import Fraction
from pathlib import Path

import numpy as np
import torch
from torch import nn

from sfumato.accounting import accountants, formats
from sfumato.accounting.mechanism import Mechanism
from sfumato.auditing.arguments import LEAST_TARGET, Keep, calibrated, require_levels, whole
from sfumato.auditing.bounds import audit_scores, require_enough
from sfumato.auditing.record import CanaryResult
from sfumato.clipping import GradFn, clipped_grad
from sfumato.data.images import ImageSet
from sfumato.data.views import Views
from sfumato.errors import InputError
from sfumato.json_record import pick
from sfumato.randomness import Stream, Streams
from sfumato.run_folder.ledger import Ledger, new_run_line
from sfumato.training.step import Draws, PrivateStep

SIDE = 64
"""Of a canary's image, in pixels. One weight belongs to each pixel, and noise is drawn in blocks of as
many weights."""
_MOST_CANARIES = SIDE * SIDE
_MOST_GAMES = 10**12
_MOST_SEEN = 2 * 10**8  # of a run; scores take five times as much memory
_VIEWS = Views("none", 0, 0)
_CLIPPING_NORM = 1.0
_MICROBATCH = 64
_IN_MEMORY = "/dev/shm"
_LONG = 2.0
"""Seconds from which on the time to expect is told."""


def audit_canary(
    *,
    epsilon: float,
    delta: float,
    num_steps: int = 100,
    sampling_prob: float = 0.1,
    num_games: int = 200_000,
    confidence: float = 0.95,
    report: Callable[[str], None] = lambda text: None,
    keep: Keep = lambda scores, members: None,
) -> CanaryResult:
    """Attacks the product's own private step, at noise calibrated to an epsilon.

    Guarantee: if the step is the mechanism that its certificate states, `violated` is true with
    probability at most 1 - ``confidence`` for each of the two bounds that decide it.

    Args:
        epsilon: Claimed; noise is calibrated to it as for a run.
        delta: In (0, 1).
        num_steps: T, updates of a run.
        sampling_prob: q, a fraction with a denominator of at most 4096.
        num_games: At least so many are played, in as many runs as that takes.
        confidence: Of each bound.
        report: Is told how far it has come.
        keep: Is given scores and membership of every game, which the result forgets.

    Raises:
        InputError: If an argument is out of range, the budget is impossible, or the games are too
            few for any bound above 0.
    """
    require_levels(delta, confidence, epsilon, LEAST_TARGET)
    num_steps, num_games = whole("num_steps", num_steps, 1, _MOST_SEEN), whole("num_games", num_games, 1, _MOST_GAMES)
    num_canaries, num_runs = _games(sampling_prob, num_games)
    if num_steps * num_canaries > _MOST_SEEN:
        raise InputError(
            f"{num_steps:,} updates that see {num_canaries:,} canaries each do not fit into memory. Take fewer updates."
        )
    # The coins fall near one half: one game less on each side is not what is refused here.
    require_enough(num_games // 2, num_games // 2, confidence, delta)
    started = time.perf_counter()
    mechanism = calibrated(num_canaries, round(sampling_prob * num_canaries), num_steps, epsilon, delta)
    sigma = mechanism.noise_multiplier
    report(f"{num_runs} runs of {num_canaries:,} canaries, {num_steps} updates each, at noise multiplier {sigma:g}")
    scores, members = play(mechanism, num_runs, report)
    keep(scores, members)
    nominal = accountants.epsilon(mechanism, delta).epsilon
    found = audit_scores(
        scores, members, delta=delta, confidence=confidence, nominal_epsilon=nominal, mechanism=mechanism
    )
    return CanaryResult(
        **{**dict(found), "audit": "canary"},
        target_epsilon=epsilon,
        **pick(mechanism, "noise_multiplier", "sampling_prob", "num_steps"),
        num_runs=num_runs,
        games_per_run=num_canaries,
        seconds=time.perf_counter() - started,
    )


def play(
    mechanism: Mechanism, num_runs: int, report: Callable[[str], None] = lambda text: None
) -> tuple[np.ndarray, np.ndarray]:
    """Runs of the real step, each with fresh random numbers.

    Args:
        mechanism: Its examples are the canaries, at most `SIDE` squared.

    Returns:
        Scores and membership of every game, (num_runs x N,).
    """
    started = time.perf_counter()
    scores, members = [], []
    for run in range(num_runs):
        took_part = coins(mechanism.num_examples)
        scores.append(log_likelihood_ratio(observe(mechanism, took_part), mechanism))
        members.append(took_part)
        seconds = time.perf_counter() - started
        if seconds / (run + 1) * num_runs > _LONG and run % max(1, num_runs // 10) == 0:
            report(formats.progress("runs", run + 1, num_runs, seconds))
    return np.concatenate(scores), np.concatenate(members)


@functools.cache
def _grad_fn() -> GradFn:
    """Of a model that canaries are made for; one for all audits of a process: it takes seconds to settle."""
    # A weight for each pixel, whose gradient is the image.
    model = nn.Sequential(nn.Flatten(), nn.Linear(_MOST_CANARIES, 1, bias=False))
    grad_fn = clipped_grad(model, _output, clipping_norm=_CLIPPING_NORM, microbatch_size=_MICROBATCH)
    grad_fn.prepare(torch.zeros(1, 1, SIDE, SIDE), torch.zeros(1, dtype=torch.int64))
    return grad_fn


def coins(count: int) -> np.ndarray:
    """(count,) fair coins from the operating system, bool."""
    words = Streams().stream("coins").uint64(count)
    return (words & np.uint64(1)).astype(bool)


def observe(mechanism: Mechanism, took_part: np.ndarray) -> np.ndarray:
    """One run: what the attacker sees of each canary at each update.

    Args:
        took_part: (N,): the coins.

    Returns:
        (T, N): the canary's coordinate of the noisy sum, in units of the sensitivity.
    """
    step, data = PrivateStep(_grad_fn(), mechanism, _VIEWS), canaries(took_part)
    parameters = {"1.weight": torch.zeros(1, _MOST_CANARIES)}  # its gradient is the same at all weights
    seen = np.empty((mechanism.num_steps, mechanism.num_examples))
    draws = Draws(mechanism, _VIEWS, Streams())
    run = new_run_line(mechanism, unit="image", clipping_norm=_CLIPPING_NORM, delta=None, recipe_sha256=None)
    # The ledger of an audit need not outlive it, so it need not wait for a disk.
    with tempfile.TemporaryDirectory(dir=_IN_MEMORY if os.path.isdir(_IN_MEMORY) else None) as folder:
        with contextlib.closing(Ledger(Path(folder) / "ledger.jsonl")) as ledger:
            ledger.begin(run)
            for update in range(1, mechanism.num_steps + 1):
                grad_sum, _ = step.collect(data, parameters, draws.of_update(update))
                ledger.append(update)
                private_grad = step.release(grad_sum["1.weight"][0], Stream(draws.noise_key(update)))
                seen[update - 1] = private_grad[: mechanism.num_examples].numpy()
    return seen * (mechanism.batch_size / step.grad_fn.sensitivity)


def canaries(took_part: np.ndarray) -> ImageSet:
    """N images, each with one bright pixel of its own; those that take no part are unreadable."""
    count = len(took_part)
    return ImageSet(
        stored=255 * torch.eye(count, _MOST_CANARIES, dtype=torch.uint8).view(count, 1, SIDE, SIDE),
        labels=torch.zeros(count, dtype=torch.int64),
        readable=torch.from_numpy(took_part),
        mean=(0.0,),
        std=(1 / 255,),  # a bright pixel is 255 clipping norms
    )


def log_likelihood_ratio(seen: np.ndarray, mechanism: Mechanism) -> np.ndarray:
    """The best score there is (Neyman and Pearson): how much likelier what was seen is with the canary
    than without.

    Args:
        seen: (T, N), as `observe` gives it.

    Returns:
        (N,): the sum over updates of log(1 - q + q exp((2 x - 1) / (2 sigma^2))).
    """
    q, sigma = mechanism.sampling_prob, mechanism.noise_multiplier
    exponent = (2 * seen - 1) / (2 * sigma**2)
    if q == 1:
        return exponent.sum(0)
    return np.logaddexp(math.log1p(-q), math.log(q) + exponent).sum(0)


def _output(outputs: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    return outputs[:, 0]


def _games(sampling_prob: float, num_games: int) -> tuple[int, int]:
    """Canaries of a run, so that q times their number is whole, and runs."""
    if not 0 < sampling_prob <= 1:
        raise InputError(f"sampling_prob must lie between 0 and 1, not {sampling_prob}.")
    fraction = Fraction(sampling_prob).limit_denominator(_MOST_CANARIES)
    if fraction == 0 or not math.isclose(fraction, sampling_prob, rel_tol=1e-6):
        raise InputError(
            f"sampling_prob must be a fraction with a denominator of at most {_MOST_CANARIES}, not {sampling_prob}: a "
            "whole number of a run's canaries is drawn in the mean. Take 0.1, for example."
        )
    unit = fraction.denominator
    num_runs = math.ceil(num_games / (_MOST_CANARIES // unit * unit))
    return math.ceil(num_games / num_runs / unit) * unit, num_runs
