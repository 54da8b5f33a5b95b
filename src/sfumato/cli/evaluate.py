"""`sfumato evaluate`: how good a trained model is on held-out images."""

from pathlib import Path
from typing import Annotated

import typer

from sfumato.cli import options, output


def evaluate(
    run: options.Run,
    data_root: Annotated[Path | None, typer.Option(help="Where the data lies; default as in training.")] = None,
    test_views: Annotated[
        int | None,
        typer.Option(min=0, max=256, help="Random views of each image that decide together; default as in the recipe."),
    ] = None,
    json_: options.Json = False,
) -> None:
    """Scores the averaged weights on the run's held-out images. These numbers are not private."""
    from sfumato.data import datasets
    from sfumato.training.augtest import augtest
    from sfumato.training.evaluation import predict_logits, score
    from sfumato.training.step import Views
    from sfumato.training.trained import load_run

    trained = load_run(run)
    recipe = trained.recipe
    if recipe.data.name == "folder" and data_root is not None:
        recipe = recipe.model_copy(update={"data": recipe.data.model_copy(update={"path": str(data_root)})})
    dataset = datasets.load_for(recipe, data_root, output.note)
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
    print(f"{facts['num_images']} {facts['held_out']} images: accuracy {output.per_cent(facts['accuracy'])}", end="")
    print(f", balanced {output.per_cent(facts['balanced_accuracy'])}; always naming the largest class: {output.per_cent(facts['majority_rate'])}")
    output.print_augtest(facts)
    if facts["auroc"] is not None:
        print(f"AUROC {facts['auroc']:.4f}")
    for name, accuracy in zip(facts["classes"], facts["per_class"], strict=True):
        print(f"  {name:<24}{output.per_cent(accuracy)}")
