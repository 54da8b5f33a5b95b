"""The processes that train one model together: one, or the ranks of a process group (torch.distributed).

The first rank draws what is random, counts what is released and writes the run folder. Sums of clipped gradients are
added up over ranks, each coordinate in the rank that owns it, which then adds its noise: once, and never each rank its
own part of it (De et al. 2022, Lemma A.1).
"""

import contextlib
import datetime
import itertools
import math
import os
import pickle
import re
import signal
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any, TypeVar

import torch
import torch.distributed as dist

from sfumato.errors import InputError, MachineError, first_line
from sfumato.run_folder.launch import is_under_torchrun
from sfumato.training.noise import BLOCK
from sfumato.training.process import end_with

Value = TypeVar("Value")
Part = Callable[[torch.Tensor, int], torch.Tensor]
"""What is released of a part of the sum that begins at some coordinate."""

_BUCKET = 1 << 20
"""Coordinates that are reduced at once: while one bucket travels, noise is added to the one before."""
_PAUSE = 0.1
_GRACE = 60.0
"""Seconds in which a rank that lost the others ends, or torchrun kills it."""
_WORLDS = itertools.count()
"""Of this process, one after another."""


class World:
    """One process: it has every share, its sums are the sums, and what it computes is the same for all.

    Attributes:
        rank, size: Which process this is, of how many.
        is_sharded: Whether each rank keeps the optimizer's memory and the averages of its own coordinates alone.
        patience: Seconds to wait for a run folder that another start still holds.
    """

    rank, size, is_sharded, patience = 0, 1, False, 0.0

    @property
    def is_first(self) -> bool:
        return self.rank == 0

    def share(self, count: int) -> slice:
        """This process's part of so many rows: of every so many one, so that shares differ by one row at most."""
        return slice(self.rank, count, self.size)

    def shard(self, length: int) -> slice:
        """The part of a vector that this process moves."""
        return slice(0, length)

    @contextlib.contextmanager
    def together(self) -> Iterator[None]:
        """A block that each process does by itself, however long it takes: all go on after it, or none does."""
        yield

    def same(self, compute: Callable[[], Value]) -> Value:
        """What the first process computes, in all of them."""
        return compute()

    def any(self, *flags: bool) -> list[bool]:
        """Of each flag, whether any process has it."""
        return list(flags)

    def gather(self, rows: torch.Tensor) -> torch.Tensor:
        """The rows of all processes, by rank, on the CPU."""
        return rows.cpu()

    def total(self, value: float) -> float:
        """The sum over the processes."""
        return value

    def sum(self, vector: torch.Tensor) -> Any:
        """Begins to add up a vector over the processes; what `release` takes."""
        return vector

    def norm(self, summed: Any) -> float:
        """Of a sum that was released."""
        return float(torch.linalg.vector_norm(summed.double()))

    def release(self, summed: Any, part: Part, like: torch.Tensor) -> torch.Tensor:
        """What is released of a sum: made once, part by part, by whoever has the part; then in every process whole, or
        its shard, of the type of ``like``.
        """
        released = torch.empty_like(like)
        released.copy_(part(summed, 0))
        return released

    def spread(self, vector: torch.Tensor) -> None:
        """Gives every process what each has of a vector in its own shard."""

    def whole(self, mine: torch.Tensor, length: int) -> torch.Tensor:
        """A vector of which each process has its shard, in the first process, on its CPU; elsewhere anything."""
        return mine.detach().cpu()

    def from_first(self, tensor: torch.Tensor) -> None:
        """Gives a tensor the values that it has in the first process."""

    def __enter__(self) -> "World":
        return self

    def __exit__(self, kind: type[BaseException] | None, *error: object) -> None:
        """Nothing follows."""


