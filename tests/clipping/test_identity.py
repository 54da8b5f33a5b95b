"""The digest of what is computed: alike in every process, another for whatever computes otherwise."""

import os
import subprocess
import sys
import textwrap

import pytest
import torch
from torch import nn

from sfumato.clipping import clipped_grad
from sfumato.clipping.identity import identity


def loss(outputs, labels):
    return nn.functional.cross_entropy(outputs, labels, reduction="none")


class Network(nn.Module):
    def __init__(self, scale=1.0, power=2, dim=1, table=0.5, constant=0.5, order=(0, 1), persistent=False):
        super().__init__()
        torch.manual_seed(0)
        self.first, self.second = nn.Linear(6, 6), nn.Linear(6, 6)
        self.scale, self.power, self.dim, self.order = scale, power, dim, order
        self.constant = torch.full((6,), constant)
        self.register_buffer("table", torch.full((6,), table), persistent=persistent)

    def forward(self, x):
        layers = (self.first, self.second)
        x = layers[self.order[1]](torch.tanh(layers[self.order[0]](x)))
        return torch.softmax(x * self.scale, self.dim) ** self.power + self.table + self.constant


def graph_of(model):
    grad_fn = clipped_grad(model, loss, clipping_norm=1.0, engine="graph", methods={"memory_format": "contiguous"})
    grad_fn(torch.ones(2, 6), torch.zeros(2, dtype=torch.long))
    return grad_fn.identity()


def test_whatever_changes_what_a_graph_computes_changes_its_digest():
    same = [graph_of(Network()) for _ in range(2)]
    others = [
        graph_of(Network(**change))
        for change in (
            {"scale": 1.0 + 2**-50},
            {"power": 3},
            {"dim": -1},
            {"table": 0.5000001},
            {"constant": 0.5000001},
            {"order": (1, 0)},
        )
    ]
    assert same[0] == same[1] and len({same[0], *others}) == 1 + len(others)


def test_weights_are_state_and_in_no_digest():
    model = Network()
    before = graph_of(model), identity(model, loss, None)
    with torch.no_grad():
        for value in model.parameters():
            value.add_(1.0)
    assert (graph_of(model), identity(model, loss, None)) == before
    tables = [Network(table=value, persistent=True) for value in (0.5, 0.25)]
    assert graph_of(tables[0]) == graph_of(tables[1])


def test_buffers_that_no_checkpoint_has_are_in_the_digest_of_every_engine():
    assert identity(Network(table=0.5), loss, None) != identity(Network(table=0.25), loss, None)


@pytest.fixture
def package(tmp_path):
    """Somebody's own package: a network, a module that it uses, and one that it does not."""
    folder = tmp_path / "theirs"
    folder.mkdir()
    (folder / "__init__.py").touch()
    (folder / "layers.py").write_text("SLOPE = 1.0\n\n\ndef bend(x):\n    return x.clamp(-SLOPE, SLOPE)\n")
    (folder / "unused.py").write_text("VALUE = 1\n")
    (folder / "network.py").write_text(
        textwrap.dedent("""
        from torch import nn

        from theirs.layers import bend


        class Base(nn.Module):
            pass


        class Theirs(Base):
            def __init__(self):
                super().__init__()
                self.linear = nn.Linear(4, 4)
                self.hook = lambda x: x  # shows an address

            def forward(self, x):
                return bend(self.linear(x))

            def extra_repr(self):
                return repr(self.hook)
        """)
    )
    (tmp_path / "ask.py").write_text(
        textwrap.dedent("""
        import sys

        from theirs.network import Theirs
        from theirs import unused
        from torch.nn.functional import cross_entropy

        from sfumato.clipping.identity import identity

        print(identity(Theirs(), cross_entropy, None))
        """)
    )
    return folder


def told(package, hash_seed="0"):
    environment = {**os.environ, "PYTHONHASHSEED": hash_seed, "PYTHONDONTWRITEBYTECODE": "1"}
    done = subprocess.run(
        [sys.executable, str(package.parent / "ask.py")],
        capture_output=True,
        text=True,
        env=environment,
        cwd=package.parent,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_without_a_graph_the_sources_tell_and_those_that_they_use(package):
    first = told(package)
    assert told(package, hash_seed="7") == first  # an address in a printed module says nothing
    (package / "unused.py").write_text("VALUE = 2\n")
    assert told(package) == first
    (package / "layers.py").write_text((package / "layers.py").read_text().replace("SLOPE = 1.0", "SLOPE = 2.0"))
    second = told(package)
    (package / "network.py").write_text((package / "network.py").read_text().replace("bend(self", "-bend(self"))
    assert len({first, second, told(package)}) == 3
