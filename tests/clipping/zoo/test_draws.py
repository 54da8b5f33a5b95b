"""What a model draws comes from the key, the example and the view: laws of random layers under every engine."""

import hashlib

import numpy as np
import pytest
import torch
from scipy import stats
from torch import nn
from torch.distributions import Normal
from torch.nn import functional as F

from sfumato.clipping import clipped_grad
from sfumato.clipping.random_layers import KeyedDraws, _mix, draw_seeds
from sfumato.errors import InputError
from tests.clipping.problems import FIXED, Do, cross_entropy, distance, norm
from tests.clipping.zoo.law import BY_NAME, ENTRIES, IDS, KEY, pictures

pytestmark = pytest.mark.filterwarnings("ignore")
ENGINES = ["graph", "func", "reference"]
OTHER_KEY = hashlib.sha256(b"the next step").digest()
DRAWN = [entry for entry in ENTRIES if entry.draws and entry.harmless]
QUICK = [BY_NAME[name] for name in ("dropout", "attention_module")]


def sums_of(entry, engine, rows=range(8), key=KEY, ids=IDS, microbatch_size=8):
    (images, targets), rows = pictures(2), list(rows)
    options = {"clipping_norm": 0.5, "augmult": 2, "microbatch_size": microbatch_size, "methods": FIXED}
    grad_fn = clipped_grad(entry.make(), cross_entropy, engine=engine, **options)
    return grad_fn(images[rows], targets[rows], key=key, example_ids=ids[rows])


def assert_bits(one, other):
    assert torch.equal(one.grad_norms, other.grad_norms)
    assert all(torch.equal(value, other.grad_sum[name]) for name, value in one.grad_sum.items())


def assert_same(one, other):
    """The same masks: what is left is the order of additions."""
    assert distance(one.grad_sum, other.grad_sum) <= 1e-5 * norm(one.grad_sum)


entries = pytest.mark.parametrize(
    "entry", [pytest.param(entry, id=entry.name, marks=() if entry in QUICK else pytest.mark.slow) for entry in DRAWN]
)


@entries
def test_place_company_and_microbatch_change_no_draw(entry):
    """Nor does what was drawn before, in PyTorch's own generator or by another call."""
    torch.manual_seed(1)
    whole = sums_of(entry, "auto")
    torch.manual_seed(2)
    assert_bits(whole, sums_of(entry, "auto"))
    order = [5, 2, 7, 0, 3, 6, 1, 4]
    permuted = sums_of(entry, "auto", order)
    assert_same(whole, permuted)
    torch.testing.assert_close(permuted.grad_norms, whole.grad_norms[order], rtol=1e-5, atol=0)
    assert_same(whole, sums_of(entry, "auto", microbatch_size=3))
    parts = [sums_of(entry, "auto", rows).grad_sum for rows in ([0, 5, 6], [1, 2, 3, 4, 7])]
    together = {name: sum(sums[name] for sums in parts) for name in whole.grad_sum}
    assert distance(whole.grad_sum, together) <= 1e-5 * norm(together)


@entries
def test_another_key_or_another_id_draws_anew(entry):
    whole = sums_of(entry, "auto").grad_sum
    for other in (
        sums_of(entry, "auto", key=OTHER_KEY),
        sums_of(entry, "auto", ids=IDS + 1),
        sums_of(entry, "auto", ids=IDS + 2**32),
    ):
        assert distance(whole, other.grad_sum) > 1e-2 * norm(whole)


@pytest.mark.parametrize("name", ["dropout", "noise", "attention_module"])
def test_engines_draw_the_same_and_move_no_global_state(name):
    before = torch.get_rng_state()
    found = [sums_of(BY_NAME[name], engine).grad_sum for engine in ENGINES]
    assert torch.equal(before, torch.get_rng_state())
    for other in found[1:]:
        assert distance(found[0], other) <= 1e-4 * norm(found[0])


@pytest.mark.parametrize("engine", ["graph", "reference"])
def test_a_model_that_draws_needs_key_and_ids(engine):
    images, targets = pictures(0)
    grad_fn = clipped_grad(BY_NAME["dropout"].make(), cross_entropy, clipping_norm=1.0, engine=engine)
    for given in (
        {},
        {"key": KEY},
        {"example_ids": IDS},
        {"key": KEY[:31], "example_ids": IDS},
        {"key": KEY, "example_ids": IDS[:7]},
        {"key": KEY, "example_ids": IDS.float()},
    ):
        with pytest.raises(InputError):
            grad_fn(images, targets, **given)


class Seen(nn.Module):
    """The gradient of its one weight is what a layer makes of an example."""

    def __init__(self, layer, values):
        super().__init__()
        self.layer = layer if isinstance(layer, nn.Module) else Do(layer)
        self.out = nn.Linear(values, 1, bias=False)

    def forward(self, x):
        return self.out(self.layer(x).flatten(1))[:, 0]


