"""A training loop of one's own: its samples, its noise, and what its certificate says of them."""

import json
import sys
import types
from decimal import Decimal

import jsonschema
import numpy as np
import pytest
import torch

import sfumato
from sfumato.accounting.rounding import epsilon_text
from sfumato.errors import InputError
from sfumato.run_folder.entries import releases
from sfumato.run_folder.ledger import Ledger
from sfumato.run_folder.schemas import SCHEMAS, schema_of
from sfumato.training.own_loop_arguments import length, sum_that_noise_fits
from tests.training.loops import DELTA, MECHANISM, ZEROS, begin, release, spent, written


def test_a_loop_ends_with_a_certificate_of_what_it_released(tmp_path):
    folder = tmp_path / "deep" / "run"
    loop = begin(str(folder))
    for step in range(1, 8):  # it stops early
        assert written(folder).epsilon == spent(12)  # never below what will have been spent
        release(loop, step)
    claim = loop.finish()
    assert claim == written(folder) == loop.finish()
    assert (claim.status, claim.num_steps, claim.epsilon, claim.delta) == ("complete", 7, spent(7), DELTA)
    assert claim.attacker is not None and claim.private and claim.unit == "one image"
    assert any("its author's word" in line for line in claim.not_covered)
    ledger = Ledger.open(folder / "ledger.jsonl")
    assert releases(ledger.lines) == {(0, step) for step in range(1, 8)}
    assert (claim.ledger_lines, claim.ledger_head, claim.run_id) == (9, ledger.head, ledger.lines[0]["run_id"])
    jsonschema.validate(json.loads((folder / "privacy.json").read_text()), schema_of(SCHEMAS["loop-certificate"]))
    assert sorted(path.name for path in folder.iterdir()) == ["ledger.head", "ledger.jsonl", "privacy.json"]
    with pytest.raises(InputError, match="has finished"):
        release(loop, 8)
    with pytest.raises(InputError, match="has finished"):
        begin(folder)


def test_persons_are_counted_by_all_their_images(tmp_path):
    mechanism = MECHANISM.replace(images_per_unit=4)
    loop = begin(tmp_path, mechanism)
    for step in range(1, 13):
        release(loop, step)
    claim = loop.finish()
    assert claim.epsilon == claim.epsilon_person == sfumato.epsilon(mechanism, DELTA).epsilon > spent(12)
    assert claim.unit == "one person with at most 4 images" and claim.person_groups == "declared, not checked"


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"mechanism": MECHANISM.replace(noise_multiplier=0.0)}, "without noise"),
        ({"mechanism": MECHANISM.replace(sampling="shuffled")}, "shuffled"),
        ({"delta": 1.0}, "delta must lie"),
        ({"clipping_norm": 0.0}, "clipping_norm must be a number above 0"),
        ({"clipping_norm": float("inf")}, "clipping_norm must be a number above 0"),
        ({"clipping_norm": "1"}, "clipping_norm must be a number above 0"),
        ({"clipping_norm": True}, "clipping_norm must be a number above 0"),
        ({"delta": "1e-5"}, "delta must be a number above 0"),
        ({"accountant": "x"}, "accountant must be one of"),
        ({"clipping_norm": float("nan")}, "clipping_norm must be a number above 0"),
    ],
)
def test_what_has_no_epsilon_is_refused_before_anything_is_written(tmp_path, changes, says):
    with pytest.raises(InputError, match=says):
        begin(tmp_path / "run", **changes)
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize("step", [1.0, 1.5, True, "1", None])
def test_a_step_that_is_no_whole_number_is_refused(tmp_path, step):
    loop = begin(tmp_path)
    with pytest.raises(InputError, match="step must be a whole number"):
        release(loop, step)
    release(loop, np.int64(1))
    assert loop.finish().num_steps == 1


def test_each_update_is_released_once_and_no_more_than_are_stated(tmp_path):
    loop = begin(tmp_path)
    release(loop, 3)
    for step in (3, 2, 0, 13):
        with pytest.raises(InputError, match="is not one after 3"):
            release(loop, step)
    assert loop.finish().num_steps == 1


@pytest.mark.parametrize(
    "noise", ["2", None, 10**400, float("nan"), Decimal("sNaN"), torch.ones(2), torch.tensor(1.0, device="meta")]
)
def test_a_mechanism_s_noise_is_a_number(noise):
    with pytest.raises(InputError, match="noise_multiplier must be finite"):
        sfumato.Mechanism(1000, 100, noise, 12)


