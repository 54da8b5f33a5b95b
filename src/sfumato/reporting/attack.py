"""What an attacker gains, as a curve: how often an image that took part is recognised, at most, at each rate of false
alarms.
"""

from typing import Any

import numpy as np

from sfumato.accounting.mechanism import Mechanism
from sfumato.reporting import formats
from sfumato.reporting.markup import Html, element
from sfumato.reporting.plots import INK, SERIES, drawn
from sfumato.run_folder.record import Certificate, Recorded

LEAST = 1e-5
"""The lowest rate of false alarms that is drawn."""
_POINTS = 201


def attack_section(run: Recorded) -> list[Html]:
    """The curve of what the mechanism lets anybody tell; nothing where nothing is guaranteed, or where a run was
    chosen from several, for which there are single bounds alone.
    """
    certificate = run.certificate
    guarantee = certificate.guarantee
    if guarantee is None or guarantee.attacker is None or certificate.selected_from is not None:
        return []
    from sfumato.accounting.attacker import true_positive_rates

    rates = np.geomspace(LEAST, 1, _POINTS)
    most = true_positive_rates(_mechanism(certificate), rates.tolist())
    who = "person" if guarantee.of_persons else "image"
    at = {rate: float(most[np.searchsorted(rates, rate * (1 - 1e-9))]) for rate in (1e-4, 1e-3, 1e-2, 1e-1)}
    described = "; ".join(
        f"{100 * rate:g} % false alarms: {formats.per_cent_at_most(most)}" for rate, most in at.items()
    )
    figure = drawn(
        lambda figure: draw_rates(figure, LEAST, [("at most, by the mechanism", rates, most)]),
        400,
        "What an attacker gains",
        f"Share of those that took part that is recognised, at most, by rate of false alarms. {described}.",
        "attack",
    )
    caption = (
        f"Whatever test somebody uses to tell whether one {who} took part, its rates lie on the curve or below. On the "
        "dashed line lies who guesses. Both axes are logarithmic: at the left are attackers who are seldom wrong."
    )
    return [
        element(
            "section",
            element("h2", "What an attacker gains"),
            element("figure", figure, element("figcaption", caption)),
        )
    ]


def _mechanism(certificate: Certificate) -> Mechanism:
    of_images = certificate.drawn == "images" and certificate.guarantee is not None and certificate.guarantee.of_persons
    return Mechanism(
        certificate.num_examples,
        certificate.batch_size,
        certificate.noise_multiplier,
        certificate.num_steps,
        images_per_unit=(certificate.max_images_per_person or 1) if of_images else 1,
        first_release_noise=certificate.first_release_noise,
    )


def draw_rates(figure: Any, least: float, curves: list[tuple[str, Any, Any]]) -> None:
    """Curves of true positives over false ones on logarithmic axes, beside the diagonal.

    Args:
        least: Where the axes begin.
        curves: The name of each, rates of false positives, rates of true ones.
    """
    figure.subplots_adjust(left=72 / 736, right=1 - 24 / 736)
    axes = figure.subplots()
    axes.plot([least, 1], [least, 1], color=INK, linestyle=(0, (2, 3)), linewidth=1.5, label="guessing")
    for (name, false_positives, true_positives), colour in zip(curves, SERIES, strict=False):
        axes.plot(false_positives, true_positives, color=colour, label=name)
    for set_scale, set_limits, axis in (
        (axes.set_xscale, axes.set_xlim, axes.xaxis),
        (axes.set_yscale, axes.set_ylim, axes.yaxis),
    ):
        set_scale("log")
        set_limits(least, 1)
        axis.set_major_formatter(lambda value, _: f"{100 * value:g} %")
    axes.minorticks_off()
    axes.set_xlabel("false alarms")
    axes.set_title("Recognised of those that took part")
    axes.legend(loc="lower right", handlelength=1.6)
