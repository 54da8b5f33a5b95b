"""`sfumato.PrivateLoop`: samples, noise, count and certificate of somebody's own loop."""

import contextlib
import json
import multiprocessing
import os
import signal
import stat
from unittest.mock import Mock

import numpy as np
import pytest
import torch
from torch import nn

import sfumato
from sfumato.clipping.protocol import ClippedGrad
from sfumato.errors import InputError, MachineError
from sfumato.run_folder import ledger
from sfumato.run_folder.ledger import Ledger
from sfumato.training.state import Ema
from tests.data.conftest import refused

MECHANISM = sfumato.Mechanism(num_examples=1000, batch_size=100, noise_multiplier=2.0, num_steps=12)
DELTA = 1e-5


def parts():
    torch.manual_seed(0)
    model = nn.Linear(10, 10, bias=False)
    return {"model": model, "optimizer": torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)}


def begin(folder, mechanism=MECHANISM, state=None, **changes):
    given = {"clipping_norm": 1.0, "delta": DELTA, "state": state or parts(), **changes}
    return sfumato.PrivateLoop(folder, mechanism, **given)


def zeros(update, sensitivity=1.0, value=0.0, clipping_norm=1.0):
    count = len(update.indices)
    grad_sum = {"weight": torch.full((10, 10), value)}
    return ClippedGrad(grad_sum, torch.zeros(count), torch.zeros(count), sensitivity, clipping_norm)


def spent(num_steps=12):
    return sfumato.epsilon(MECHANISM.replace(num_steps=num_steps), DELTA).epsilon


def lines(folder):
    return ledger.read(folder / "ledger.jsonl")


def releases(folder):
    return lines(folder).num_releases


def test_a_loop_takes_the_whole_plan_and_certifies_it(tmp_path):
    folder, state = tmp_path / "run", parts()
    loop = begin(folder, state=state)
    before = state["model"].weight.detach().clone()
    claim = json.loads((folder / "privacy.json").read_text())
    assert (claim["status"], claim["epsilon"], claim["epsilon_so_far"]) == ("running", spent(), 0)
    for number, update in enumerate(loop, start=1):
        assert update.number == number and releases(folder) == number - 1
        update.apply(zeros(update), state["optimizer"])
        assert releases(folder) == number
    assert not state["model"].weight.equal(before)
    found = loop.certificate
    assert (found.status, found.epsilon, found.epsilon_so_far) == ("complete", spent(), spent())
    assert (found.num_steps, found.num_applied, found.num_lost, found.ledger_lines) == (12, 12, 0, 13)
    assert "its author's word" in found.not_covered[0] and stat.S_IMODE((folder / "owner").stat().st_mode) == 0o700
    assert list(begin(folder)) == []  # it has ended
    for asked in (sfumato.verify, sfumato.report, sfumato.load):
        with pytest.raises(InputError, match="is of a loop of your own"):
            asked(folder)


def test_samples_are_poisson_and_noise_has_its_scale_each_time_anew(tmp_path):
    many = MECHANISM.replace(num_steps=300)
    counts, noise = np.zeros(1000), []
    for update in begin(tmp_path / "run", many):
        counts[update.indices] += 1
        noise.append(update.release(zeros(update))["weight"].flatten() * 100)
    rate = counts.mean() / 300
    assert abs(rate - 0.1) < 6 * (0.09 / 300_000) ** 0.5
    assert 0.7 < counts.var() / (300 * 0.09) < 1.3
    values = torch.stack(noise)
    assert abs(float(values.square().mean()) / 4 - 1) < 6 * (2 / values.numel()) ** 0.5
    assert abs(float((values[:-1] * values[1:]).mean())) / 4 < 6 / values[1:].numel() ** 0.5


def test_noise_is_in_units_of_the_stated_sensitivity_around_the_sum(tmp_path):
    loop = begin(tmp_path / "run", clipping_norm=50.0)
    update = next(iter(loop))
    private_grad = update.release(zeros(update, sensitivity=50.0, value=7.0, clipping_norm=50.0))["weight"]
    assert abs(float(private_grad.mean()) - 0.07) < 6 * 1.0 / 10
    assert abs(float(private_grad.std()) - 1.0) < 0.45


