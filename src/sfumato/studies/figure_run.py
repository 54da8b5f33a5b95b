"""A figure's sweep from beginning to end: tuned with one run each, then as many runs as asked for at each best."""

import dataclasses
from pathlib import Path

from sfumato.errors import InputError
from sfumato.run_folder.files import write_json
from sfumato.studies.claims import Verdict, judge
from sfumato.studies.figures import Study, best_cells, why_not_covered
from sfumato.studies.grid import cells_of, for_sharing, in_words
from sfumato.studies.plan import SweepOptions
from sfumato.studies.result import Sweep
from sfumato.studies.sweep import PLAN_FILE, sweep_by

FIGURE_FILE = "figure.json"
TUNING, BEST = "tuning", "best"


@dataclasses.dataclass(frozen=True)
class Answer:
    """What a figure's sweep found.

    Attributes:
        found: Of every cell; where keys are tuned, of the best cell at each setting of the others, by runs that did
            not choose it.
        tuning: One run of every cell, by which the best were chosen; None: nothing is tuned.
        verdicts: Of the study's claims.
    """

    found: Sweep
    tuning: Sweep | None
    verdicts: list[Verdict]


def run_figure(study: Study, options: SweepOptions) -> Answer:
    """Makes the sweep of a figure, or goes on with it. Where keys are tuned there are two in its folder, `tuning` and
    `best`; each is gone on with after a kill.

    Guarantee: `epsilon_together` of what is found covers the runs of the tuning, too; it is None where what was chosen
        decides the mechanisms themselves.

    Args:
        options: From `options_of`, with name and output. Its seeds are the runs of each cell without that of the
            tuning. Paired ones have the seeds from 1, since seed 0 chose.

    Raises:
        InputError, MachineError, Interrupted: As `sweep`.
    """
    folder, tuning = Path(options.output or ""), None
    if study.tuned:
        if (folder / PLAN_FILE).exists():
            raise InputError(
                f"{folder} holds another sweep, and this figure's are two below it. Give another --output."
            )
        tuning, spent = sweep_by(dataclasses.replace(options, seeds=1, output=folder / TUNING))
        asked = {in_words(for_sharing(each)): each for each in cells_of(options.grid, options.cells)}
        best = [asked[in_words(cell.settings)] for cell in best_cells(tuning, study.tuned)]
        options.report(f"tuned: {', '.join(study.tuned)}; {len(best)} of {len(tuning.cells)} cells are run again")
        of_best = dataclasses.replace(options, grid={}, cells=best, labels=study.labels, first_seed=1)
        found, _ = sweep_by(
            dataclasses.replace(of_best, output=folder / BEST),
            before=spent,
            not_covered=why_not_covered(tuning, study.tuned),
        )
    else:
        found, _ = sweep_by(dataclasses.replace(options, labels=study.labels))
    verdicts = [judge(claim, found) for claim in study.claims]
    facts = {
        "figure": found.recipe,
        "verdicts": [verdict.as_json() for verdict in verdicts],
        "tuning": None if tuning is None else tuning.as_json(),
        "found": found.as_json(),
    }
    write_json(folder / FIGURE_FILE, facts)
    return Answer(found, tuning, verdicts)
