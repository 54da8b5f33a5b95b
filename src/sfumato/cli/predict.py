"""`sfumato predict`: classes and probabilities for images."""

import csv
import json
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import typer

from sfumato.cli import options, output

if TYPE_CHECKING:
    from sfumato.evaluation.calibration import Threshold
    from sfumato.evaluation.classifier import Prediction


def predict(
    run: options.Run,
    images: Annotated[
        list[Path], typer.Argument(help="Image files, folders of them, patterns; - reads names from stdin.")
    ],
    format_: Annotated[
        Literal["text", "csv", "jsonl"], typer.Option("--format", help="A line for each image, as text, CSV or JSON.")
    ] = "text",
    trust: options.Trust = None,
    json_: options.Json = False,
) -> None:
    """Names the class of each image, with the model's probabilities where they are calibrated."""
    from sfumato.evaluation.classifier import Classifier

    classifier = Classifier(run, trust or ())
    if (mixing := classifier.dependence) is not None:
        output.warn(f"answers depend on which images are judged together: {mixing}")
    if not classifier.is_calibrated:
        output.note(
            f"no probabilities are shown: nobody has calibrated them. Do so by `sfumato calibrate {run} FOLDER` with "
            "labelled images"
        )
    calibration = classifier.trained.calibration
    threshold = None if calibration is None else calibration.threshold
    if threshold is not None:
        output.note(
            f"{threshold.positive} is named from probability {threshold.probability:.4f} on, for a {threshold.aim} of "
            f"{output.per_cent(threshold.at)}"
        )
    named = [Path(line) for line in sys.stdin.read().splitlines() if line] if Path("-") in images else []
    found = classifier.each([path for path in images if path != Path("-")] + named, _progress)
    if json_:
        output.print_json({"run": str(run), "predictions": [_row(one) for one in found]})
        return
    writer = csv.writer(sys.stdout, lineterminator="\n")
    if format_ == "csv":
        writer.writerow(["image", "class", "probability", "why", *classifier.classes])
    for one in found:
        if one.why is not None:
            output.note(f"{one.image} cannot be read: {one.why}")
        if format_ == "jsonl":
            output.say(json.dumps(_row(one), allow_nan=False))
        elif format_ == "csv":
            each = (one.probabilities or {}).get
            writer.writerow(
                [output.plain(one.image), one.class_name, one.probability, one.why, *map(each, classifier.classes)]
            )
        else:
            output.say(f"{one.image}  {one.class_name or 'unreadable'}{_sure(one, threshold)}")


def _sure(one: "Prediction", threshold: "Threshold | None") -> str:
    """The probability of the class that is named; where a threshold decides, of the one that is looked
    for.
    """
    if one.probabilities is None:
        return ""
    if threshold is not None:
        return f"  {threshold.positive} {output.less_than_sure(one.probabilities[threshold.positive])}"
    return f"  {output.less_than_sure(one.probability or 0.0)}"


def _row(one: "Prediction") -> dict[str, object]:
    return {"image": one.image, "class": one.class_name, **one.model_dump(exclude={"image", "class_name"})}


def _progress(done: int, of: int) -> None:
    if of > done or done > 512:
        output.note(f"{done} of {of} images")
