"""`sfumato evaluate`: how good a trained model is on held-out images."""

from pathlib import Path
from typing import Annotated

import typer

from sfumato.cli import options, output


def evaluate(
    run: options.Run,
    data_root: Annotated[
        Path | None,
        typer.Option(help="Where the data lies; default as in training, where the run's owner has noted it."),
    ] = None,
    test_views: Annotated[
        int | None,
        typer.Option(min=0, max=256, help="Random views of each image that decide together; default as in the recipe."),
    ] = None,
    trust: options.Trust = None,
    json_: options.Json = False,
) -> None:
    """Scores the averaged weights on the run's held-out images. These numbers are not private."""
    from sfumato.evaluation.use import evaluate as score_run

    found = score_run(run, data_root=data_root, test_views=test_views, trust=trust or (), report=output.note)
    if json_:
        output.print_json(found.as_json())
        return
    output.say(
        f"{found.num_images} {found.held_out} images: accuracy {output.per_cent(found.accuracy)}, "
        f"balanced {output.per_cent(found.balanced_accuracy)}; always naming the largest class: "
        f"{output.per_cent(found.majority_rate)}"
    )
    output.print_augtest(found.test_views, found.accuracy_augtest_vote, found.accuracy_augtest_mean)
    if found.auroc is not None:
        output.say(f"AUROC {found.auroc:.4f}")
    for name, accuracy in zip(found.classes, found.per_class, strict=True):
        output.say(f"  {name:<24}{output.per_cent(accuracy)}")
