"""What a loss may keep between two images, wherever it keeps it: no image meets what another left.

Each case is a loss of the user's that looks at values, so that it is called for one example after
another, and that turns its sign once it has seen an image with large outputs.
"""

import collections
import functools
import random

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from sfumato.clipping import clipped_grad
from sfumato.errors import InputError
from tests.clipping.problems import cross_entropy

LARGE = 3000.0


def linear():
    torch.manual_seed(0)
    return nn.Sequential(nn.Flatten(), nn.Linear(12, 5))


def flat(out):
    return torch.cat([value.flatten() for value in out.grad_sum.values()])


def turned(outputs, labels, is_turned, turn):
    """The loss, with what its holder says; ``turn`` is called at an image with large outputs."""
    loss = cross_entropy(outputs, labels)
    loss = -loss if is_turned() else loss
    if outputs.abs().max().item() > LARGE:
        turn()
    return loss


def by_attribute(holder, name="seen"):
    """A loss that notes in an attribute, which need not exist before."""

    def loss(outputs, labels):
        return turned(outputs, labels, lambda: hasattr(holder, name), lambda: setattr(holder, name, True))

    return loss


def wrapped_library_function():
    state = [False]

    @functools.wraps(F.cross_entropy)
    def loss(outputs, labels):
        return turned(outputs, labels, lambda: state[0], lambda: state.__setitem__(0, True))

    return loss


def wrapped_by_a_library():
    state = [False]

    @torch.enable_grad()
    def loss(outputs, labels):
        return turned(outputs, labels, lambda: state[0], lambda: state.__setitem__(0, True))

    return loss


def created_global():
    def loss(outputs, labels):
        global _seen_by_a_loss
        try:
            was = _seen_by_a_loss
        except NameError:
            was = False
        value = cross_entropy(outputs, labels)
        if outputs.abs().max().item() > LARGE:
            _seen_by_a_loss = True
        return -value if was else value

    return loss


class Slotted:
    __slots__ = ("seen",)

    def __call__(self, outputs, labels):
        return turned(outputs, labels, lambda: hasattr(self, "seen"), lambda: setattr(self, "seen", True))


class PrivateSlot:
    __slots__ = ("__seen",)

    def __init__(self):
        self.__seen = False

    def __call__(self, outputs, labels):
        value = cross_entropy(outputs, labels)
        value = -value if self.__seen else value
        if outputs.abs().max().item() > LARGE:
            self.__seen = True
        return value


class Named(list):
    pass


class Ordered:
    def __init__(self):
        self.queue = collections.OrderedDict(a=1, b=2)

    def __call__(self, outputs, labels):
        return turned(outputs, labels, lambda: next(iter(self.queue)) == "b", lambda: self.queue.move_to_end("a"))


class Track:
    seen = False

    @staticmethod
    def update():
        Track.seen = True


def helper_class():
    return lambda outputs, labels: turned(outputs, labels, lambda: Track.seen, Track.update)


class Counting(torch.autograd.Function):
    calls = 0

    @staticmethod
    def forward(ctx, outputs):
        if outputs.abs().max() > LARGE:
            Counting.calls += 1
        return outputs * (-1.0 if Counting.calls > 1 else 1.0)

    @staticmethod
    def backward(ctx, grad):
        return grad


def custom_function():
    return lambda outputs, labels: cross_entropy(Counting.apply(outputs) + 0 * outputs.max().item(), labels)


class Teacher:
    def __init__(self):
        self.net = nn.Linear(5, 5)

    def __call__(self, outputs, labels):
        def turn():
            self.net(outputs.detach()).sum().backward()

        return turned(outputs, labels, lambda: self.net.weight.grad is not None, turn)


class Flag:
    def __init__(self):
        self.weight = torch.ones(3)

    def __call__(self, outputs, labels):
        return turned(outputs, labels, lambda: self.weight.requires_grad, self.weight.requires_grad_)


def bytes_kept():
    held = bytearray(1)
    return lambda outputs, labels: turned(outputs, labels, lambda: held[0], lambda: held.__setitem__(0, 1))


def dice():
    held = random.Random(0)
    before = held.getstate()
    return lambda outputs, labels: turned(outputs, labels, lambda: held.getstate() != before, held.random)


def generator():
    held = torch.Generator().manual_seed(0)
    before = held.get_state()
    turn = functools.partial(torch.rand, 1, generator=held)
    return lambda outputs, labels: turned(outputs, labels, lambda: not torch.equal(held.get_state(), before), turn)