def test_the_line_is_on_disk_before_there_is_noise(tmp_path, monkeypatch):
    loop = begin(tmp_path / "run")
    update = next(iter(loop))
    seen, noise = [], "sfumato.training.private_loop.add_noise"
    monkeypatch.setattr(noise, lambda *args: seen.append(releases(tmp_path / "run")) or {})
    update.release(zeros(update))
    assert seen == [1]
    monkeypatch.setattr(Ledger, "append", Mock(side_effect=MachineError("full")))
    update = next(iter(loop))
    with pytest.raises(MachineError):
        update.release(zeros(update))
    assert seen == [1]


def test_a_sample_is_not_passed_over(tmp_path):
    """Not by asking for the next one, nor by beginning again: a notebook's cell is handed the same once more."""
    loop = begin(tmp_path / "run")
    updates = iter(loop)
    first = next(updates)
    refused("drawn and not released", next, updates)
    with pytest.raises(ZeroDivisionError):
        for update in loop:
            assert update is first
            raise ZeroDivisionError
    assert releases(tmp_path / "run") == 0
    second = []
    for update in loop:
        second.append(update)
        update.release(zeros(update))
    assert second[0] is first and len(second) == 12


def test_a_sum_is_released_once_and_only_of_its_own_sample_and_norm(tmp_path):
    loop = begin(tmp_path / "run", clipping_norm=0.5)
    updates = iter(loop)
    update = next(updates)
    other = ClippedGrad({"weight": torch.zeros(10, 10)}, torch.zeros(3), torch.zeros(3), 1.0, 0.5)
    refused("of 3 examples", update.release, other)
    for sensitivity, norm in ((2.0, 2.0), (float("nan"), 0.5), (1.0, float("nan")), (1.0, 5.0)):  # NaN: nobody said
        refused("clipped to", update.release, zeros(update, sensitivity=sensitivity, clipping_norm=norm))
    renamed = ClippedGrad({"0.weight": torch.zeros(10, 10)}, *[torch.zeros(len(update.indices))] * 2, 1.0, 0.5)
    for use in (update.release, lambda loss: update.apply(loss, parts()["optimizer"])):
        refused("a mean loss .* grad_fn returns, not Tensor", use, torch.ones(()))
    refused("no parameter '0.weight'", update.apply, renamed, parts()["optimizer"])
    assert releases(tmp_path / "run") == 0
    update.release(zeros(update, sensitivity=0.5, clipping_norm=0.5))
    refused("released before", update.release, zeros(update))
    assert next(updates).release(zeros(loop._pending, clipping_norm=0.5))["weight"].shape == (10, 10)


def test_an_empty_sample_is_an_update_all_the_same(tmp_path):
    few = sfumato.Mechanism(num_examples=4, batch_size=1, noise_multiplier=5.0, num_steps=30)
    state = parts()
    grad_fn = sfumato.clipped_grad(state["model"], nn.CrossEntropyLoss(reduction="none"), clipping_norm=1.0)
    images, labels = torch.randn(4, 10), torch.arange(4)
    sizes = []
    for update in begin(tmp_path / "run", few, state=state, delta=1e-3):
        sizes.append(len(update.indices))
        update.apply(grad_fn(images[update.indices], labels[update.indices]), state["optimizer"])
    assert 0 in sizes and len(sizes) == 30 == releases(tmp_path / "run")


MANY = MECHANISM.replace(num_steps=100)


def with_averages():
    state = parts()
    return state | {"averages": Ema(dict(state["model"].named_parameters()), [0.9])}


def run_until(folder, last, kill):
    """A loop in a process of its own that ends amid an update."""
    state = with_averages()
    loop = begin(folder, MANY, state=state)
    for update in loop:
        update.apply(zeros(update), state["optimizer"])
        state["averages"].update(dict(state["model"].named_parameters()), update.number)
        if update.number == last:
            torch.save({name: part.state_dict() for name, part in state.items()}, folder.parent / "left.pt")
            if kill:
                os.kill(os.getpid(), signal.SIGKILL)
            loop.close()
            return


