"""Engines beside the law: what one gets wrong, in words."""

import torch

from sfumato.clipping.agreement import SHORTEST, norm_of, or_infinite, unit_length
from sfumato.clipping.checks import random_state_kept
from sfumato.clipping.law import BATCHES, BrokenLaw, Law, Truth, first_line
from sfumato.clipping.numerics import convolutions
from sfumato.clipping.protocol import Batch, Coefficient, Engine, is_out_of_memory
from sfumato.clipping.stand_in import Snapshot, stand_in

# In double precision or not, each time with other images: a law is broken if it breaks every time.
_TRIES = (True, True, False, False, False, False)
# How far an engine may lie from the loop, relative to gradients of norm one. Single precision is
# for models that do not run in double precision throughout: rounding moves some of their values
# across a kink.
_GRADIENTS = {True: 1e-6, False: 3e-4}
# Rounding alone moves values across kinks on some images, not on all.
_SPEED_TRIES = 3
# How far gradients may lie from those of float32, relative to their norm, where convolutions round
# to TF32.
_TF32_ROUNDS_BY = 0.1


def complaint(law: Law, engine: Engine, truth: Truth) -> str | None:
    """What an engine gets wrong, in words; None if it keeps the law.

    Args:
        truth: From `examine`, or from `truth` at other values; where an engine differs, more are
            made.
    """
    complaint: str | None = None
    failed, tried = False, None
    for number, double in enumerate(_TRIES):
        # In single precision only where double precision is not to be had: it is less exact.
        if (double and not truth.double) or (not double and truth.exact and not failed):
            continue
        try:
            tried = truth if tried is None else law.truth(double, truth.seed + number, shifted=truth.shifted)
            error, name = _error(law, engine, tried)
        except BrokenLaw:
            raise
        except Exception as failure:  # engines raise whatever the model's code runs into
            if is_out_of_memory(failure):
                raise
            failed = True
            complaint = complaint or f"fails: {first_line(failure)}"
            continue
        if error <= _GRADIENTS[double]:
            if tried is not truth:  # chance, or something that has changed since
                again = law.truth(truth.double, truth.seed, shifted=truth.shifted)
                law.refuse_memory([truth.norms, truth.losses], [again.norms, again.losses], truth.double)
            return None
        path = name.rpartition(".")[0]
        place = f"'{path}' ({type(law.model.get_submodule(path)).__name__})" if path else "the model"
        complaint = (
            f"gives other gradients than plain autograd on single images, by {error:.2g} of their "
            f"norm, at {place} or before it: a hook, a custom backward pass or a torch.no_grad "
            "region is lost, or rows depend on their place"
        )
    return complaint


def complaint_of_speed(
    law: Law, engine: Engine, truth: Truth, coefficient: Coefficient, count: int, precision: str
) -> str | None:
    """What an engine gets wrong that rounds coarsely or is compiled, beside the same engine as it
    was checked; None if nothing.
    """
    error, rounds_by = 0.0, max(engine.rounds_by, _TF32_ROUNDS_BY if precision == "tf32" else 0.0)
    if not rounds_by:
        return None
    for seed in range(_SPEED_TRIES):
        batch = law.batch(count, truth, seed)
        with random_state_kept(law.row), stand_in(law.model, None, seed):
            with convolutions(precision):
                fast = engine.clipped_sum(coefficient, batch)
            with engine.plainly():
                plain = engine.clipped_sum(coefficient, batch)
        total = norm_of(plain.grad_sum.values())
        difference = norm_of(fast.grad_sum[name] - value for name, value in plain.grad_sum.items())
        norms = (fast.grad_norms / plain.grad_norms - 1).nan_to_num().abs().max()
        error = max(float(difference / total.clamp(min=1e-30)), float(norms))
        if error <= rounds_by:
            return None
    compiled = ", compiled," if engine.compiles else ""
    return f'gives in precision "{precision}"{compiled} other gradients than in float32, by {error:.2g} of their norm'


def _error(law: Law, engine: Engine, truth: Truth) -> tuple[float, str]:
    """The largest difference between an engine and the loop, and the last parameter that it shows
    at.
    """
    worst, name = 0.0, ""
    usable = truth.norms.isfinite() & truth.losses.isfinite()
    with (
        random_state_kept(law.row),
        stand_in(law.model, torch.float64 if truth.double else None, truth.seed if truth.shifted else None),
    ):
        before = Snapshot.of(law.model)
        for batch in BATCHES:
            chosen = [i for i in batch if usable[i]]
            if not chosen:
                continue
            index = torch.tensor(chosen, device=truth.images.device)
            weights = unit_length(truth.norms[chosen])  # every example counts alike
            is_real = torch.ones(len(chosen), dtype=torch.bool, device=truth.images.device)
            made_up = Batch(
                truth.images[index], tuple(target[index] for target in truth.targets), is_real, truth.seeds[index]
            )
            out = engine.clipped_sum(unit_length, made_up)
            losses = (out.losses.double() - truth.losses[chosen]).abs() / truth.losses[chosen].abs().clamp(min=1)
            expected_norms = truth.norms[chosen]
            shorter = (expected_norms - out.grad_norms.double()) / expected_norms.clamp(min=SHORTEST)
            # Rounding that a norm takes in makes it longer, in float32 by more.
            norms = shorter.abs().max() if truth.double else torch.maximum(shorter.max(), (-shorter).max() / 1000)
            error = max(or_infinite(losses.max()), or_infinite(norms))
            squares = 0.0
            for parameter, total in out.grad_sum.items():
                expected = sum(weight * truth.grads[i][parameter] for weight, i in zip(weights, chosen, strict=True))
                square = or_infinite((total.double() - expected).square().sum()) / len(chosen) ** 2
                squares += square
                if square > _GRADIENTS[truth.double] ** 2:
                    name = parameter
            worst = max(worst, error, squares**0.5)
        law._refuse_changes(before)
    return worst, name
