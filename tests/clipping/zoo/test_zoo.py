"""Models that break private gradients, and those that must not be mistaken for them: each keeps the law, or is refused."""

import pytest

from tests.clipping.zoo.catalogue import ENTRIES
from tests.clipping.zoo.hooks import remove_global_hooks
from tests.clipping.zoo.law import try_law

pytestmark = pytest.mark.filterwarnings("ignore")  # those of the models themselves


@pytest.fixture(autouse=True)
def no_global_hooks():
    yield
    remove_global_hooks()


def check(entry, engine, augmult):
    outcome = try_law(entry, engine, augmult)
    assert not outcome.broken(), f"{entry.name} ({entry.says}), engine {engine}: {'; '.join(outcome.broken())}"
    if entry.harmless and engine == "auto":
        assert not outcome.refused, outcome.refused
        assert outcome.engine == "graph" or not entry.graph
    return outcome


def test_the_names_are_unique_and_there_are_enough():
    assert len({entry.name for entry in ENTRIES}) == len(ENTRIES)
    assert sum(not entry.harmless for entry in ENTRIES) >= 100


@pytest.mark.parametrize("entry", ENTRIES, ids=lambda entry: entry.name)
def test_the_law_holds_or_the_model_is_refused(entry):
    check(entry, "auto", 2)


@pytest.mark.slow
@pytest.mark.parametrize("augmult", [0, 2])
@pytest.mark.parametrize("engine", ["graph", "func", "reference", "auto"])
@pytest.mark.parametrize("entry", ENTRIES, ids=lambda entry: entry.name)
def test_the_law_holds_under_every_engine(entry, engine, augmult):
    check(entry, engine, augmult)
