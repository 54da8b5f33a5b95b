"""Every kind of page, made from files and results that are written by hand: nothing is trained."""

import json
from pathlib import Path

import numpy as np

from sfumato.auditing import page as audit_page
from sfumato.auditing.bounds import audit_scores
from sfumato.reporting import several
from sfumato.reporting.page import write_report
from sfumato.run_folder.record import Result
from sfumato.scaling import law
from sfumato.scaling import page as law_page
from sfumato.searching import page as search_page
from sfumato.searching.result import SearchResult
from sfumato.studies import page as sweep_page
from sfumato.studies.result import Sweep
from tests.reporting import folders

DIGITS = [str(digit) for digit in range(10)]
CLAIM = {"epsilon_lower_bound": 1.2345, "bound": "guesses", "confidence": 0.95, "delta": 1e-4, "num_canaries": 100}
CLAIM |= {"num_guesses": 50, "num_right": 40, "perfect": 4.0, "violated": False}
CLAIM["scores"] = {"edges": [0.0, 1.0, 2.0, 3.0], "members": [1, 20, 30], "non_members": [30, 15, 4]}
DECISION = {"positive": "0", "probability": 0.3, "aim": "sensitivity", "at": 0.9}


def recipe(epsilon: float | None = 3.0, seed: int | None = None, rate: float = 2.0) -> str:
    """recipe.toml of another target, seed or learning rate; None: without a budget."""
    text = folders.RECIPE.replace("learning_rate = 2.0", f"learning_rate = {rate}")
    text = text.replace("target_epsilon = 3.0", f"target_epsilon = {epsilon}") if epsilon else text
    return text + (f"[run]\nseed = {seed}\n" if seed is not None else "")


def thirty(folder: Path) -> list[Path]:
    """Ten settings of three runs each: eight private, one with public seeds, one with a run that is unfinished."""
    runs = []
    for number, epsilon in enumerate([0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0, 8.0, 8.0, 8.0]):
        for repeat in range(3):
            claim = folders.private_certificate(epsilon=epsilon - 0.0041, epsilon_pld=epsilon - 0.0041)
            seed, rate = None, 1.0 if number == 9 else 2.0
            if number == 8:
                claim, seed = folders.public_certificate(), repeat
            accuracy = 0.55 + 0.04 * number + 0.01 * repeat**2 - 0.001 * number * repeat
            result = folders.finished(DIGITS, accuracy=accuracy, accuracy_interval=[accuracy - 0.02, accuracy + 0.02])
            if (number, repeat) == (9, 2):
                claim, result = {**claim, "status": "running"}, None
            place = folder / f"cell-{number + 1}" / f"run-{repeat + 1}"
            runs.append(folders.write_run(place, claim, result, folders.curve(3), recipe(epsilon, seed, rate)))
    return runs


def sweep(rates=(1.0, 2.0, 4.0, 8.0, 16.0), decays=(0.9, 0.99, 0.999)) -> Sweep:
    numbers = {"noise_multiplier": 3.1, "batch_size": 512, "num_steps": 60, "num_examples": 1437, "delta": 1e-4}
    cells = []
    for number, (rate, decay) in enumerate((rate, decay) for rate in rates for decay in decays):
        accuracy = 0.9 + 0.004 * number
        run = {"seed": None, "accuracy": accuracy, "accuracy_last": 0.9, "num_lost": 0}
        summary = {
            "median": accuracy,
            "mean": accuracy,
            "std": 0.01,
            "standard_error": 0.0071,
            "label": None,
            "seeds": 2,
        }
        cell = {"settings": {"optimizer.learning_rate": rate, "ema.decay": decay}, **summary, **numbers}
        cell |= {"private": True, "why_not_private": None, "epsilon": 2.996123, "epsilon_if_private": None}
        cell |= {"shares_runs": False, "paired": None}
        cells.append({**cell, "runs": [{**run, "run": f"cell-{number + 1}/run-{each}"} for each in (1, 2)]})
    keys = ["optimizer.learning_rate", "ema.decay"]
    facts = {"recipe": "demo/digits", "output": "sweep", "keys": keys, "axes": keys, "seeds": 2, "paired": False}
    facts |= {
        "held_out": "valid",
        "private": True,
        "epsilon_together": 11.2345,
        "delta": 1e-4,
        "updates_together": 1800,
    }
    return Sweep.model_validate({**facts, "cells": cells, "not_covered": ["the running time"], "warnings": ["slow"]})


