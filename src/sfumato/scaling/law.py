r"""Accuracy against batch size at a constant total amount of noise (Sander et al. 2022, Section 3.4
and Figure 4).

Two laws. The paper's line in :math:`\log_2 B`, and :math:`a + b / B`, which follows from the
variance of an update: a part from the privacy noise that does not depend on B, and a part v / B
from sampling. The one that predicts left-out batch sizes better is used.
"""

import dataclasses
import math
from collections.abc import Callable, Sequence

import numpy as np

from sfumato.errors import InputError

LAWS: dict[str, Callable[[np.ndarray], np.ndarray]] = {
    "a + b / B": lambda batch_size: 1 / batch_size,
    "a + b log2 B": lambda batch_size: np.log2(batch_size),
}
LEVEL = 0.95
# Below this probability of so bad a fit, the points do not support a law.
_IMPLAUSIBLE = 0.01
# Below this one, they exclude it, and its extrapolation need not be feared.
_EXCLUDED = 0.05
# Largest spread over smallest, between batch sizes, that intervals still cover well (LOG.md).
_UNEVEN = 3.0
NOT_TOLD_APART = [
    "the runs do not tell the two laws apart, so intervals reach over both: more seeds or other batch sizes narrow them"
]


@dataclasses.dataclass(frozen=True)
class Point:
    """The accuracy of one run.

    Attributes:
        batch_size: B.
        seed: Runs with the same seed share initial weights and noise; None shares nothing.
        accuracy: In [0, 1].
    """

    batch_size: int
    seed: int | None
    accuracy: float


@dataclasses.dataclass(frozen=True)
class Prediction:
    """What one more run, with a seed of its own, reaches at a batch size; the interval covers it
    with probability 95 %.
    """

    batch_size: int
    accuracy: float
    low: float
    high: float


@dataclasses.dataclass(frozen=True)
class Fit:
    """One law, fitted.

    Attributes:
        law: Its name, a key of `LAWS`.
        a, b: Its coefficients.
        left_out_error: Root mean square error at each batch size, predicted from the others.
        plausibility: Probability of means at least as far from the law, if it held; None where
            spread cannot be told from misfit.
        pairing_gain: By what factor runs that share seeds shrink the standard error of b; 1
            without.
        warnings: What to doubt.
    """

    law: str
    a: float
    b: float
    left_out_error: float
    plausibility: float | None
    pairing_gain: float
    warnings: tuple[str, ...]
    _design: "_Design"

    def predict(self, batch_size: int) -> Prediction:
        """The accuracy of one more run, with its prediction interval (Student's t)."""
        x = float(LAWS[self.law](np.array(float(batch_size))))
        variance, freedom = self._design.variance_at(x)
        from scipy.stats import t

        half = float(t.ppf((1 + LEVEL) / 2, freedom)) * math.sqrt(variance)
        centre = self.a + self.b * x
        # No accuracy lies outside [0, 1], so the interval covers as often when it ends there.
        low, value, high = (min(max(at, 0.0), 1.0) for at in (centre - half, centre, centre + half))
        return Prediction(batch_size, value, low, high)


def fit(points: Sequence[Point]) -> list[Fit]:
    """Fits both laws, the one to use first.

    Raises:
        InputError: If there are fewer than three batch sizes, or too few runs to tell their spread.
    """
    sizes = sorted({point.batch_size for point in points})
    if len(sizes) < 3:
        raise InputError(f"{len(sizes)} batch sizes do not show a law: at least three are needed. Simulate at more.")
    if len(points) < 4:
        raise InputError(
            f"{len(points)} runs leave nothing to tell their spread from: at least four are "
            "needed. Simulate more seeds."
        )
    fits = [_fit(law, points, sizes) for law in LAWS]
    fits.sort(key=lambda found: found.left_out_error)
    if all(found.plausibility is not None and found.plausibility < _IMPLAUSIBLE for found in fits):
        first = dataclasses.replace(
            fits[0], warnings=(*fits[0].warnings, "the points support neither law: predictions may be far off")
        )
        fits = [first, *fits[1:]]
    return fits


def predict(fits: Sequence[Fit], batch_size: int) -> Prediction:
    """The prediction of the law that is used; its interval reaches over those of laws that the
    points do not exclude.

    With few runs the two laws often cannot be told apart, and the wrong one is chosen: the interval
    of the chosen one alone would then cover 80 times in 100 (LOG.md).

    Args:
        fits: As `fit` returns them.
        batch_size: Where.
    """
    used = fits[0].predict(batch_size)
    possible = [used, *(found.predict(batch_size) for found in rivals(fits))]
    return dataclasses.replace(used, low=min(one.low for one in possible), high=max(one.high for one in possible))


def rivals(fits: Sequence[Fit]) -> list[Fit]:
    """The laws that are not used, but that the points do not exclude."""
    return [found for found in fits[1:] if found.plausibility is None or found.plausibility >= _EXCLUDED]


