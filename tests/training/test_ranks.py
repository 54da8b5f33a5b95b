"""Many ranks compute what one process does, and count it once."""

import json
import os
import signal
import time

import numpy as np
import pytest
import torch
from PIL import Image

from sfumato.run_folder import ledger
from sfumato.run_folder.checkpoint import Checkpoints
from tests.auditing.planted.plants import Edit
from tests.training import faults

NETS = """
from torch import nn

class Double(nn.Module):
    def __init__(self, num_classes, **options):
        super().__init__()
        layers = nn.Conv2d(1, 8, 3, padding=1), nn.GroupNorm(4, 8), nn.ReLU(), nn.Flatten(), nn.Linear(512, num_classes)
        self.layers = nn.Sequential(*layers).double()

    def forward(self, images):
        return self.layers(images.double())
"""
RECIPE = """
data = {name = "digits"}
model = {name = "nets:Double"}
augmentation = {kind = "flip", augmult = 2, test_views = 3}
privacy = {noise_multiplier = 0.5, delta = 1e-5}
optimizer = {learning_rate = 1.0, momentum = 0.9}
ema = {decay = [0.9, 0.5]}
training = {batch_size = 64, num_steps = 20, evaluate_every = 10, norm_histogram_every = 7}
run = {seed = 3}
"""

SLOW = pytest.mark.slow


@pytest.fixture(scope="module")
def modules(tmp_path_factory):
    folder = tmp_path_factory.mktemp("modules")
    (folder / "nets.py").write_text(NETS)
    (folder / "recipe.toml").write_text(RECIPE)
    return folder


def command(modules, folder, **changes):
    settings = {key.replace("__", "."): value for key, value in changes.items()}
    told = {key: "" if value is None else json.dumps(value) for key, value in settings.items()}
    words = [word for key, value in told.items() for word in ("--set", f"{key}={value}")]
    return ["train", str(modules / "recipe.toml"), *words, "--output", str(folder), "--resume", "--trust", "nets"]


def state(folder):
    """Parameters, averages and moments, each as one vector."""
    found = Checkpoints(folder / "owner" / "checkpoints").newest().state
    parts = [found["model"], *found["averages"], *found["optimizer"].values()]
    return [torch.cat([value.flatten() for value in part.values()]) for part in parts]


def distance(folder, other):
    pairs = zip(state(folder), state(other), strict=True)
    return max(float((one - two).norm() / two.norm()) for one, two in pairs)


def told(folder):
    """What is said of accuracies, and noted for the owner: what is equal, and what is rounded."""
    result = json.loads((folder / "result.json").read_text())
    notes = list(map(json.loads, (folder / "owner" / "metrics_private.jsonl").read_text().splitlines()))
    histograms = [note["norms"] for note in notes if "norms" in note]
    equal = [result[key] for key in ("test_views", "accuracy_augtest_vote", "accuracy_augtest_mean")]
    equal += [(folder / "metrics.jsonl").read_text(), *(each["counts"] for each in histograms)]
    rounded = [note[key] for note in notes for key in ("loss", "grad_norm", "clipped_square", "clipped_fraction")]
    return equal, rounded + [each["signal_to_noise"] for each in histograms]


def lines(folder):
    return ledger.read(folder / ledger.LEDGER_FILE)


ORDINARY = {"training__num_steps": 5, "optimizer__max_grad_norm": 0.1}


@pytest.fixture(scope="module")
def alone(tmp_path_factory, modules):
    """The same runs by one process: of 20 updates, of 3, and of ordinary ones."""
    folder = tmp_path_factory.mktemp("alone")
    for steps in (20, 3):
        assert faults.run(command(modules, folder / str(steps), training__num_steps=steps), modules=modules) == 0
    assert faults.run([*command(modules, folder / "ordinary", **ORDINARY), "--non-private"], modules=modules) == 0
    return folder


@pytest.mark.parametrize(
    ("size", "sharded", "microbatch_size"),
    [(2, False, 7), (4, True, 5), pytest.param(2, True, 32, marks=SLOW)],
)
def test_any_number_of_ranks_ends_with_the_parameters_of_one(alone, tmp_path, modules, size, sharded, microbatch_size):
    changes = {"training__shard_state": sharded, "training__microbatch_size": microbatch_size}
    log = tmp_path / "log"
    ranks = faults.start_ranks(size, command(modules, tmp_path / "run", **changes), modules=modules, log=log)
    assert faults.join(ranks) == [0] * size, log.read_text()
    assert distance(tmp_path / "run", alone / "20") < 1e-9
    assert lines(tmp_path / "run").num_releases == 20
    (equal, rounded), (its_equal, its_rounded) = told(tmp_path / "run"), told(alone / "20")
    assert equal == its_equal and len(equal) == 7 and rounded == pytest.approx(its_rounded, rel=1e-9)


