"""`sfumato evaluate`: how good a trained model is on held-out images."""

from pathlib import Path
from typing import Annotated

import typer

from sfumato.cli import options, output
from sfumato.errors import InputError
from sfumato.run_folder.files import DATA_ROOT_FILE, read_data_root


def evaluate(
    run: options.Run,
    data_root: Annotated[Path | None, typer.Option(help="Where the data lies; default as in training, where the run's owner has noted it.")] = None,
    test_views: Annotated[
        int | None,
        typer.Option(min=0, max=256, help="Random views of each image that decide together; default as in the recipe."),
    ] = None,
    trust: options.Trust = None,
    json_: options.Json = False,
) -> None:
    """Scores the averaged weights on the run's held-out images. These numbers are not private."""
    from sfumato.data import loading as datasets
    from sfumato.evaluation.augtest import augtest
    from sfumato.evaluation.row_independence import evaluation_finding
    from sfumato.evaluation.scores import predict_logits, score
    from sfumato.evaluation.trained import load_run
    from sfumato.training.step import Views

    trained = load_run(run, trust or ())
    if data_root is None and (noted := read_data_root(run)) is not None:
        output.note(f"images of {noted}, as {run / DATA_ROOT_FILE} says")
        data_root = noted
    if data_root is None and trained.recipe.data.name == "folder":
        raise InputError(f"{run} does not say where its images lie: only its owner's note {DATA_ROOT_FILE} does. Name the folder by --data-root.")
    recipe, data = trained.recipe, trained.recipe.data
    if data.name == "folder":  # labels are numbered as the model numbers them
        path = None if data_root is None else str(data_root)
        recipe = recipe.model_copy(update={"data": data.model_copy(update={"classes": list(trained.classes), "path": path})})
    dataset = datasets.load_for(recipe, data_root, output.note)
    if (len(dataset.classes), dataset.shape) != (len(trained.classes), (trained.channels, trained.image_size, trained.image_size)):
        raise InputError(f"{run} judges other images or classes than data set {data.name} has. Give a run that was trained on it.")
    if (mixing := evaluation_finding(trained.model, trained.row)) is not None:
        output.warn(f"accuracies depend on which images are judged together: {mixing}")
    logits = trained.objective.decision_logits(predict_logits(trained.model, dataset.held_out))
    num_views = trained.recipe.augmentation.test_views if test_views is None else test_views
    views = Views.of(trained.recipe.augmentation)
    facts = {
        "run": str(run),
        "held_out": dataset.held_out_name,
        "num_images": len(dataset.held_out),
        "classes": list(dataset.classes),
        **score(logits, dataset.held_out.labels),
        **augtest(trained.model, dataset.held_out, views, num_views, trained.objective.decision_logits),
    }
    if test_views and not facts["test_views"]:
        output.note("no test with views: this run was trained without augmentation")
    if json_:
        output.print_json(facts)
        return
    balanced, majority = output.per_cent(facts["balanced_accuracy"]), output.per_cent(facts["majority_rate"])
    output.say(
        f"{facts['num_images']} {facts['held_out']} images: accuracy {output.per_cent(facts['accuracy'])}, "
        f"balanced {balanced}; always naming the largest class: {majority}"
    )
    output.print_augtest(facts)
    if facts["auroc"] is not None:
        output.say(f"AUROC {facts['auroc']:.4f}")
    for name, accuracy in zip(facts["classes"], facts["per_class"], strict=True):
        output.say(f"  {name:<24}{output.per_cent(accuracy)}")
