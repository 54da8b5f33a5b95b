"""`sfumato predict`: classes and probabilities for images."""

from pathlib import Path
from typing import Annotated

import typer

from sfumato.cli import options, output


def predict(
    run: options.Run,
    images: Annotated[list[Path], typer.Argument(help="Image files, or folders of them.")],
    trust: options.Trust = None,
    json_: options.Json = False,
) -> None:
    """Names the class of each image, with the model's probabilities."""
    from sfumato.evaluation.use import predict as name_classes

    found = name_classes(run, images, trust=trust or (), report=output.note)
    if json_:
        rows = [
            {"image": row.image, "class": row.class_name, **row.model_dump(include={"probability", "probabilities"})}
            for row in found
        ]
        output.print_json({"run": str(run), "predictions": rows})
        return
    for row in found:
        output.say(f"{row.image}  {row.class_name or 'unreadable'}  {output.per_cent(row.probability)}")
