"""What must hold of every private run, stated without a fault in mind.

Each takes part in every row of the table (`python -m benchmarks.planted`): it returns what is broken, or None.
`STATISTICAL` ones look at runs with fresh keys. They err with probability `ERROR` at most in each of their dozen
comparisons, the audit with `AUDIT_ERROR` in each of two: all together accuse sound code in one of 10^6 cases at most.
The others are exact, up to float rounding.
"""

import functools
import math
import re
from collections.abc import Callable

import numpy as np
from scipy.stats import binom, chi2, t

from sfumato import randomness
from sfumato.accounting import accountants, calibration
from sfumato.accounting.mechanism import Mechanism
from sfumato.auditing import canary
from sfumato.auditing.bounds import audit_scores
from sfumato.errors import InputError
from tests.auditing.planted import runs
from tests.auditing.planted.runs import Seen

ERROR, AUDIT_ERROR = 1e-9, 1e-7
_FAR = 8.0
"""Standard deviations: fourth powers have a long tail, of which six hold 1e-9 in the limit alone."""
Law = Callable[[], str | None]


def influence() -> str | None:
    """One example moves what a run publishes by its own clipped gradient: by the sensitivity, and not at all where it
    has no finite gradient or could not be read.
    """
    long, none = (runs.BRIGHT, runs.LONELY, runs.FIRST_OF_THE_LAST), (runs.BLACK, runs.UNREADABLE)
    return _influence("OneLayer", dict.fromkeys(long, 1.0) | dict.fromkeys(none, 0.0))


def networks() -> str | None:
    """A network that looks at several images at once is refused, or one example moves no more than with others."""
    try:
        return _influence("Mixing", {runs.BRIGHT: 1.0})
    except InputError:
        return None


def _influence(network: str, expected: dict[int, float]) -> str | None:
    """Two whole runs of one update with one public seed, at q = 1, on data with and without an example: the weights
    that they publish differ by the learning rate over B times that example's contribution, and the noise is the same.
    """
    for example, sensitivities in expected.items():
        whole, other = _one_update(network, None), _one_update(network, example)
        moved = runs.NUM_EXAMPLES * runs.distance(whole.weights, other.weights)
        if not abs(moved - sensitivities) < 1e-4:  # NaN is no number either
            return f"an example moves the sum by {moved:.4g} sensitivities, not {sensitivities:g}"
    return None


def public() -> str | None:
    """Recipe, ledger and certificate are the same whatever an example is: no default and no claim is made of it."""
    whole, other = (_one_update("OneLayer", example) for example in (None, runs.LONELY))
    for name in runs.PUBLISHED:
        for line, its in zip(whole.files[name].splitlines(), other.files[name].splitlines(), strict=True):
            if _without_names(line) != _without_names(its):
                return f"{name} depends on an example: {line}"
    return None


def release() -> str | None:
    """Each release is the clipped sum of its sample, by hand, over the constant B, plus noise of the stated scale that
    is new in every coordinate and every update, of both runs.
    """
    noise = np.array([_noise(seen, number) for seen in _two_runs() for number in range(len(seen.gradients))])
    sums = np.array([runs.clipped_sum(seen, number) for seen in _two_runs() for number in range(len(seen.gradients))])
    if not np.isfinite(noise).all():
        return "a release is not finite"
    along = (noise * _unit(sums)).sum(1, keepdims=True)
    whole = {"everywhere": noise.reshape(-1, 1), "in the direction of the sum": along, "in a coordinate": noise}
    for where, values in whole.items():
        scales, error = np.square(values).sum(0), ERROR / 2 / values.shape[1]
        wrong = (scales < chi2.ppf(error, len(values))) | (scales > chi2.isf(error, len(values)))
        if wrong.any():
            scale = math.sqrt(scales[wrong.argmax()] / len(values))
            return f"what is added {where} has {scale:.3g} times the scale of the noise"
    # Of n normal numbers, the mean of fourth powers lies around 3 with a variance of 96 / n.
    if abs(float((noise**4).mean()) - 3) > _FAR * math.sqrt(96 / noise.size):
        return f"the noise is not Gaussian: its kurtosis is {float((noise**4).mean()):.3g}"
    for what, rows in (("updates", noise), ("coordinates", noise.T)):
        alike = _unit(rows) @ _unit(rows).T
        pairs = alike[np.triu_indices(len(rows), 1)]
        largest = min(1 - 1e-12, float(abs(pairs).max()))
        # Of independent normal numbers, r sqrt((n - 1) / (1 - r^2)) has Student's distribution.
        freedom = rows.shape[1] - 1
        if 2 * len(pairs) * t.sf(largest * math.sqrt(freedom / (1 - largest**2)), freedom) < ERROR:
            return f"the noise of two {what} has correlation {largest:.3g}"
    return None


