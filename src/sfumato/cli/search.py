"""`sfumato search`: cheap search at a constant total amount of noise, then the one private recipe."""

import shlex
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from sfumato import config, recipes
from sfumato.cli import options, output, paid_search
from sfumato.cli.simulate import parse_seeds
from sfumato.cli.train import override, trust_options, trusted_modules
from sfumato.errors import InputError
from sfumato.reporting import formats
from sfumato.run_folder.files import refuse_among_images

if TYPE_CHECKING:
    from sfumato.scaling.search.result import SearchResult


def search(
    recipe: Annotated[str, typer.Argument(help="Of the expensive run: a shipped recipe or the path of a TOML file.")],
    trials: Annotated[int, typer.Option(help="How many settings are tried.")],
    space: Annotated[
        Path | None, typer.Option(help="TOML file of what may be changed; default: the grid of Sander et al. 2022.")
    ] = None,
    sampler: Annotated[
        str | None, typer.Option(help="greedy (one group after another), tpe or random; default: greedy.")
    ] = None,
    prune: Annotated[bool | None, typer.Option(help="Give up trials that fall behind; with tpe and random.")] = None,
    paid: Annotated[
        bool,
        typer.Option(
            "--paid",
            help="Trials are private runs within one budget; the best is the product. Needs --data or --score-noise.",
        ),
    ] = False,
    score_noise: Annotated[
        float | None, typer.Option(help="With --paid, instead of --data: noise on the private images judged right.")
    ] = None,
    batch_size: Annotated[
        int | None, typer.Option(help="B of the simulations; default: a 64th of the recipe's, at least 16.")
    ] = None,
    seeds: Annotated[
        str | None, typer.Option(help="Comma-separated; each trial is one run for each; default: 0,1,2.")
    ] = None,
    data: Annotated[
        str | None, typer.Option(help="Search on this public data set instead, or score --paid trials on it.")
    ] = None,
    epsilon: Annotated[float | None, typer.Option(help="Target epsilon of the final run.")] = None,
    delta: Annotated[float | None, typer.Option(help="Delta of the final run.")] = None,
    set_: options.Set = None,
    storage: Annotated[
        str | None, typer.Option(help="sqlite:///FILE, journal:FILE or postgresql://...; default: a file in --output.")
    ] = None,
    worker: Annotated[
        bool, typer.Option("--worker", help="Help with a search that may run elsewhere, too; needs --storage.")
    ] = False,
    output_folder: Annotated[
        Path | None,
        typer.Option("--output", help="Default: runs/<recipe>-search, or -paid-search; the same again goes on."),
    ] = None,
    data_root: options.DataRoot = None,
    device: options.Device = "auto",
    trust: options.Trust = None,
    json_: options.Json = False,
) -> None:
    """Searches hyper-parameters by cheap simulations and ends with one recipe for the single
    private run.
    """
    name, values = recipes.read(recipe)
    override(values, epsilon=epsilon, delta=delta, accountant=None, assignments=set_ or [], data_root=data_root)
    parsed = config.parse(values)
    trusted = trusted_modules(parsed, set_ or [], trust or [])
    if trials < 1:
        raise InputError(f"--trials must be at least 1, not {trials}.")
    if trials > 1_000_000:
        raise InputError(f"--trials must be at most 1000000, not {trials}: nobody can make so many.")
    if data is not None and data == parsed.data.name:
        raise InputError(
            f"--data {data} are the private images themselves. Name other, public images, or leave --data out."
        )
    folder = output_folder or Path("runs") / f"{name.replace('/', '-')}-{'paid-search' if paid else 'search'}"
    refuse_among_images(folder, parsed.data)
    if paid:
        refused = {
            "--storage": storage,
            "--worker": worker,
            "--prune": prune,
            "--batch-size": batch_size,
            "--seeds": seeds,
        }
        paid_search.refuse(refused, sampler)
        best = paid_search.run(
            parsed,
            trials,
            folder,
            space=space,
            data=data,
            score_noise=score_noise,
            data_root=data_root,
            device=device,
            trust=trusted,
        )
        if json_:
            output.print_json(best.as_json())
        else:
            paid_search.show(best)
        return
    if score_noise is not None:
        raise InputError(
            "--score-noise is for --paid: simulations are not private, whatever noise their scores have. Leave it out."
        )
    numbers = parse_seeds(seeds or "0,1,2")
    if worker and storage is None:
        raise InputError("--worker joins a search that others take part in: name their --storage.")

    from sfumato.scaling.search.run import search as run_search
    from sfumato.scaling.search.storage import shown
    from sfumato.training.interrupt import Interrupted

    try:
        found = run_search(
            parsed,
            trials,
            output=folder,
            name=name,
            space=space,
            sampler=sampler or "greedy",
            prune=prune,
            batch_size=batch_size,
            seeds=numbers,
            data=data,
            storage=storage,
            worker=worker,
            data_root=data_root,
            device=device,
            trust=trusted,
            report=output.note,
        )
    except (Interrupted, KeyboardInterrupt):
        again = shlex.join(["sfumato", *sys.argv[1:]])
        if storage is not None:  # its password is not for logs
            again = again.replace(storage, shown(storage))
        output.note(f"interrupted; every finished trial is kept. Go on with the same command: {again}")
        raise typer.Exit(1) from None
    if json_:
        output.print_json(found.as_json())
    else:
        root = (
            ["--data-root", parsed.data.path] if parsed.data.path is not None else []
        )  # no part of the recipe, which is for sharing
        _show(found, [*root, *trust_options(trusted)])


