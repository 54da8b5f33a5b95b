"""Several runs side by side: what differs, and accuracy against epsilon and against compute."""

import itertools
import json
import statistics
from collections.abc import Callable, Sequence
from pathlib import Path

from sfumato import config
from sfumato.accounting import formats
from sfumato.reporting import html
from sfumato.reporting.charts import COLOURS, Chart, Curve, Panel, accuracies, chart, spanning
from sfumato.reporting.page import Recorded, read_run, write_report
from sfumato.reporting.page import render as page_of_one
from sfumato.run_folder.files import DATA_ROOT_FILE, read_place, refuse_among_images, refuse_drawing, write_atomically


class Setting:
    """Runs that differ in their randomness alone.

    Attributes:
        number: From 1 on.
        values: Every key of the recipe, and how many images there were.
        claim: Epsilon, delta and unit of one run.
        accuracies: Of the runs that have finished.
        num_gradients: Of single examples, views counted, that the plan of one run takes.
    """

    def __init__(self, number: int, values: dict[str, str], runs: list[Recorded]) -> None:
        self.number, self.values, self.runs = number, values, runs
        self.certificate, self.claim = runs[0].certificate, claim_of(runs[0])
        self.accuracies = [run.result.accuracy for run in runs if run.result is not None]
        views = max(1, runs[0].recipe.get("augmentation", {}).get("augmult") or 0)
        self.num_gradients = self.certificate.num_steps * self.certificate.batch_size * views

    @property
    def median(self) -> float:
        return statistics.median(self.accuracies)


def report(runs: Sequence[Path | str] | Path | str, output: Path | str | None = None) -> Path:
    """Writes one page: about one run, or about several side by side.

    It shows the public files of the runs alone.

    Args:
        runs: Their folders.
        output: An HTML file; default: report.html, in the folder of one run, or here for several.

    Returns:
        The path of the page.

    Raises:
        InputError: If a folder holds no run, or the page cannot lie there.
        MachineError: If it cannot be written; an older one is then intact.
    """
    listed = [runs] if isinstance(runs, str | Path) else runs
    folders = list({Path(run).resolve(): Path(run) for run in listed}.values())
    if len(folders) == 1 and output is None:
        return write_report(folders[0])
    path = Path("report.html" if output is None else output)
    refuse_drawing(path, "--output", html.ENDINGS)
    found = [read_run(folder) for folder in folders]
    for folder, run in zip(folders, found, strict=True):  # what owner/ says of where images lie comes on no page
        refuse_among_images(path, config.parse(run.recipe).data, read_place(folder, DATA_ROOT_FILE))
    page = page_of_one(found[0]) if len(found) == 1 else render(found, names_of(folders))
    write_atomically(path, page.encode())
    return path


def names_of(folders: Sequence[Path]) -> list[str]:
    """The ends of their paths, as long as is needed to tell them apart."""
    parts = [folder.resolve().parts for folder in folders]
    each = (["/".join(part[-length:]) for part in parts] for length in itertools.count(1))
    return next(names for names in each if len(set(names)) == len(names))


def render(runs: Sequence[Recorded], names: Sequence[str]) -> str:
    """The whole page as HTML text.

    Args:
        runs: At least two.
        names: What each is called.
    """
    settings = settings_of(runs)
    keys = list(dict.fromkeys(key for setting in settings for key in setting.values))
    differing = [key for key in keys if len({setting.values.get(key) for setting in settings}) > 1]
    finished = [setting for setting in settings if setting.accuracies]
    named = ([run.recipe.get(part, {}).get("name") or "a network" for run in runs] for part in ("model", "data"))
    what = [", ".join(dict.fromkeys(each)) for each in named]
    number = {id(run): setting.number for setting in settings for run in setting.runs}
    reasons = {run.certificate.why_not_private or "no finite epsilon" for run in runs if not run.certificate.holds}
    return html.render(
        "runs.html",
        kicker="Sfumato report",
        title=f"{len(runs)} runs",
        what=what,
        settings=settings,
        num_finished=sum(len(setting.accuracies) for setting in settings),
        num_runs=len(runs),
        num_private=sum(run.certificate.holds for run in runs),
        reasons=sorted(reasons),
        differing=differing,
        setting_rows=[_setting_row(setting, differing) for setting in settings],
        run_rows=[_run_row(name, number[id(run)], run) for name, run in zip(names, runs, strict=True)],
        charts=[_against_epsilon(finished), _against_compute(finished)],
    )


