"""`sfumato search`: cheap search at a constant total amount of noise, then the one private recipe."""

import shlex
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from sfumato.accounting import formats
from sfumato.cli import options, output
from sfumato.cli.train import asked, trust_options
from sfumato.errors import InputError

if TYPE_CHECKING:
    from sfumato.searching.result import PrivateSearchResult, SearchResult


def search(
    recipe: str,
    *,
    trials: int,
    space: Path | None = None,
    sampler: str | None = None,
    prune: Annotated[bool | None, typer.Option("--prune/--no-prune")] = None,
    paid: bool = False,
    score_noise: float | None = None,
    batch_size: int | None = None,
    seeds: str | None = None,
    data: str | None = None,
    epsilon: float | None = None,
    delta: float | None = None,
    set_: options.Set = None,
    storage: str | None = None,
    worker: bool = False,
    output_: Path | None = None,
    budget: Path | None = None,
    data_root: Path | None = None,
    device: str = "auto",
    trust: options.Trust = None,
    json_: bool = False,
) -> None:
    """Searches hyper-parameters by cheap simulations and ends with one recipe for the single
    private run.

    Args:
        recipe: Of the expensive run: a shipped recipe or the path of a TOML file.
        trials: How many settings are tried.
        space: TOML file of what may be changed; default: the grid of Sander et al. 2022.
        sampler: greedy (one group after another), tpe or random; default: greedy.
        prune: Give up trials that fall behind; with tpe and random.
        paid: Trials are private runs within one budget; the best is the product. Needs --data or --score-noise.
        score_noise: With --paid, instead of --data: noise on the private images judged right.
        batch_size: B of the simulations; default: a 64th of the recipe's, at least 16.
        seeds: Each trial is one run for each, its seed public: 0,1,2 or a range, 0-4; default: 0-2.
        data: Search on this public data set instead, or score --paid trials on it.
        storage: sqlite:///FILE or postgresql://...; default: a file in --output.
        worker: Help with a search that may run elsewhere, too; needs --storage.
        output_: Default: runs/<recipe>-search, or -paid-search; the same again goes on.

    Example:
        sfumato search cifar10-cnn-eps-8 --trials 20 --output runs/search
    """
    name, parsed, trusted = asked(recipe, {"target_epsilon": epsilon, "delta": delta}, set_, data_root, trust)
    given: dict[str, Any] = {"sampler": sampler, "prune": prune, "storage": storage, "worker": worker}
    given |= {"batch_size": batch_size, "seeds": seeds, "budget": budget}
    _refuse(trials, paid, score_noise, given)

    from sfumato.searching.options import SearchOptions
    from sfumato.searching.private import private_search
    from sfumato.searching.search import search_by

    given |= {"sampler": sampler or "greedy", "seeds": options.parse_seeds(seeds or "0-2")}
    given |= {"space": space, "data": data, "score_noise": score_noise, "data_root": data_root, "device": device}
    folder = output_ or Path("runs") / f"{name.replace('/', '-')}-{'paid-search' if paid else 'search'}"
    wanted = SearchOptions(parsed, trials, folder, name=name, trust=trusted, report=output.note, **given)
    with output.interruptible():
        found = private_search(wanted) if paid else search_by(wanted)
    root = ["--data-root", parsed.data.path] if parsed.data.path is not None else []  # in no recipe, which is shared
    output.answer(found, json_, show_paid if paid else lambda found: show(found, [*root, *trust_options(trusted)]))


_VOID = {
    "sampler": "trials must be drawn independently of those before",
    "prune": "a trial that is given up early would tell of its score",
    "storage": "others who read the storage would learn how many trials there are",
    "worker": "others would learn how many trials there are",
    "batch_size": "trials are whole private runs, not simulations",
    "seeds": "a public seed would make every trial public",
}
"""Why these options would void the accounting of a paid search."""


def _refuse(trials: int, paid: bool, score_noise: float | None, given: dict[str, Any]) -> None:
    """Refuses options that are impossible, or would void the accounting."""
    if not 1 <= trials <= 1_000_000:
        raise InputError(f"--trials must lie between 1 and 1000000, not {trials}.")
    for key, why in _VOID.items() if paid else ():
        value = given[key]
        if value is not None and value is not False and (key, value) != ("sampler", "random"):
            option = f"--{key.replace('_', '-')}" + (f" {value}" if key == "sampler" else "")
            raise InputError(f"--paid does not go with {option}: {why}. Leave it out.")
    if not paid and score_noise is not None:
        raise InputError(
            "--score-noise is for --paid: simulations are not private, whatever noise their scores have. Leave it out."
        )
    if not paid and given["budget"] is not None:
        raise InputError("--budget is for --paid: simulations are not private. Train the recipe that is found with it.")
    if given["worker"] and given["storage"] is None:
        raise InputError("--worker joins a search that others take part in: name their --storage.")


def show(found: "SearchResult", more: list[str]) -> None:
    """The result in words; `more` are the options that training the final recipe needs besides."""
    for stage in found.stages:
        needed = "" if stage.needed is None else f" (chance alone: up to {100 * stage.needed:.2f})"
        verdict = "kept" if stage.counts else "not a gain, left as it was"
        gain = f"{100 * stage.gain:+.2f} points{needed}: {verdict}" if stage.gain > 0 else "nothing better was found"
        output.say(f"{stage.name:<16}{gain}")
        output.say(f"  tried: {_in_words(stage.tried)}")
        if stage.untried:
            output.say(f"  not tried, for want of trials: {_in_words(stage.untried)}")
    if found.augtest_gain is not None:
        views = "if several views of each image are tested: no part of what follows"
        output.say(f"{'AugTest':<16}{100 * found.augtest_gain:+.2f} points, {views}")
    for key, value in found.best.settings.items():
        output.say(f"  {key} = {value}")
    predicted = found.predicted_accuracy
    value, low, high = map(output.per_cent, (predicted.value, predicted.low, predicted.high))
    output.say(
        f"predicted at the reference: {value}, between {low} and {high} (95 %, validation split, law {found.law})"
    )
    output.say(f"the search cost {output.per_cent(found.cost.search_fraction)} of one run of the recipe it began with")
    if found.search_data == "private":
        looked = "the simulations looked at the private images"
        output.say(f"{looked}: the search is not covered by the certificate of the final run")
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
    best = output.per_cent(found.best.accuracy)
    output.say(f"selected {found.best.run}: {best} on the images by which it was selected")
    output.say(f"held-out accuracy {output.per_cent(found.accuracy)}")
    epsilon, delta = formats.epsilon_text(found.epsilon_search_inclusive), formats.delta_text(found.delta)
    output.say(f"epsilon {epsilon} at delta {delta}, the search included (by RDP)")
    output.say("not covered: the running time; how many trials there were must stay secret, and nothing here tells")
