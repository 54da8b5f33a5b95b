"""Plots of plans and laws, as files."""

import math
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from sfumato.accounting import formats, gaussian, rdp
from sfumato.accounting.mechanism import Mechanism
from sfumato.errors import InputError
from sfumato.reporting.charts import figure_of
from sfumato.run_folder.files import refuse_drawing
from sfumato.scaling.law import Run
from sfumato.scaling.page import drawn

if TYPE_CHECKING:
    from matplotlib.axes import Axes

FORMATS = (".svg", ".png", ".pdf")
_SIGMAS = np.geomspace(0.3, 20, 40)
_STEPS = (0.25, 1.0, 4.0)
_ORDERS = np.geomspace(1.1, 64, 40)
_WALLS = (0.5, 2.0)


def draw_plan(mechanism: Mechanism, delta: float, path: Path) -> None:
    """Epsilon by RDP against sigma at one eta, and the Renyi divergence of a step over its limit
    for large sigma.

    Left, Figure 2: along each curve eta and S are constant and q = sqrt 2 eta sigma / sqrt S.
    Right, Figure 3: RDP of order alpha over alpha eta_step^2 at one eta_step: 1 is what epsilon_TAN
    assumes.

    Raises:
        InputError: If the file's ending is unknown, or there is no noise.
    """
    if not mechanism.noise_multiplier or not mechanism.num_steps:
        raise InputError("--plot draws noise against epsilon, but the run has no noise or no steps.")
    refuse_drawing(path, "--plot", FORMATS)
    from matplotlib.figure import Figure

    figure = Figure(figsize=(10, 4), layout="constrained")
    left, right = figure.subplots(1, 2)
    _draw_epsilons(left, mechanism, delta)
    _draw_divergences(right, mechanism)
    figure.savefig(path)


def _draw_epsilons(left: "Axes", mechanism: Mechanism, delta: float) -> None:
    eta = gaussian.snr(mechanism)
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
    left.set(xscale="log", yscale="log", xlabel="sigma", title=f"eta = {eta:.3g}")
    left.set_ylabel(f"epsilon by RDP at delta {formats.delta_text(delta)}")
    left.legend(frameon=False)


def _draw_divergences(right: "Axes", mechanism: Mechanism) -> None:
    eta_step = gaussian.snr_per_step(mechanism)
    own = mechanism.noise_multiplier
    others = [(math.sqrt(2) * eta_step * sigma, sigma) for sigma in (0.5, 1.0, 2.0, 4.0)]
    for q, sigma in [*others, (mechanism.sampling_prob, own)]:
        if q <= 1:
            is_own = (q, sigma) == (mechanism.sampling_prob, own)
            over = [rdp.rdp(q, sigma, order) / (order * eta_step**2) for order in _ORDERS]
            label = f"this run, {sigma:.3g}" if is_own else f"sigma = {sigma:g}"
            right.plot(_ORDERS, over, "r--" if is_own else "-", label=label)
    right.set(xscale="log", yscale="log", title=f"eta_step = {eta_step:.3g}")
    right.set(xlabel="order alpha", ylabel="RDP of a step / (alpha eta_step²)")
    right.legend(frameon=False, loc="upper left", fontsize="small")


def draw_law(runs: Sequence[Run], facts: dict[str, Any], path: Path) -> None:
    """The page's chart of a law (`sfumato.scaling.page`) as a file.

    Args:
        facts: From `sfumato.scaling.law.scaling_law`.

    Raises:
        InputError: If the file's ending is unknown.
    """
    refuse_drawing(path, "--plot", FORMATS)
    figure_of(*drawn(runs, facts)).savefig(path)