def settings_of(runs: Sequence[Recorded]) -> list[Setting]:
    """The runs by what they share: recipe but for a seed, claim, classes and number of images."""
    groups: dict[str, tuple[dict[str, str], list[Recorded]]] = {}
    for run in runs:
        values = {key: str(value) for key, value in config.dotted(run.recipe).items()}
        values.pop("run.seed", None)
        values["training images"] = formats.count(run.certificate.public_inputs.num_examples)
        alike = json.dumps([values, claim_of(run), run.classes], sort_keys=True)
        groups.setdefault(alike, (values, []))[1].append(run)
    return [Setting(number, *group) for number, group in enumerate(groups.values(), start=1)]


def claim_of(run: Recorded) -> list[str]:
    """Epsilon, delta and unit; a run that is not private has none."""
    certificate = run.certificate
    if not certificate.holds:
        return ["not private", "", ""]
    return [formats.epsilon_text(certificate.epsilon), formats.delta_text(certificate.delta), certificate.unit or ""]


def _setting_row(setting: Setting, keys: Sequence[str]) -> list[str]:
    found = setting.accuracies
    shown = [setting.median, min(found), max(found)] if found else [None] * 3
    values = [setting.values.get(key, "none") for key in keys]
    count = f"{len(found)} of {len(setting.runs)}" if len(found) < len(setting.runs) else str(len(found))
    return [str(setting.number), *map(formats.per_cent, shown), count, setting.claim[0], *values]


def _run_row(name: str, number: int, run: Recorded) -> list[str]:
    reached = "unfinished"
    if run.result is not None:
        reached = formats.share(run.result.accuracy, run.result.accuracy_interval)
    return [name, str(number), reached, *claim_of(run)]


def _against_epsilon(settings: Sequence[Setting]) -> Chart | None:
    """Of the private settings. Epsilons of other units or deltas are marked as such."""
    private = [setting for setting in settings if setting.certificate.holds]
    points = [(each, each.certificate.epsilon or 0.0, f"{each.claim[2]}, delta {each.claim[1]}") for each in private]
    return _scatter(points, formats.epsilon_text, "epsilon of one run")


def _against_compute(settings: Sequence[Setting]) -> Chart | None:
    points = [
        (each, float(each.num_gradients), "private" if each.certificate.holds else "not private") for each in settings
    ]
    return _scatter(points, amount, "gradients of single images")


def _scatter(points: list[tuple[Setting, float, str]], text: Callable[[float], str], what: str) -> Chart | None:
    """Medians as dots, from the least to the greatest accuracy as lines. None of no setting.

    Args:
        points: Each setting, where it stands, and its kind, which has a colour.
        text: How a place is written.
        what: Places are.
    """
    if not points:
        return None
    curves = []
    for colour, kind in zip(itertools.cycle(COLOURS), dict.fromkeys(kind for _, _, kind in points)):
        of_kind = [(setting, place) for setting, place, own in points if own == kind]
        x, y = [place for _, place in of_kind], [100 * setting.median for setting, _ in of_kind]
        labels = [str(setting.number) for setting, _ in of_kind]
        curves.append(Curve(kind, x, y, colour, markers=True, width=0, labels=labels))
        for setting, place in of_kind:
            ends = [100 * min(setting.accuracies), 100 * max(setting.accuracies)]
            curves.append(Curve("", [place] * 2, ends, colour, width=1.5))
    told = [f"setting {each.number} {formats.per_cent(each.median)} at {text(place)}" for each, place, _ in points]
    described = f"Median accuracy against {what}: {'; '.join(told)}."
    x_axis = spanning([place for _, place, _ in points], text, what)
    panel = Panel("Held-out accuracy", curves, accuracies(curves), 260)
    return chart(x_axis, [panel], f"Accuracy against {what}", described, what.split()[0])


def amount(value: float) -> str:
    """A large number in short.

    Example:
        >>> amount(2.5e6), amount(800)
        ('2.5 million', '800')
    """
    for size, word in ((1e12, "trillion"), (1e9, "billion"), (1e6, "million")):
        if value >= size:
            return f"{value / size:.3g} {word}"
    return f"{value:,.0f}"