def _fit(law: str, points: Sequence[Point], sizes: list[int]) -> Fit:
    design = _Design(law, points, sizes)
    errors = []
    for left_out in sizes:
        others = [point for point in points if point.batch_size != left_out]
        a, b = _least_squares(law, others)
        mean = np.mean([point.accuracy for point in points if point.batch_size == left_out])
        errors.append(a + b * float(LAWS[law](np.array(float(left_out)))) - mean)
    warnings = []
    spreads = [float(np.std(design.table[:, i], ddof=1)) for i in range(len(sizes))] if design.paired else []
    if spreads and len(design.table) >= 4 and max(spreads) > _UNEVEN * max(min(spreads), 1e-12):
        warnings.append("the spread over seeds differs between batch sizes: intervals cover less than they claim")
    return Fit(
        law,
        design.a,
        design.b,
        float(np.sqrt(np.mean(np.square(errors)))),
        design.plausibility(),
        design.pairing_gain,
        tuple(warnings),
        design,
    )


def _least_squares(law: str, points: Sequence[Point]) -> tuple[float, float]:
    x = LAWS[law](np.array([float(point.batch_size) for point in points]))
    y = np.array([point.accuracy for point in points])
    centred = x - x.mean()
    b = float(centred @ y / (centred @ centred))
    return float(y.mean() - b * x.mean()), b


class _Design:
    """The runs as a table of seeds and batch sizes where each seed ran at each size; otherwise as a
    plain list.

    In a table a run is law + its seed's own level + the rest. The level does not touch b, so that b
    is known as well as the rest allows, and a as well as both do.
    """

    def __init__(self, law: str, points: Sequence[Point], sizes: list[int]) -> None:
        self.a, self.b = _least_squares(law, points)
        x = LAWS[law](np.array([float(point.batch_size) for point in points]))
        y = np.array([point.accuracy for point in points])
        self.mean_x, self.spread_x, self.count = float(x.mean()), float(((x - x.mean()) ** 2).sum()), len(points)
        residuals = y - self.a - self.b * x
        self.plain_variance, self.plain_freedom = float(residuals @ residuals) / (self.count - 2), self.count - 2
        self.table, self.x = _as_table(points, sizes), LAWS[law](np.array(sizes, dtype=float))
        self.paired = len(self.table) >= 2
        if self.paired:
            seeds, columns = self.table.shape
            levels = self.table.mean(1)
            self.between, self.between_freedom = columns * float(levels.var(ddof=1)), seeds - 1
            rest = self.table - levels[:, None] - self.b * (self.x - self.x.mean())
            self.within_freedom = seeds * (columns - 1) - 1
            self.within = float((rest**2).sum()) / self.within_freedom

    @property
    def pairing_gain(self) -> float:
        return math.sqrt(self.plain_variance / self.within) if self.paired and self.within > 0 else 1.0

    def variance_at(self, x: float) -> tuple[float, float]:
        """Of one more run's distance from the fit: variance, and degrees of freedom
        (Satterthwaite).
        """
        lever = (x - self.mean_x) ** 2 / self.spread_x
        if not self.paired:
            return self.plain_variance * (1 + 1 / self.count + lever), self.plain_freedom
        seeds, columns = self.table.shape
        level = self.between / columns * (1 + 1 / seeds)
        rest = self.within * ((columns - 1) / columns + lever)
        total = level + rest
        if total == 0:
            return 0.0, self.within_freedom
        return total, total**2 / (level**2 / self.between_freedom + rest**2 / self.within_freedom)

    def plausibility(self) -> float | None:
        """Lack of fit against what seeds and sizes together leave (F test)."""
        if not self.paired:
            return None
        from scipy.stats import f

        seeds, columns = self.table.shape
        of_sizes = self.table.mean(0)
        misfit = seeds * float(((of_sizes - self.a - self.b * self.x) ** 2).sum()) / (columns - 2)
        leftover = self.table - self.table.mean(1, keepdims=True) - of_sizes + self.table.mean()
        noise = float((leftover**2).sum()) / ((seeds - 1) * (columns - 1))
        return float(f.sf(misfit / noise, columns - 2, (seeds - 1) * (columns - 1))) if noise > 0 else None


def _as_table(points: Sequence[Point], sizes: list[int]) -> np.ndarray:
    """(seeds, sizes) accuracies if every seed ran once at every size; else no rows."""
    cells = {(point.seed, point.batch_size): point.accuracy for point in points}
    seeds = sorted({point.seed for point in points if point.seed is not None})
    if len(cells) != len(points) or len(points) != len(seeds) * len(sizes):
        return np.zeros((0, len(sizes)))
    return np.array([[cells[seed, size] for size in sizes] for seed in seeds])