def search() -> SearchResult:
    of_rates = {"name": "learning rate", "best": 1, "gain": 0.0213, "needed": 0.0081, "counts": True}
    of_rates |= {"settings": {"optimizer.learning_rate": 4.0}, "untried": [{"optimizer.learning_rate": 16.0}]}
    of_rates |= {"tried": [{"optimizer.learning_rate": rate} for rate in (1.0, 4.0, 8.0)]}
    of_decays = {**of_rates, "name": "averaging", "best": 0, "gain": 0.001, "counts": False, "untried": []}
    of_decays |= {"tried": [{"ema.decay": decay} for decay in (0.9, 0.99)], "accuracies": [0.9223, 0.9156]}
    facts = {"best": {"settings": {"optimizer.learning_rate": 4.0}, "accuracy": 0.9213}, "trials": 6, "given_up": 1}
    facts |= {"stages": [{**of_rates, "accuracies": [0.8911, 0.9213, None]}, of_decays], "noise_multiplier": 3.142}
    facts |= {"epsilon_final": 2.996123, "delta": 1e-4, "epsilon_search_inclusive": None, "law": "a + b / B"}
    facts |= {"predicted_accuracy": {"value": 0.9312, "low": 0.9011, "high": 0.9523}, "augtest_gain": None}
    facts |= {"cost": {"search_views": 1000, "search_fraction": 0.4321, "final_views": 9999}, "warnings": ["few seeds"]}
    return SearchResult.model_validate({**facts, "storage": "sqlite:///x", "search_data": "private", "recipe": None})


def law_runs() -> list[law.Run]:
    found = []
    for size in (16, 32, 64, 128):
        for seed in range(3):
            accuracy = 0.9 - 1.2 / size + 0.004 * seed
            found.append(law.Run(size, seed, accuracy, Path("run"), 60, 1437, 0.01, 12_345, None))
    return found


def pages(folder: Path) -> dict[str, Path]:
    """Every kind of page below a folder, by its name."""
    private, result, curve = folders.private_certificate(), folders.finished(DIGITS), folders.curve(26)
    runs = {
        "private": (folders.private_certificate(audit=CLAIM), result, curve),
        "not private": (folders.public_certificate(), folders.finished(["a", "b" * 30]), curve),
        "unfinished": ({**private, "status": "running"}, None, curve[:3]),
    }
    made = {}
    for name, run in runs.items():
        place = folders.write_run(folder / name, *run)
        if name == "private":
            calibrated = {"temperature": 1.5, "fitted_on": "held-out", "num_images": 360, "threshold": DECISION}
            (place / "calibration.json").write_text(json.dumps(calibrated))
        made[name] = write_report(place)
    made["several"] = several.report(thirty(folder / "thirty"), folder / "several.html")
    scores, members = np.random.default_rng(0).normal(size=2000), np.arange(2000) % 2
    found = audit_scores(scores + members, members, delta=0.01, nominal_epsilon=1.0)
    facts = law.scaling_law(law_runs(), [256, 512])
    texts = {
        "sweep": sweep_page.render(sweep()),
        "search": search_page.render(search()),
        "audit": audit_page.render(found, scores + members, members),
        "law": law_page.render(law_runs(), facts),
    }
    for name, text in texts.items():
        made[name] = folder / f"{name}.html"
        made[name].write_text(text, encoding="utf-8")
    return made


def headlines(name: str, folder: Path) -> list[float]:
    """Numbers of the files that the page must show."""
    if name in ("private", "not private", "unfinished"):
        claim = json.loads((folder / name / "privacy.json").read_text())
        path = folder / name / "result.json"
        result = [Result.model_validate_json(path.read_bytes()).accuracy] if path.exists() else []
        return [claim["epsilon"] or claim["epsilon_if_private"], *result]
    return []