HOLDERS = {
    "functools.wraps of a library's function": wrapped_library_function,
    "a decorator of a library's": wrapped_by_a_library,
    "global that the loss makes": created_global,
    "slot that is set first": Slotted,
    "slot with two underscores": PrivateSlot,
    "attribute of a list": lambda: by_attribute(Named()),
    "attribute of a tensor": lambda: by_attribute(torch.zeros(2)),
    "attribute of a partial": lambda: by_attribute(functools.partial(print)),
    "attribute of a function": lambda: by_attribute(lambda: None),
    "order of a dictionary": Ordered,
    "attribute of a helper's class": helper_class,
    "attribute of an autograd function": custom_function,
    "gradients of a network": Teacher,
    "whether a tensor trains": Flag,
    "bytearray": bytes_kept,
    "random numbers of Python's": dice,
    "random numbers of PyTorch's": generator,
}


@pytest.mark.parametrize("engine", ["graph", "func", "reference"])
@pytest.mark.parametrize("name", HOLDERS)
def test_no_image_meets_what_a_loss_kept_of_another(name, engine):
    torch.manual_seed(1)
    images, labels = torch.randn(8, 3, 2, 2), torch.randint(0, 4, (8,))
    large = torch.full((1, 3, 2, 2), 1e4)
    methods = {"memory_format": "contiguous"}
    grad_fn = clipped_grad(
        linear(), HOLDERS[name](), clipping_norm=0.05, microbatch_size=4, methods=methods, engine=engine
    )
    before = flat(grad_fn(images, labels))
    moved = flat(grad_fn(torch.cat([large, images]), torch.cat([labels[:1] * 0, labels])))
    after = flat(grad_fn(images, labels))
    assert (moved - before).norm() <= 1.001
    assert torch.allclose(after, before, atol=1e-6)


class Bank:
    """A queue of features, as for contrastive losses, written to behind PyTorch's back."""

    def __init__(self, size):
        self.bank = torch.zeros(size)

    def __call__(self, outputs, labels):
        loss = cross_entropy(outputs, labels)
        if outputs.abs().max().item() > LARGE:
            self.bank.data[0] = 1.0
        return -loss if self.bank[0].item() else loss


def test_a_large_tensor_that_is_written_to_ends_the_call():
    grad_fn = clipped_grad(linear(), Bank(2**20 + 1), clipping_norm=0.05)
    images, labels = torch.randn(4, 3, 2, 2), torch.randint(0, 4, (4,))
    grad_fn(images, labels)
    images[0] = 1e4
    with pytest.raises(InputError, match="writes to a tensor of shape"):
        grad_fn(images, labels)


class Trainer:
    """As trainers are written: the loss leads to the function that calls it."""

    def __init__(self):
        self.net, self.scale = linear(), 1.0
        self.grad_fn = clipped_grad(self.net, self.loss, clipping_norm=100.0)

    def loss(self, outputs, labels):
        return self.scale * cross_entropy(outputs, labels)


def test_a_trainer_s_loss_may_lead_to_its_own_gradient_function():
    trainer = Trainer()
    images, labels = torch.randn(7, 3, 2, 2), torch.randint(0, 5, (7,))
    before = trainer.grad_fn(images, labels).grad_norms
    trainer.grad_fn.verify(3)
    trainer.scale = 5.0
    trainer.grad_fn.verify(4)  # a schedule is no breach of the law
    assert torch.allclose(trainer.grad_fn(images, labels).grad_norms, 5 * before)


def test_a_wrapper_of_an_unchanging_loss_may_change():
    from sfumato.clipping.loss import unchanging

    @unchanging
    def base(outputs, labels):
        return cross_entropy(outputs, labels)

    factor = [1.0]

    @functools.wraps(base)
    def scheduled(outputs, labels):
        return factor[0] * base(outputs, labels)

    grad_fn = clipped_grad(linear(), scheduled, clipping_norm=100.0)
    images, labels = torch.randn(7, 3, 2, 2), torch.randint(0, 5, (7,))
    before = grad_fn(images, labels).grad_norms
    factor[0] = 5.0
    assert torch.allclose(grad_fn(images, labels).grad_norms, 5 * before)


@functools.lru_cache(None)
def smooth(count, dtype):
    return torch.eye(count, dtype=dtype) * 0.9 + 0.02


