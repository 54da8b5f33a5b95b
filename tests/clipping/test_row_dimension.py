"""What a graph may do with the dimension that counts rows; numbers of rows that no test tries included."""

import pytest
import torch
from torch import nn

from sfumato.clipping.capture import NotCapturable, capture


class Applies(nn.Module):
    def __init__(self, function):
        super().__init__()
        self.function, self.layer = function, nn.Linear(4, 4)

    def forward(self, x):
        return self.layer(self.function(x))


REFUSED = {
    "code of the row": lambda x: x + torch.arange(x.shape[0], dtype=x.dtype)[:, None],
    "scaled by their number": lambda x: x / x.shape[0],
    "a table cut to their number": lambda x: x + torch.linspace(0, 1, 100)[: x.shape[0], None],
    "every second": lambda x: torch.cat([x[::2], x[1::2]]) + 0 * x,
    "from the second on": lambda x: torch.cat([x[:1], -x[1:]]),
    "flipped": lambda x: x.flip(0),
    "rolled": lambda x: x.roll(1, 0),
    "rolled as one": lambda x: x.roll(1),
    "cumulated": lambda x: x.cumsum(0),
    "numbers by cumulated ones": lambda x: x + torch.ones_like(x).cumsum(0),
    "sorted": lambda x: x.sort(0)[0],
    "softmax": lambda x: x.softmax(0),
    "halves": lambda x: torch.cat([part * (i + 1) for i, part in enumerate(x.tensor_split(2))]),
    "all": lambda x: x + x.amax(),
    "kept mean": lambda x: x - x.mean(0, keepdim=True),
    "paired": lambda x: x + (x @ x.T) @ x,
    "selected": lambda x: x + x.select(0, 0),
    "picked": lambda x: x[torch.zeros(1, dtype=torch.long)] + x,
    "unbound": lambda x: x * x.unbind(0)[0],
}
ALLOWED = {
    "columns cut": lambda x: x[:, 1:].repeat(1, 2)[:, :4],
    "columns flipped and rolled": lambda x: x.flip(1).roll(1, 1),
    "columns sorted": lambda x: x.sort(1)[0] + x.cumsum(-1) + x.softmax(1),
    "columns picked": lambda x: x[:, torch.tensor([3, 2, 1, 0])],
    "masked": lambda x: torch.where(x > 0, x, 0.0) + x.masked_fill(x > 1, 1.0),
    "rows last": lambda x: (x.T * torch.ones(4, 1)).T,
    "windows among the rows": lambda x: (x.reshape(-1, 2) * torch.arange(2.0)).reshape(x.shape[0], 4),
    "tokens for each": lambda x: torch.cat([torch.ones(1, 2).expand(x.shape[0], 2), x[:, :2]], 1),
    "zeros for each": lambda x: x + torch.zeros(x.shape[0], 4) + x.new_ones(x.shape[0], 1),
    "all rows taken": lambda x: x[:][:, 0:4],
    "a row's own mean": lambda x: x - x.mean(1, keepdim=True),
}


@pytest.mark.parametrize("name", REFUSED)
def test_rows_know_neither_their_place_nor_their_number(name):
    with pytest.raises(NotCapturable):
        capture(Applies(REFUSED[name]), torch.zeros(1, 4))


@pytest.mark.parametrize("name", ALLOWED)
def test_what_each_row_does_by_itself_is_taken(name):
    captured = capture(Applies(ALLOWED[name]), torch.zeros(1, 4))
    assert captured.sources == {"layer.weight": ("layer.weight",), "layer.bias": ("layer.bias",)}
