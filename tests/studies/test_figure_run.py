"""A figure's sweep: tuned with one run each, then run anew at each best."""

import json

import pytest

from sfumato.accounting.accountants import epsilon
from sfumato.accounting.mechanism import Mechanism
from sfumato.errors import InputError
from sfumato.studies.claims import Claim
from sfumato.studies.figures import Study, cost_at_most, options_of, plan_figure, run_figure

RATE, DECAY = "optimizer.learning_rate", "ema.decay"
STUDY = Study(
    recipe="demo/digits",
    settings={
        "model.options.width": 8,
        "data.split": "train",
        "privacy.noise_multiplier": 1.0,
        "training.batch_size": 32,
        "training.num_steps": 3,
    },
    unset=["privacy.target_epsilon"],
    grid={DECAY: [0.5, 0.9], RATE: [0.1, 2.0]},
    axes=[DECAY, RATE],
    seeds=1,
    tuned=[RATE],
    claims=[Claim(says="averaging helps", rule="above", these={DECAY: 0.9}, those={DECAY: 0.5})],
)


def ask(folder, study=STUDY, **options):
    return run_figure(study, options_of(study, output=folder, name="a figure", report=lambda line: None, **options))


@pytest.fixture(scope="module")
def private(tmp_path_factory):
    folder = tmp_path_factory.mktemp("figure") / "figure"
    return ask(folder), folder


def test_each_best_cell_of_the_tuning_is_run_anew(private):
    found, folder = private
    assert [len(cell.runs) for cell in found.tuning.cells] == [1] * 4
    reached = {(cell.settings[DECAY], cell.settings[RATE]): cell.mean for cell in found.tuning.cells}
    for cell in found.found.cells:
        decay = cell.settings[DECAY]
        assert reached[decay, cell.settings[RATE]] == max(reached[decay, rate] for rate in (0.1, 2.0))
    assert [cell.settings[DECAY] for cell in found.found.cells] == [0.5, 0.9]
    assert [cell.seeds for cell in found.found.cells] == [1, 1]
    claims = [json.loads(path.read_text()) for path in folder.rglob("privacy.json")]
    assert len({claim["run_id"] for claim in claims}) == 4 + 2 * 1


def test_what_the_best_cells_cost_includes_the_runs_that_chose_them(private):
    found, _ = private
    assert found.tuning.updates_together == 4 * 3
    assert found.found.updates_together == (4 + 2) * 3
    assert found.found.epsilon_together == epsilon(Mechanism(1150, 32, 1.0, 18), 1e-5).epsilon
    assert found.found.private


def test_the_figure_says_whether_its_claims_hold(private):
    found, folder = private
    [verdict] = found.verdicts
    one, other = found.found.cells
    assert verdict.value == pytest.approx(other.mean - one.mean)
    assert verdict.verdict == "open" and verdict.low is None  # of one run
    read = json.loads((folder / "figure.json").read_text())
    assert read["verdicts"] == [verdict.as_json()]
    assert read["found"] == json.loads((folder / "best" / "sweep.json").read_text())


def test_the_same_figure_again_makes_nothing_and_another_one_is_refused(private):
    found, folder = private
    before = {path: path.stat().st_mtime_ns for path in folder.rglob("ledger.jsonl")}
    assert ask(folder) == found
    assert {path: path.stat().st_mtime_ns for path in folder.rglob("ledger.jsonl")} == before
    with pytest.raises(InputError, match="holds another sweep"):
        ask(folder, STUDY.model_copy(update={"seeds": 2}))


def test_paired_runs_have_other_seeds_than_the_one_that_chose(tmp_path):
    one_point = STUDY.model_copy(update={"seeds": 2, "grid": {RATE: [0.1, 2.0]}, "claims": [], "axes": [RATE]})
    found = ask(tmp_path / "figure", one_point, paired=True)
    assert {run.seed for cell in found.tuning.cells for run in cell.runs} == {0}
    assert [[run.seed for run in cell.runs] for cell in found.found.cells] == [[1, 2]]
    assert found.found.epsilon_together is None


def test_without_tuned_keys_there_is_one_sweep(tmp_path):
    study = STUDY.model_copy(update={"tuned": [], "grid": {DECAY: [0.5]}, "claims": []})
    found = ask(tmp_path / "figure", study)
    assert found.tuning is None
    assert (tmp_path / "figure" / "sweep.json").exists()
    with pytest.raises(InputError, match="holds another sweep"):
        ask(tmp_path / "figure")  # a tuned one
    assert not (tmp_path / "figure" / "tuning").exists()


def test_a_figure_costs_its_tuning_and_the_dearest_of_each_point_at_most():
    settings = {key: value for key, value in STUDY.settings.items() if not key.startswith("training.")}
    grid = {"training.batch_size": [32, 64], "training.num_steps": [5, 2], "augmentation.augmult": [1, 3]}
    changed = {"settings": {**settings, "augmentation.kind": "crop"}, "grid": grid, "axes": []}
    study = STUDY.model_copy(update={**changed, "tuned": ["training.num_steps"], "seeds": 2})
    found = cost_at_most(study, plan_figure(study))
    assert found.runs == 4 + 2 * 4  # a run serves both numbers of updates
    assert found.updates == 4 * 5 + 2 * 4 * 5
    assert found.view_gradients == 5 * (32 + 64) * (1 + 3) * (1 + 2)
