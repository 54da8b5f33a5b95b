"""`sfumato search`: cheap search at a constant total amount of noise, then the one private recipe."""

import shlex
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from sfumato.cli import options, output
from sfumato.cli.train import asked, trust_options
from sfumato.errors import InputError
from sfumato.reporting import formats

if TYPE_CHECKING:
    from sfumato.searching.result import PrivateSearchResult, SearchResult


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
    epsilon: options.Epsilon = None,
    delta: options.Delta = None,
    set_: options.Set = None,
    storage: Annotated[
        str | None, typer.Option(help="sqlite:///FILE or postgresql://...; default: a file in --output.")
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
    name, parsed, trusted = asked(
        recipe, epsilon=epsilon, delta=delta, assignments=set_, data_root=data_root, trust=trust
    )
    if not 1 <= trials <= 1_000_000:
        raise InputError(f"--trials must lie between 1 and 1000000, not {trials}.")
    if paid:
        _refuse_beside_paid(sampler, prune, storage, worker, batch_size, seeds)
    elif score_noise is not None:
        raise InputError(
            "--score-noise is for --paid: simulations are not private, whatever noise their scores have. Leave it out."
        )
    elif worker and storage is None:
        raise InputError("--worker joins a search that others take part in: name their --storage.")
    numbers = options.parse_seeds(seeds or "0,1,2")

    from sfumato.searching.options import SearchOptions
    from sfumato.searching.private import private_search
    from sfumato.searching.search import search_by

    wanted = SearchOptions(
        parsed,
        trials,
        output_folder or Path("runs") / f"{name.replace('/', '-')}-{'paid-search' if paid else 'search'}",
        name=name,
        space=space,
        sampler=sampler or "greedy",
        prune=prune,
        batch_size=batch_size,
        seeds=numbers,
        data=data,
        storage=storage,
        worker=worker,
        score_noise=score_noise,
        data_root=data_root,
        device=device,
        trust=trusted,
        report=output.note,
    )
    with output.interruptible():
        if paid:
            best = private_search(wanted)
        else:
            found = search_by(wanted)
    if json_:
        output.print_json((best if paid else found).as_json())
    elif paid:
        show_paid(best)
    else:
        # No part of the recipe, which is for sharing.
        root = ["--data-root", parsed.data.path] if parsed.data.path is not None else []
        show(found, [*root, *trust_options(trusted)])


def _refuse_beside_paid(
    sampler: str | None,
    prune: bool | None,
    storage: str | None,
    worker: bool,
    batch_size: int | None,
    seeds: str | None,
) -> None:
    """Refuses options that would void the accounting, each with its reason."""
    for option, is_given, why in (
        (f"--sampler {sampler}", sampler not in (None, "random"), "trials must be drawn independently of those before"),
        ("--prune", prune, "a trial that is given up early would tell of its score"),
        ("--storage", storage is not None, "others who read the storage would learn how many trials there are"),
        ("--worker", worker, "others would learn how many trials there are"),
        ("--batch-size", batch_size is not None, "trials are whole private runs, not simulations"),
        ("--seeds", seeds is not None, "a public seed would make every trial public"),
    ):
        if is_given:
            raise InputError(f"--paid does not go with {option}: {why}. Leave it out.")


def show(found: "SearchResult", more: list[str]) -> None:
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


def show_paid(found: "PrivateSearchResult") -> None:
    """The result of a paid search in words."""
    output.say(
        f"selected {found.best.run}: {output.per_cent(found.best.accuracy)} on the images by which it was selected"
    )
    output.say(f"held-out accuracy {output.per_cent(found.accuracy)}")
    output.say(
        f"epsilon {formats.epsilon_text(found.epsilon_search_inclusive)} at delta "
        f"{formats.delta_text(found.delta)}, the search included (by RDP)"
    )
    output.say("not covered: the running time; how many trials there were must stay secret, and nothing here tells")
