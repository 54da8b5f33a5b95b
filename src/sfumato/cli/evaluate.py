"""`sfumato evaluate`: how good a trained model is on held-out images."""

from pathlib import Path
from typing import Annotated

import typer

from sfumato.cli import options, output


def evaluate(
    run: options.Run,
    folder: Annotated[
        Path | None,
        typer.Argument(help="Images with labels, scored whole; default: what the run held out.", show_default=False),
    ] = None,
    data_root: Annotated[
        Path | None,
        typer.Option(help="Where the data lies; default as in training, where the run's owner has noted it."),
    ] = None,
    test_views: Annotated[
        int | None,
        typer.Option(min=0, max=256, help="Random views of each image that decide together; default as in the recipe."),
    ] = None,
    specificity: Annotated[float, typer.Option(min=0, max=1, help="At which each class's sensitivity is told.")] = 0.95,
    trust: options.Trust = None,
    json_: options.Json = False,
) -> None:
    """Scores the averaged weights on the run's held-out images, or on a folder of others. These
    numbers are not private.
    """
    from sfumato.evaluation.use import evaluate as score_run

    found = score_run(
        run,
        folder,
        data_root=data_root,
        test_views=test_views,
        specificity=specificity,
        trust=trust or (),
        report=output.note,
    )
    if json_:
        output.print_json(found.as_json())
        return
    where = "images of the folder" if found.held_out == "folder" else f"{found.held_out} images"
    low, high = found.intervals.accuracy
    output.say(
        f"{found.num_images} {where}: accuracy {output.per_cent(found.accuracy)} "
        f"({output.per_cent(low)} to {output.per_cent(high)}), balanced {output.per_cent(found.balanced_accuracy)}; "
        f"always naming the largest class: {output.per_cent(found.majority_rate)}"
    )
    output.print_augtest(found.test_views, found.accuracy_augtest_vote, found.accuracy_augtest_mean)
    if found.auroc is not None:
        output.say(f"AUROC {found.auroc:.4f}")
    if found.calibration_error is not None:
        output.say(f"calibration error {output.per_cent(found.calibration_error)}")
    output.say(f"  {'class':<24}{'accuracy':>10}{f'sensitivity at specificity {specificity:g}':>36}")
    for name, accuracy, sensitivity in zip(found.classes, found.per_class, found.sensitivity_per_class, strict=True):
        output.say(f"  {name:<24}{output.per_cent(accuracy):>10}{output.per_cent(sensitivity):>36}")
    for count, label, decided in _largest_confusions(found.confusion, found.classes):
        output.say(f"{count} of {label} taken for {decided}")


def _largest_confusions(confusion: list[list[int]], classes: list[str], most: int = 3) -> list[tuple[int, str, str]]:
    found = [
        (count, label, decided)
        for label, row in zip(classes, confusion, strict=True)
        for decided, count in zip(classes, row, strict=True)
        if label != decided and count
    ]
    return sorted(found, key=lambda cell: -cell[0])[:most]