def sampling() -> str | None:
    """Each example is drawn alone with probability q = B / N, whatever else is drawn, at every update anew."""
    drawn = np.array([np.isin(np.arange(runs.NUM_EXAMPLES), sample) for seen in _two_runs() for sample in seen.samples])
    q = runs.BATCH_SIZE / runs.NUM_EXAMPLES
    counts = drawn.sum(1)
    if _is_unlikely(binom, int(counts.sum()), drawn.size, q):
        return f"examples are drawn with probability {counts.sum() / drawn.size:.3g}, not {q:.3g}"
    spread = float(((counts - drawn.shape[1] * q) ** 2).sum() / (drawn.shape[1] * q * (1 - q)))
    if _is_unlikely(chi2, spread, len(counts)):
        return f"the batch's size varies {spread / len(counts):.3g} times as much as that of a Poisson sample"
    # Steps of one run, two by two, and the same step of both runs: each pair by itself.
    halves = drawn.reshape(2, -1, runs.NUM_EXAMPLES)
    for one, other in ((halves[:, 1::2], halves[:, ::2]), (halves[0], halves[1])):
        if _is_unlikely(binom, int((one & other).sum()), one.size, q * q):
            return f"an example is drawn in both of two updates with probability {(one & other).mean():.3g}"
    return None


def account() -> str | None:
    """The certificate's epsilon is not below that of the updates that were seen, by another library and from below."""
    from dp_accounting.pld import privacy_loss_distribution as library

    for seen in _two_runs():
        lines = sum(line["kind"] == "release" for line in seen.ledger)
        if lines != len(seen.gradients):
            return f"{len(seen.gradients)} updates were applied, {lines} are on the ledger"
        below = {"pessimistic_estimate": False, "use_connect_dots": False, "value_discretization_interval": 1e-3}
        q = runs.BATCH_SIZE / runs.NUM_EXAMPLES
        one = library.from_gaussian_mechanism(runs.SIGMA, sampling_prob=q, **below)
        least = one.self_compose(len(seen.gradients)).get_epsilon_for_delta(runs.DELTA)
        stated = seen.certificate["epsilon"]
        if not (stated is not None and least <= stated <= 1.02 * least):
            return f"the certificate states epsilon {stated}, the updates that were seen spend at least {least:.4f}"
    return None


def secret() -> str | None:
    """Each update has keys of its own for what it draws and for its noise, which nobody can guess: none is used twice,
    in either run, nor is one that of a public seed, a number, or anything that the run publishes.
    """
    keys = [key for seen in _two_runs() for key in seen.keys]
    if len(set(keys)) != len(keys) or len(keys) != 2 * 2 * runs.NUM_STEPS or {len(key) for key in keys} != {32}:
        return "a key is used twice"
    published = " ".join(text for seen in _two_runs() for text in seen.files.values())
    words = [word for word in re.findall("[0-9a-f]{32,64}", published) if len(word) in (32, 64)]
    guesses = {bytes.fromhex(word).ljust(32, b"\0") for word in words}
    for number in range(100):
        guesses |= {randomness.key_from_seed(number), number.to_bytes(32, "big"), number.to_bytes(32, "little")}
    if guesses & set(keys):
        return "a key can be guessed"
    return None