def test_a_mechanism_s_numbers_are_whole_whatever_library_they_come_from(tmp_path):
    for kind in (np.int64, np.int32, torch.tensor):
        mechanism = sfumato.Mechanism(kind(1000), kind(100), 2.0, kind(12))
        assert mechanism == MECHANISM and type(mechanism.batch_size) is int
        assert 50 < len(begin(tmp_path / kind.__name__, mechanism).batch(1)) < 150
    for name in ("num_examples", "batch_size", "num_steps"):
        for value in (100.5, "100", None, True):
            with pytest.raises(InputError, match=f"{name} must be a whole number"):
                MECHANISM.replace(**{name: value})


def test_every_release_has_noise_of_its_own_of_the_mechanism_s_scale(tmp_path):
    """Of one object, of one that goes on, and of updates that are tried again."""
    mechanism, size = MECHANISM.replace(num_steps=3), 40_000
    found = []
    for _ in range(3):
        loop = begin(tmp_path, mechanism)
        for step in (1, 2, 3):
            loop.batch(step)
            sums = {"weight": torch.full((size,), 0.01), "bias": torch.ones(0)}
            noisy = loop.release(step, sums, sensitivity=0.5)
            assert noisy["weight"].dtype == torch.float32 and noisy["bias"].shape == (0,)
            found.append(noisy["weight"].double().numpy() - 0.01)
        loop.close()
    noise = np.stack(found)
    assert noise.std() == pytest.approx(2.0 * 0.5, rel=0.01) and abs(noise.mean()) < 0.01
    assert abs(np.corrcoef(noise)[np.triu_indices(9, 1)]).max() < 6 / size**0.5


def test_each_sample_is_drawn_for_one_release_and_each_release_has_one(tmp_path):
    mechanism = MECHANISM.replace(num_steps=200)
    loop, batches = begin(tmp_path, mechanism), []
    for step in range(1, 201):
        with pytest.raises(InputError, match="no sample was drawn"):
            loop.release(step, ZEROS, sensitivity=1.0)
        batches.append(loop.batch(step))
        assert (loop.batch(step) == batches[-1]).all()
        loop.release(step, ZEROS, sensitivity=1.0)
        for late in (loop.batch, loop.model_key):
            with pytest.raises(InputError, match="is not one after"):
                late(step)
    drawn = np.concatenate(batches)
    counts = np.bincount(drawn, minlength=1000)
    assert abs(len(drawn) - 20_000) < 5 * (20_000 * 0.9) ** 0.5 and abs(counts - 20).max() < 6 * (20 * 0.9) ** 0.5
    assert len({batch.tobytes() for batch in batches}) == 200


def test_a_model_key_is_of_one_release_as_its_sample_is(tmp_path):
    keys = []
    for _ in range(2):
        loop = begin(tmp_path)
        for step in (1, 2):
            keys.append(loop.model_key(step))
            release(loop, step)
            assert loop.model_key(step + 1) != keys[-1]
        keys.append(loop.model_key(3))
    loop = begin(tmp_path)
    assert loop.model_key(1) == keys[-1]  # nothing was released since
    assert len(set(keys)) == 5 and {len(key) for key in keys} == {32}


@pytest.mark.parametrize(
    ("grad_sum", "sensitivity", "says"),
    [
        ({}, 1.0, "must be a dictionary of tensors"),
        ([torch.zeros(2)], 1.0, "must be a dictionary of tensors"),
        ({"x": [0.0]}, 1.0, "float32 or float64, not a list"),
        ({"x": torch.zeros(2, dtype=torch.int64)}, 1.0, "not a torch.int64 tensor"),  # halves beside it would round it
        ({"x": torch.zeros(2, dtype=torch.complex64)}, 1.0, "not a torch.complex64 tensor"),
        ({"x": torch.zeros(2).to_sparse()}, 1.0, "must be a dense tensor"),
        ({"x": torch.zeros(2), "y": torch.zeros(2, device="meta")}, 1.0, "must be a dense tensor"),
        (ZEROS, 0.0, "sensitivity must be a number above 0"),
        (ZEROS, float("nan"), "sensitivity must be a number above 0"),
        (ZEROS, "1", "sensitivity must be a number above 0"),
        (ZEROS, 1e-320, "is no noise in float32"),
    ],
)
def test_a_sum_that_takes_no_noise_is_refused_and_does_not_count(tmp_path, grad_sum, sensitivity, says):
    loop = begin(tmp_path)
    loop.batch(1)
    with pytest.raises(InputError, match=says):
        loop.release(1, grad_sum, sensitivity=sensitivity)
    assert not releases(Ledger.open(tmp_path / "ledger.jsonl").lines)
    loop.release(1, ZEROS, sensitivity=1.0)
    assert loop.finish().num_steps == 1


