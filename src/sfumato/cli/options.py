"""How commands take and explain their options: a command is a function, and its docstring says what each one is."""

import copy
import inspect
import re
from collections.abc import Callable
from typing import Annotated, Any, get_args, get_origin

import typer

from sfumato.errors import InputError

EXPLAINED = {
    "recipe": "A shipped recipe (`sfumato recipes list`) or the path of a TOML file.",
    "run": "A run folder.",
    "folder": "Images with labels, not trained on; default: what the run held out.",
    "epsilon": "Target epsilon of a private run.",
    "delta": "Delta; default: the largest power of ten up to 1/(10 N).",
    "accountant": "pld (tighter) or rdp.",
    "budget": "The file of a budget (sfumato budget new) that each run reserves its plan in, or is refused.",
    "set_": "Changes one key of the recipe.",
    "data_root": "Where the data lies; for named data sets default: $SFUMATO_DATA.",
    "seeds": "One run for each, its seed public, so not private: 0,1,2 or a range, 0-4.",
    "device": "auto, cpu, cuda ...",
    "max_lost": "The share of the planned updates that crashes may cost the model; they count for epsilon.",
    "trust": "Lets a file name this module for its model's code; may be repeated.",
    "no_cache": "Keeps no decoded images or features on disk, and reads none.",
    "paired": "Run n of every cell has the public seed n - 1: to compare, not private.",
    "workers": "Processes on this machine.",
    "confidence": "Of each bound.",
    "page": "An HTML file to write: the attack's curve, its scores, its bounds.",
    "json_": "One JSON object on stdout.",
}
"""What several commands take, by the parameter's name: each has one spelling and one explanation."""


def _without_cache(context: typer.Context, asked: bool) -> bool:
    if asked:
        from sfumato.data import store

        context.with_resource(store.switched_off())
    return asked


MOST_SEEDS = 1000

Set = Annotated[list[str] | None, typer.Option(metavar="SECTION.KEY=VALUE")]
Trust = Annotated[list[str] | None, typer.Option(metavar="PACKAGE.MODULE")]
Share = Annotated[float, typer.Option(min=0, max=1)]
Workers = Annotated[int, typer.Option(min=1, max=1024)]
NoCache = Annotated[bool, typer.Option(callback=_without_cache)]


def add(app: typer.Typer, *commands: Callable[..., Any]) -> None:
    """Adds commands. Parameters before the * are arguments, the others options: `set_` is --set. Each is explained
    under Args in the docstring, or in `EXPLAINED`; a line under Example ends the help.
    """
    for command in commands:
        told, _, example = inspect.cleandoc(command.__doc__ or "").partition("\n\nExample:\n")
        text, _, listed = told.partition("\n\nArgs:\n")
        said = EXPLAINED | dict(re.findall(r"^    (\w+): (.+(?:\n {5,}.+)*)", listed, re.MULTILINE))
        for name, parameter in inspect.signature(command).parameters.items():
            kind, info = parameter.annotation, None
            if get_origin(kind) is Annotated:
                kind, info = get_args(kind)
            if parameter.kind is not parameter.KEYWORD_ONLY:
                info = typer.Argument(show_default=False)
            else:
                info = copy.copy(info) or typer.Option()
                if info.default is ...:  # a name that is given lies here, too
                    info.default = f"--{name.strip('_').replace('_', '-')}"
            info.help = " ".join(said.get(name, "").split())  # there are no docstrings under python -OO
            command.__annotations__[name] = Annotated[kind, info]
        name = command.__name__.strip("_").replace("_", "-")
        app.command(name, help=text, epilog=f"Example: {example.strip()}")(command)


def parse_seeds(text: str) -> list[int]:
    """Whole numbers and ranges with commas between them: 0,1,2 or 0-4 (or 0..4), each seed once."""
    seeds: list[int] = []
    if re.fullmatch(r"\d{1,18}((\.\.|-)\d{1,18})?(,\d{1,18}((\.\.|-)\d{1,18})?)*", text):
        ends = [re.split(r"\.\.|-", part) for part in text.split(",")]
        seeds = [seed for each in ends for seed in range(int(each[0]), int(each[-1]) + 1)[:MOST_SEEDS]]
    if not seeds or len(set(seeds)) != len(seeds) or len(seeds) >= MOST_SEEDS:
        what = f"fewer than {MOST_SEEDS} whole numbers and ranges such as 0,1,2 or 0-4, each seed once"
        raise InputError(f"--seeds takes {what}, not {text[:40]!r}: equal seeds give equal runs.")
    return seeds


def runs_of_a_cell(text: str | None, paired: bool) -> tuple[int | None, bool]:
    """How many runs --seeds asks for in a sweep, where a number alone is how many, and whether they are paired."""
    if text is None or re.fullmatch(r"\d{1,18}", text):
        return None if text is None else int(text), paired
    if (seeds := parse_seeds(text)) != list(range(len(seeds))):
        raise InputError(f"--seeds {text[:40]}: a cell's seeds begin at 0. Give a range such as 0-4, or how many runs.")
    return len(seeds), True
