"""The page of an audit: the curve of the attack beside what the claim allows, the scores of both sides, and the bounds
beside the claim.
"""

import math
from typing import Any

import numpy as np

from sfumato.accounting.attacker import true_positive_rates
from sfumato.accounting.formats import count, lower_epsilon_text
from sfumato.accounting.mechanism import Mechanism
from sfumato.auditing.bounds import sides
from sfumato.auditing.record import AuditResult, Bound, CanaryResult, MembershipResult
from sfumato.reporting import html
from sfumato.reporting.attack import histograms, rates_chart
from sfumato.reporting.charts import Chart

_MOST_POINTS = 400
_BINS = 60
_TAIL = 0.001
"""Of the scores at either end, drawn in the last bin."""
_LARGEST = 1e100
"""Scores beyond are infinite to the eye, and in no bar."""


def render(found: AuditResult, scores: Any, members: Any) -> str:
    """The whole page as HTML text.

    Args:
        found: What the audit ended with.
        scores: (G,), of all its games.
        members: (G,), 1 or true where the example took part.
    """
    inside, outside = sides(scores, members)
    title = {"bounds": "Scores of an attack", "canary": "Canaries", "membership": "Membership"}[found.audit]
    longest = 1.05 * max(found.nominal_epsilon or 0.0, 1e-3, *(bound.epsilon or 0.0 for bound in found.bounds))
    return html.render(
        "audit.html",
        kicker="Sfumato audit",
        title=title,
        found=found,
        rates=_curve(found, inside, outside),
        scores=_scores(found, inside, outside),
        at_least=_at_least,
        longest=longest,
        rows=[_row(bound) for bound in found.bounds],
    )


def _curve(found: AuditResult, inside: np.ndarray, outside: np.ndarray) -> Chart:
    least = 10.0 ** -min(6, max(2, math.ceil(math.log10(len(outside)))))
    rates = np.geomspace(least, 1, _MOST_POINTS)
    curves = [("this attack", *counted_rates(inside, outside, rates))]
    if found.nominal_epsilon is not None:
        curves.append(("at most, by epsilon and delta", rates, _of_pair(found.nominal_epsilon, found.delta, rates)))
        mechanism = mechanism_of(found)
        if mechanism is not None:
            curves.append(("at most, by the mechanism", rates, true_positive_rates(mechanism, rates.tolist())))
    described = f"Area under the curve {found.auc:.3f}, advantage {found.advantage:.3f}."
    return rates_chart(least, curves, "The attack's curve", described, "rates")


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


def _scores(found: AuditResult, inside: np.ndarray, outside: np.ndarray) -> Chart:
    what, sign = ("Loss on the example", -1) if found.audit == "membership" else ("Score", 1)
    without, with_it = (sign * side[abs(side) < _LARGEST] for side in (outside, inside))
    known = np.concatenate([without, with_it])
    low, high = np.quantile(known, [_TAIL, 1 - _TAIL]) if len(known) else (0.0, 1.0)
    edges = np.linspace(low, high if high - low > _BINS * np.finfo(float).tiny else low + 1, _BINS + 1)
    named = ("without the example", without), ("with it", with_it)
    counted = [(name, np.histogram(side.clip(edges[0], edges[-1]), edges)[0]) for name, side in named]
    means = [f"{name.split()[0]} {side.mean():.4g}" for name, side in named if len(side)]
    described = f"{what}, mean {' and '.join(means)}."
    games = "Games", lambda count: f"{count:,.0f}"
    return histograms(edges, counted, games, what.lower(), "Both sides", described, "sides")


def _row(bound: Bound) -> list[str]:
    false = f"{count(bound.false_positives)} of {count(bound.num_non_members)}"
    true = f"{count(bound.true_positives)} of {count(bound.num_members)}"
    return [bound.name, _at_least(bound.epsilon), false, true, bound.assumption]


def _at_least(epsilon: float | None) -> str:
    return lower_epsilon_text(epsilon) if epsilon else "nothing"
