"""What the small twins of the papers' figures found: a table for each, from the folders of `sfumato figures run`.

    sfumato figures run de2022/figure-8 --scale small --output DEST/figure-8
    python -m benchmarks.figures DEST/figure-8 ...

Writes benchmarks/results/figures/<paper>-<figure>.json: each claim with its interval, each cell's mean and standard
deviation, and the minutes that all runs took on this machine, whatever else it did. Prints the claims.
"""

import argparse
import json
from pathlib import Path
from typing import Any

from benchmarks.machine import machine
from sfumato.cli.sweep import in_words
from sfumato.studies.claims import Verdict, judge
from sfumato.studies.figures import FIGURE_FILE, read_figure
from sfumato.studies.result import Sweep

RESULTS = Path(__file__).parent / "results" / "figures"


def compact(folder: Path) -> dict[str, Any]:
    """Of one figure's folder."""
    facts = json.loads((folder / FIGURE_FILE).read_text(encoding="utf-8"))
    found, tuning = facts["found"], facts["tuning"]
    study = read_figure(facts["figure"].partition(" ")[0]).small
    assert study is not None
    sweep = Sweep.model_validate(found)
    seconds = [json.loads(path.read_text(encoding="utf-8"))["seconds"] for path in folder.rglob("result.json")]
    return {
        "figure": facts["figure"],
        "verdicts": [judge(claim, sweep).as_json() for claim in study.claims],
        "held_out": found["held_out"],
        "seeds": found["seeds"],
        "private": found["private"],
        "epsilon_together": found["epsilon_together"],
        "delta": found["delta"],
        "runs": len(seconds),
        "runs_of_tuning": 0 if tuning is None else len(tuning["cells"]),
        "minutes_of_all_runs": round(sum(seconds) / 60, 1),
        "cells": [
            {
                **({"label": cell["label"]} if cell["label"] else {"settings": cell["settings"]}),
                **{name: round(cell[name], 5) for name in ("mean", "median", "std", "standard_error")},
            }
            for cell in found["cells"]
        ],
        "machine": machine(),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("folders", type=Path, nargs="+")
    for folder in parser.parse_args().folders:
        facts = compact(folder)
        name = facts["figure"].partition(" ")[0].replace("/", "-")
        RESULTS.mkdir(parents=True, exist_ok=True)
        (RESULTS / f"{name}.json").write_text(json.dumps(facts, indent=1) + "\n", encoding="utf-8")
        print(f"{facts['figure']}: {facts['runs']} runs, {facts['minutes_of_all_runs']} minutes")
        for verdict in facts["verdicts"]:
            print(" ", in_words(Verdict.model_validate(verdict)))


if __name__ == "__main__":
    main()
