"""Options that several commands have, each with one spelling and one explanation."""

from pathlib import Path
from typing import Annotated

import typer

from sfumato.errors import InputError

Recipe = Annotated[str, typer.Argument(help="A shipped recipe (`sfumato recipes list`) or the path of a TOML file.")]
Run = Annotated[Path, typer.Argument(help="A run folder.")]
Output = Annotated[Path | None, typer.Option("--output", help="The run folder; default: runs/<recipe>-<time>.")]
Set = Annotated[
    list[str] | None, typer.Option("--set", metavar="SECTION.KEY=VALUE", help="Changes one key of the recipe.")
]
Epsilon = Annotated[float | None, typer.Option(help="Target epsilon of a private run.")]
DataRoot = Annotated[Path | None, typer.Option(help="Where the data lies; for named data sets default: $SFUMATO_DATA.")]
Delta = Annotated[float | None, typer.Option(help="Delta; default: the largest power of ten up to 1/(10 N).")]
ImagesPerPerson = Annotated[
    int | None, typer.Option(help="At most so many training images of one person; the rest is left out.")
]
Device = Annotated[str, typer.Option(help="auto, cpu, cuda ...")]
MaxLost = Annotated[
    float,
    typer.Option(
        min=0, max=1, help="The share of the planned updates that crashes may cost the model; they count for epsilon."
    ),
]
Trust = Annotated[
    list[str] | None,
    typer.Option(
        "--trust", metavar="PACKAGE.MODULE", help="Lets a file name this module for its model's code; may be repeated."
    ),
]


def _without_cache(context: typer.Context, asked: bool) -> bool:
    if asked:
        from sfumato.data import store

        context.with_resource(store.switched_off())
    return asked


NoCache = Annotated[
    bool,
    typer.Option(
        "--no-cache", callback=_without_cache, help="Keeps no decoded images or features on disk, and reads none."
    ),
]
LabelledImages = Annotated[
    Path | None,
    typer.Argument(help="Images with labels, not trained on; default: what the run held out.", show_default=False),
]
Json = Annotated[bool, typer.Option("--json", help="One JSON object on stdout.")]


def parse_seeds(text: str) -> list[int]:
    """Whole numbers with commas between them, or from one to another: 0,1,2 or 0..2."""
    seeds: list[int] = []
    try:
        for part in text.split(","):
            first, _, last = part.partition("..")
            seeds += [int(part)] if not last else range(int(first), int(last) + 1)
    except ValueError:
        raise InputError(
            f"--seeds takes whole numbers with commas between them, such as 0,1,2 or 0..2, not {text!r}."
        ) from None
    return seeds