@pytest.mark.parametrize("kill", [True, False])
def test_a_loop_that_ended_amid_goes_on_from_its_checkpoint(tmp_path, kill):
    """A kill costs what the last checkpoint has not, and counts it; `close` costs nothing."""
    folder = tmp_path / "run"
    process = multiprocessing.get_context("fork").Process(target=run_until, args=(folder, 7, kill))
    process.start()
    process.join(60)
    assert process.exitcode == (-signal.SIGKILL if kill else 0)
    assert releases(folder) == 7
    state = with_averages()
    loop = begin(folder, MANY, state=state)
    if not kill:
        found = {name: part.state_dict() for name, part in state.items()}
        left = torch.load(tmp_path / "left.pt", weights_only=True)
        torch.testing.assert_close(found, left, rtol=0, atol=0)
        assert "momentum_buffer" in found["optimizer"]["state"][0]
    lost = 1 if kill else 0  # a checkpoint every second update, written when the next is asked for
    claim = loop.certificate
    assert (claim.num_lost, claim.num_applied, claim.ledger_lines, claim.status) == (lost, 7 - lost, 8, "running")
    assert 0 < claim.epsilon_so_far < claim.epsilon
    update = next(iter(loop))
    update.apply(zeros(update), state["optimizer"])
    last = lines(folder).releases[-1]
    assert (last.release, last.step) == (8, 8 - lost)


def test_too_many_lost_updates_end_a_loop_unless_its_owner_allows_them(tmp_path):
    folder = tmp_path / "run"
    begin(folder, MANY).close()
    opened = Ledger(folder / "ledger.jsonl")
    for _ in range(11):
        opened.append(1)
    opened.close()
    with pytest.raises(MachineError, match="11 of 100 updates were lost"):
        begin(folder, MANY)
    begin(folder, MANY, max_lost=0.2).close()


@pytest.mark.parametrize("fails", [False, True])
def test_the_end_of_a_block_loses_nothing_unless_an_exception_came_before_an_update_was_applied(tmp_path, fails):
    """Checkpoints are far apart; the last update was released, and applied by one's own code, or perhaps not."""
    folder, many = tmp_path / "run", MECHANISM.replace(num_steps=1000)
    with contextlib.suppress(ZeroDivisionError), begin(folder, many) as loop:
        for update in loop:
            update.release(zeros(update))
            if update.number == 9 and fails:
                raise ZeroDivisionError
            if update.number == 9:
                break
    claim = begin(folder, many).certificate
    assert (claim.num_lost, claim.num_applied) == ((9, 0) if fails else (0, 9))


def test_state_that_no_checkpoint_could_give_back_is_refused_before_any_release(tmp_path):
    state = parts()
    state["optimizer"] = torch.optim.SGD(state["model"].parameters(), lr=np.float64(0.1))
    refused("could not give back", begin, tmp_path / "run", state=state)
    begin(tmp_path / "run")  # and the folder is as good as new


@pytest.mark.parametrize("state", ["fewer", "other shapes"])
def test_state_of_other_names_or_shapes_is_refused(tmp_path, state):
    begin(tmp_path / "run").close()
    given = {"model": parts()["model"]} if state == "fewer" else {**parts(), "model": nn.Linear(3, 3)}
    refused("checkpoint keeps", begin, tmp_path / "run", state=given)


def test_a_folder_with_a_link_is_not_gone_on_with(tmp_path):
    begin(tmp_path / "run").close()
    (tmp_path / "mine").write_text("precious\n")
    [room] = (tmp_path / "run" / "owner" / "checkpoints").glob(".next-*")
    room.unlink()
    room.symlink_to(tmp_path / "mine")
    refused("symbolic link", begin, tmp_path / "run")
    assert (tmp_path / "mine").read_text() == "precious\n"


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"mechanism": MECHANISM.replace(num_steps=13)}, "another plan"),
        ({"clipping_norm": 2.0}, "another plan"),
        ({"delta": 1e-6}, "another plan"),
        ({}, "another process"),
    ],
)
def test_a_folder_of_another_loop_or_of_one_that_runs_is_refused(tmp_path, changes, said):
    loop = begin(tmp_path / "run")
    if changes:
        loop.close()
    refused(said, begin, tmp_path / "run", **changes)


def test_nothing_is_begun_among_other_files_or_without_a_finite_epsilon(tmp_path):
    (tmp_path / "notes.txt").touch()
    refused("holds notes.txt", begin, tmp_path)
    for mechanism in (MECHANISM.replace(noise_multiplier=0.0), MECHANISM.replace(sampling="shuffled")):
        refused("noise|sampl", begin, tmp_path / "run", mechanism)
    refused("model", begin, tmp_path / "run", state={"optimizer": parts()["optimizer"]})
    assert not (tmp_path / "run").exists()