def seen(layer, images, engine, key=KEY, ids=None, augmult=0):
    """What a layer makes of the images, added up over images and averaged over views, through the sum of gradients."""
    rows = images[:, 0] if augmult else images
    with torch.no_grad(), torch.random.fork_rng(devices=[]):
        values = Seen(layer, 1).layer(rows[:1]).numel()
    model = Seen(layer, values).train()
    unclipped = {"clipping_norm": 1e6, "rescale_to_unit_norm": False}
    grad_fn = clipped_grad(model, lambda outputs: outputs, augmult=augmult, engine=engine, **unclipped)
    ids = torch.arange(len(images)) if ids is None else torch.as_tensor(ids)
    return grad_fn(images, key=key, example_ids=ids).grad_sum["out.weight"][0]


def alone(layer, image, engine, number=0, key=KEY):
    return seen(layer, image[None], engine, key=key, ids=[number])


def correlation(one, other):
    return abs(torch.corrcoef(torch.stack([one.double(), other.double()]))[0, 1].item())


ONES = torch.ones(64, 16, 16)
# |correlation| of 16,384 independent pairs stays below this but for 6 in 10 million.
INDEPENDENT = 5 / 128


@pytest.mark.parametrize(("engine", "rate"), [("graph", 0.1), ("graph", 0.9), ("func", 0.1), ("reference", 0.9)])
def test_dropout_keeps_its_rate(engine, rate):
    values = torch.cat([alone(nn.Dropout(rate), ONES, engine, number) for number in range(4)])
    kept = values != 0
    torch.testing.assert_close(values[kept], torch.full_like(values[kept], 1 / (1 - rate)))
    spread = (rate * (1 - rate) / len(values)) ** 0.5
    assert abs(kept.double().mean().item() - (1 - rate)) < 5 * spread


@pytest.mark.parametrize("engine", ENGINES)
def test_masks_of_two_examples_two_steps_two_layers_and_two_calls_are_uncorrelated(engine):
    layer = nn.Dropout(0.5)
    first = alone(layer, ONES, engine, 0)
    assert torch.equal(first, alone(layer, ONES, engine, 0))
    assert correlation(first, first.roll(1)) < INDEPENDENT
    for other in (1, 256, 2**32, 2**62, -1):
        assert correlation(first, alone(layer, ONES, engine, other)) < INDEPENDENT, other
    assert correlation(first, alone(layer, ONES, engine, 0, key=OTHER_KEY)) < INDEPENDENT
    assert correlation(first, alone(layer, ONES, engine, 0, key=bytes([KEY[0] ^ 1]) + KEY[1:])) < INDEPENDENT
    assert correlation(first, alone(layer, ONES, engine, 0, key=KEY[:-1] + bytes([KEY[-1] ^ 1]))) < INDEPENDENT
    two_layers = nn.ModuleList([nn.Dropout(0.5), nn.Dropout(0.5)])
    for apply in (
        lambda x: torch.cat([two_layers[0](x), two_layers[1](x)], 1),
        lambda x: torch.cat([layer(x), layer(x)], 1),
        lambda x: torch.cat([F.dropout(x), torch.rand_like(x)], 1),
        lambda x: torch.cat([torch.rand_like(x), torch.rand_like(x)], 1) + 0 * torch.cat([x, x], 1),
        lambda x: torch.cat([torch.randn_like(x), torch.rand_like(x)], 1) + 0 * torch.cat([x, x], 1),
    ):
        assert correlation(*alone(apply, ONES, engine).chunk(2)) < INDEPENDENT


@pytest.mark.parametrize("engine", ENGINES)
def test_masks_of_two_views_are_uncorrelated(engine):
    """The views hold 1 and 4, so that the sum of what was kept of both tells which was."""
    views = torch.stack([ONES, 4 * ONES])[None]
    total = seen(nn.Dropout(0.5), views, engine, augmult=2).round()  # the mean of 0 or 2, and of 0 or 8
    assert set(total.tolist()) == {0, 1, 4, 5}
    first, second = total % 2, (total >= 4).float()
    assert correlation(first, second) < INDEPENDENT
    assert abs(first.mean().item() - 0.5) < INDEPENDENT and abs(second.mean().item() - 0.5) < INDEPENDENT


