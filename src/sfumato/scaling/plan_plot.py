"""Figures 2 and 3 of Sander et al. (2022) for a user's own numbers, with the user's run on them."""

import math
from pathlib import Path

import numpy as np

from sfumato.accounting import gaussian, rdp, rounding
from sfumato.accounting.mechanism import Mechanism
from sfumato.errors import InputError
from sfumato.scaling.law_plot import FORMATS

_SIGMAS = np.geomspace(0.3, 20, 40)
_STEPS = (0.25, 1.0, 4.0)
_ORDERS = np.geomspace(1.1, 64, 40)
_WALLS = (0.5, 2.0)


def draw(mechanism: Mechanism, delta: float, path: Path) -> None:
    """Epsilon by RDP against sigma at one eta, and the Renyi divergence of a step over its limit
    for large sigma.

    Left, Figure 2: along each curve eta and S are constant and q = sqrt 2 eta sigma / sqrt S.
    Right, Figure 3: RDP of order alpha over alpha eta_step^2 at one eta_step: 1 is what epsilon_TAN
    assumes.

    Raises:
        InputError: If the file's ending is unknown, or there is no noise.
    """
    if path.suffix not in FORMATS:
        raise InputError(f"--plot writes {', '.join(FORMATS)}, not {path.name!r}.")
    if not mechanism.noise_multiplier or not mechanism.num_steps:
        raise InputError("--plot draws noise against epsilon, but the run has no noise or no steps.")
    from matplotlib.figure import Figure

    eta, eta_step = gaussian.snr(mechanism), gaussian.snr_per_step(mechanism)
    figure = Figure(figsize=(10, 4), layout="constrained")
    left, right = figure.subplots(1, 2)
    for factor in _STEPS:
        steps = max(1, round(mechanism.num_steps * factor))
        points = [(sigma, math.sqrt(2) * eta * sigma / math.sqrt(steps)) for sigma in _SIGMAS]
        curve = [(sigma, rdp.epsilon_rdp([(q, sigma, steps)], delta)) for sigma, q in points if q <= 1]
        if curve:
            left.plot(*zip(*curve, strict=True), label=f"S = {steps}")
    left.axhline(gaussian.epsilon_tan(mechanism, delta), color="tab:gray", linestyle="--", label="epsilon_TAN, a guide")
    for wall in _WALLS:
        left.axvline(wall, color="tab:gray", linewidth=0.8, linestyle=":")
    own = rdp.epsilon_rdp(mechanism.parts, delta)
    left.plot(mechanism.noise_multiplier, own, "*", color="tab:red", markersize=14, label="this run")
    left.set(
        xscale="log",
        yscale="log",
        xlabel="sigma",
        ylabel=f"epsilon by RDP at delta {rounding.delta_text(delta)}",
        title=f"eta = {eta:.3g}",
    )
    left.legend(frameon=False)

    for sigma in (0.5, 1.0, 2.0, 4.0):
        q = math.sqrt(2) * eta_step * sigma
        if q <= 1:
            right.plot(
                _ORDERS, [_over_limit(q, sigma, order, eta_step) for order in _ORDERS], label=f"sigma = {sigma:g}"
            )
    q, sigma = mechanism.sampling_prob, mechanism.noise_multiplier
    right.plot(
        _ORDERS,
        [_over_limit(q, sigma, order, eta_step) for order in _ORDERS],
        color="tab:red",
        linestyle="--",
        label=f"this run, {sigma:.3g}",
    )
    right.set(
        xscale="log",
        yscale="log",
        xlabel="order alpha",
        ylabel="RDP of a step / (alpha eta_step²)",
        title=f"eta_step = {eta_step:.3g}",
    )
    right.legend(frameon=False, loc="upper left", fontsize="small")
    figure.savefig(path)


def _over_limit(q: float, sigma: float, order: float, eta_step: float) -> float:
    return rdp.rdp(q, sigma, order) / (order * eta_step**2)
