"""Models that break private gradients, and those that only look so: each keeps the law or is refused."""

import pytest
import torch

from sfumato.clipping import clipped_grad
from sfumato.errors import InputError
from tests.clipping.problems import FIXED, cross_entropy
from tests.clipping.zoo.families import FAMILIES
from tests.clipping.zoo.hooks import remove_global_hooks
from tests.clipping.zoo.law import BY_NAME, ENTRIES, QUICK, changed, state, try_law

pytestmark = pytest.mark.filterwarnings("ignore")  # those of the models themselves
# For the quick suite; all are for the slow one.
REPRESENTATIVES = """
arange tutorial_positions table_by_row halves roll one_over_rows folded
beyond_12 little_mean mean softmax_over_rows attention_over_rows batch_norm batch_norm_untracked batch_norm_behind_zero
mean_in_buffer mean_in_new_buffer mean_in_attribute records_features act_norm_flag codebook spectral_norm
looks_backward doubles_gradient_of_output doubles_parameter little_parameter zero_head_parameter
reversal straight_through_by_detach right_function mixes_backward no_grad_mean weight_detached
dropout stochastic_depth gumbel_softmax stochastic_depth_batch draws_by_value
plain windows class_token weight_norm
""".split()
# Others are in tests/clipping/test_families.py, gradients and all.
QUICK_FAMILIES = "torchvision_convnext mambaout starnet convit".split()
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


def test_there_are_as_many_families_as_before():
    assert len({name for name, *_ in FAMILIES}) == len(FAMILIES)
    assert sum(engine == "graph" for *_, engine in FAMILIES) >= 54


@pytest.mark.parametrize(
    ("factory", "size", "engine"),
    [
        pytest.param(*others, id=name, marks=() if name in QUICK_FAMILIES else pytest.mark.slow)
        for name, *others in FAMILIES
    ],
)
def test_a_family_keeps_its_engine(factory, size, engine):
    """The one that it had before the law was checked: what the law refuses must be what breaks it."""
    torch.manual_seed(0)
    model = factory().train()
    for module in model.modules():
        for rate in {"p", "drop_prob", "drop_rate"} & vars(module).keys():  # a model that draws needs a key
            if isinstance(getattr(module, rate), float):  # in MaxViT "p" is the size of a window
                setattr(module, rate, 0.0)
    before, random_state = state(model), torch.get_rng_state()
    grad_fn = clipped_grad(model, cross_entropy, clipping_norm=1.0, methods=FIXED)
    inputs = torch.randn(2, 3, size, size, generator=torch.Generator().manual_seed(0))
    try:
        out = grad_fn(inputs, torch.tensor([1, 3]))
    except InputError:
        found = "refused"
    else:
        found = grad_fn.engine
        assert (out.grad_norms > 0).all() and out.grad_norms.isfinite().all()
    assert engine in (found, "any")
    assert changed(before, model, random_state) == ()
