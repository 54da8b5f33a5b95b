"""report.html: one self-contained page that says what a run is worth and what it promises."""

from importlib import resources
from pathlib import Path
from typing import Any

from sfumato.reporting import formats, wording
from sfumato.reporting.attack import attack_section
from sfumato.reporting.audited import audit_section
from sfumato.reporting.markup import Html, element
from sfumato.reporting.plots import training_curves
from sfumato.run_folder.files import write_atomically
from sfumato.run_folder.record import Recorded, read_run

MOST_ROWS = 25
MANY_CLASSES = 12
NOTHING_FROM_ELSEWHERE = (
    "default-src 'none'; style-src 'unsafe-inline'"  # the browser enforces that the page loads nothing
)


def write_report(folder: Path | str) -> Path:
    """Writes ``report.html`` into a run folder, finished or not.

    It shows the public files alone: privacy.json, result.json, metrics.jsonl, recipe.toml.
    Running times stand in none of its sections: no guarantee covers them.

    Args:
        folder: Of the run.

    Returns:
        The path of the page.

    Raises:
        InputError: If the certificate or the recipe is missing or damaged.
        MachineError: If the page cannot be written; an older one is then intact.
    """
    folder = Path(folder)
    path = folder / "report.html"
    write_atomically(path, render(read_run(folder)).encode())
    return path


def render(run: Recorded) -> str:
    """The whole page as HTML text."""
    sections = [
        _certificate(run),
        *attack_section(run),
        *audit_section(run),
        _not_covered(run),
        _accuracy(run),
        *_decision(run),
        _curves(run),
        _per_class(run),
        _recipe(run),
        _values(run),
    ]
    return whole_page(f"{run.name} · Sfumato report", _header(run), *sections)


def whole_page(title: str, *parts: Html) -> str:
    """A page that stands for itself, as HTML text."""
    style = resources.files("sfumato.reporting").joinpath("page.css").read_text(encoding="utf-8")
    head = element(
        "head",
        element("meta", charset="utf-8"),
        element("meta", http_equiv="Content-Security-Policy", content=NOTHING_FROM_ELSEWHERE),
        element("meta", name="viewport", content="width=device-width, initial-scale=1"),
        element("meta", name="color-scheme", content="light dark"),
        element("title", title),
        element("style", Html(style)),
    )
    body = element("body", element("main", *parts))
    return "<!DOCTYPE html>\n" + element("html", head, body, lang="en") + "\n"


def _header(run: Recorded) -> Html:
    model = run.recipe.get("model", {}).get("name", "a network")
    classes = f" for {formats.count(len(run.classes))} classes" if run.classes else ""
    how = "with differential privacy" if run.is_private else "without a privacy guarantee"
    lead = (
        f"An image classifier ({model}){classes}, "
        f"trained on {formats.count(run.certificate.public_inputs.num_examples)} images {how}."
    )
    parts = [
        element("p", "Sfumato report", class_="kicker"),
        element("h1", run.name),
        element("p", lead, class_="lead"),
    ]
    if run.result is None:
        parts.append(
            element(
                "p",
                "This run is unfinished: there is no final model yet, and accuracies are those so far.",
                class_="unfinished",
            )
        )
    return element("header", *parts)


def _certificate(run: Recorded) -> Html:
    parts = [element("h2", "What is guaranteed"), wording.verdict(run)]
    rows = [
        element(
            "div",
            element("dt", name),
            element("dd", element("span", value, class_="value"), " ", meaning) if value else element("dd", meaning),
        )
        for name, value, meaning in wording.terms(run)
    ]
    return element("section", *parts, element("dl", *rows, class_="terms"))


def _not_covered(run: Recorded) -> Html:
    points = element("ul", *(element("li", point) for point in run.certificate.not_covered))
    intro = "The guarantee says nothing about:" if run.is_private else "Even a private run would say nothing about:"
    return element("section", element("h2", "What is not covered"), element("p", intro), points)


