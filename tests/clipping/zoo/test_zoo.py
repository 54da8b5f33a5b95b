"""Models that break private gradients, and those that only look so: each keeps the law or is refused."""

import pytest

from tests.clipping.zoo.apart import try_law_apart
from tests.clipping.zoo.catalogue import BY_NAME, ENTRIES, VARIANTS
from tests.clipping.zoo.hooks import remove_global_hooks
from tests.clipping.zoo.law import try_law

pytestmark = pytest.mark.filterwarnings("ignore")  # those of the models themselves
TOGETHER = [entry for entry in ENTRIES if not entry.apart]


def entries(chosen):
    return pytest.mark.parametrize("entry", chosen, ids=lambda entry: entry.name)


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
    assert set(VARIANTS) < set(BY_NAME)
    assert sum(not entry.harmless for entry in ENTRIES) >= 40


@entries([entry for entry in TOGETHER if entry.name not in VARIANTS])
def test_the_law_holds_or_the_model_is_refused(entry):
    check(entry, "auto", 2)


@pytest.mark.slow
@pytest.mark.parametrize(("augmult", "microbatch_size"), [(0, 8), (2, 3)])
@pytest.mark.parametrize("engine", ["graph", "func", "reference", "auto"])
@entries(TOGETHER)
def test_the_law_holds_under_every_engine(entry, engine, augmult, microbatch_size):
    """With microbatches of three the last one is filled up."""
    check(entry, engine, augmult, microbatch_size=microbatch_size)


@pytest.mark.slow
@pytest.mark.parametrize("engine", ["graph", "func", "reference", "auto"])
@entries([entry for entry in ENTRIES if entry.apart])
def test_the_law_holds_for_models_that_can_crash(entry, engine):
    broken = try_law_apart(entry.name, engine, 0)
    assert not broken, f"{entry.name} ({entry.says}), engine {engine}: {broken}"


@pytest.mark.slow
@pytest.mark.parametrize(
    "name",
    [
        "halves",
        "arange",
        "beyond_12",
        "doubles_parameter",
        "reversal",
        "no_grad_mean",
        "plain",
        "windows",
        "class_token",
    ],
)
def test_the_law_holds_compiled(name):
    check(BY_NAME[name], "graph", 2, compile=True)
