"""`sfumato evaluate`, `sfumato predict` and `sfumato calibrate`: using what was trained."""

import csv
import json
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

from sfumato.accounting import formats
from sfumato.cli import options, output

if TYPE_CHECKING:
    from sfumato.evaluation.calibration import Calibration, Threshold
    from sfumato.evaluation.classifier import Prediction
    from sfumato.evaluation.evaluate import Evaluation

_MOST_CONFUSIONS = 3


def evaluate(
    run: Path,
    folder: Path | None = None,
    *,
    data_root: Path | None = None,
    test_views: Annotated[int | None, typer.Option(min=0, max=256)] = None,
    specificity: options.Share = 0.95,
    prevalence: Annotated[float | None, typer.Option(min=0, max=1)] = None,
    by: Annotated[str | None, typer.Option(metavar="COLUMN")] = None,
    plot: Path | None = None,
    report_: bool = False,
    trust: options.Trust = None,
    json_: bool = False,
) -> None:
    """Scores the averaged weights on the run's held-out images, or on a folder of others. These
    numbers are not private.

    Args:
        test_views: Random views of each image that decide together; default as in the recipe.
        specificity: At which each class's sensitivity is told.
        prevalence: Share of positive images where the model is used; default: as among these images.
        by: A column of the folder's table: accuracy of each of its values.
        plot: Draws how often it is right against how sure it says it is (.svg, .png or .pdf).
        report_: Puts these images into report.html: name and size of the folder, every number, the day. Published.

    Example:
        sfumato evaluate runs/xrays xrays-of-2026 --report
    """
    from sfumato.evaluation.evaluate import FORMATS, draw_reliability
    from sfumato.evaluation.evaluate import evaluate as score_run
    from sfumato.reporting.page import write_report
    from sfumato.run_folder.files import refuse_drawing

    if plot is not None:
        refuse_drawing(plot, "--plot", FORMATS)
    how: dict[str, Any] = {"test_views": test_views, "specificity": specificity, "prevalence": prevalence, "by": by}
    how["publish"] = report_
    found = score_run(run, folder, data_root=data_root, trust=trust or (), report=output.note, **how)
    if report_:
        output.note(f"report {write_report(run)} tells of this test set, and evaluation.json beside it")
    output.answer(found, json_, _show)
    if plot is not None:  # last: what was computed is told by now
        draw_reliability(found, plot)


def _show(found: "Evaluation") -> None:
    from sfumato.reporting.tested import class_table, group_table, in_words

    for line in in_words(found):
        output.say(line)
    output.print_augtest(found.test_views, found.accuracy_augtest_vote, found.accuracy_augtest_mean)
    if found.calibration_error is not None:
        how = "" if found.calibration is not None else " (probabilities are not calibrated: sfumato calibrate)"
        output.say(f"calibration error {output.per_cent(found.calibration_error)}{how}")
    if (groups := group_table(found)) is not None:
        _say_table(*groups)
    if found.is_multilabel:
        return _say_table(*class_table(found))
    areas = ["-" if area is None else f"{area:.3f}" for area in found.auroc_per_class]
    shares = (map(output.per_cent, each) for each in (found.per_class, found.sensitivity_per_class))
    names = ["class", "accuracy", f"sensitivity at specificity {found.specificity:g}", "AUROC"]
    _say_table(names, [list(row) for row in zip(found.classes, *shares, areas, strict=True)])
    confusions = [
        (count, label, decided)
        for label, row in zip(found.classes, found.confusion, strict=True)
        for decided, count in zip(found.classes, row, strict=True)
        if label != decided and count
    ]
    for count, label, decided in sorted(confusions, key=lambda cell: -cell[0])[:_MOST_CONFUSIONS]:
        output.say(f"{count} of {label} taken for {decided}")


