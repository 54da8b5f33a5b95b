"""Models that break private gradients, and those that only look so: each keeps the law or is refused."""

import pytest

from tests.clipping.zoo.catalogue import BY_NAME, ENTRIES, REPRESENTATIVES
from tests.clipping.zoo.hooks import remove_global_hooks
from tests.clipping.zoo.law import QUICK, try_law

pytestmark = pytest.mark.filterwarnings("ignore")  # those of the models themselves
ENGINES = ["graph", "func", "reference", "auto"]


@pytest.fixture(autouse=True)
def no_global_hooks():
    yield
    remove_global_hooks()


def check(entry, engine, augmult, **options):
    outcome = try_law(entry, engine, augmult, **options)
    assert not outcome.broken(), f"{entry.name} ({entry.says}), engine {engine}: {'; '.join(outcome.broken())}"
    if entry.harmless and engine == "auto":
        assert not outcome.refused, outcome.refused
        assert outcome.engine == "graph" or not entry.graph
    if entry.graph and engine == "graph":
        assert not outcome.refused, outcome.refused


def test_the_names_are_unique_and_there_are_enough():
    assert len(BY_NAME) == len(ENTRIES)
    assert set(REPRESENTATIVES) < set(BY_NAME) and len(REPRESENTATIVES) >= 40
    assert sum(not BY_NAME[name].harmless for name in REPRESENTATIVES) >= 25


@pytest.mark.parametrize("name", REPRESENTATIVES)
def test_the_law_holds_or_the_model_is_refused(name):
    """Under every engine, without views and with two of them."""
    for engine in ENGINES[:3]:
        for augmult in (0, 2):
            check(BY_NAME[name], engine, augmult, batches=QUICK)


@pytest.mark.slow
@pytest.mark.parametrize(("augmult", "microbatch_size"), [(0, 8), (2, 3)])
@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("entry", ENTRIES, ids=lambda entry: entry.name)
def test_the_law_holds_for_the_whole_zoo(entry, engine, augmult, microbatch_size):
    check(entry, engine, augmult, microbatch_size=microbatch_size)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["halves", "doubles_parameter", "no_grad_mean", "plain", "windows", "class_token"])
def test_the_law_holds_compiled(name):
    check(BY_NAME[name], "graph", 2, compile=True)
