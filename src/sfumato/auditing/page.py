"""The page of an audit: the curve of the attack beside what the claim allows, the scores of both sides, and the bounds
beside the claim.
"""

import math
from pathlib import Path
from typing import Any

import numpy as np

from sfumato.accounting import formats
from sfumato.accounting.attacker import true_positive_rates
from sfumato.accounting.formats import lower_epsilon_text
from sfumato.accounting.mechanism import Mechanism
from sfumato.auditing.bounds import as_numbers
from sfumato.auditing.record import AuditResult, CanaryResult, MembershipResult
from sfumato.reporting.attack import histograms, rates_chart
from sfumato.reporting.html import (
    Html,
    bar,
    element,
    figure,
    header,
    numbers_table,
    paragraph,
    section,
    together,
    whole_page,
)
from sfumato.run_folder.files import write_atomically

_MOST_POINTS = 400
_BINS = 60
_TAIL = 0.001
"""Of the scores at either end, drawn in the last bin."""
_LARGEST = 1e100
"""Scores beyond are infinite to the eye, and in no bar."""


def write_page(path: Path, found: AuditResult, scores: Any, members: Any) -> None:
    """Writes what `render` gives.

    Raises:
        MachineError: If it cannot be written; an older one is then intact.
    """
    write_atomically(path, render(found, scores, members).encode())


def render(found: AuditResult, scores: Any, members: Any) -> str:
    """The whole page as HTML text.

    Args:
        found: What the audit ended with.
        scores: (G,), of all its games.
        members: (G,), 1 or true where the example took part.
    """
    values, coins = as_numbers(scores), as_numbers(members)
    inside, outside = (np.sort(values[coins == took_part]) for took_part in (1, 0))
    title = {"bounds": "Scores of an attack", "canary": "Canaries", "membership": "Membership"}[found.audit]
    games = f"{formats.count(found.num_games)} games at delta {formats.delta_text(found.delta)}"
    lead = f"{games}. Each bound holds with confidence {100 * found.confidence:.12g} %."
    sections = [_verdict(found), _curve(found, inside, outside), _scores(found, inside, outside), _bounds(found)]
    return whole_page(f"{title} · Sfumato audit", header("Sfumato audit", title, lead), *sections)


def _verdict(found: AuditResult) -> Html:
    text = "Without assumptions nothing is shown."
    if found.epsilon_lower_bound:
        text = f"Whatever the mechanism is, epsilon is at least {lower_epsilon_text(found.epsilon_lower_bound)}."
    if found.nominal_epsilon is None:
        head, told = "Nothing is claimed", " So there is nothing to refute."
    else:
        claim = f"The claim of epsilon {formats.epsilon_text(found.nominal_epsilon)}"
        head = f"{claim} is {'refuted' if found.violated else 'not refuted'}"
        told = "" if found.violated else " That is no proof of it."
    kind = "verdict none" if found.violated else "verdict"
    return element("div", paragraph(head, "headline"), paragraph(text + told), class_=kind)


def _curve(found: AuditResult, inside: np.ndarray, outside: np.ndarray) -> Html:
    least = 10.0 ** -min(6, max(2, math.ceil(math.log10(len(outside)))))
    rates = np.geomspace(least, 1, _MOST_POINTS)
    curves = [("this attack", *counted_rates(inside, outside, rates))]
    if found.nominal_epsilon is not None:
        curves.append(("at most, by epsilon and delta", rates, _of_pair(found.nominal_epsilon, found.delta, rates)))
        mechanism = mechanism_of(found)
        if mechanism is not None:
            curves.append(("at most, by the mechanism", rates, true_positive_rates(mechanism, rates.tolist())))
    described = f"Area under the curve {found.auc:.3f}, advantage {found.advantage:.3f}."
    drawing = rates_chart(least, curves, "The attack's curve", described, "rates")
    caption = (
        "True positives over false ones as they were counted in all games, luck included; both axes are logarithmic. "
        "Intervals decide about the claim, below."
    )
    return section("What the attack reached", figure(drawing, caption))


