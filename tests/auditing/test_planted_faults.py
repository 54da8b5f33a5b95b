"""Every way of losing privacy that is planted in the code breaks a law, and the code as it is breaks none."""

import sys

import pytest

from sfumato.training import step
from sfumato.training.noise import with_noise
from tests.auditing.planted import laws
from tests.auditing.planted.faults import FAULTS, MORE
from tests.auditing.planted.plants import Edit, planted


@pytest.mark.parametrize("name", laws.LAWS)
def test_the_code_keeps_the_law(name):
    assert laws.broken(laws.LAWS[name]) is None


def name_of(fault):
    """As a test's name."""
    return fault.name.replace(" ", "-")


@pytest.mark.parametrize("fault", FAULTS, ids=name_of)
def test_a_classic_fault_breaks_a_law(fault):
    assert found(fault) is not None


@pytest.mark.slow
@pytest.mark.parametrize("fault", MORE, ids=name_of)
def test_another_fault_breaks_a_law(fault):
    assert found(fault) is not None


def found(fault):
    """What the fault's law says where the fault is planted; None if it sees nothing."""
    try:
        with planted(*fault.edits):
            laws.forget()
            return laws.broken(laws.LAWS[fault.law])
    finally:
        laws.forget()


def test_what_is_planted_is_seen_by_all_who_use_it_and_taken_out_again():
    real = step.with_noise, step.Draws.noise_key
    stddev = Edit("training.noise:with_noise", "_GRID_BITS)", "_GRID_BITS - 1)")
    with planted(stddev, Edit("training.step:Draws.noise_key", "release)", "release + 0)")):
        assert step.with_noise is sys.modules["sfumato.training.noise"].with_noise is not real[0]
        assert step.Draws.noise_key is not real[1]
    assert (step.with_noise, step.Draws.noise_key) == real and step.with_noise is with_noise


@pytest.mark.parametrize("before", ["no such text", "self"])
def test_a_fault_whose_text_does_not_stand_in_the_code_once_is_an_error(before):
    real = step.Draws.noise_key
    edits = [Edit("training.step:Draws.noise_key", *words) for words in (("release)", "release + 0)"), (before, ""))]
    with pytest.raises(ValueError, match="once"), planted(*edits):
        pass
    assert step.Draws.noise_key is real
