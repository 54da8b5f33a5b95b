"""What an attacker gains at most, and what an attack on the run showed: charts of its report."""

from typing import Any

import numpy as np

from sfumato.accounting import formats
from sfumato.accounting.attacker import true_positive_rates
from sfumato.accounting.mechanism import Mechanism
from sfumato.json_record import pick
from sfumato.reporting.charts import COLOURS, Chart, Curve, Panel, chart, linear, logarithmic
from sfumato.run_folder.record import Certificate

LEAST = 1e-5
"""The lowest rate of false alarms that is drawn."""
_POINTS = 201


def attack_chart(certificate: Certificate) -> Chart | None:
    """The curve of what the mechanism lets anybody tell; None where nothing is guaranteed, or where a run was
    chosen from several, for which there are single bounds alone.
    """
    if not certificate.holds or certificate.attacker is None or certificate.selected_from is not None:
        return None
    numbers = pick(certificate, "num_examples", "batch_size", "noise_multiplier", "num_steps")
    of_images = certificate.drawn == "images" and certificate.of_persons
    per_unit = (certificate.max_images_per_person or 1) if of_images else 1
    rates = np.geomspace(LEAST, 1, _POINTS)
    most = true_positive_rates(Mechanism(**numbers, images_per_unit=per_unit), rates.tolist())
    at = {rate: float(most[np.searchsorted(rates, rate * (1 - 1e-9))]) for rate in (1e-4, 1e-3, 1e-2, 1e-1)}
    told = "; ".join(f"{100 * rate:g} % false alarms: {formats.per_cent_at_most(most)}" for rate, most in at.items())
    described = f"Share of those that took part that is recognised, at most, by rate of false alarms. {told}."
    curves = [("at most, by the mechanism", rates, most)]
    return rates_chart(LEAST, curves, "What an attacker gains", described, "attack")


def rates_chart(least: float, curves: list[tuple[str, Any, Any]], title: str, description: str, name: str) -> Chart:
    """Curves of true positives over false ones on logarithmic axes, beside the diagonal.

    Args:
        least: Where the axes begin.
        curves: The name of each, rates of false positives, rates of true ones.
    """
    x, y = (logarithmic(least, lambda rate: f"{100 * rate:g} %", label) for label in ("false alarms", ""))
    drawn = [Curve("guessing", [least, 1], [least, 1], "muted", dashed=True, width=1.5)]
    drawn += [Curve(*curve, colour) for curve, colour in zip(curves, COLOURS, strict=False)]
    return chart(x, [Panel("Recognised of those that took part", drawn, y, 320)], title, description, name)


def histograms(
    edges: Any, sides: list[tuple[str, Any]], y: tuple[str, Any], label: str, title: str, description: str, name: str
) -> Chart:
    """Two or more histograms over the same bins.

    Args:
        edges: Of the bins.
        sides: The name of each, and its heights.
        y: What the heights are, and how one is written.
        label: Of the values.
    """
    most = max(1e-9, *(float(max(heights)) for _, heights in sides))
    curves = [
        Curve(side, edges, heights, colour, steps=True, band=(np.zeros(len(heights)), heights), width=1.5)
        for (side, heights), colour in zip(sides, ("second", "first"), strict=True)
    ]
    x = linear(float(edges[0]), float(edges[-1]), 8, lambda value: f"{value:.6g}", label)
    panel = Panel(y[0], curves, linear(0, 1.05 * most, 5, y[1]), 180)
    return chart(x, [panel], title, description, name)


def canaries_chart(certificate: Certificate) -> Chart | None:
    """How far an attack on the run told canaries apart; None where there was none."""
    if certificate.audit is None or not certificate.holds:
        return None
    scores = certificate.audit.scores
    sides = {"took no part": scores.non_members, "took part": scores.members}
    shares = [(name, np.array(counts) / max(1, sum(counts))) for name, counts in sides.items()]
    in_, out = formats.count(sum(scores.members)), formats.count(sum(scores.non_members))
    described = f"Two histograms: of {in_} canaries that took part and {out} that did not."
    y = "Share of each group", lambda value: f"{100 * value:g} %"
    return histograms(scores.edges, shares, y, "score", "Scores of the canaries", described, "canaries")