@pytest.mark.parametrize(
    ("layer", "image", "law"),
    [
        (lambda x: x + torch.randn_like(x), 0 * ONES, stats.norm()),
        (lambda x: x + torch.randn(x.shape), 0 * ONES, stats.norm()),
        (lambda x: x + torch.empty_like(x).normal_(1, 2), 0 * ONES, stats.norm(1, 2)),
        (lambda x: x + torch.rand_like(x), 0 * ONES, stats.uniform()),
        (lambda x: x + torch.empty_like(x).uniform_(2, 5), 0 * ONES, stats.uniform(2, 3)),
        (lambda x: x + torch.normal(1.0, 2.0, x.shape), 0 * ONES, stats.norm(1, 2)),
        (lambda x: x + Normal(x, torch.ones_like(x)).sample(), 0 * ONES, stats.norm()),
        (lambda x: Normal(x, torch.ones_like(x), validate_args=False).rsample(), 0 * ONES, stats.norm()),
    ],
    ids="randn_like randn normal_ rand_like uniform_ of_a_shape sample rsample".split(),
)
def test_draws_follow_their_law(layer, image, law):
    """One alone; and four added up, which would spread twice as far if all four drew the same."""
    assert stats.kstest(alone(layer, image, "auto").double().numpy(), law.cdf).pvalue > 1e-6
    total = seen(layer, image.expand(4, *image.shape), "auto").double().numpy()
    assert np.std(total) == pytest.approx(2 * law.std(), rel=0.05)
    assert np.mean(total) == pytest.approx(4 * law.mean(), abs=10 * law.std() / 128)


def test_bernoulli_follows_its_probabilities():
    image = torch.linspace(-3, 3, 8).repeat_interleave(2048).reshape(64, 16, 16)
    values = alone(lambda x: torch.bernoulli(x.sigmoid()) + 0 * x, image, "auto").view(8, -1)
    assert set(values.unique().tolist()) == {0, 1}
    rates = torch.linspace(-3, 3, 8).sigmoid()
    assert ((values.mean(1) - rates).abs() < 5 * (rates * (1 - rates) / 2048).sqrt()).all()


def test_channels_are_dropped_whole():
    layer, image = nn.Dropout2d(0.3), torch.ones(256, 2, 2)
    values = alone(layer, image, "auto").view(256, 4)
    assert (values == values[:, :1]).all()
    assert abs((values[:, 0] != 0).double().mean().item() - 0.7) < 5 * (0.21 / 256) ** 0.5


def test_an_operation_that_is_told_to_evaluate_draws_nothing_and_one_that_trains_draws_by_its_key():
    rows, seeds = torch.rand(4, 100) + 1, draw_seeds(KEY, IDS[:4], 1)
    for call in (torch.native_dropout, lambda x, rate, trains: (F.rrelu(-x, rate / 2, rate, trains),)):
        with KeyedDraws(None):
            still = call(rows, 0.5, False)[0]
        with KeyedDraws(None), pytest.raises(InputError):
            call(rows, 0.5, True)
        assert torch.equal(still, call(rows, 0.5, False)[0])
    with KeyedDraws(seeds, (0,)):
        first = torch.native_dropout(rows, 0.5, True)[0]
    with KeyedDraws(seeds, (0,)):
        assert torch.equal(torch.native_dropout(rows, 0.5, True)[0], first) and not torch.equal(first, rows)


def test_alpha_dropout_keeps_mean_and_variance():
    image = torch.randn(64, 16, 16, generator=torch.Generator().manual_seed(0))
    values = alone(nn.AlphaDropout(0.2), image, "auto")
    assert values.mean().item() == pytest.approx(0, abs=0.05) and values.std().item() == pytest.approx(1, abs=0.05)


def test_every_row_has_its_own_depth():
    """Image i is one at place i and zero elsewhere: the sum shows each one's factor."""

    def drop_path(x):
        return x * x.new_empty(x.shape[0], *[1] * (x.ndim - 1)).bernoulli_(0.8) / 0.8

    factors = seen(drop_path, torch.eye(400), "auto")
    kept = factors > 0
    torch.testing.assert_close(factors[kept], torch.full_like(factors[kept], 1.25))
    assert abs(kept.double().mean().item() - 0.8) < 5 * (0.16 / 400) ** 0.5


def lowbias32(word):
    """As its author prints it in C, for unsigned words: https://nullprogram.com/blog/2018/07/31/."""
    word = (word ^ word >> 16) * 0x7FEB352D % 2**32
    word = (word ^ word >> 15) * 0x846CA68B % 2**32
    return word ^ word >> 16


def test_words_are_mixed_by_the_published_bijection():
    """One constant off, and two of all words may meet: with an even factor half of them do."""
    words = [0, 1, 2**15, 2**31 - 1, 2**31, 2**32 - 1, *np.random.default_rng(0).integers(2**32, size=1000).tolist()]
    signed = torch.tensor(words, dtype=torch.int64).to(torch.int32)  # as PyTorch wraps around
    assert [word % 2**32 for word in _mix(signed).tolist()] == [lowbias32(word) for word in words]
