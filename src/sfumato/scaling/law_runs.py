"""Runs of one study, read from their folders, and what their accuracies say about larger batches."""

import dataclasses
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from sfumato import config
from sfumato.errors import InputError
from sfumato.json_record import pick
from sfumato.run_folder import record
from sfumato.run_folder.record import PrivateMetrics, Result
from sfumato.scaling.law import NOT_TOLD_APART, Point, fit, predict, rivals

# sigma / B may differ by rounding of sigma to four digits.
_SAME = 1e-3


@dataclasses.dataclass(frozen=True)
class Run:
    """One finished run: its point, and the numbers that must be common to a study.

    Attributes:
        noise_per_image: sigma / B.
        clipped_square: Mean square of the clipped gradients' norms over the logged steps, in units of C; None where
            the run did not record it.
    """

    folder: Path
    point: Point
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
        point=Point(result.batch_size, recipe.run.seed, result.accuracy),
        noise_per_image=result.noise_multiplier / result.batch_size,
        **pick(result, "num_steps", "num_examples", "num_parameters"),
        clipped_square=sum(squares) / len(squares) if squares else None,
    )


def scaling_law(runs: Sequence[Run], predict_batch_sizes: Sequence[int]) -> dict[str, Any]:
    """Both laws, which one is used and why, and its predictions, JSON-ready.

    Raises:
        InputError: See `sfumato.scaling.law.fit`.
    """
    fits = fit([run.point for run in runs])
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
        "warnings": [*used.warnings, *NOT_TOLD_APART[: len(rivals(fits))]],
    }


def _rho(runs: Sequence[Run]) -> dict[str, float]:
    """Variance of an update from sampling over that from privacy noise, (B / sigma)^2 v / (B d), at
    the smallest and largest batch.

    v is the mean squared norm of clipped gradients in units of C, d the number of parameters.
    """
    squares: dict[int, list[float]] = {}
    for run in sorted(runs, key=lambda run: run.point.batch_size):
        if run.clipped_square is not None:
            squares.setdefault(run.point.batch_size, []).append(run.clipped_square)
    noise, dimension = runs[0].noise_per_image ** 2, runs[0].num_parameters
    return {
        str(size): sum(squares[size]) / len(squares[size]) / (noise * size * dimension)
        for size in [*list(squares)[:1], *list(squares)[-1:]]
    }