def test_ordinary_training_by_ranks_is_that_of_one(alone, tmp_path, modules):
    words = [*command(modules, tmp_path / "run", **ORDINARY, training__shard_state=True), "--non-private"]
    assert faults.join(faults.start_ranks(3, words, modules=modules)) == [0, 0, 0]
    assert distance(tmp_path / "run", alone / "ordinary") < 1e-9


_WORLD = "training.world:Ranks"
FAULTS = {
    "a rank left out": Edit(f"{_WORLD}.sum", "dist.reduce(vector[span]", "dist.reduce(vector[span] * (self.rank < 1)"),
    "a rank's images counted twice": Edit("training.world:World.share", "self.rank, count", "0, count"),
    "noise on every rank summed": Edit(
        "training.learner:Learner.collect",
        "return self.state.flat.join(grad_sum), rows",
        "noise = torch.randn(len(self.state.flat.values))\n    return self.state.flat.join(grad_sum) + noise, rows",
    ),
    "ranks with different draws": Edit(
        "training.loop:_Run._take_updates",
        "world.same(functools.partial(self.draws.of_update, release))",
        "self.draws.of_update(release + world.rank)",
    ),
    "a stale copy": Edit(f"{_WORLD}.spread", "if self.is_sharded:", "if False:"),
    "an extra reduction": Edit(
        f"{_WORLD}.sum",
        "spans = self._spans(len(vector))",
        "spans = list(self._spans(len(vector)))\n"
        "    [self._wait(dist.all_reduce(vector, async_op=True)) for _ in range(1)]",
    ),
    "a rank's own ledger": Edit(
        "training.loop:_Run._take_updates",
        "world.same(functools.partial(self._counted, release))",
        "self._counted(release)",
    ),
    "noise of the first coordinates everywhere": Edit(
        f"{_WORLD}.release", "part(values, span.start)", "part(values, 0)"
    ),
}

QUICK = ("a rank left out", "noise on every rank summed", "ranks with different draws", "a stale copy")


@pytest.mark.parametrize("fault", [pytest.param(name, marks=() if name in QUICK else SLOW) for name in FAULTS])
def test_a_fault_in_the_distributed_step_shows(alone, tmp_path, modules, fault):
    words = command(modules, tmp_path / "run", training__num_steps=3, training__shard_state=True)
    ranks = faults.start_ranks(2, words, modules=modules, edits=[FAULTS[fault]])
    if fault == "a rank's own ledger":  # of which there is none to open
        assert faults.join(ranks) == [1, 1]
    else:
        assert faults.join(ranks) == [0, 0] and distance(tmp_path / "run", alone / "3") > 1e-3


SLOWLY = Edit(
    "training.loop:_Run._counted", "self.writer.started.append(", "time.sleep(0.1)\n    self.writer.started.append("
)


def stopped(ranks, folder, rank, number):
    """A signal to one rank once there are releases: exit statuses."""
    until = time.monotonic() + 60
    path = folder / ledger.LEDGER_FILE
    while not path.exists() or path.read_bytes().count(b"\n") < 4:
        assert time.monotonic() < until
        time.sleep(0.02)
    os.kill(ranks[rank].pid, number)
    return faults.join(ranks)


@pytest.mark.parametrize("rank", [pytest.param(0, marks=SLOW), 1])
def test_a_stop_of_any_rank_is_one_of_all_and_loses_nothing(alone, tmp_path, modules, rank):
    folder = tmp_path / "run"
    words = command(modules, folder, training__shard_state=True)
    ranks = faults.start_ranks(2, words, modules=modules, edits=[SLOWLY])
    assert stopped(ranks, folder, rank, signal.SIGTERM) == [1, 1]
    assert 3 <= lines(folder).num_releases == Checkpoints(folder / "owner" / "checkpoints").newest().num_releases < 20
    assert faults.join(faults.start_ranks(3, command(modules, folder), modules=modules)) == [0, 0, 0]
    assert distance(folder, alone / "20") < 1e-9