def _interval(ends: list[float] | None) -> str:
    return "" if ends is None else f" ({formats.per_cent(ends[0])} to {formats.per_cent(ends[1])}, 95 %)"


def _accuracy(run: Recorded) -> Html:
    if run.result is None:
        title = element("h2", "How good it is")
        if not run.metrics:
            return element("section", title, element("p", "Nothing has been evaluated yet."))
        last = run.metrics[-1]
        tiles = [_tile("accuracy so far", formats.per_cent(last.accuracy)), _tile("at step", formats.count(last.step))]
        return element("section", title, element("div", *tiles, class_="tiles"))
    result = run.result
    tiles = [
        _tile("accuracy" + _interval(result.accuracy_interval), formats.per_cent(result.accuracy)),
        _tile("balanced accuracy", formats.per_cent(result.balanced_accuracy)),
        _tile("always the most frequent class", formats.per_cent(result.majority_rate)),
    ]
    if result.accuracy_top5 is not None:
        tiles.append(_tile("among the first five", formats.per_cent(result.accuracy_top5)))
    if result.auroc is not None:
        tiles.append(_tile("AUROC", f"{result.auroc:.4f}"))
    tiles.append(_tile("accuracy of the last weights", formats.per_cent(result.accuracy_last)))
    if result.test_views:
        tiles.append(_tile(f"majority of {result.test_views} views", formats.per_cent(result.accuracy_augtest_vote)))
        tiles.append(
            _tile(f"mean probability of {result.test_views} views", formats.per_cent(result.accuracy_augtest_mean))
        )
    text = (
        f"Measured on the held-out images ({result.held_out}) that could be read, with the averaged weights, which "
        "are the ones kept. Balanced accuracy is the mean over the classes, each counting the "
        "same. These numbers are not private with respect to the held-out images."
    )
    if result.test_views:
        text += (
            " The last two let several random views of each image decide together; "
            "results are compared by the plain accuracy."
        )
    parts = [element("h2", "How good it is"), element("div", *tiles, class_="tiles"), element("p", text)]
    if result.accuracy <= result.majority_rate:
        parts.append(
            element("p", "The classifier is no better than always naming the most frequent class.", class_="remark")
        )
    return element("section", *parts)


def _decision(run: Recorded) -> list[Html]:
    """What was fitted after training; nothing where nothing was."""
    fitted = run.calibration
    if fitted is None:
        return []
    where = "held-out images of this run" if fitted.fitted_on == "held-out" else "other images with labels"
    shifted = "" if fitted.shifts is None else ", and shifted for each class"
    parts = [
        element(
            "p",
            f"After training, probabilities were calibrated on {formats.count(fitted.num_images)} {where}: outputs are "
            f"divided by {formats.quantity(fitted.temperature)}{shifted}. This is not private with respect to those "
            "images. Accuracies on this page are of decisions before it; `sfumato evaluate` tells of those after it.",
        )
    ]
    if (threshold := fitted.threshold) is not None:
        aim = "find" if threshold.aim == "sensitivity" else "leave alone"
        of = f"images of {threshold.positive}" if threshold.aim == "sensitivity" else "other images"
        parts.append(
            element(
                "p",
                f"{threshold.positive} is named from a probability of {formats.per_cent(threshold.probability)} on, "
                f"chosen to {aim} at least {formats.per_cent(threshold.at)} of the {of} among them.",
            )
        )
    return [element("section", element("h2", "How it decides"), *parts)]


def _tile(name: str, value: str) -> Html:
    return element(
        "p", element("span", value, class_="number"), " ", element("span", name, class_="label"), class_="tile"
    )


def _curves(run: Recorded) -> Html:
    title = element("h2", "How it was reached")
    if not run.metrics:
        return element("section", title, element("p", "No step has been evaluated yet, so there is no curve."))
    majority_rate = run.result.majority_rate if run.result else None
    target = run.recipe.get("privacy", {}).get("target_epsilon")
    figure = training_curves(run.metrics, with_epsilon=run.is_private, majority_rate=majority_rate, target=target)
    caption = "Accuracy on held-out images after each evaluated step"
    caption += (
        ", and the epsilon spent until then." if run.is_private else ". No epsilon is drawn: this run is not private."
    )
    return element("section", title, element("figure", figure, element("figcaption", caption)))


