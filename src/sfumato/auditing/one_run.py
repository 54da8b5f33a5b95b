"""From one run to a lower bound on epsilon (Steinke, Nasr, Jagielski 2023, Privacy auditing with one training run).

m canaries took part in the run, each if its own fair coin fell so. An attacker who sees what the run released
guesses some of the coins. Under (epsilon, delta) no attacker has many right, although all canaries met in one model:
where games are not independent, the coins are. First the audit of a finished run, then that of anybody's scores.
"""

import bisect
import functools
import math
from collections.abc import Collection
from pathlib import Path
from typing import Any

import numpy as np
import torch

from sfumato.accounting import formats
from sfumato.accounting.gaussian import mu_gaussian
from sfumato.auditing.arguments import require_levels
from sfumato.auditing.bounds import as_numbers, sides
from sfumato.auditing.rates import stated
from sfumato.auditing.record import GuessBound, GuessPower, OneRunResult
from sfumato.data.canaries import canary_images
from sfumato.errors import InputError
from sfumato.evaluation import trained
from sfumato.evaluation.scores import predict_logits
from sfumato.evaluation.trained import Trained
from sfumato.json_record import pick
from sfumato.reporting.page import write_report
from sfumato.run_folder import launch, record
from sfumato.run_folder.record import Certificate, Histogram, OneRunClaim
from sfumato.run_folder.verification import verify_run

_SHARE = 5
_LEAST = 40
_MOST_EPSILON = 1024.0
_MOST_CANARIES = 10**7
_BINS = 30


def audit_one_run(run: Path | str, *, confidence: float = 0.95, trust: Collection[str] = ()) -> OneRunResult:
    """Attacks a finished private run by the canaries that it was trained with (`audit.canaries`), and puts what
    that showed into its certificate and its report.

    The attacker sees the released weights alone. What is published then depends on them, on canaries that everybody
    can make, and on their coins: on no training image but through what the certificate covers.

    Guarantee: if the run is as private as its certificate states, the bound is above the certificate's epsilon with
    probability at most 1 - ``confidence``.

    Args:
        run: Its folder, with the coins that it keeps for its owner.
        confidence: Of the bound, in (0.5, 1).
        trust: Modules that may be imported for the run's model, each by its full name.

    Raises:
        InputError: If the run is unfinished, makes no claim, had no canaries or too few, its coins are not there, or a
            file is another run's.
    """
    folder = Path(run)
    claim = _claim(folder)
    assert claim.epsilon is not None and claim.delta is not None
    require_levels(claim.delta, confidence, claim.epsilon)
    count = claim.public_inputs.num_canaries
    took_part = launch.read_coins(folder, claim.run_id, count)
    levels = {"delta": claim.delta, "confidence": confidence, "nominal_epsilon": claim.epsilon}
    found = audit_guesses(scores(trained.load(folder, trust), count), took_part, **levels)
    record.write(folder / record.CERTIFICATE_FILE, claim.model_copy(update={"audit": _as_claimed(found)}))
    write_report(folder)
    return found


def scores(model: Trained, count: int) -> np.ndarray:
    """(m,): minus the loss of each canary; of a model that diverged, which has none, minus infinity."""
    how = {key: model.decoding[key] for key in ("mean", "std", "image_size")}
    stored_size = model.recipe.data.stored_size(how["image_size"])
    images = canary_images(count, len(model.classes), stored_size=stored_size, **how)
    log_probabilities = torch.log_softmax(predict_logits(model.model, images).double(), 1)
    found = log_probabilities.gather(1, images.labels[:, None])[:, 0].numpy()
    return np.nan_to_num(found, nan=-np.inf, posinf=np.inf, neginf=-np.inf)


def _claim(folder: Path) -> Certificate:
    """The certificate of a run that can be audited, held to its recipe, ledger and weights."""
    claim = record.read(folder / record.CERTIFICATE_FILE, Certificate)
    if not claim.holds:
        raise InputError(f"{folder} claims no privacy, so there is nothing to try: {claim.why_not_private}.")
    if not claim.public_inputs.num_canaries:
        raise InputError(
            f"{folder} was trained without canaries. Train with them: sfumato train RECIPE --set audit.canaries=1000."
        )
    if claim.status != "complete":
        raise InputError(f"{folder} is unfinished, and an audit attacks what a run releases. Go on: sfumato resume.")
    return verify_run(folder)[0]


