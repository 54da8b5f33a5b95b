"""What a graph may do with the dimension that counts rows; numbers of rows that no test tries included."""

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from sfumato.clipping import clipped_grad
from sfumato.clipping.graph.export import trace
from sfumato.errors import InputError
from tests.clipping.problems import Made


def applies(function):
    return Made(lambda self, x: self.layer(function(x)), layer=nn.Linear(4, 4))


ALL_ROWS_ALONG = torch.ones(1, 1, 2)


def convolved_rows(x):
    """Row i meets row i - 40: on few rows there is nothing to see."""
    return F.conv1d(x.T.unsqueeze(1), ALL_ROWS_ALONG, padding=40, dilation=40)[:, 0, : x.shape[0]].T


def place_by_pooling(x):
    place = F.max_pool1d(x.T[None], 1, return_indices=True)[1][0].T
    return torch.where(place > 40, -x, x)


def attention_over_rows(x):
    return F.scaled_dot_product_attention(x[None], x[None], x[None])[0]


@torch.library.custom_op("sfumato_tests::silu", mutates_args=())
def flipped_rows(x: torch.Tensor) -> torch.Tensor:
    """Bears the name of an operation that leaves rows apart."""
    return x.flip(0)


flipped_rows.register_fake(torch.empty_like)


def counted_by_einsum(x):
    return x * torch.where(torch.einsum("n,md->md", torch.ones_like(x)[:, 0], torch.ones_like(x)) > 32, -1, 1)