def counted_rates(inside: np.ndarray, outside: np.ndarray, rates: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """False and true positives of "took part from this score on", where of those without at most such a share has it.

    Args:
        inside: Sorted scores with the example.
        outside: Sorted scores without it.
        rates: (n,), in (0, 1].
    """
    most = np.floor(rates * len(outside) + 1e-9).astype(np.int64)
    # One more has the next lower score: the threshold lies above it, unless all may have it.
    below = np.concatenate([[-np.inf], outside])[len(outside) - most]
    false, true = (
        (len(side) - np.searchsorted(side, below, side="right") * (most < len(outside))) / len(side)
        for side in (outside, inside)
    )
    return false, true


def _of_pair(epsilon: float, delta: float, rates: np.ndarray) -> np.ndarray:
    growth = math.exp(min(epsilon, 700.0))
    return np.minimum(growth * rates + delta, 1 - (1 - rates - delta) / growth).clip(0, 1)


def mechanism_of(found: AuditResult) -> Mechanism | None:
    """What is claimed; None where an epsilon alone is."""
    if isinstance(found, CanaryResult):
        count = found.games_per_run
        return Mechanism(count, round(found.sampling_prob * count), found.noise_multiplier, found.num_steps)
    if isinstance(found, MembershipResult):
        count = found.num_examples + 1
        batch_size = count if found.fixed_batches else found.batch_size
        return Mechanism(count, batch_size, found.noise_multiplier, found.num_claimed_steps)
    return None


def _scores(found: AuditResult, inside: np.ndarray, outside: np.ndarray) -> Html:
    what, sign = ("Loss on the example", -1) if found.audit == "membership" else ("Score", 1)
    without, with_it = (sign * side[abs(side) < _LARGEST] for side in (outside, inside))
    known = np.concatenate([without, with_it])
    low, high = np.quantile(known, [_TAIL, 1 - _TAIL]) if len(known) else (0.0, 1.0)
    edges = np.linspace(low, high if high - low > _BINS * np.finfo(float).tiny else low + 1, _BINS + 1)
    sides = ("without the example", without), ("with it", with_it)
    counted = [(name, np.histogram(side.clip(edges[0], edges[-1]), edges)[0]) for name, side in sides]
    means = [f"{name.split()[0]} {side.mean():.4g}" for name, side in sides if len(side)]
    described = f"{what}, mean {' and '.join(means)}."
    games = "Games", lambda count: f"{count:,.0f}"
    drawing = histograms(edges, counted, games, what.lower(), "Both sides", described, "sides")
    caption = "Where the two hills lie over each other, no attack by this score can tell. Tails are in the last bars."
    return section("Scores with and without the example", figure(drawing, caption))


def _bounds(found: AuditResult) -> Html:
    most = (
        "Epsilon is at least so much; the line across the bars marks what is claimed. By clopper-pearson, so many "
        f"games show at best: an attack that is never wrong {_at_least(found.power.perfect)}"
    )
    if found.power.tight is not None:
        most += f", the best attack on a tight mechanism {_at_least(found.power.tight)}"
    claimed = found.nominal_epsilon or 0.0
    longest = 1.05 * max(claimed, 1e-3, *(bound.epsilon or 0.0 for bound in found.bounds))
    bars, rows = [], []
    for bound in found.bounds:
        least, count = _at_least(bound.epsilon), formats.count
        bars.append(bar(together(bound.name), (bound.epsilon or 0.0) / longest, least, claimed / longest, ""))
        false = f"{count(bound.false_positives)} of {count(bound.num_non_members)}"
        rows.append(
            (bound.name, least, false, f"{count(bound.true_positives)} of {count(bound.num_members)}", bound.assumption)
        )
    return section(
        "Bounds beside the claim",
        paragraph(f"{most}."),
        element("dl", *bars, class_="bars"),
        numbers_table(("bound", "epsilon at least", "false positives", "true positives", "assumes"), rows),
    )


def _at_least(epsilon: float | None) -> str:
    return lower_epsilon_text(epsilon) if epsilon else "nothing"