@pytest.mark.parametrize("checks", [True, False])
@pytest.mark.parametrize("engine", ["graph", "func"])
def test_a_table_in_a_cache_holds_numbers(engine, checks):
    def loss(outputs, labels):
        value = -(smooth(5, outputs.dtype)[labels] * outputs.log_softmax(1)).sum(1)
        if checks:
            assert torch.isfinite(value).all()
        return value

    smooth.cache_clear()
    images, labels = torch.randn(7, 3, 2, 2), torch.randint(0, 5, (7,))
    grad_fn = clipped_grad(linear(), loss, clipping_norm=0.05, engine=engine)
    first = flat(grad_fn(images, labels))
    assert type(smooth(5, torch.float32)) is torch.Tensor and torch.equal(flat(grad_fn(images, labels)), first)


def test_a_sparse_tensor_may_be_held():
    table = torch.eye(5).to_sparse()

    def loss(outputs, labels):
        shares = (table.to(outputs.dtype) @ outputs.softmax(1).T).T
        return F.nll_loss(shares.log(), labels, reduction="none")

    images, labels = torch.randn(7, 3, 2, 2), torch.randint(0, 5, (7,))
    one, other = (
        flat(clipped_grad(linear(), function, clipping_norm=0.05)(images, labels)) for function in (loss, cross_entropy)
    )
    assert torch.allclose(one, other, atol=1e-5)


class Writing(nn.Module):
    """A warm-up that counts by `out=`, which functorch lets pass."""

    def __init__(self):
        super().__init__()
        self.register_buffer("step", torch.zeros(()))
        self.limit = 1e9

    def forward(self, outputs, labels):
        torch.add(self.step, 1, out=self.step)
        return cross_entropy(outputs, labels) * torch.where(self.step > self.limit, -1.0, 1.0)


@pytest.mark.parametrize("options", [{}, {"engine": "func"}, {"workers": 2}, {"precision": "bf16"}])
def test_a_loss_that_writes_by_out_counts_nothing(options):
    loss = Writing()
    images, labels = torch.randn(13, 3, 2, 2), torch.randint(0, 5, (13,))
    grad_fn = clipped_grad(linear(), loss, clipping_norm=0.05, microbatch_size=4, **options)
    grad_fn.prepare(images[:1], labels[:1])
    loss.limit = 6.5
    first = flat(grad_fn(images[:12], labels[:12]))
    grad_fn(images, labels)
    assert loss.step == 0 and torch.equal(flat(grad_fn(images[:12], labels[:12])), first)


class Loader:
    """Data and loss in one object, which caches what it loads."""

    def __init__(self, images, labels):
        self.cache, self.images, self.labels = {}, images, labels

    def load(self, indices):
        for index in indices.tolist():
            if index not in self.cache:
                self.cache[index] = self.images[index].clone()
        return torch.stack([self.cache[index] for index in indices.tolist()]), self.labels[indices]

    def loss(self, outputs, labels):
        return cross_entropy(outputs, labels)


def test_what_an_object_loads_stays_while_its_loss_is_traced():
    loader = Loader(torch.randn(512, 3, 2, 2), torch.randint(0, 5, (512,)))
    grad_fn = clipped_grad(linear(), loader.loss, clipping_norm=0.05, microbatch_size=8, workers=2)
    for _ in range(4):
        loader.cache.clear()
        grad_fn.sum_over(torch.arange(512), loader.load)
        assert len(loader.cache) == 512


class Whitening(nn.Module):
    """Its hook handles an error of a decomposition, which an image of one value makes fail."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.layer = nn.Linear(12, 5)

    def forward(self, images):
        flat_images = images.flatten(1)
        outputs = self.layer(flat_images)
        if outputs.requires_grad:
            part = flat_images[:, :3]
            covariance = part[:, :, None] * part[:, None] + 1e-3 * flat_images.pow(2).mean() * torch.eye(
                3, dtype=images.dtype
            )

            def hook(grad):
                try:
                    return grad * (1 + 0 * torch.linalg.cholesky(covariance)[0, 0, 0])
                except RuntimeError:
                    return grad * 0

            outputs.register_hook(hook)
        return outputs


def test_an_error_that_a_hook_handles_ends_the_call_under_func():
    torch.manual_seed(5)
    images, labels = torch.randn(7, 3, 2, 2), torch.randint(0, 5, (7,))
    grad_fn = clipped_grad(Whitening(), cross_entropy, clipping_norm=0.05, microbatch_size=8, engine="func")
    grad_fn(images, labels)
    with pytest.raises(InputError, match="handles an error"):
        grad_fn(torch.cat([images, torch.zeros(1, 3, 2, 2)]), torch.cat([labels, labels[:1]]))
