"""`sfumato evaluate`: how good a trained model is on held-out images."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from sfumato.cli import options, output

if TYPE_CHECKING:
    from sfumato.evaluation.evaluate import Decision, Evaluation

_MOST_CONFUSIONS = 3


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
    from sfumato.evaluation.evaluate import draw_reliability, require_plot
    from sfumato.evaluation.evaluate import evaluate as score_run

    if plot is not None:
        require_plot(plot)
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
        draw_reliability(found, plot)


def _show(found: "Evaluation", specificity: float) -> None:
    where = "images of the folder" if found.held_out == "folder" else f"{found.held_out} images"
    balanced, majority = output.per_cent(found.balanced_accuracy), output.per_cent(found.majority_rate)
    output.say(
        f"{found.num_images} {where}: accuracy {output.share(found.accuracy, found.intervals.accuracy)}, balanced "
        f"{balanced}; always naming the largest class: {majority}"
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
        right = output.share(group.accuracy, group.interval)
        output.say(f"  {group.value or '(not stated)':<24}{group.num_images:>10}   {right}")
    confusions = [
        (count, label, decided)
        for label, row in zip(found.classes, found.confusion, strict=True)
        for decided, count in zip(found.classes, row, strict=True)
        if label != decided and count
    ]
    for count, label, decided in sorted(confusions, key=lambda cell: -cell[0])[:_MOST_CONFUSIONS]:
        output.say(f"{count} of {label} taken for {decided}")


def _show_decision(decision: "Decision") -> None:
    counts = decision.counts
    output.say(
        f"{decision.positive} from probability {decision.threshold:.4f} on: {counts['found']} found, "
        f"{counts['missed']} missed, {counts['false_alarms']} false alarms, {counts['left_alone']} left alone"
    )
    output.say(
        f"  sensitivity {output.share(decision.sensitivity, decision.sensitivity_interval)}, specificity "
        f"{output.share(decision.specificity, decision.specificity_interval)}"
    )
    output.say(
        f"  where {output.per_cent(decision.prevalence)} of images are {decision.positive}: of those named so "
        f"{output.per_cent(decision.positive_predictive_value)} are right, of the others "
        f"{output.per_cent(decision.negative_predictive_value)}"
    )
