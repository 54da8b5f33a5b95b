"""`sfumato predict`: classes and probabilities for images."""

from pathlib import Path
from typing import Annotated, Any

import typer

from sfumato.cli import options, output
from sfumato.errors import InputError


def predict(
    run: options.Run,
    images: Annotated[list[Path], typer.Argument(help="Image files, or folders of them.")],
    trust: options.Trust = None,
    json_: options.Json = False,
) -> None:
    """Names the class of each image, with the model's probabilities."""
    import torch

    from sfumato.data.folders import decode_images
    from sfumato.evaluation.row_independence import evaluation_finding
    from sfumato.evaluation.scores import predict_logits
    from sfumato.evaluation.trained import load_run

    trained = load_run(run, trust or ())
    paths, decoded = decode_images(
        images, image_size=trained.image_size, channels=trained.channels, mean=trained.mean, std=trained.std, report=output.note
    )
    if (mixing := evaluation_finding(trained.model, trained.row)) is not None:
        output.warn(f"answers depend on which images are judged together: {mixing}")
    logits = trained.objective.decision_logits(predict_logits(trained.model, decoded))
    if not logits[decoded.readable].isfinite().all():
        raise InputError(f"the model of {run} gives no finite outputs, so it names no class. Train again with a smaller optimizer.learning_rate.")
    rows: list[dict[str, Any]] = []
    for path, readable, probabilities in zip(paths, decoded.readable.tolist(), torch.softmax(logits.double(), 1).tolist(), strict=True):
        best = max(range(len(probabilities)), key=probabilities.__getitem__)
        rows.append(
            {
                "image": str(path),
                "class": trained.classes[best] if readable else None,
                "probability": probabilities[best] if readable else None,
                "probabilities": dict(zip(trained.classes, probabilities, strict=True)) if readable else None,
            }
        )
    if json_:
        output.print_json({"run": str(run), "predictions": rows})
        return
    for row in rows:
        output.say(f"{row['image']}  {row['class'] or 'unreadable'}  {output.per_cent(row['probability'])}")