def _as_claimed(found: OneRunResult) -> OneRunClaim:
    (bound,) = found.bounds
    return OneRunClaim(
        bound="guesses of coins (Steinke, Nasr, Jagielski 2023, Theorem 5.2)",
        num_canaries=found.num_games,
        perfect=found.power.perfect,
        violated=bool(found.violated),
        **pick(found, "epsilon_lower_bound", "confidence", "delta", "scores"),
        **pick(bound, "num_guesses", "num_right"),
    )


def audit_guesses(
    scores: Any, took_part: Any, *, delta: float, confidence: float = 0.95, nominal_epsilon: float | None = None
) -> OneRunResult:
    """A lower bound on epsilon from the scores of one run's canaries.

    The attacker guesses that the canaries with the k highest scores took part, and that those with the k lowest did
    not. k follows from m alone (`num_guesses`), so nothing is chosen by what the coins turned out to be.

    Guarantee: if the coins were fair, independent of each other and unknown to whoever made the scores, and what the
    scores were made of is (epsilon, delta)-private in each canary, then the bound is above epsilon with probability at
    most 1 - ``confidence``. It assumes nothing else of the mechanism, nor of the scores; but the order in which the
    canaries are given must not depend on the coins, since it decides among equal scores.

    Args:
        scores: (m,): higher where the attacker believes more that the canary took part.
        took_part: (m,), true or 1 where it did.
        delta: In (0, 1).
        confidence: In (0.5, 1).
        nominal_epsilon: That is claimed at ``delta``, if any.

    Raises:
        InputError: If scores and coins are no such arrays, an argument is out of range, or there are too few canaries
            for any bound above 0.

    Example:
        >>> coins = np.arange(1000) % 2
        >>> result = audit_guesses(coins, coins, delta=1e-5)
        >>> round(result.epsilon_lower_bound, 2) == round(result.power.perfect, 2)
        True
    """
    require_levels(delta, confidence, nominal_epsilon)
    inside, outside = sides(scores, took_part)
    values, coins = as_numbers(scores), as_numbers(took_part) == 1
    count, error = len(coins), 1 - confidence
    reach = power(count, confidence, delta, nominal_epsilon)
    if not reach.perfect > 0:
        remedy = "Claim"
        if enough := _needed(0.0, delta, error):
            remedy = f"Train with {enough:,} (audit.canaries), or claim"
        raise InputError(
            f"{count:,} canaries at delta {formats.delta_text(delta)} and confidence {confidence:.12g}: an attack "
            f"that is never wrong would show nothing. {remedy} a smaller delta, or ask for less confidence."
        )
    half = num_guesses(count) // 2
    order = np.argsort(values, kind="stable")  # of equal scores the first is the lower, whatever the coins
    right_low, right_high = int((~coins[order[:half]]).sum()), int(coins[order[count - half :]].sum())
    bound = GuessBound(
        name="guesses",
        epsilon=epsilon_of_guesses(count, 2 * half, right_low + right_high, delta, error),
        assumption="none",
        num_guesses=2 * half,
        num_right=right_low + right_high,
        right_high=right_high,
        right_low=right_low,
    )
    upper = order[count - count // 2 :]  # a threshold that no coin moves: the median
    return OneRunResult(
        audit="one-run",
        epsilon_lower_bound=bound.epsilon,
        bounds=[bound],
        advantage=float(coins[upper].sum() / len(inside) - (~coins[upper]).sum() / len(outside)),
        power=reach,
        scores=histogram(inside, outside),
        **stated(inside, outside, delta, confidence, nominal_epsilon, bound.epsilon),
    )


def num_guesses(count: int) -> int:
    """How many of m coins are guessed: a fifth, those that the attacker is surest of, but at least 40 or all; an even
    number.

    Guesses with small scores are hardly better than chance, and few guesses show little. For Gaussian scores a fifth
    is close to the best of 1,000 canaries, whatever the epsilon.
    """
    return min(count, max(_LEAST, count // _SHARE)) // 2 * 2


def probability(count: int, guesses: int, right: int, epsilon: float, delta: float) -> float:
    """How likely it is, at most, that so many guesses are right: Steinke et al. (2023), Theorem 5.2 and Appendix D.

    With delta 0 each guess is right as that of randomised response is: with probability 1 / (1 + e^-epsilon), whatever
    the others were. Delta adds 2 m delta max_i P[right - i <= X < right] / i, X being that binomial number.

    Args:
        count: m, canaries.
        guesses: r, coins that are guessed.
        right: v, guesses that were right.

    Example:
        >>> round(probability(10, 10, 10, 0.0, 0.0) * 1024, 9)
        1.0
    """
    from scipy.stats import binom

    q = 1 / (1 + math.exp(-epsilon))
    at_least = float(binom.sf(right - 1, guesses, q))
    if not right:
        return 1.0
    below = np.cumsum(binom.pmf(np.arange(right - 1, -1, -1), guesses, q))  # P[right - i <= X < right], i = 1, 2, ...
    return min(1.0, at_least + 2 * count * delta * float((below / np.arange(1, right + 1)).max()))


@functools.lru_cache(maxsize=4096)
def epsilon_of_guesses(count: int, guesses: int, right: int, delta: float, error: float) -> float:
    """The largest epsilon under which so many right guesses are less likely than ``error``; 0 where that is none.

    A mechanism that keeps a smaller epsilon keeps this one too, so all smaller ones are refuted with it.
    """

    from scipy.optimize import brentq

    def excess(epsilon: float) -> float:
        return probability(count, guesses, right, epsilon, delta) - error

    if excess(0.0) >= 0:
        return 0.0
    if excess(_MOST_EPSILON) < 0:
        return _MOST_EPSILON
    return max(0.0, float(brentq(excess, 0.0, _MOST_EPSILON, xtol=1e-10)) - 1e-9)


@functools.lru_cache(maxsize=64)
def power(count: int, confidence: float, delta: float, epsilon: float | None) -> GuessPower:
    """What so many canaries could show.

    Args:
        count: m.
        confidence: Of the bound.
        epsilon: That is claimed, if any.
    """
    error = 1 - confidence
    guesses = num_guesses(count)
    best = epsilon_of_guesses(count, guesses, guesses, delta, error)
    if epsilon is None:
        return GuessPower(perfect=best, tight=None, games_needed=None)
    right = math.floor(_expected_right(count, guesses, mu_gaussian(epsilon, delta))) if epsilon > 0 else guesses // 2
    tight = epsilon_of_guesses(count, guesses, right, delta, error)
    return GuessPower(perfect=best, tight=tight, games_needed=_needed(epsilon, delta, error))


def histogram(inside: np.ndarray, outside: np.ndarray) -> Histogram:
    """Of scores; both sorted."""
    ends = max(min(inside[0], outside[0]), -1e6), min(max(inside[-1], outside[-1]), 1e6)
    edges = np.linspace(ends[0], max(ends[1], ends[0] + 1e-9), _BINS + 1)
    members, non_members = (np.histogram(np.clip(side, edges[0], edges[-1]), edges)[0] for side in (inside, outside))
    return Histogram(edges=edges.tolist(), members=members.tolist(), non_members=non_members.tolist())


def _expected_right(count: int, guesses: int, mu: float) -> float:
    """Right guesses of the best attack on a Gaussian mechanism, expected: scores are Gaussians mu apart."""
    from scipy.optimize import brentq
    from scipy.special import ndtr

    share = guesses / (2 * count)
    at = brentq(lambda score: (ndtr(-score) + ndtr(mu - score)) / 2 - share, -40.0, 40.0 + mu)
    return float(ndtr(mu - at)) * count  # of either half, ndtr(mu - at) count / 2


def _needed(epsilon: float, delta: float, error: float) -> int | None:
    """So many canaries with which an attack that is never wrong shows more than epsilon: few, if not the fewest. None
    where none were found up to 10^7.

    Delta weighs more, the more canaries there are. So of all that have equally many guesses the fewest show most: as
    many as are guessed, up to 40; beyond, five times as many.
    """

    def is_enough(count: int) -> bool:
        guesses = num_guesses(count)
        return probability(count, guesses, guesses, epsilon, delta) < error  # the bound is above epsilon then

    if found := next(filter(is_enough, range(2, _LEAST + 1, 2)), None):
        return found
    high = _LEAST  # guesses
    while not is_enough(_SHARE * high):
        high *= 2
        if _SHARE * high > _MOST_CANARIES or 2 * _SHARE * high * delta > 1:
            return None
    return _SHARE * bisect.bisect_left(range(high), True, lo=high // 2, key=lambda guesses: is_enough(_SHARE * guesses))
