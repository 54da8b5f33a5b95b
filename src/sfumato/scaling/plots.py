"""Plots of plans and laws, as files."""

import math
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from sfumato.accounting import gaussian, rdp, rounding
from sfumato.accounting.mechanism import Mechanism
from sfumato.errors import InputError
from sfumato.scaling.law import fit, predict
from sfumato.scaling.law_runs import Study

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

FORMATS = (".svg", ".png", ".pdf")
_SIGMAS = np.geomspace(0.3, 20, 40)
_STEPS = (0.25, 1.0, 4.0)
_ORDERS = np.geomspace(1.1, 64, 40)
_WALLS = (0.5, 2.0)


def _figure(path: Path, width: float) -> "Figure":
    if path.suffix not in FORMATS:
        raise InputError(f"--plot writes {', '.join(FORMATS)}, not {path.name!r}.")
    from matplotlib.figure import Figure

    return Figure(figsize=(width, 4), layout="constrained")


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
    figure = _figure(path, 10)
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
    left.set(
        xscale="log",
        yscale="log",
        xlabel="sigma",
        ylabel=f"epsilon by RDP at delta {rounding.delta_text(delta)}",
        title=f"eta = {eta:.3g}",
    )
    left.legend(frameon=False)


def _draw_divergences(right: "Axes", mechanism: Mechanism) -> None:
    eta_step = gaussian.snr_per_step(mechanism)
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


def _over_limit(q: float, sigma: float, order: float, eta_step: float) -> float:
    return rdp.rdp(q, sigma, order) / (order * eta_step**2)


def draw_law(study: Study, facts: dict[str, Any], path: Path) -> None:
    """Runs as points, the law that is used with its interval, the other dashed, predictions as
    stars.

    Args:
        facts: From `sfumato.scaling.law_runs.scaling_law`.

    Raises:
        InputError: If the file's ending is unknown.
    """
    points = study.points
    fits = fit(points)
    used, other = fits
    sizes = [point.batch_size for point in points] + [prediction["batch_size"] for prediction in facts["predictions"]]
    grid = np.unique(np.geomspace(min(sizes) / 1.2, max(sizes) * 1.2, 200).round().astype(int))
    predicted = [predict(fits, int(size)) for size in grid]

    figure = _figure(path, 6)
    axes = figure.subplots()
    axes.fill_between(
        grid,
        [100 * p.low for p in predicted],
        [100 * p.high for p in predicted],
        color="tab:blue",
        alpha=0.15,
        linewidth=0,
        label="95 % of runs",
    )
    axes.plot(grid, [100 * p.accuracy for p in predicted], color="tab:blue", label=used.law)
    axes.plot(
        grid,
        [100 * other.predict(int(size)).accuracy for size in grid],
        color="tab:gray",
        linestyle="--",
        label=f"{other.law} (not used)",
    )
    axes.plot(
        [point.batch_size for point in points],
        [100 * point.accuracy for point in points],
        "o",
        color="black",
        markersize=4,
        label="simulations",
    )
    for number, prediction in enumerate(facts["predictions"]):
        axes.plot(
            prediction["batch_size"],
            100 * prediction["accuracy"],
            "*",
            color="tab:red",
            markersize=14,
            label="prediction" if number == 0 else None,
        )
    axes.set_xscale("log", base=2)
    axes.set_xlabel("batch size at a constant sigma / B")
    axes.set_ylabel("held-out accuracy, %")
    axes.legend(frameon=False)
    figure.savefig(path)
