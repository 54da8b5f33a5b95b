"""What the randomness of an update is bound to, and what is not released."""

import numpy as np
import pytest
import torch

from sfumato.accounting.mechanism import Mechanism
from sfumato.data.views import Views
from sfumato.randomness import new_key
from sfumato.run_folder import entries as lines_of
from sfumato.run_folder.ledger import Ledger
from sfumato.run_folder.tensor_mac import tensor_mac
from sfumato.training.draws import Draws, SumChanged

MECHANISM, VIEWS = Mechanism(400, 100, 1.0, 5), Views("flip", 2, 0)
SUM = {"a": torch.tensor([0.5, -1.0]), "b": torch.zeros(3)}
CONTEXT = {"recipe": "r", "data": "d"}


def begun(folder, key, *more, recipe="digest"):
    """A ledger with its first lines, open for more."""
    folder.mkdir(exist_ok=True)
    ledger = Ledger.open(folder / "ledger.jsonl", exclusive=True)
    ledger.appends_under(key)
    for line in (lines_of.run_line("id", MECHANISM, 1.0, recipe), lines_of.first_session_line({"threads": 1}), *more):
        ledger.append(line)
    return ledger


def draws(ledger, key, context=CONTEXT, is_public=False, is_accounted=True):
    return Draws(key, context, ledger, is_public=is_public, is_accounted=is_accounted)


def sample(drawn, step):
    randomness = drawn.of_step(step, MECHANISM, VIEWS)
    return randomness.indices.tobytes() + randomness.view_bits.tobytes()


def noise(stream):
    return stream.uint64(64).tobytes()


def bit_of(total, position=0):
    changed = {name: value.clone() for name, value in total.items()}
    changed["a"].view(torch.int32)[position] ^= 1
    return changed


def test_a_repeated_update_has_the_same_sample_and_the_same_noise_and_no_second_line(tmp_path):
    key = new_key()
    ledger = begun(tmp_path / "run", key)
    first = draws(ledger, key)
    seen = [(sample(first, step), noise(first.record(step, SUM))) for step in (1, 2, 3)]
    assert len({part for pair in seen for part in pair}) == 6 and first.num_updates == 3
    again = draws(ledger, key)
    assert [again.is_recorded(step) for step in (1, 2, 3, 4)] == [True, True, True, False]
    assert [(sample(again, step), noise(again.record(step, SUM))) for step in (1, 2, 3)] == seen
    assert len(ledger.lines) == 5 and again.num_updates == 3


@pytest.mark.parametrize(
    "changed",
    [
        bit_of(SUM),
        {"a": SUM["a"], "b": -SUM["b"]},  # minus zero
        {"b": SUM["b"], "a": SUM["a"]},
        {"a": SUM["a"].double(), "b": SUM["b"]},
        {"a": SUM["a"][:, None], "b": SUM["b"]},
        {"a": torch.cat([SUM["a"], SUM["b"][:1]]), "b": SUM["b"][1:]},
        {"a": SUM["a"], "c": SUM["b"]},
    ],
    ids=["bit", "sign", "order", "type", "shape", "division", "name"],
)
def test_another_sum_never_meets_the_noise_of_the_first(tmp_path, changed):
    """Recorded, it is refused; in another copy of the run, its noise is another."""
    key = new_key()
    ledger, copy = begun(tmp_path / "run", key), begun(tmp_path / "copy", key)
    one, other = draws(ledger, key), draws(copy, key)
    assert sample(one, 1) == sample(other, 1)
    assert noise(one.record(1, SUM)) != noise(other.record(1, changed))
    a, b = (each.of_step(2, MECHANISM, VIEWS) for each in (one, other))  # from then on nothing is shared
    assert (
        len(np.intersect1d(a.indices, b.indices)) < 0.5 * len(a.indices) and np.mean(a.view_bits == b.view_bits) < 0.01
    )
    lines = list(ledger.lines)
    with pytest.raises(SumChanged, match="update 1 "):
        draws(ledger, key).record(1, changed)
    assert ledger.lines == lines


