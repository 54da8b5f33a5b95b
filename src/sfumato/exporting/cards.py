"""README.md, the model card, and PRIVACY.md, the privacy card: what a receiver and a lawyer read."""

import dataclasses
import re
from pathlib import Path
from typing import Any

import jinja2
import markupsafe

from sfumato import config
from sfumato.accounting import formats
from sfumato.evaluation.trained import Trained
from sfumato.json_record import pick
from sfumato.reporting.html import PAGES
from sfumato.reporting.page import read_run
from sfumato.reporting.tested import class_table
from sfumato.reporting.wording import of_attacker, who_guesses
from sfumato.run_folder.files import write_atomically
from sfumato.run_folder.record import Certificate, Result
from sfumato.run_folder.tested import Tested

CARDS = ("README.md", "PRIVACY.md")


@dataclasses.dataclass(frozen=True)
class About:
    """What an owner says of a model, and no file of its run does. Each is published.

    Attributes:
        intended_use: What for, by whom.
        data: Where the images come from, and who is on them.
        license: Of the model, as the hub names it: an SPDX identifier in small letters, or "other".
    """

    intended_use: str | None = None
    data: str | None = None
    license: str | None = None


def write(folder: Path, trained: Trained, about: About, why_not_timm: str | None, differs: str | None) -> None:
    """Writes both cards.

    Args:
        folder: Of the export, with the files of its run.
        trained: The model.
        about: What its owner says.
        why_not_timm: It cannot read the folder; None: it can, and then
        differs: in what its answers differ.
    """
    run = read_run(folder)
    certificate, result, tested, recipe = run.certificate, run.result, run.tested, config.parse_resolved(run.recipe)
    assert result is not None  # only a finished run is exported
    loader = jinja2.FileSystemLoader(Path(__file__).parent / "templates")
    templates = PAGES.overlay(loader=loader, autoescape=False, finalize=_as_markdown)
    scores = [_score(f"held-out images ({result.held_out})", result, result.accuracy_interval)]
    if tested is not None:
        scores.append(_score(tested.test_set, tested, tested.intervals.accuracy))
    facts: dict[str, Any] = {"certificate": certificate, "inputs": certificate.public_inputs, "recipe": recipe}
    facts |= {"result": result, "tested": tested, "scores": scores, "attacks": _attacks(certificate)}
    facts["label_table"] = None if tested is None or tested.decisions is None else class_table(tested)
    facts |= {"is_multilabel": trained.objective.is_multilabel, "is_calibrated": trained.calibration is not None}
    facts |= {"name": run.name, "about": about, "why_not_timm": why_not_timm, "differs": differs, "formats": formats}
    for card in CARDS:
        write_atomically(folder / card, templates.get_template(card).render(facts).encode())


def _attacks(certificate: Certificate) -> list[str]:
    """What an attacker can tell at most, a sentence or two each."""
    of_unit, of_person = certificate.attacker, certificate.attacker_person
    told = [who_guesses(of_unit, of_persons=certificate.of_persons)]
    told += [of_attacker(of_unit)] if of_unit is not None else []
    more = of_person is not None and not certificate.of_persons
    return told + ([who_guesses(of_person, of_persons=True)] if more else [])


def _score(of: str, found: Result | Tested, interval: list[float] | None) -> dict[str, Any]:
    """How good the model is on some images."""
    told = pick(found, "accuracy", "balanced_accuracy", "majority_rate", "auroc")
    per_class = dict(zip(found.classes, found.per_class, strict=True))
    worst = min(share for share in per_class.values() if share is not None)
    return {**told, "of": of, "interval": interval, "per_class": per_class, "worst": worst}


def _as_markdown(value: Any) -> str:
    """No value becomes markup, or another line: names of classes are anybody's."""
    if isinstance(value, markupsafe.Markup):
        return value
    text = re.sub(r"([\\`*\[\]|~$]|\b_|_\b)", r"\\\1", " ".join(str(value).split()))
    for sign, entity in {"&": "&amp;", "<": "&lt;", ">": "&gt;", "://": "&#58;//", "www.": "www&#46;"}.items():
        text = text.replace(sign, entity)
    return formats.plain(text)