def _per_class(run: Recorded) -> Html:
    title = element("h2", "Accuracy per class")
    if run.result is None:
        return element("section", title, element("p", "Known once the run has finished."))
    majority_rate = run.result.majority_rate
    pairs = list(zip(run.result.classes, run.result.per_class, strict=True))
    bars = element(
        "dl",
        *(_bar(name, value, majority_rate) for name, value in pairs),
        class_="bars many" if len(pairs) > MANY_CLASSES else "bars",
    )
    text = (
        f"The line across the bars marks {formats.per_cent(majority_rate)}, "
        "the accuracy of always naming the most frequent class."
    )
    known = [(value, name) for name, value in pairs if value is not None]
    parts: list[str] = [text]
    if known:
        value, name = min(known)
        parts += [" The weakest class is ", element("bdi", name, class_="name"), f" with {formats.per_cent(value)}."]
    return element("section", title, element("p", *parts), bars)


def _bar(name: str, value: float | None, majority_rate: float) -> Html:
    label = element("dt", element("bdi", name))
    if value is None:
        return element("div", label, element("dd", element("span", "no held-out image", class_="absent")))
    fill = element("span", class_="fill", style=f"width: {100 * value:.2f}%")
    reference = element("span", class_="reference", style=f"left: {100 * majority_rate:.2f}%")
    track = element("span", fill, reference, class_="track", aria_hidden="true")
    return element("div", label, element("dd", track, element("span", formats.per_cent(value), class_="value")))


def _recipe(run: Recorded) -> Html:
    parts = [
        element("h2", "Hyper-parameters"),
        element("p", "The resolved recipe, every filled-in value included: enough to run again."),
    ]
    if "privacy" in run.recipe and not run.is_private:
        parts.append(
            element(
                "p", "Its privacy section says what was asked for; for this run it is no guarantee.", class_="remark"
            )
        )
    tables = [_recipe_section(section, values) for section, values in run.recipe.items()]
    return element("section", *parts, element("div", *tables, class_="recipe"))


def _recipe_section(section: str, values: Any) -> Html:
    items = values.items() if isinstance(values, dict) else [("", values)]
    rows = [
        element("tr", element("th", key, scope="row"), element("td", _as_text(value)))
        for key, value in items
        if value != {}
    ]
    return element("table", element("caption", section), element("tbody", *rows))


def _as_text(value: Any) -> str:
    """A TOML value as one would write it, without the quotes around a lone string."""
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, list):
        return ", ".join(_as_text(item) for item in value)
    if isinstance(value, dict):
        return ", ".join(f"{key} = {_as_text(item)}" for key, item in value.items())
    return formats.delta_text(value) if isinstance(value, float) and 0 < value < 1e-3 else str(value)


def _values(run: Recorded) -> Html:
    """The numbers behind the curves; evenly thinned where there are many, the last one kept."""
    if not run.metrics:
        return Html("")
    every = -(-len(run.metrics) // MOST_ROWS)
    shown = run.metrics[::-1][::every][::-1]
    names = ["step", "accuracy", "accuracy, last weights"] + (["epsilon so far"] if run.is_private else [])
    head = element("thead", element("tr", *(element("th", name, scope="col") for name in names)))
    rows = []
    for line in shown:
        cells = [formats.count(line.step), formats.per_cent(line.accuracy), formats.per_cent(line.accuracy_last)]
        if run.is_private:
            cells.append(formats.epsilon_text(line.epsilon))
        rows.append(element("tr", *(element("td", cell) for cell in cells)))
    note = [element("p", f"One of every {every} lines of metrics.jsonl.")] if every > 1 else []
    return element(
        "section",
        element("h2", "Numbers of the curves"),
        *note,
        element("table", head, element("tbody", *rows), class_="numbers"),
    )