def _say_table(names: list[str], rows: list[list[str]]) -> None:
    widths = [max(map(len, column)) for column in zip(names, *rows, strict=True)]
    for row in (names, *rows):
        output.say("  " + "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip())


def predict(
    run: Path,
    images: list[Path],
    *,
    format_: Literal["text", "csv", "jsonl"] = "text",
    trust: options.Trust = None,
    json_: bool = False,
) -> None:
    """Names the class of each image, with the model's probabilities where they are calibrated.

    Args:
        images: Image files, folders of them, patterns; - reads names from stdin.
        format_: A line for each image, as text, CSV or JSON.

    Example:
        sfumato predict runs/xrays new-image.png
    """
    from sfumato.evaluation.classifier import Classifier

    classifier = Classifier(run, trust or ())
    if (mixing := classifier.dependence) is not None:
        output.warn(f"answers depend on which images are judged together: {mixing}")
    if not classifier.is_calibrated:
        output.note(
            f"no probabilities are shown: nobody has calibrated them. Do so by `sfumato calibrate {run} FOLDER` with "
            "labelled images"
        )
    if (missing := classifier.missing_threshold) is not None:
        output.warn(missing)
    calibration = classifier.trained.calibration
    threshold = None if calibration is None else calibration.threshold
    if calibration is not None and (limits := calibration.all_thresholds):
        each = ", ".join(f"{limit.positive} is named from probability {limit.probability:.4f} on" for limit in limits)
        output.note(f"{each}, for a {limits[0].aim} of {output.per_cent(limits[0].at)}")
    named = [Path(line) for line in sys.stdin.read().splitlines() if line] if Path("-") in images else []
    started = time.perf_counter()

    def tell(done: int, of: int) -> None:
        if of > done or done > 512:
            output.note(formats.progress("images", done, of, time.perf_counter() - started))

    found = classifier.each([path for path in images if path != Path("-")] + named, tell)
    if json_:
        output.print_json({"run": str(run), "predictions": [_row(one) for one in found]})
        return
    writer = csv.writer(sys.stdout, lineterminator="\n")
    if format_ == "csv":
        writer.writerow(["image", "class", "probability", "why", *map(_cell, classifier.classes)])
    for one in found:
        if one.why is not None:
            output.note(f"{one.image} cannot be read: {one.why}")
        if format_ == "jsonl":
            output.say(json.dumps(_row(one), allow_nan=False))
        elif format_ == "csv":
            shares = [(one.probabilities or {}).get(name) for name in classifier.classes]
            row = [_cell(output.plain(one.image)), _cell(_named(one) or ""), one.probability, one.why]
            writer.writerow([*row, *shares])
        else:
            output.say(f"{one.image}  {_named(one) or 'unreadable'}{_sure(one, threshold)}")


def _named(one: "Prediction") -> str | None:
    """Its class, or its labels."""
    return one.class_name if one.labels is None else " | ".join(one.labels) or "no label"


def _cell(text: str) -> str:
    """What a spreadsheet shows, and does not compute."""
    return f"'{text}" if text.startswith(("=", "+", "-", "@")) else text


def _sure(one: "Prediction", threshold: "Threshold | None") -> str:
    """The probability of the class that is named; where a threshold decides, of the one that is looked
    for. Never certainty.
    """
    if one.probabilities is None:
        return ""
    if one.labels is not None:
        return "".join(f"  {label} {output.per_cent(one.probabilities[label])}" for label in one.labels)
    name = "  " if threshold is None else f"  {threshold.positive} "
    value = (one.probability or 0.0) if threshold is None else one.probabilities[threshold.positive]
    if value < 0.0001:
        return f"{name}below 0.01 %"
    return f"{name}above 99.99 %" if value > 0.9999 else f"{name}{output.per_cent(value)}"


def _row(one: "Prediction") -> dict[str, object]:
    return {"image": one.image, "class": one.class_name, **one.model_dump(exclude={"image", "class_name"})}


def calibrate(
    run: Path,
    folder: Path | None = None,
    *,
    positive: str | None = None,
    sensitivity: float | None = None,
    specificity: float | None = None,
    publish: bool = False,
    data_root: Path | None = None,
    trust: options.Trust = None,
    json_: bool = False,
) -> None:
    """Fits probabilities, and a threshold where one is asked for, on images with labels. `predict` and
    `evaluate` use them from then on. Not private with respect to these images.

    Args:
        positive: The one of two classes that is looked for; default: the second. Of several labels an image: the one
            that gets a threshold; default: each.
        sensitivity: Of two classes, or each label: finds at least this share of the positive images.
        specificity: Likewise: leaves at least this share of the others alone.
        publish: Writes it into model.safetensors too, for whoever has a copy. No epsilon covers these images.

    Example:
        sfumato calibrate runs/xrays xrays-of-spring --positive PNEUMONIA --sensitivity 0.95
    """
    from sfumato.evaluation.evaluate import calibrate as fit
    from sfumato.reporting.page import write_report

    aim: dict[str, Any] = {"positive": positive, "sensitivity": sensitivity, "specificity": specificity}
    found = fit(run, folder, publish=publish, data_root=data_root, trust=trust or (), report=output.note, **aim)
    write_report(run)
    output.answer(found, json_, lambda found: _show_calibration(found, run, publish))


def _show_calibration(found: "Calibration", run: Path, publish: bool) -> None:
    shifts = "" if found.shifts is None else f", shifts {', '.join(f'{shift:+.3f}' for shift in found.shifts)}"
    output.say(f"temperature {found.temperature:.4g}{shifts}; fitted on {found.num_images} {found.fitted_on} images")
    for each in found.all_thresholds:
        output.say(
            f"{each.positive} from probability {each.probability:.4f} on: {each.aim} {output.per_cent(each.at)} or "
            "more on these images"
        )
    output.say(
        f"written to {run / 'calibration.json'}{' and the weights' * publish}, which `evaluate` and `predict` use; not "
        "private with respect to these images. report.html says so, and tells of accuracies without it"
    )
