"""Every family keeps the engine that it had before the law was checked: what the law refuses must be what breaks it."""

import pytest
import torch

pytest.importorskip("timm")
from sfumato.clipping import clipped_grad  # noqa: E402
from sfumato.errors import InputError  # noqa: E402
from tests.clipping.zoo.entry import cross_entropy  # noqa: E402
from tests.clipping.zoo.families import FAMILIES  # noqa: E402
from tests.clipping.zoo.law import changed, state  # noqa: E402

pytestmark = pytest.mark.filterwarnings("ignore")  # PyTorch's, on what it is slow at
QUICK = """
small_cnn_4_activation-norm vit_tiny torchvision_vit torchvision_convnext mambaout starnet sequencer2d convit
""".split()


def check(factory, size, engine):
    torch.manual_seed(0)
    model = factory().train()
    for module in model.modules():
        for rate in {"p", "drop_prob", "drop_rate"} & vars(module).keys():  # a model that draws needs a key
            if isinstance(getattr(module, rate), float):  # in MaxViT "p" is the size of a window
                setattr(module, rate, 0.0)
    before, random_state = state(model), torch.get_rng_state()
    grad_fn = clipped_grad(model, cross_entropy, clipping_norm=1.0, methods={"memory_format": "contiguous"})
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


def test_there_are_as_many_as_before():
    assert len({name for name, *_ in FAMILIES}) == len(FAMILIES)
    assert sum(engine == "graph" for *_, engine in FAMILIES) >= 54


@pytest.mark.parametrize(
    ("factory", "size", "engine"),
    [pytest.param(*others, id=name, marks=() if name in QUICK else pytest.mark.slow) for name, *others in FAMILIES],
)
def test_a_family_keeps_its_engine(factory, size, engine):
    check(factory, size, engine)
