"""`sfumato evaluate`: how good a trained model is on held-out images."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from sfumato.cli import options, output

if TYPE_CHECKING:
    from sfumato.evaluation.use import Decision, Evaluation


def evaluate(
    run: options.Run,
    folder: options.LabelledImages = None,
    data_root: options.DataRoot = None,
    test_views: Annotated[
        int | None,
        typer.Option(min=0, max=256, help="Random views of each image that decide together; default as in the recipe."),
    ] = None,
    specificity: Annotated[float, typer.Option(min=0, max=1, help="At which each class's sensitivity is told.")] = 0.95,
    prevalence: Annotated[
        float | None,
        typer.Option(
            min=0, max=1, help="Share of positive images where the model is used; default: as among these images."
        ),
    ] = None,
    by: Annotated[
        str | None,
        typer.Option(metavar="COLUMN", help="A column of the folder's table: accuracy of each of its values."),
    ] = None,
    plot: Annotated[
        Path | None,
        typer.Option(help="Draws how often it is right against how sure it says it is (.svg, .png or .pdf)."),
    ] = None,
    trust: options.Trust = None,
    json_: options.Json = False,
) -> None:
    """Scores the averaged weights on the run's held-out images, or on a folder of others. These
    numbers are not private.
    """
    from sfumato.evaluation import reliability_plot
    from sfumato.evaluation.use import evaluate as score_run

    if plot is not None:
        reliability_plot.check(plot)
    found = score_run(
        run,
        folder,
        data_root=data_root,
        test_views=test_views,
        specificity=specificity,
        prevalence=prevalence,
        by=by,
        trust=trust or (),
        report=output.note,
    )
    output.answer(found, json_, lambda found: _show(found, specificity))
    if plot is not None:  # last: what was computed is told by now
        reliability_plot.draw(found, plot)


def _show(found: "Evaluation", specificity: float) -> None:
    where = "images of the folder" if found.held_out == "folder" else f"{found.held_out} images"
    low, high = found.intervals.accuracy
    output.say(
        f"{found.num_images} {where}: accuracy {output.per_cent(found.accuracy)} "
        f"({output.per_cent(low)} to {output.per_cent(high)}), balanced {output.per_cent(found.balanced_accuracy)}; "
        f"always naming the largest class: {output.per_cent(found.majority_rate)}"
    )
    output.print_augtest(found.test_views, found.accuracy_augtest_vote, found.accuracy_augtest_mean)
    if found.auroc is not None:
        low, high = found.intervals.auroc or (found.auroc, found.auroc)
        output.say(f"AUROC {found.auroc:.4f} ({low:.4f} to {high:.4f})")
    if found.calibration_error is not None:
        how = "" if found.calibration is not None else " (probabilities are not calibrated: sfumato calibrate)"
        output.say(f"calibration error {output.per_cent(found.calibration_error)}{how}")
    if found.decision is not None:
        _show_decision(found.decision)
    output.say(f"  {'class':<24}{'accuracy':>10}{f'sensitivity at specificity {specificity:g}':>36}")
    for name, accuracy, sensitivity in zip(found.classes, found.per_class, found.sensitivity_per_class, strict=True):
        output.say(f"  {name:<24}{output.per_cent(accuracy):>10}{output.per_cent(sensitivity):>36}")
    if found.groups is not None:
        output.say(f"  {found.by:<24}{'images':>10}{'accuracy':>10}")
    for group in found.groups or []:
        interval, name = " to ".join(map(output.per_cent, group.interval)), group.value or "(not stated)"
        output.say(f"  {name:<24}{group.num_images:>10}{output.per_cent(group.accuracy):>10} ({interval})")
    for count, label, decided in _largest_confusions(found.confusion, found.classes):
        output.say(f"{count} of {label} taken for {decided}")


def _show_decision(decision: "Decision") -> None:
    def told(share: float | None, interval: list[float] | None) -> str:
        return "-" if interval is None else f"{output.per_cent(share)} ({' to '.join(map(output.per_cent, interval))})"

    counts = decision.counts
    output.say(
        f"{decision.positive} from probability {decision.threshold:.4f} on: {counts['found']} found, "
        f"{counts['missed']} missed, {counts['false_alarms']} false alarms, {counts['left_alone']} left alone"
    )
    output.say(
        f"  sensitivity {told(decision.sensitivity, decision.sensitivity_interval)}, specificity "
        f"{told(decision.specificity, decision.specificity_interval)}"
    )
    output.say(
        f"  where {output.per_cent(decision.prevalence)} of images are {decision.positive}: of those named so "
        f"{output.per_cent(decision.positive_predictive_value)} are right, of the others "
        f"{output.per_cent(decision.negative_predictive_value)}"
    )


def _largest_confusions(confusion: list[list[int]], classes: list[str], most: int = 3) -> list[tuple[int, str, str]]:
    found = [
        (count, label, decided)
        for label, row in zip(classes, confusion, strict=True)
        for decided, count in zip(classes, row, strict=True)
        if label != decided and count
    ]
    return sorted(found, key=lambda cell: -cell[0])[:most]
