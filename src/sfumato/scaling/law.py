r"""Accuracy against batch size at a constant total amount of noise (Sander et al. 2022, Section 3.4
and Figure 4).

Two laws. The paper's line in :math:`\log_2 B`, and :math:`a + b / B`, which follows from the
variance of an update: a part from the privacy noise that does not depend on B, and a part v / B
from sampling. The one that predicts left-out batch sizes better is used.

The points are runs of one study, read from their folders.
"""

import dataclasses
import math
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from sfumato import config
from sfumato.errors import InputError
from sfumato.json_record import pick
from sfumato.run_folder import record
from sfumato.run_folder.record import PrivateMetrics, Result

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
# sigma / B may differ by rounding of sigma to four digits.
_SAME = 1e-3


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


class Fit:
    """One law, fitted.

    Where each seed ran at each batch size, the runs are a table of seeds and sizes, and a run is law + its seed's own
    level + the rest. The level does not touch b, so that b is known as well as the rest allows, and a as well as both
    do. Otherwise they are a plain list.

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

    def __init__(self, law: str, points: Sequence[Point]) -> None:
        sizes = sorted({point.batch_size for point in points})
        self.law, self.warnings = law, list[str]()
        x = LAWS[law](np.array([float(point.batch_size) for point in points]))
        y = np.array([point.accuracy for point in points])
        self.a, self.b = _least_squares(x, y)
        self._mean_x, self._spread_x, self._count = float(x.mean()), float(((x - x.mean()) ** 2).sum()), len(points)
        residuals = y - self.a - self.b * x
        self._plain_variance = float(residuals @ residuals) / (self._count - 2)
        self._table, self._x = _as_table(points, sizes), LAWS[law](np.array(sizes, dtype=float))
        self.left_out_error = _left_out_error(x, y, self._x)
        self._paired = len(self._table) >= 2
        self.pairing_gain, self.plausibility = 1.0, self._plausibility() if self._paired else None
        if self._paired:
            seeds, columns = self._table.shape
            levels = self._table.mean(1)
            self._between = columns * float(levels.var(ddof=1))
            rest = self._table - levels[:, None] - self.b * (self._x - self._x.mean())
            self._within_freedom = seeds * (columns - 1) - 1
            self._within = float((rest**2).sum()) / self._within_freedom
            if self._within > 0:
                self.pairing_gain = math.sqrt(self._plain_variance / self._within)
            spreads = self._table.std(0, ddof=1)
            if seeds >= 4 and max(spreads) > _UNEVEN * max(min(spreads), 1e-12):
                self.warnings.append(
                    "the spread over seeds differs between batch sizes: intervals cover less than they claim"
                )

    def predict(self, batch_size: int) -> Prediction:
        """The accuracy of one more run, with its prediction interval (Student's t)."""
        from scipy.stats import t

        x = float(LAWS[self.law](np.array(float(batch_size))))
        variance, freedom = self._variance_at(x)
        half = float(t.ppf((1 + LEVEL) / 2, freedom)) * math.sqrt(variance)
        centre = self.a + self.b * x
        # No accuracy lies outside [0, 1], so the interval covers as often when it ends there.
        low, value, high = (min(max(at, 0.0), 1.0) for at in (centre - half, centre, centre + half))
        return Prediction(batch_size, value, low, high)

    def _variance_at(self, x: float) -> tuple[float, float]:
        """Of one more run's distance from the fit: variance, and degrees of freedom
        (Satterthwaite).
        """
        lever = (x - self._mean_x) ** 2 / self._spread_x
        if not self._paired:
            return self._plain_variance * (1 + 1 / self._count + lever), self._count - 2
        seeds, columns = self._table.shape
        level = self._between / columns * (1 + 1 / seeds)
        rest = self._within * ((columns - 1) / columns + lever)
        total = level + rest
        if total == 0:
            return 0.0, self._within_freedom
        return total, total**2 / (level**2 / (seeds - 1) + rest**2 / self._within_freedom)

    def _plausibility(self) -> float | None:
        """Lack of fit against what seeds and sizes together leave (F test)."""
        from scipy.stats import f

        seeds, columns = self._table.shape
        of_sizes = self._table.mean(0)
        misfit = seeds * float(((of_sizes - self.a - self.b * self._x) ** 2).sum()) / (columns - 2)
        leftover = self._table - self._table.mean(1, keepdims=True) - of_sizes + self._table.mean()
        noise = float((leftover**2).sum()) / ((seeds - 1) * (columns - 1))
        return float(f.sf(misfit / noise, columns - 2, (seeds - 1) * (columns - 1))) if noise > 0 else None


def fit(points: Sequence[Point]) -> list[Fit]:
    """Fits both laws, the one to use first, which has the warnings of both together, too.

    Raises:
        InputError: If there are fewer than three batch sizes, or too few runs to tell their spread.
    """
    sizes = {point.batch_size for point in points}
    if len(sizes) < 3 or len(points) < 4:
        what = f"{len(points)} runs at {len(sizes)} batch sizes show no law"
        raise InputError(f"{what}: at least three sizes and at least four runs are needed. Simulate more.")
    fits = sorted((Fit(law, points) for law in LAWS), key=lambda found: found.left_out_error)
    if all(found.plausibility is not None and found.plausibility < _IMPLAUSIBLE for found in fits):
        fits[0].warnings.append("the points support neither law: predictions may be far off")
    if rivals(fits):
        fits[0].warnings.append(
            "the runs do not tell the two laws apart, so intervals reach over both: more seeds or other batch sizes "
            "narrow them"
        )
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


def _left_out_error(x: np.ndarray, y: np.ndarray, places: np.ndarray) -> float:
    errors = []
    for left_out in places:
        a, b = _least_squares(x[x != left_out], y[x != left_out])
        errors.append(a + b * left_out - y[x == left_out].mean())
    return float(np.sqrt(np.mean(np.square(errors))))


def _least_squares(x: np.ndarray, y: np.ndarray) -> tuple[float, float]:
    centred = x - x.mean()
    b = float(centred @ y / (centred @ centred))
    return float(y.mean() - b * x.mean()), b


def _as_table(points: Sequence[Point], sizes: list[int]) -> np.ndarray:
    """(seeds, sizes) accuracies if every seed ran once at every size; else no rows."""
    cells = {(point.seed, point.batch_size): point.accuracy for point in points}
    seeds = sorted({point.seed for point in points if point.seed is not None})
    if len(cells) != len(points) or len(points) != len(seeds) * len(sizes):
        return np.zeros((0, len(sizes)))
    return np.array([[cells[seed, size] for size in sizes] for seed in seeds])


@dataclasses.dataclass(frozen=True)
class Run(Point):
    """One finished run, and the numbers that must be common to a study.

    Attributes:
        noise_per_image: sigma / B.
        clipped_square: Mean square of the clipped gradients' norms over the logged steps, in units of C; None where
            the run did not record it.
    """

    folder: Path
    num_steps: int
    num_examples: int
    noise_per_image: float
    num_parameters: int
    clipped_square: float | None


def read_study(folders: Sequence[Path]) -> list[Run]:
    """Reads finished runs that differ in batch size and seed alone; a folder without a result is searched for folders
    that have one.

    Raises:
        InputError: If a folder holds no finished run, or runs differ in what a study holds constant.
    """
    found: list[Path] = []
    for folder in folders:
        is_run = (folder / record.RESULT_FILE).exists()
        inside = [folder] if is_run else sorted(path.parent for path in folder.glob(f"**/{record.RESULT_FILE}"))
        if not inside:
            raise InputError(f"{folder} holds no finished run. Give runs of `sfumato simulate` or `sfumato train`.")
        found += inside
    runs = [_read(folder) for folder in dict.fromkeys(found)]
    first = runs[0]
    for run in runs[1:]:
        for name, what in (("num_steps", "steps"), ("num_examples", "images"), ("noise_per_image", "sigma / B")):
            one, other = getattr(run, name), getattr(first, name)
            if not math.isclose(one, other, rel_tol=_SAME if name == "noise_per_image" else 0.0):
                differ = f"{what} {one:.9g} in {run.folder}, {other:.9g} in {first.folder}"
                raise InputError(f"a law holds at one number of each, but there are {differ}. Leave one out.")
    return runs


def _read(folder: Path) -> Run:
    result = record.read(folder / record.RESULT_FILE, Result)
    recipe = config.parse(config.read(folder / "recipe.toml"))
    if not result.noise_multiplier:
        raise InputError(f"{folder} was trained without noise, which a study holds constant. Leave it out.")
    lines = record.read_lines(folder / record.PRIVATE_METRICS_FILE, PrivateMetrics)
    squares = [line.clipped_square for line in lines if line.clipped_square is not None]
    return Run(
        folder=folder,
        seed=recipe.run.seed,
        noise_per_image=result.noise_multiplier / result.batch_size,
        **pick(result, "batch_size", "accuracy", "num_steps", "num_examples", "num_parameters"),
        clipped_square=sum(squares) / len(squares) if squares else None,
    )


def scaling_law(runs: Sequence[Run], predict_batch_sizes: Sequence[int]) -> dict[str, Any]:
    """Both laws, which one is used and why, and its predictions, JSON-ready.

    Raises:
        InputError: See `fit`.
    """
    fits = fit(runs)
    used, other = fits
    shown = f"{100 * used.left_out_error:.2f}"  # two perfect fits differ by rounding alone, whatever their ratio is
    worse = f" ({other.left_out_error / used.left_out_error:.1f} times as far)" if float(shown) else ""
    return {
        "law": used.law,
        "coefficients": pick(used, "a", "b"),
        "laws": [pick(found, "law", "a", "b", "left_out_error", "plausibility", "pairing_gain") for found in fits],
        "why": f"{used.law} predicts batch sizes that it was not shown within {shown} points, "
        f"{other.law} within {100 * other.left_out_error:.2f}{worse}",
        "pairing_gain": used.pairing_gain,
        "rho": _rho(runs),
        "rho_private": False,
        "predictions": [dataclasses.asdict(predict(fits, batch_size)) for batch_size in predict_batch_sizes],
        "num_runs": len(runs),
        "warnings": used.warnings,
    }


def _rho(runs: Sequence[Run]) -> dict[str, float]:
    """Variance of an update from sampling over that from privacy noise, (B / sigma)^2 v / (B d), at
    the smallest and largest batch.

    v is the mean squared norm of clipped gradients in units of C, d the number of parameters.
    """
    squares: dict[int, list[float]] = {}
    for run in sorted(runs, key=lambda run: run.batch_size):
        if run.clipped_square is not None:
            squares.setdefault(run.batch_size, []).append(run.clipped_square)
    noise, dimension = runs[0].noise_per_image ** 2, runs[0].num_parameters
    return {
        str(size): sum(squares[size]) / len(squares[size]) / (noise * size * dimension)
        for size in [*list(squares)[:1], *list(squares)[-1:]]
    }