def _show(found: "SearchResult", more: list[str]) -> None:
    """The result in words; `more` are the options that training the final recipe needs besides."""
    for stage in found.stages:
        needed = "" if stage.needed is None else f" (chance alone: up to {100 * stage.needed:.2f})"
        verdict = "kept" if stage.counts else "not a gain, left as it was"
        output.say(
            f"{stage.name:<16}"
            + (f"{100 * stage.gain:+.2f} points{needed}: {verdict}" if stage.gain > 0 else "nothing better was found")
        )
        output.say(f"  tried: {_in_words(stage.tried)}")
        if stage.untried:
            output.say(f"  not tried, for want of trials: {_in_words(stage.untried)}")
    if found.augtest_gain is not None:
        output.say(
            f"{'AugTest':<16}{100 * found.augtest_gain:+.2f} points, if several views of each "
            "image are tested: no part of what follows"
        )
    for key, value in found.best.settings.items():
        output.say(f"  {key} = {value}")
    predicted = found.predicted_accuracy
    low, high = output.per_cent(predicted.low), output.per_cent(predicted.high)
    output.say(
        f"predicted at the reference: {output.per_cent(predicted.value)}, between {low} and "
        f"{high} (95 %, validation split, law {found.law})"
    )
    output.say(f"the search cost {output.per_cent(found.cost.search_fraction)} of one run of the recipe it began with")
    if found.search_data == "private":
        output.say(
            "the simulations looked at the private images: the search is not covered by the "
            "certificate of the final run"
        )
    for warning in found.warnings:
        output.warn(warning)
    if found.recipe:
        command = shlex.join(["sfumato", "train", found.recipe, *more])
        epsilon, delta = formats.epsilon_text(found.epsilon_final), formats.delta_text(found.delta)
        output.say(f"epsilon of the final run: {epsilon} at delta {delta}. Train it: {command}")


def _in_words(listed: list[dict[str, Any]]) -> str:
    """Settings on one line, the first ten of them."""
    words = [", ".join(f"{key} = {value}" for key, value in settings.items()) for settings in listed[:10]]
    more = [f"and {len(listed) - 10} more (all in search.json)"] if len(listed) > 10 else []
    return "; ".join([*words, *more]) or "nothing"
