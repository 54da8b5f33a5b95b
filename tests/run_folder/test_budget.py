"""Never a composed sum above a budget, never a reservation lost, whatever runs at once or is killed."""

import contextlib
import json
import random
import re
import signal
import time
from concurrent.futures import ThreadPoolExecutor

import pytest

import sfumato
import sfumato.cli
from sfumato.accounting.mechanism import Mechanism
from sfumato.data.catalogue import Facts
from sfumato.errors import InputError
from sfumato.planning.resolve import resolve
from sfumato.recipes import recipe_of
from sfumato.run_folder import budget, ledger
from sfumato.run_folder.ledger import LEDGER_FILE, new_run_line
from sfumato.run_folder.verification import compare_run
from tests.accounting import truth
from tests.cli.test_cli import call, json_of, refused, settings
from tests.run_folder.loops import DELTA, WHOLE, work
from tests.training import faults

N = 1000
LARGE, SMALL = Mechanism(N, 200, 6.0, 100), Mechanism(N, 20, 1.2, 200)  # epsilon 1.32 and 1.27, together 1.84
RECIPE = {"data": {"name": "digits"}, "privacy": {"target_epsilon": 3.0, "delta": DELTA}}


def begun(path, epsilon=3.0, num_examples=N, **privacy):
    """A budget that holds for runs of `line`."""
    asked = recipe_of(RECIPE, {"privacy.target_epsilon": epsilon, **privacy})
    facts = Facts(num_examples=num_examples, num_classes=10, image_size=8, channels=1)
    return budget.begin(path, resolve(asked, facts))


def line(found, mechanism, **changes):
    """The first line of the ledger of a new run under a budget."""
    stated = {"unit": "image", "clipping_norm": 1.0, "delta": DELTA, "recipe_sha256": None}
    return new_run_line(mechanism, **stated | {"budget": found.stated.budget_id} | changes)


def test_plans_of_unlike_runs_are_composed_tightly_and_never_below_the_truth(tmp_path):
    found = begun(tmp_path / "b", 4.0)
    reserved, sums = [], []
    for mechanism in (LARGE, SMALL, LARGE):
        sums.append(budget.reserve(found.path, line(found, mechanism)).epsilon_reserved)
        reserved.append((mechanism.sampling_prob, mechanism.noise_multiplier, mechanism.num_steps))
    exact = [truth.epsilon(*reserved[0], DELTA), *(truth.epsilon_of_unlike(reserved[:n], DELTA) for n in (2, 3))]
    assert all(least <= each <= 1.02 * least for least, each in zip(exact, sums, strict=True))
    assert budget.read(found.path).epsilon() == sums[-1]


