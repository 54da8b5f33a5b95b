"""Runs of one study, read from their folders, and what their accuracies say about larger batches."""

import dataclasses
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from sfumato import config
from sfumato.errors import InputError
from sfumato.run_folder import record
from sfumato.run_folder.record import PrivateMetrics, Result
from sfumato.scaling.law import NOT_TOLD_APART, Fit, Point, fit, predict, rivals

# sigma / B may differ by rounding of sigma to four digits.
_SAME = 1e-3


@dataclasses.dataclass(frozen=True)
class Run:
    """One finished run: its point, and the numbers that must be common to a study.

    Attributes:
        noise_per_image: sigma / B.
        clipped_square: Mean square of the clipped gradients' norms, in units of C; None where the
            run did not record it.
    """

    folder: Path
    point: Point
    num_steps: int
    num_examples: int
    noise_per_image: float
    num_parameters: int
    clipped_square: float | None


@dataclasses.dataclass(frozen=True)
class Study:
    """Runs that differ in batch size and seed alone."""

    runs: tuple[Run, ...]

    @property
    def points(self) -> list[Point]:
        return [run.point for run in self.runs]


def read_study(folders: Sequence[Path]) -> Study:
    """Reads finished runs; a folder without a result is searched for folders that have one.

    Raises:
        InputError: If a folder holds no finished run, or runs differ in what a study holds constant
            (named).
    """
    found: list[Path] = []
    for folder in folders:
        inside = (
            [folder]
            if (folder / "result.json").exists()
            else sorted(path.parent for path in folder.glob("**/result.json"))
        )
        if not inside:
            raise InputError(
                f"{folder} holds no finished run. Give run folders of `sfumato simulate` or `sfumato train`."
            )
        found += inside
    runs = [_read(folder) for folder in dict.fromkeys(found)]
    first = runs[0]
    for run in runs[1:]:
        if run.num_steps != first.num_steps:
            raise InputError(
                f"{run.folder} took {run.num_steps} steps and {first.folder} {first.num_steps}: a "
                "law holds at one number of steps. Leave one out."
            )
        if run.num_examples != first.num_examples or not math.isclose(
            run.noise_per_image, first.noise_per_image, rel_tol=_SAME
        ):
            raise InputError(
                f"{run.folder} has sigma / B = {run.noise_per_image:.4g} on {run.num_examples} "
                f"images and {first.folder} {first.noise_per_image:.4g} on {first.num_examples}: "
                "a law holds at one signal-to-noise ratio per step. Leave one out."
            )
    return Study(tuple(runs))


def _read(folder: Path) -> Run:
    result = record.read(folder / record.RESULT_FILE, Result)
    recipe = config.parse(config.read(folder / "recipe.toml"))
    sigma, batch_size = result.noise_multiplier, result.batch_size
    if not sigma:
        raise InputError(
            f"{folder} was trained without noise: it belongs to no study at a constant total "
            "amount of noise. Leave it out."
        )
    return Run(
        folder=folder,
        point=Point(batch_size, recipe.run.seed, result.accuracy),
        num_steps=result.num_steps,
        num_examples=result.num_examples,
        noise_per_image=sigma / batch_size,
        num_parameters=result.num_parameters,
        clipped_square=_clipped_square(folder),
    )


def _clipped_square(folder: Path) -> float | None:
    """Mean over the logged steps."""
    lines = record.read_lines(folder / record.PRIVATE_METRICS_FILE, PrivateMetrics)
    values = [line.clipped_square for line in lines if line.clipped_square is not None]
    return sum(values) / len(values) if values else None


def scaling_law(study: Study, predict_batch_sizes: Sequence[int]) -> dict[str, Any]:
    """Both laws, which one is used and why, and its predictions, JSON-ready.

    Raises:
        InputError: See `sfumato.scaling.law.fit`.
    """
    fits = fit(study.points)
    used, other = fits
    shown = f"{100 * used.left_out_error:.2f}"  # two perfect fits differ by rounding alone, whatever their ratio is
    worse = other.left_out_error / used.left_out_error if float(shown) else math.inf
    return {
        "law": used.law,
        "coefficients": {"a": used.a, "b": used.b},
        "laws": [_of(found) for found in fits],
        "why": f"{used.law} predicts batch sizes that it was not shown within {shown} points, "
        f"{other.law} within {100 * other.left_out_error:.2f}"
        + (f" ({worse:.1f} times as far)" if math.isfinite(worse) else ""),
        "pairing_gain": used.pairing_gain,
        "rho": _rho(study),
        "rho_private": False,
        "predictions": [dataclasses.asdict(predict(fits, batch_size)) for batch_size in predict_batch_sizes],
        "num_runs": len(study.runs),
        "warnings": [*used.warnings, *NOT_TOLD_APART[: len(rivals(fits))]],
    }


def _of(found: Fit) -> dict[str, Any]:
    return {key: getattr(found, key) for key in ("law", "a", "b", "left_out_error", "plausibility", "pairing_gain")}


def _rho(study: Study) -> dict[str, float]:
    """Variance of an update from sampling over that from privacy noise, (B / sigma)^2 v / (B d), at
    the smallest and largest batch.

    v is the mean squared norm of clipped gradients in units of C, d the number of parameters.
    """
    rho: dict[str, float] = {}
    for batch_size in sorted({run.point.batch_size for run in study.runs}):
        squares = [
            run.clipped_square
            for run in study.runs
            if run.point.batch_size == batch_size and run.clipped_square is not None
        ]
        if squares:
            run = study.runs[0]
            rho[str(batch_size)] = (
                sum(squares) / len(squares) / (run.noise_per_image**2 * batch_size * run.num_parameters)
            )
    ends = list(rho)[:1] + list(rho)[-1:]
    return {batch_size: rho[batch_size] for batch_size in ends}