# The first ones begin to matter at more rows, or other values, than any test tries.
REFUSED = {
    "counted by einsum": counted_by_einsum,
    "batch statistics of large values": lambda x: x + F.batch_norm((x - 1e5).relu(), None, None, training=True),
    "written to the first row": lambda x: x.scatter(1, torch.arange(4)[None], 0.0),
    "added to the first row": lambda x: torch.zeros_like(x).scatter_add(1, torch.arange(4)[None], x),
    "another's operation of a known name": lambda x: torch.ops.sfumato_tests.silu(x),
    "their number as a fill value": lambda x: x * (1 - 2 * x.new_full((1,), x.shape[0] // 80)),
    "their number as a tensor": lambda x: x * torch.full((1,), x.shape[0] * 1.0),
    "convolved": convolved_rows,
    "unfolded": lambda x: x + F.unfold(x.T[None, None], (1, 2), padding=(0, 40), dilation=(1, 40)).sum() * 0,
    "a step at place 40": lambda x: x + torch.tril(torch.ones(1, x.shape[0]), diagonal=40).T,
    "places by pooling": place_by_pooling,
    "a table of rows": lambda x: F.embedding((x[:, 0] > 100).long(), x),
    "a table by views": lambda x: x + torch.arange(64.0).repeat(x.shape[0]).view(64, x.shape[0])[0][:, None],
    "a place by views": lambda x: (x.view(2, x.shape[0], 2) + torch.arange(2.0)[:, None, None]).view(x.shape[0], 4),
    "attention": attention_over_rows,
    "a mask cut to their number": lambda x: x * torch.ones(500).tril()[: x.shape[0], None],
    "counted": lambda x: x + (x > 100).sum() * 1.0,
    "code of the row": lambda x: x + torch.arange(x.shape[0], dtype=x.dtype)[:, None],
    "scaled by their number": lambda x: x / x.shape[0],
    "a table cut to their number": lambda x: x + torch.linspace(0, 1, 100)[: x.shape[0], None],
    "every second": lambda x: torch.cat([x[::2], x[1::2]]) + 0 * x,
    "from the second on": lambda x: torch.cat([x[:1], -x[1:]]),
    "flipped": lambda x: x.flip(0),
    "rolled": lambda x: x.roll(1, 0),
    "rolled as one": lambda x: x.roll(1),
    "cumulated": lambda x: x.cumsum(0),
    "sorted": lambda x: x.sort(0)[0],
    "softmax": lambda x: x.softmax(0),
    "halves": lambda x: torch.cat([part * (i + 1) for i, part in enumerate(x.tensor_split(2))]),
    "paired": lambda x: x + (x @ x.T) @ x,
    "selected": lambda x: x + x.select(0, 0),
    "picked": lambda x: x[torch.zeros(1, dtype=torch.long)] + x,
}
ALLOWED = {
    "columns cut": lambda x: x[:, 1:].repeat(1, 2)[:, :4],
    "columns flipped and rolled": lambda x: x.flip(1).roll(1, 1),
    "dead code": lambda x: (torch.arange(x.shape[0]), x.flip(0), x)[-1],
    "columns sorted": lambda x: x.sort(1)[0] + x.cumsum(-1) + x.softmax(1),
    "columns picked": lambda x: x[:, torch.tensor([3, 2, 1, 0])],
    "masked": lambda x: torch.where(x > 0, x, 0.0) + x.masked_fill(x > 1, 1.0),
    "rows last": lambda x: (x.T * torch.ones(4, 1)).T,
    "windows among the rows": lambda x: (x.reshape(-1, 2) * torch.arange(2.0)).reshape(x.shape[0], 4),
    "tokens for each": lambda x: torch.cat([torch.ones(1, 2).expand(x.shape[0], 2), x[:, :2]], 1),
    "zeros for each": lambda x: x + torch.zeros(x.shape[0], 4) + x.new_ones(x.shape[0], 1),
    "all rows taken": lambda x: x[:][:, 0:4],
    "their own products": lambda x: torch.einsum("nd,nd->nd", x, x) + torch.einsum("nd,de->ne", x, torch.ones(4, 4)),
    "their own places": lambda x: x.gather(1, x.argsort(1)),
    "viewed as themselves": lambda x: x.view_as(x),
    "their own attention": lambda x: F.scaled_dot_product_attention(x[:, None], x[:, None], x[:, None])[:, 0],
    "their own table": lambda x: x + F.embedding((x[:, 0] > 0).long(), torch.ones(2, 4)),
    "their own convolution": lambda x: F.conv1d(x[:, None], torch.ones(1, 1, 3), padding=1)[:, 0],
    "their own lower triangle": lambda x: (x[:, None] * torch.ones(4, 1)).tril().sum(1),
    "copies of rows": lambda x: x.repeat_interleave(2, 0).view(-1, 2, 4).mean(1),
    "statistics that stay": lambda x: F.batch_norm((x * 1).relu_(), torch.zeros(4), torch.ones(4)),
    "a row's own mean": lambda x: x - x.mean(1, keepdim=True),
    "constants of its type, unbound": lambda x: x - x.new_ones(2, 4).unbind(0)[1],
    "constants of its type, as many as rows are tried with": lambda x: x * x.new_ones(3, 4).cumsum(0)[1],
    "as large as another": lambda x: torch.broadcast_tensors(x, torch.ones(4))[1] * x,
}


@pytest.mark.parametrize("name", REFUSED)
def test_rows_know_neither_their_place_nor_their_number(name):
    with pytest.raises(InputError, match="could depend on the others|cannot be traced"):
        trace(applies(REFUSED[name]), torch.zeros(1, 4))


@pytest.mark.parametrize("name", [name for name in ALLOWED if "constants" in name])
def test_constants_of_its_type_are_no_rows(name):
    """The whole engine takes them."""
    grad_fn = clipped_grad(applies(ALLOWED[name]), lambda outputs: outputs.square().sum(1), clipping_norm=1.0)
    grad_fn(torch.randn(3, 4))
    assert grad_fn.engine == "graph"


@pytest.mark.parametrize("name", ALLOWED)
def test_what_each_row_does_by_itself_is_taken(name):
    captured = trace(applies(ALLOWED[name]), torch.zeros(1, 4))
    assert captured.sources == {"layer.weight": ("layer.weight",), "layer.bias": ("layer.bias",)}