def test_no_sample_is_passed_over(tmp_path):
    """Whoever passes over empty samples releases more of each that is not."""
    loop = begin(tmp_path, MECHANISM.replace(num_examples=100, batch_size=1))
    loop.batch(1)
    with pytest.raises(InputError, match="sample 1 was drawn and not released"):
        loop.batch(2)
    loop.release(1, ZEROS, sensitivity=1.0)
    release(loop, 2)
    assert loop.finish().num_steps == 2


@pytest.mark.parametrize("value", [1e8, float("nan"), float("inf")])
def test_a_sum_that_its_sample_cannot_have_is_refused_and_does_not_count(tmp_path, value):
    loop = begin(tmp_path)
    size = len(loop.batch(1))
    with pytest.raises(InputError, match="the sum is longer than"):
        loop.release(1, {"weight": torch.tensor([value, 0.0])}, sensitivity=1.0)
    loop.release(1, {"weight": torch.tensor([float(size), 0.0])}, sensitivity=1.0)
    assert loop.finish().num_steps == 1


def test_what_finish_returns_is_the_caller_s_own(tmp_path):
    loop = begin(tmp_path)
    loop.finish().not_covered.clear()
    assert any("author's word" in line for line in loop.finish().not_covered)


def test_a_sample_that_waited_when_its_loop_was_closed_waits_when_it_ends(tmp_path):
    loop = begin(tmp_path)
    release(loop, 1)
    pending = loop.batch(2)
    loop.close()
    loop = begin(tmp_path)
    with pytest.raises(InputError, match="a sample of a session before was drawn"):
        loop.finish()
    with pytest.raises(InputError, match="no sample was drawn for update 1"):
        loop.release(1, ZEROS, sensitivity=1.0)
    assert np.array_equal(loop.batch(1), pending)
    loop.release(1, ZEROS, sensitivity=1.0)
    assert loop.finish().num_steps == 2
    assert {path.name for path in tmp_path.iterdir()} == {"ledger.head", "ledger.jsonl", "privacy.json"}


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_a_sum_of_few_bits_is_refused_for_one_image_moves_it_by_more_than_it_adds(tmp_path, dtype):
    rows = torch.full((5000, 1), 1.0, dtype=dtype)
    moved = float(rows.sum() - rows[1:].sum())
    assert moved == 0 or moved > 1.5
    loop = begin(tmp_path)
    loop.batch(1)
    with pytest.raises(InputError, match="float32 or float64"):
        loop.release(1, {"x": rows[:2].sum(0)}, sensitivity=1.0)


def test_a_loop_that_stops_early_says_what_all_planned_updates_would_have_cost(tmp_path):
    loop = begin(tmp_path)
    release(loop, 1)
    claim = loop.finish()
    [line] = [line for line in claim.not_covered if "chosen by samples or by what" in line]
    assert f"12 were planned, whose epsilon is {epsilon_text(spent(12))}" in line and claim.epsilon == spent(1)


def test_a_loop_with_a_sample_that_waits_does_not_end(tmp_path):
    loop = begin(tmp_path)
    loop.batch(1)
    with pytest.raises(InputError, match="sample 1 was drawn and not released"):
        loop.finish()
    loop.release(1, ZEROS, sensitivity=1.0)
    assert loop.finish().num_steps == 1


@pytest.mark.parametrize(("noise", "delta"), [(0.1, 1e-5), (1e-3, 1e-5), (1.0, 1e-30), (2.0, 1e-320)])
def test_what_the_end_of_the_noise_would_give_away_is_not_claimed(tmp_path, noise, delta):
    with pytest.raises(InputError, match="ends at 10.6 standard deviations"):
        begin(tmp_path / "run", MECHANISM.replace(noise_multiplier=noise), delta=delta)
    assert not (tmp_path / "run").exists()


def test_numbers_of_an_array_are_not_in_a_refusal(tmp_path):
    loop = begin(tmp_path)
    loop.batch(1)
    for wrong in (torch.tensor([0.123, 0.456]), np.array([[0.123], [0.456]]), torch.tensor(True), bytearray(b"1")):
        with pytest.raises(InputError, match="sensitivity must be a number above 0, not a") as refusal:
            loop.release(1, ZEROS, sensitivity=wrong)
        assert "0.123" not in str(refusal.value) and "\n" not in str(refusal.value)