def test_what_does_not_fit_is_refused_with_the_largest_plan_that_does(tmp_path):
    found = begun(tmp_path / "b", 1.6)
    budget.reserve(found.path, line(found, LARGE))
    before = found.path.read_bytes()
    with pytest.raises(InputError, match="of 1.6 reserved") as error:
        budget.reserve(found.path, line(found, SMALL))
    assert found.path.read_bytes() == before
    fits = int(re.search(r"of up to (\d+) updates", str(error.value))[1])
    assert budget.read(found.path).epsilon([SMALL.replace(num_steps=fits + SMALL.num_steps // 100)]) > 1.6
    assert budget.reserve(found.path, line(found, SMALL.replace(num_steps=fits))).epsilon_reserved <= 1.6
    with pytest.raises(InputError, match="Not one update fits"):
        budget.reserve(found.path, line(found, SMALL.replace(noise_multiplier=0.2, num_steps=1)))


def opened(folder, run, releases=0):
    folder.mkdir()
    found = ledger.Ledger(folder / LEDGER_FILE)
    found.begin(run)
    for step in range(1, releases + 1):
        found.append(step)
    return contextlib.closing(found)


def test_a_run_reserves_once_gives_back_what_never_released_and_keeps_the_rest_whole(tmp_path):
    found = begun(tmp_path / "b")
    run, other = line(found, SMALL), line(found, SMALL)
    first = budget.reserve(found.path, run)
    assert budget.reserve(found.path, run) == first and len(budget.read(found.path).reserved) == 1
    budget.reserve(found.path, other)
    with opened(tmp_path / "other", other) as idle:
        budget.give_back(found.path, idle)
        budget.give_back(found.path, idle)
    assert budget.read(found.path).epsilon() == first.epsilon_reserved
    assert budget.reserve(found.path, other).epsilon_reserved > first.epsilon_reserved  # whoever goes on with it
    with opened(tmp_path / "run", run, releases=1) as released, pytest.raises(AssertionError, match="stays reserved"):
        budget.give_back(found.path, released)
    assert budget.read(found.path).reserved.keys() == {run.run_id, other.run_id}


def test_runs_of_another_unit_or_of_more_images_are_refused_and_of_a_part_of_them_not(tmp_path):
    found = begun(tmp_path / "b")
    for mechanism, changes, says in (
        (SMALL, {"unit": None}, "claims nothing"),
        (SMALL, {"unit": "person"}, "one person"),
        (SMALL.replace(images_per_unit=2), {}, "with up to 2 images"),
        (SMALL.replace(num_examples=N + 1), {}, "this run has 1001"),
    ):
        with pytest.raises(InputError, match=says):
            budget.reserve(found.path, line(found, mechanism, **changes))
    assert budget.read(found.path).reserved == {}
    budget.reserve(found.path, line(found, Mechanism(N - 500, 20, 2.0, 10)))
    assert len(budget.read(found.path).reserved) == 1


def test_a_torn_line_is_no_reservation_and_anything_else_is_damage(tmp_path):
    found = begun(tmp_path / "b")
    first = line(found, SMALL)
    budget.reserve(found.path, first)
    whole = found.path.read_bytes()
    torn = whole + whole.splitlines()[1][:-5]
    found.path.write_bytes(torn)
    assert budget.read(found.path).reserved.keys() == {first.run_id}
    with opened(tmp_path / "run", first) as idle:
        budget.give_back(found.path, idle)  # by a shorter line
    assert budget.read(found.path).reserved == {} and found.path.read_bytes().startswith(whole)
    for damaged in (b"", whole[10:], whole + b"{}\n", whole + b'{"kind":"returned","run_id":"nobody"}\n'):
        found.path.write_bytes(damaged)
        with pytest.raises(InputError, match="Restore it from a copy"):
            budget.reserve(found.path, line(found, SMALL))
        assert found.path.read_bytes() == damaged
    with pytest.raises(InputError, match="is there already"):
        begun(found.path)


def test_a_reservation_is_on_disk_when_it_is_made(tmp_path, monkeypatch):
    found, synced = begun(tmp_path / "b"), []
    monkeypatch.setattr(ledger.os, "fsync", lambda descriptor: synced.append(found.path.read_bytes()))
    budget.reserve(found.path, line(found, SMALL))
    assert synced == [found.path.read_bytes()]


def test_who_reserves_at_once_waits_and_the_sum_holds(tmp_path):
    found = begun(tmp_path / "b", 2.0)
    with ThreadPoolExecutor(4) as pool:
        made = [pool.submit(budget.reserve, found.path, line(found, LARGE)) for _ in range(8)]
    assert {type(each.exception()) for each in made} == {type(None), InputError}
    last = budget.read(found.path)
    assert len(last.reserved) == sum(each.exception() is None for each in made)
    one_more = line(found, LARGE)
    assert last.epsilon() <= 2.0 < last.epsilon([one_more.mechanism])


def holds(path, folder):
    """At any moment: the sum is within the budget, and whatever released something is in it with its whole plan."""
    released = {}
    for each in folder.glob(f"*/{LEDGER_FILE}"):
        with contextlib.suppress(InputError):  # its first line is not whole yet: it has released nothing
            lines = ledger.read(each)
            if lines.releases:
                released[lines.run.run_id] = lines.run
    found = budget.read(path)  # after the ledgers: what they count was reserved before
    assert {run_id: found.reserved[run_id].run for run_id in released} == released
    assert found.epsilon() <= found.stated.epsilon
    return found, released


def four_with_kills(path, folder, kills, pause):
    """Four processes, and ten ends by SIGKILL at random moments; whoever was killed begins again."""
    chance, killed = random.Random(), 0

    def start(number):
        process = faults._context.Process(target=work, args=(path, folder, number, chance.random()))
        process.start()
        return process

    folder.mkdir()
    at_work = [start(number) for number in range(4)]
    try:
        while any(process.is_alive() for process in at_work):
            time.sleep(chance.uniform(0, pause))
            victim = chance.choice([number for number, process in enumerate(at_work) if process.is_alive()] or [0])
            if killed < kills:
                at_work[victim].kill()
                at_work[victim].join()
                killed += at_work[victim].exitcode == -signal.SIGKILL
                at_work[victim] = start(victim)
            holds(path, folder)
    finally:
        for process in at_work:
            process.kill()
    assert killed == kills and [process.exitcode for process in at_work] == [0] * 4
    return holds(path, folder)


@pytest.mark.parametrize(
    ("epsilon", "kills", "pause"), [(0.8, 10, 0.05), pytest.param(3.0, 100, 0.1, marks=pytest.mark.slow)]
)
def test_four_processes_and_kills_never_exceed_a_budget_nor_lose_a_reservation(tmp_path, epsilon, kills, pause):
    path = tmp_path / "b"
    begun(path, epsilon, num_examples=4)
    found, released = four_with_kills(path, tmp_path / "runs", kills, pause)
    assert found.epsilon([WHOLE]) > epsilon or found.epsilon([WHOLE.replace(num_steps=1)]) > epsilon  # it was used up
    assert len(released) > 10


TINY = {"training.num_steps": 3, "training.batch_size": 64, "model.options.width": 2}
TINY |= {"privacy.noise_multiplier": 2.0, "privacy.target_epsilon": ""}
TRAIN = ["train", "demo/digits", *settings(TINY)]


@pytest.fixture(scope="module")
def shared(tmp_path_factory):
    """A budget of the digits that one run is reserved in: its file, and the run."""
    folder = tmp_path_factory.mktemp("shared")
    words = ["budget", "new", folder / "b", "--epsilon", "0.3", "--delta", "1e-5", "--recipe", "demo/digits"]
    assert sfumato.cli.run([*map(str, words)]) == 0
    sfumato.train("demo/digits", folder / "run", settings=TINY | {"privacy.target_epsilon": None}, budget=folder / "b")
    return folder / "b", folder / "run"


def claim_of(run):
    return json.loads((run / "privacy.json").read_text())


def test_a_certificate_names_the_budget_and_what_was_reserved_of_it(shared, capsys):
    path, run = shared
    stated, claim = json_of(capsys, "budget", "show", path), claim_of(run)
    assert claim["budget"].items() <= stated.items() and claim["budget"]["epsilon"] == 0.3
    assert stated["epsilon_reserved"] == claim["epsilon"] == stated["runs"][0]["epsilon_reserved"]
    assert [each["run_id"] for each in stated["runs"]] == [claim["run_id"]]
    assert any("not reserved in the budget" in line for line in claim["not_covered"])
    assert not any("other runs on the same images" in line for line in claim["not_covered"])
    assert compare_run(run)[2] == []
    forged = claim | {"budget": claim["budget"] | {"budget_id": "0" * 32}}
    (run / "privacy.json").write_text(json.dumps(forged))
    assert any("another budget" in each for each in compare_run(run)[2])
    (run / "privacy.json").write_text(json.dumps(claim))
    status, out, _ = call(capsys, "budget", "show", path)
    assert status == 0 and "of 0.3 is reserved, at delta 1e-5, for each image of 1437" in out
    private = [str(path.parent), "digits", "sha256_of_images"]
    assert not [word for word in private if word in path.read_text()]


def test_what_does_not_fit_leaves_no_trace(shared, capsys, tmp_path):
    path, before = shared[0], shared[0].read_bytes()
    more = [*TRAIN, "--set", "training.num_steps=9", "--budget", path]
    for words in ([], ["--dry-run"], ["--resume"]):
        line = refused(capsys, *more, "--output", tmp_path / "run", *words)
        fits = int(re.search(r"of up to (\d+) updates", line)[1])
        assert 0 < fits < 9 and "of 0.3 reserved" in line
        assert words == ["--resume"] or not (tmp_path / "run").exists()
    sweep = ["sweep", "demo/digits", *settings(TINY), "--grid", "optimizer.learning_rate=1,2", "--seeds", 2]
    assert "with 4 more" in refused(capsys, *sweep, "--budget", path, "--output", tmp_path / "sweep")
    assert "claims nothing" in refused(capsys, *sweep, "--paired", "--budget", path, "--output", tmp_path / "sweep")
    selected = [*TRAIN, "--set", "privacy.selected_from=10", "--budget", path, "--output", tmp_path / "other"]
    assert "selected from others" in refused(capsys, *selected)
    assert "claims nothing" in refused(capsys, *TRAIN, "--non-private", "--budget", path)
    assert "or begin one" in refused(capsys, *TRAIN, "--budget", tmp_path / "b")
    assert not (tmp_path / "sweep").exists() and not (tmp_path / "other").exists()
    assert path.read_bytes() == before


def test_a_run_has_the_budget_that_it_was_begun_under_and_no_other(shared, capsys, tmp_path):
    path, run = shared
    assert json_of(capsys, "resume", run, "--budget", path)["run_id"] == claim_of(run)["run_id"]
    other = ["budget", "new", tmp_path / "b", "--epsilon", "3", "--recipe", "demo/digits"]
    assert json_of(capsys, *other)["runs"] == []
    assert "under another recipe, mechanism, budget" in refused(capsys, "resume", run, "--budget", tmp_path / "b")
    assert "is there already" in refused(capsys, *other)
    assert "--epsilon" in refused(capsys, *other[:3], "--recipe", "demo/digits")


# Before its first line there is no reservation, before its first release there is one, and no room for another.
@pytest.mark.parametrize(("append", "reserved"), [(1, 0), (2, 1)])
def test_a_run_that_is_killed_before_its_first_release_goes_on_with_one_reservation(append, reserved, tmp_path, capsys):
    path, run, log = tmp_path / "b", tmp_path / "run", tmp_path / "log"
    json_of(capsys, "budget", "new", path, "--epsilon", "0.23", "--delta", "1e-5", "--recipe", "demo/digits")
    words = [*TRAIN, "--output", str(run), "--budget", str(path)]
    assert faults.run(words, die_at=("ledger", append, 0.5), log=log) == -signal.SIGKILL, log.read_text()
    assert len(budget.read(path).reserved) == reserved
    result = json_of(capsys, *words, "--resume")
    found = budget.read(path)
    assert [*found.reserved] == [result["run_id"]] and found.epsilon() == result["epsilon"]
    assert claim_of(run)["budget"]["budget_id"] == found.stated.budget_id


def test_a_sweep_reserves_each_of_its_runs(tmp_path, capsys):
    path, folder = tmp_path / "b", tmp_path / "sweep"
    json_of(capsys, "budget", "new", path, "--epsilon", "0.3", "--delta", "1e-5", "--recipe", "demo/digits")
    sweep = ["sweep", "demo/digits", *settings(TINY), "--grid", "optimizer.learning_rate=1,2", "--output", folder]
    found = json_of(capsys, *sweep, "--budget", path)
    assert len(budget.read(path).reserved) == 2 and budget.read(path).epsilon() <= found["epsilon_together"] * 1.3
    before = path.read_bytes()
    assert json_of(capsys, *sweep, "--budget", path)["cells"] == found["cells"] and path.read_bytes() == before
    assert "its budget is another" in refused(capsys, *sweep)