@pytest.mark.parametrize("rank", [0, pytest.param(1, marks=SLOW)])
def test_a_rank_that_is_killed_ends_the_others_and_what_it_lost_is_counted(tmp_path, modules, rank):
    folder, log, words = tmp_path / "run", tmp_path / "log", {"run__seed": None, "training__checkpoint_every": 2}
    ranks = faults.start_ranks(2, command(modules, folder, **words), modules=modules, edits=[SLOWLY], log=log)
    statuses = stopped(ranks, folder, rank, signal.SIGKILL)
    assert statuses[rank] == -signal.SIGKILL and statuses[1 - rank] == 1
    assert f"rank {1 - rank} of 2 lost the others" in log.read_text()
    counted, newest = lines(folder).num_releases, Checkpoints(folder / "owner" / "checkpoints").newest()
    assert newest.num_releases <= counted <= newest.num_releases + 4
    ranks = faults.start_ranks(3, command(modules, folder, **words), modules=modules)
    assert faults.join(ranks) == [0, 0, 0]
    claim = json.loads((folder / "privacy.json").read_text())
    assert claim["private"] and claim["ledger_lines"] == 21 and lines(folder).num_releases == 20
    assert claim["num_lost"] == counted - newest.num_releases == 20 - claim["num_applied"]
    assert lines(folder).releases[-1].launch == 2


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ("(root / 'train' / '0' / '0.png').write_bytes(b'cut')", "other images"),
        ("values['privacy']['noise_multiplier'] = 0.1", "other recipe"),
    ],
)
def test_ranks_that_would_train_otherwise_are_refused(tmp_path, modules, change, says):
    """One file that is damaged on one machine would have another image counted twice."""
    log, commands = tmp_path / "log", []
    for rank in (0, 1):
        root, values = tmp_path / str(rank), {"privacy": {"noise_multiplier": 1.0}}
        for place in range(40):
            own = root / ("train" if place < 32 else "valid") / str(place % 2) / f"{place}.png"
            own.parent.mkdir(parents=True, exist_ok=True)
            Image.fromarray(np.full((8, 8), place, dtype=np.uint8)).save(own)
        if rank:
            exec(change)
        settings = [f"privacy.noise_multiplier={values['privacy']['noise_multiplier']}", "run.seed=3"]
        settings += ["training.num_steps=2", "training.batch_size=16", "data.channels=1", "data.image_size=8"]
        told = [word for setting in settings for word in ("--set", setting)]
        commands.append(["train", "image-folder", "--data-root", str(root), "--output", str(tmp_path / "run"), *told])
    ranks = faults.start_ranks(2, [*commands[0], "--resume"], [*commands[1], "--resume"], modules=modules, log=log)
    assert faults.join(ranks) == [2, 2] and says in log.read_text() and not (tmp_path / "run").exists()


def test_a_folder_that_one_rank_does_not_see_is_refused(tmp_path, modules):
    log, words = tmp_path / "log", [command(modules, tmp_path / name / "run") for name in ("one", "other")]
    edit = Edit("run_folder.launch:require_sight", "+ _SEEN_WITHIN", "+ 1")
    ranks = faults.start_ranks(2, *words, modules=modules, log=log, edits=[edit])
    assert faults.join(ranks) == [2, 2] and "another folder here" in log.read_text()


def test_wrong_input_of_one_rank_is_one_line_for_all(tmp_path, modules):
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "mine.txt").write_text("mine")
    log = tmp_path / "log"
    assert faults.join(faults.start_ranks(2, command(modules, tmp_path / "run"), modules=modules, log=log)) == [2, 2]
    assert log.read_text().count("error") == 1 and "holds mine.txt" in log.read_text()


def test_a_rank_that_reaches_no_other_ends_in_time(tmp_path, modules):
    here = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": 1, "WORLD_SIZE": 2, "RANK": 1, "TORCHELASTIC_RUN_ID": "test"}
    log, words = tmp_path / "log", command(modules, tmp_path / "run", training__rank_timeout=1)
    assert faults.join([faults.start(words, modules=modules, log=log, environment=[*here.items()])]) == [1]
    assert "rank 1 of 2 lost the others" in log.read_text()


def test_a_rank_that_dies_while_each_reads_images_is_missed(tmp_path, modules):
    dies = "import os; os.environ['RANK'] == '1' and os._exit(1)"
    edit = Edit("training.loop:train", "files.refuse_name(folder)", f"exec({dies!r})\n        time.sleep(2)")
    log, words = tmp_path / "log", command(modules, tmp_path / "run")
    assert faults.join(faults.start_ranks(2, words, modules=modules, log=log, edits=[edit])) == [1, 1]
    assert "rank 0 of 2 lost the others" in log.read_text()