def test_a_large_sum_is_released_in_inference_mode(tmp_path):
    loop = begin(tmp_path)
    loop.batch(1)
    with torch.inference_mode():
        noisy = loop.release(1, {"x": torch.zeros(200_000)}, sensitivity=1.0)["x"]
    assert abs(float(noisy.std()) - 2.0) < 0.05


@pytest.mark.parametrize(
    "names", [("key",), ("ledger.jsonl",), ("ledger.jsonl", "key"), ("sample.json",), ("ledger.jsonl", "photo.jpg")]
)
def test_files_of_somebody_else_that_bear_a_loop_s_names_are_left_alone(tmp_path, names):
    for name in names:
        (tmp_path / name).write_text(f"my own {name}")
    with pytest.raises(InputError, match="has no ledger of a loop"):
        begin(tmp_path)
    assert {path.name: path.read_text() for path in tmp_path.iterdir()} == {name: f"my own {name}" for name in names}


@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
def test_a_step_that_is_compiled_draws_and_counts_as_one_that_is_not(tmp_path, backend):
    loop, noises, samples = begin(tmp_path), [], []

    @torch.compile(backend=backend)
    def update(step, images):
        batch = loop.batch(step)
        noisy = loop.release(step, {"weight": images.sin() * 0}, sensitivity=1.0)
        return noisy["weight"] * 1, batch

    for step in range(1, 7):
        noise, sample = update(step, torch.ones(40_000))
        noises.append(noise)
        samples.append(tuple(sample.tolist()))
    noise = torch.stack(noises)
    assert ((noise.std(1) / 2 - 1).abs() < 0.03).all() and len(set(samples)) == 6
    assert torch.corrcoef(noise).triu(1).abs().max() < 0.03
    assert loop.finish().num_steps == 6


@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
def test_a_loop_may_begin_and_end_within_a_function_that_is_compiled(tmp_path, backend):
    @torch.compile(backend=backend)
    def train(folder, images):
        loop = begin(folder)
        loop.batch(1)
        noisy = loop.release(1, {"weight": images.sin() * 0}, sensitivity=1.0)
        return noisy["weight"] * 1, loop.finish()

    noises = []
    for name in ("a", "b"):
        noise, certificate = train(tmp_path / name, torch.ones(40_000))
        noises.append(noise)
        assert certificate.num_steps == 1
    noise = torch.stack(noises)
    assert ((noise.std(1) / 2 - 1).abs() < 0.03).all() and abs(torch.corrcoef(noise)[0, 1]) < 0.03


@pytest.mark.parametrize("module", [types.ModuleType("torch._dynamo"), None])
def test_a_handler_may_end_the_loop_while_the_program_imports_what_compiles(tmp_path, monkeypatch, module):
    """The first optimizer does that, for a second. Half imported the module has nothing in it; None: it is blocked."""
    loop = begin(tmp_path)
    monkeypatch.setitem(sys.modules, "torch._dynamo", module)
    release(loop, 1)
    assert loop.finish().num_steps == 1


def test_a_sum_is_read_once():
    """Else memory that others write to, or a mapping that makes its values anew, would be noised unmeasured."""

    class Anew(dict):
        def items(self):
            return [("weight", torch.randn(4))]

    shared = torch.ones(4).share_memory_()
    whole, _ = sum_that_noise_fits({"weight": shared}, 1.0)
    shared.fill_(7.0)
    assert torch.equal(whole["weight"], torch.ones(4))
    anew, _ = sum_that_noise_fits(Anew(weight=torch.zeros(4)), 1.0)
    assert torch.equal(anew["weight"], anew["weight"]) and length(anew) == length(anew)


def test_an_object_whose_opening_failed_says_so_and_its_close_is_harmless(tmp_path):
    class Mine(sfumato.OwnLoop):
        def __init__(self, *arguments, **options):
            try:
                super().__init__(*arguments, **options)
            finally:  # what the opening raised is what is seen
                self.close()

    with pytest.raises(InputError, match="clipping_norm"):
        Mine(tmp_path, MECHANISM, clipping_norm=-1.0, delta=DELTA)
    begin(tmp_path).finish()
    with pytest.raises(InputError, match="has finished"):
        Mine(tmp_path, MECHANISM, clipping_norm=1.0, delta=DELTA)
    unopened = sfumato.OwnLoop.__new__(sfumato.OwnLoop)
    unopened.close()
    for call in (
        lambda: unopened.batch(1),
        lambda: unopened.model_key(1),
        lambda: unopened.release(1, ZEROS, sensitivity=1.0),
        unopened.finish,
    ):
        with pytest.raises(InputError, match="not opened"):
            call()