def test_the_line_is_on_disk_before_there_is_noise_and_without_it_there_is_none(tmp_path, monkeypatch):
    key = new_key()
    ledger = begun(tmp_path / "run", key)
    drawn, before = draws(ledger, key), (tmp_path / "run" / "ledger.jsonl").read_bytes()
    monkeypatch.setattr(Ledger, "append", lambda *args: (_ for _ in ()).throw(OSError))
    with pytest.raises(OSError):
        drawn.record(1, SUM)
    monkeypatch.undo()
    assert (tmp_path / "run" / "ledger.jsonl").read_bytes() == before and not drawn.is_recorded(1)
    drawn.record(1, SUM)
    assert (tmp_path / "run" / "ledger.jsonl").read_bytes().count(b'"step": 1') == 1


def test_equal_sums_do_not_show_in_the_ledger(tmp_path):
    """Those of two empty batches are both zero: their codes must not tell."""
    key = new_key()
    ledger = begun(tmp_path / "run", key)
    drawn = draws(ledger, key)
    for step in range(1, 6):
        drawn.record(step, {"a": torch.zeros(2)})
    codes = [line["sum_mac"] for line in ledger.lines[2:]]
    assert len(set(codes)) == 5 and all(len(code) == 64 for code in codes)


@pytest.mark.parametrize("change", ["key", "context", "environment", "session", "salt", "run line"])
def test_whatever_is_another_run_or_session_shares_no_bit(tmp_path, change):
    key, other_key = new_key(), new_key()
    one = draws(begun(tmp_path / "run", key), key)
    folder = tmp_path / "other"
    if change == "key":
        other = draws(begun(folder, other_key), other_key)
    elif change == "context":
        other = draws(begun(folder, key), key, {**CONTEXT, "data": "e"})
    elif change == "run line":
        other = draws(begun(folder, key, recipe="another"), key)
    else:
        first = lines_of.first_session_line({"threads": 1})
        line = lines_of.next_session_line(first, 0, None, {"threads": 2 if change == "environment" else 1})
        other = draws(begun(folder, key, line), key)
        if change == "salt":
            one = draws(begun(tmp_path / "third", key, lines_of.next_session_line(first, 0, None, {"threads": 1})), key)
    a, b = (
        np.frombuffer(sample(each, 1)[-1600:] + noise(each.record(1, SUM)), dtype=np.uint8) for each in (one, other)
    )
    assert abs(np.unpackbits(a ^ b).mean() - 0.5) < 0.05
    assert other.initial_weights() != one.initial_weights() or change in ("salt", "run line")


def test_runs_of_one_public_seed_share_their_noise_whatever_they_compute(tmp_path):
    """Common random numbers: such runs are not private, and their ledgers carry no code."""
    key = bytes(32)
    ledgers = [begun(tmp_path / name, key, recipe=name) for name in ("one", "other")]
    one, other = (
        draws(ledger, key, {"data": name}, is_public=True) for name, ledger in zip("ab", ledgers, strict=True)
    )
    for step, total in ((1, SUM), (2, bit_of(SUM))):
        assert sample(one, step) == sample(other, step)
        assert noise(one.record(step, SUM)) == noise(other.record(step, total))
    draws(ledgers[0], key, {"data": "a"}, is_public=True).record(1, bit_of(SUM))  # nothing to refuse
    assert all(line["sum_mac"] is None for ledger in ledgers for line in ledger.lines[2:])


def test_a_code_is_of_everything_and_unambiguous():
    key = bytes(range(32))
    codes = {
        tensor_mac(key, facts, tensors)
        for facts in ([], [1], ["1"], [[1]])
        for tensors in (
            {},
            {"a": torch.zeros(0)},
            {"a": torch.zeros(1)},
            {"a": torch.zeros(()), "b": torch.zeros(0)},
            {"a": torch.zeros(1, dtype=torch.bfloat16)},
        )
    }
    assert len(codes) == 20
    value = torch.arange(12.0).view(3, 4)
    assert (
        tensor_mac(key, 0, {"a": value.T})
        == tensor_mac(key, 0, {"a": value.T.contiguous()})
        != tensor_mac(bytes(32), 0, {"a": value.T})
    )
