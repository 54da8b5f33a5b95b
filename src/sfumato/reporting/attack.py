"""What an attacker gains at most, and what an attack on the run showed: two sections of its report."""

from typing import Any

import numpy as np

from sfumato.accounting import formats
from sfumato.accounting.attacker import true_positive_rates
from sfumato.accounting.formats import lower_epsilon_text
from sfumato.accounting.mechanism import Mechanism
from sfumato.reporting.charts import COLOURS, Curve, Panel, chart, linear, logarithmic
from sfumato.reporting.html import Html, figure, paragraph, section, tiles
from sfumato.run_folder.record import Certificate, Histogram, OneRunClaim

LEAST = 1e-5
"""The lowest rate of false alarms that is drawn."""
_POINTS = 201


def attack_section(certificate: Certificate) -> list[Html]:
    """The curve of what the mechanism lets anybody tell; nothing where nothing is guaranteed, or where a run was
    chosen from several, for which there are single bounds alone.
    """
    if not certificate.holds or certificate.attacker is None or certificate.selected_from is not None:
        return []
    rates = np.geomspace(LEAST, 1, _POINTS)
    most = true_positive_rates(_mechanism(certificate), rates.tolist())
    who = "person" if certificate.of_persons else "image"
    at = {rate: float(most[np.searchsorted(rates, rate * (1 - 1e-9))]) for rate in (1e-4, 1e-3, 1e-2, 1e-1)}
    told = "; ".join(f"{100 * rate:g} % false alarms: {formats.per_cent_at_most(most)}" for rate, most in at.items())
    described = f"Share of those that took part that is recognised, at most, by rate of false alarms. {told}."
    curves = [("at most, by the mechanism", rates, most)]
    drawing = rates_chart(LEAST, curves, "What an attacker gains", described, "attack")
    caption = (
        f"No test of whether one {who} took part lies above the curve; the dashed line is guessing. Logarithmic axes."
    )
    return [section("What an attacker gains", figure(drawing, caption))]


def _mechanism(certificate: Certificate) -> Mechanism:
    of_images = certificate.drawn == "images" and certificate.of_persons
    return Mechanism(
        certificate.num_examples,
        certificate.batch_size,
        certificate.noise_multiplier,
        certificate.num_steps,
        images_per_unit=(certificate.max_images_per_person or 1) if of_images else 1,
    )


def rates_chart(least: float, curves: list[tuple[str, Any, Any]], title: str, description: str, name: str) -> Html:
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
) -> Html:
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


def audit_section(certificate: Certificate) -> list[Html]:
    """What an attack on the run showed; nothing where there was none."""
    claim = certificate.audit
    if claim is None or not certificate.holds:
        return []
    shown, claimed = lower_epsilon_text(claim.epsilon_lower_bound), formats.epsilon_text(certificate.epsilon)
    refuted = (
        f"The claim of epsilon {claimed} is refuted: the certificate is wrong, or the code is, unless this is the rare "
        "case that the confidence leaves."
    )
    caption = (
        "Minus the loss of each canary under the released weights. The further the two groups are apart, the more an "
        "attacker sees."
    )
    numbers = tiles((shown, "shown: epsilon is at least that"), (claimed, "claimed: epsilon is at most that"))
    remark = [paragraph(refuted, "remark")] if claim.violated else []
    drawing = figure(_canaries(claim.scores), caption)
    return [section("What an attack showed", numbers, *remark, paragraph(_how(claim)), drawing)]


def _how(claim: OneRunClaim) -> str:
    return (
        f"{formats.count(claim.num_canaries)} canaries, made-up images of noise with labels at random, stood among the "
        f"training images; a fair coin decided for each whether it took part. From the released weights alone the "
        f"attacker guessed {formats.count(claim.num_guesses)} of these coins, and {formats.count(claim.num_right)} "
        f"guesses were right: at confidence {formats.per_cent(claim.confidence)} and delta "
        f"{formats.delta_text(claim.delta)} that shows this epsilon ({claim.bound}). An attacker who is never wrong "
        f"would have shown {lower_epsilon_text(claim.perfect)}. An attack can refute a claim, never prove one. This "
        "section depends on training images through the released weights alone."
    )


def _canaries(scores: Histogram) -> Html:
    sides = {"took no part": scores.non_members, "took part": scores.members}
    shares = [(name, np.array(counts) / max(1, sum(counts))) for name, counts in sides.items()]
    in_, out = formats.count(sum(scores.members)), formats.count(sum(scores.non_members))
    described = f"Two histograms: of {in_} canaries that took part and {out} that did not."
    y = "Share of each group", lambda value: f"{100 * value:g} %"
    return histograms(scores.edges, shares, y, "score", "Scores of the canaries", described, "canaries")
