"""How often a model is right, against how sure it says it is."""

from pathlib import Path

from sfumato.errors import InputError
from sfumato.evaluation.evaluate import Evaluation

FORMATS = (".svg", ".png", ".pdf")


def draw(found: Evaluation, path: Path) -> None:
    """The reliability diagram (Guo et al. 2017, Figure 1): on the line, what is said is as often right as it says.

    Raises:
        InputError: If the file's ending is unknown, or the model's outputs are not finite.
    """
    check(path)
    if found.reliability is None:
        raise InputError("the model's outputs are not finite, so there are no probabilities to draw. Train again.")
    from matplotlib.figure import Figure

    figure = Figure(figsize=(5, 5), layout="constrained")
    axes = figure.subplots()
    sureness, right = zip(*((each.probability, each.right) for each in found.reliability), strict=True)
    spread = [
        [each.right - each.interval[0] for each in found.reliability],
        [each.interval[1] - each.right for each in found.reliability],
    ]
    axes.plot([0, 1], [0, 1], color="tab:gray", linestyle="--", label="as often right as it says")
    axes.errorbar(sureness, right, yerr=spread, fmt="o", capsize=3, label=f"{found.num_images} images, 95 %")
    axes.set(
        xlim=(0, 1),
        ylim=(0, 1),
        xlabel="probability of the class that is named",
        ylabel="how often it is right",
        title=f"calibration error {100 * (found.calibration_error or 0.0):.2f} %",
    )
    axes.legend(frameon=False, loc="upper left")
    figure.savefig(path)


def check(path: Path) -> None:
    """Refuses a file that cannot be drawn, before anything is computed for it."""
    if path.suffix not in FORMATS:
        raise InputError(f"--plot writes {', '.join(FORMATS)}, not {path.name!r}.")
    if path.is_dir():
        raise InputError(f"--plot {path} is a folder. Name a file.")
    if not path.parent.is_dir():
        raise InputError(f"--plot {path}: there is no folder {path.parent}. Make it first.")