def weights() -> str | None:
    """The published weights follow from the releases alone: momentum and averages, by plain formulas."""
    for seen in _two_runs():
        value, speed = runs.flat(seen.before[0]), np.zeros(len(runs.flat(seen.before[0])))
        average = value.copy()
        for number, gradient in enumerate(seen.gradients):
            if np.linalg.norm(runs.flat(seen.before[number]) - value) > 1e-4 * np.linalg.norm(value):
                return f"the weights before update {number + 1} do not follow from the releases before"
            speed = runs.MOMENTUM * speed + runs.flat(gradient)
            value = value - runs.LEARNING_RATE * speed
            average += (1 - min(runs.DECAY, (1 + number) / (10 + number))) * (value - average)
        if np.linalg.norm(runs.flat(seen.weights) - average) > 1e-4 * np.linalg.norm(average):
            return "the published weights do not follow from the releases"
    return None


def audit() -> str | None:
    """An adversary who sees every update and put worst-case examples into the data shows no more than is claimed."""
    mechanism = calibration.solve(Mechanism(4000, 2000, 1.0, 4), "noise_multiplier", 4.0, 1e-5)
    scores, members = canary.play(mechanism, 3)
    nominal = accountants.epsilon(mechanism, 1e-5).epsilon
    claim = {"delta": 1e-5, "nominal_epsilon": nominal, "mechanism": mechanism}
    found = audit_scores(scores, members, confidence=1 - AUDIT_ERROR, **claim)
    if not found.violated:
        return None
    shown = max(bound.epsilon or 0.0 for bound in found.bounds if bound.name != "gaussian")
    return f"{found.num_games:,} games show epsilon {shown:.3g} where {nominal:.3g} is claimed"


LAWS: dict[str, Law] = {
    law.__name__: law for law in (influence, public, networks, release, sampling, account, secret, weights, audit)
}
REFUSES = "the product refuses"
STATISTICAL = ("release", "sampling", "audit")


def broken(law: Law) -> str | None:
    """What a law finds; where the product itself refuses to run, what it says."""
    try:
        return law()
    except InputError as refused:
        return f"{REFUSES}: {refused}"


@functools.cache
def _two_runs() -> tuple[Seen, Seen]:
    """Two runs of one recipe on the same images, with keys of their own."""
    return runs.run(runs.images(), runs.recipe()), runs.run(runs.images(), runs.recipe())


@functools.cache
def _one_update(network: str, example: int | None) -> Seen:
    """A run of one update of all examples, but for one perhaps, with a public seed."""
    recipe = runs.recipe(
        network,
        training_num_steps=1,
        training_batch_size=runs.NUM_EXAMPLES,
        privacy_noise_multiplier=0.01,  # it is rounded to a grid, which should be fine
        optimizer_momentum=0.0,
        optimizer_learning_rate=1.0,
        ema_decay=0.0,
        run_seed=3,  # with it the loss on each example has a long gradient
    )
    data = runs.images()
    return runs.run(data if example is None else runs.without(data, example), recipe)


def forget() -> None:
    """What was seen before the code changed."""
    _two_runs.cache_clear()
    _one_update.cache_clear()


def _without_names(line: str) -> str:
    """Names of runs, launches and files differ from run to run."""
    return re.sub(r'"(run_id|launch_id|\w+_sha256)": ?"[0-9a-f]+"', "", line)


def _noise(seen: Seen, number: int) -> np.ndarray:
    """What a release holds besides the clipped sum, in standard deviations; (d,)."""
    return (runs.flat(seen.gradients[number]) * runs.BATCH_SIZE - runs.clipped_sum(seen, number)) / runs.SIGMA


def _unit(rows: np.ndarray) -> np.ndarray:
    return rows / np.linalg.norm(rows, axis=1, keepdims=True).clip(1e-30)  # a batch may be empty


def _is_unlikely(distribution, value: float, *parameters: float) -> bool:
    return min(distribution.cdf(value, *parameters), distribution.sf(value, *parameters)) < ERROR / 2