class Ranks(World):
    """The processes that torchrun started, each with its copy of the parameters.

    Every wait looks again and again, so that Python sees signals meanwhile. A rank that is not heard of for
    ``timeout`` seconds, or that died, ends the others: none of them writes anything after that.

    Args:
        device: On which the model lies.
        timeout: Seconds.
        sharded: Whether each rank keeps the optimizer's memory and the averages of its own shard alone.
    """

    def __init__(self, device: torch.device, timeout: float, sharded: bool) -> None:
        end_with(os.getppid(), signal.SIGKILL)
        self.rank, self.size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
        patience = datetime.timedelta(seconds=timeout)
        with self._lost():  # the library's own patience is half an hour
            store = next(iter(dist.rendezvous("env://", timeout=patience)))[0]
        # The agent's store has what the last attempt wrote there. How often several agents restarted differs.
        is_alone = os.environ.get("GROUP_WORLD_SIZE") == "1"
        attempt = os.environ.get("TORCHELASTIC_RESTART_COUNT") if is_alone else None
        store = dist.PrefixStore(f"sfumato {next(_WORLDS)} {attempt}", store)
        backend = "gloo"
        if device.type == "cuda":
            torch.cuda.set_device(device)
            backend = "cpu:gloo,cuda:nccl"
        with self._lost():
            dist.init_process_group(backend, store=store, rank=self.rank, world_size=self.size, timeout=patience)
            self._meeting: Any = dist.new_group(timeout=patience, backend="gloo")
        self.is_sharded, self.patience = sharded, timeout + _GRACE

    @contextlib.contextmanager
    def together(self) -> Iterator[None]:
        said, done, left = "", threading.Event(), threading.Event()
        with ThreadPoolExecutor(1) as thread, contextlib.ExitStack() as leaving:
            leaving.callback(left.set)
            met = thread.submit(self._meet, done, left)
            try:
                yield
            except InputError as error:
                said = str(error)
            done.set()
            met.result()
        refusals = self.gather(torch.frombuffer(bytearray(f"{said}\0", "utf-8"), dtype=torch.uint8))
        for line in filter(None, refusals.numpy().tobytes().decode().split("\0")):
            refusal = InputError(line)
            refusal.is_said = not self.is_first
            raise refusal

    def _meet(self, done: threading.Event, left: threading.Event) -> None:
        """Until every rank is done with its block. To read images may take one rank an hour longer than another, so
        they ask each other meanwhile, in a group of their own: one that is lost is missed, and one that is slow is not.
        """
        all_done = torch.zeros(1, dtype=torch.uint8)
        while not all_done and not left.is_set():
            all_done.fill_(done.wait(_PAUSE))
            work = dist.all_reduce(all_done, dist.ReduceOp.MIN, self._meeting, async_op=True)
            self._wait(work, left)

    def same(self, compute: Callable[[], Value]) -> Value:
        data = torch.frombuffer(bytearray(pickle.dumps(compute())), dtype=torch.uint8) if self.is_first else None
        length = torch.tensor([0 if data is None else len(data)])
        self._wait(dist.broadcast(length, 0, async_op=True))
        data = torch.empty(int(length), dtype=torch.uint8) if data is None else data
        self._wait(dist.broadcast(data, 0, async_op=True))
        value: Value = pickle.loads(data.numpy().tobytes())
        return value

    def any(self, *flags: bool) -> list[bool]:
        found = torch.tensor(flags, dtype=torch.uint8)
        self._wait(dist.all_reduce(found, dist.ReduceOp.MAX, async_op=True))
        return found.bool().tolist()

    def gather(self, rows: torch.Tensor) -> torch.Tensor:
        rows = rows.cpu().contiguous()
        counts = [torch.zeros(1, dtype=torch.int64) for _ in range(self.size)]
        self._wait(dist.all_gather(counts, torch.tensor([len(rows)]), async_op=True))
        most = max(map(int, counts))
        padded = torch.cat([rows, rows.new_zeros(most - len(rows), *rows.shape[1:])])
        parts = [torch.empty_like(padded) for _ in range(self.size)]
        self._wait(dist.all_gather(parts, padded, async_op=True))
        return torch.cat([part[: int(count)] for part, count in zip(parts, counts, strict=True)])

    def total(self, value: float) -> float:
        found = torch.tensor(value, dtype=torch.float64)
        self._wait(dist.all_reduce(found, async_op=True))
        return float(found)

    def sum(self, vector: torch.Tensor) -> Any:
        # Gloo's own reduce-scatter adds up everything everywhere, and never says that it is done.
        spans = self._spans(len(vector))
        return [(span, owner, vector[span], dist.reduce(vector[span], owner, async_op=True)) for owner, span in spans]

    def norm(self, summed: Any) -> float:
        own = (part for _, owner, part, _ in summed if owner == self.rank)
        return math.sqrt(self.total(sum(float(part.double().square().sum()) for part in own)))

    def release(self, summed: Any, part: Part, like: torch.Tensor) -> torch.Tensor:
        released, sent = torch.empty_like(like), []
        first = self.shard(summed[-1][0].stop).start if self.is_sharded else 0
        for span, owner, values, work in summed:
            self._wait(work)
            if owner != self.rank and self.is_sharded:
                continue
            out = released[span.start - first : span.stop - first]
            if owner == self.rank:
                out.copy_(part(values, span.start))
            if not self.is_sharded:
                sent.append(dist.broadcast(out, owner, async_op=True))
        for work in sent:
            self._wait(work)
        return released

    def spread(self, vector: torch.Tensor) -> None:
        if self.is_sharded:
            spans = self._spans(len(vector))
            for work in [dist.broadcast(vector[span], owner, async_op=True) for owner, span in spans]:
                self._wait(work)

    def whole(self, mine: torch.Tensor, length: int) -> torch.Tensor:
        if not self.is_sharded:
            return super().whole(mine, length)
        vector = mine.new_empty(length)
        vector[self.shard(length)] = mine.detach()
        self.spread(vector)
        return vector.cpu() if self.is_first else vector

    def _spans(self, length: int) -> Iterator[tuple[int, slice]]:
        """The parts of a vector that travel at once, in the same order in all ranks, each with the rank that owns it:
        that adds noise to it, and moves it where state is sharded.
        """
        own = self._own(length)
        for owner in range(self.size):
            for first in range(owner * own, min((owner + 1) * own, length), _BUCKET):
                yield owner, slice(first, min(first + _BUCKET, (owner + 1) * own, length))

    def _own(self, length: int) -> int:
        """How many coordinates each rank owns, the last ones fewer: whole blocks of noise."""
        return math.ceil(length / (self.size * BLOCK)) * BLOCK

    def shard(self, length: int) -> slice:
        if not self.is_sharded:
            return super().shard(length)
        own = self._own(length)
        return slice(min(self.rank * own, length), min((self.rank + 1) * own, length))

    def from_first(self, tensor: torch.Tensor) -> None:
        sent = tensor.contiguous()
        # As bytes: backends lack types that buffers may have.
        self._wait(dist.broadcast(sent.view(-1).view(torch.uint8), 0, async_op=True))
        tensor.copy_(sent)

    def __exit__(self, kind: type[BaseException] | None, *error: object) -> None:
        if kind is None or issubclass(kind, InputError):  # no process is lost
            dist.destroy_process_group()

    def _wait(self, work: Any, left: threading.Event | None = None) -> None:
        pause = 2e-5
        with self._lost():
            while not work.is_completed():
                if left is not None and left.is_set():
                    return
                time.sleep(pause)
                pause = min(1.5 * pause, 2e-3)
            work.wait()

    @contextlib.contextmanager
    def _lost(self) -> Iterator[None]:
        try:
            yield
        except RuntimeError as error:
            why = re.sub(r"^\[\S*\] *", "", first_line(error)).split(". ")[0]  # a place in a library's source before it
            raise MachineError(
                f"rank {self.rank} of {self.size} lost the others ({why}). What was checkpointed is kept: torchrun "
                "starts the ranks again, or the same command with --resume."
            ) from error


def world_here(device: torch.device, timeout: float, sharded: bool) -> World:
    """The ranks that torchrun started this process with; else this process alone."""
    return Ranks(device, timeout, sharded) if is_under_torchrun() else World()
