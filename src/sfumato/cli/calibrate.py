"""`sfumato calibrate`: probabilities that are as often right as they say, and a threshold."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from sfumato.cli import options, output

if TYPE_CHECKING:
    from sfumato.evaluation.calibration import Calibration


def calibrate(
    run: options.Run,
    folder: options.LabelledImages = None,
    positive: Annotated[
        str | None, typer.Option(help="The one of two classes that is looked for; default: the second.")
    ] = None,
    sensitivity: Annotated[
        float | None, typer.Option(help="Of two classes: finds at least this share of the positive images.")
    ] = None,
    specificity: Annotated[
        float | None, typer.Option(help="Of two classes: leaves at least this share of the others alone.")
    ] = None,
    data_root: options.DataRoot = None,
    trust: options.Trust = None,
    json_: options.Json = False,
) -> None:
    """Fits probabilities, and a threshold where one is asked for, on images with labels. `predict` and
    `evaluate` use them from then on. Not private with respect to these images.
    """
    from sfumato.evaluation.evaluate import calibrate as fit
    from sfumato.reporting.page import write_report

    found = fit(
        run,
        folder,
        positive=positive,
        sensitivity=sensitivity,
        specificity=specificity,
        data_root=data_root,
        trust=trust or (),
        report=output.note,
    )
    write_report(run)
    output.answer(found, json_, lambda found: _show(found, run))


def _show(found: "Calibration", run: Path) -> None:
    shifts = "" if found.shifts is None else f", shifts {', '.join(f'{shift:+.3f}' for shift in found.shifts)}"
    output.say(f"temperature {found.temperature:.4g}{shifts}; fitted on {found.num_images} {found.fitted_on} images")
    if (threshold := found.threshold) is not None:
        output.say(
            f"{threshold.positive} from probability {threshold.probability:.4f} on: {threshold.aim} "
            f"{output.per_cent(threshold.at)} or more on these images"
        )
    output.say(
        f"written to {run / 'calibration.json'}, which `evaluate` and `predict` use; not private with respect to "
        "these images. report.html says so, and tells of accuracies without it"
    )
