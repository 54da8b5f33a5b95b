"""The processes that train one model together: one, or the ranks of a process group (torch.distributed).

The first rank draws what is random, counts what is released and writes the run folder. Sums of clipped gradients are
added up over ranks; then noise is added once (De et al. 2022, Lemma A.1): by the first rank, or, where state is
sharded, by each rank to its own coordinates.
"""

import contextlib
import ctypes
import datetime
import math
import os
import pickle
import signal
import sys
import time
from collections.abc import Callable, Iterator
from typing import Any, TypeVar

import torch
import torch.distributed as dist

from sfumato.errors import InputError, MachineError, first_line

Value = TypeVar("Value")
Part = Callable[[torch.Tensor, int], torch.Tensor]
"""What is released of a part of the sum that begins at some coordinate."""

_BUCKET = 1 << 20
"""Coordinates that are reduced at once: while one bucket travels, noise is added to the one before."""
_GRACE = 60.0
"""Seconds in which a rank that lost the others ends, or torchrun kills it."""
_PARENT_DEATH_SIGNAL = 1  # PR_SET_PDEATHSIG, of prctl.h


class World:
    """One process: it has every share, its sums are the sums, and what it computes is the same for all.

    Attributes:
        rank, size: Which process this is, of how many.
        shards: In how many parts the ranks keep the state: 1, all of it on each.
        patience: Seconds to wait for a run folder that another start still holds.
    """

    rank, size, shards = 0, 1, 1
    patience = 0.0

    @property
    def is_first(self) -> bool:
        return self.rank == 0

    def share(self, count: int) -> slice:
        """This process's part of so many rows: of every so many one, so that shares differ by one row at most."""
        return slice(self.rank, count, self.size)

    def shard(self, length: int) -> slice:
        """The part of a vector that this process moves."""
        own = length // self.shards
        first = self.rank * own if self.shards > 1 else 0
        return slice(first, first + own)

    @contextlib.contextmanager
    def together(self) -> Iterator[None]:
        """A block that each process does by itself, however long it takes: all go on after it, or none does."""
        yield

    def same(self, compute: Callable[[], Value]) -> Value:
        """What the first process computes, in all of them."""
        return compute()

    def key(self, compute: Callable[[], bytes]) -> bytes:
        """The same of 32 bytes."""
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
        """Of a sum that was released; in the first process."""
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

    def whole(self, mine: torch.Tensor) -> torch.Tensor:
        """A vector of which each process has its shard, in the first process, on its CPU; elsewhere anything."""
        return mine.detach().cpu()

    def from_first(self, tensor: torch.Tensor) -> None:
        """Gives a tensor the values that it has in the first process."""

    def close(self) -> None:
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
        end_with_parent()
        store, self.rank, self.size = next(iter(dist.rendezvous("env://")))
        if os.environ.get("GROUP_WORLD_SIZE") == "1":  # the agent's store has what the last attempt wrote there
            store = dist.PrefixStore(f"attempt {os.environ.get('TORCHELASTIC_RESTART_COUNT', 0)}", store)
        self._store, self._device, self._met = dist.PrefixStore("sfumato", store), device, 0
        backend = "cpu:gloo,cuda:nccl" if device.type == "cuda" else "gloo"
        with self._lost():
            dist.init_process_group(
                backend,
                store=store,
                rank=self.rank,
                world_size=self.size,
                timeout=datetime.timedelta(seconds=timeout),
            )
        self.shards, self.patience = self.size if sharded else 1, timeout + _GRACE

    @contextlib.contextmanager
    def together(self) -> Iterator[None]:
        said = ""
        try:
            yield
        except InputError as error:
            said = str(error) or " "
        # Not a collective: to read images may take one rank an hour longer than another.
        self._met += 1
        self._store.set(f"{self._met} {self.rank}", said)
        names = [f"{self._met} {rank}" for rank in range(self.size)]
        with self._lost():
            while not self._store.check(names):
                time.sleep(0.02)
            refusals = [said for said in map(bytes.decode, map(self._store.get, names)) if said]
        if refusals:
            refusal = InputError(refusals[0])
            refusal.is_said = not self.is_first
            raise refusal

    def same(self, compute: Callable[[], Value]) -> Value:
        data = torch.frombuffer(bytearray(pickle.dumps(compute())), dtype=torch.uint8) if self.is_first else None
        length = torch.tensor([0 if data is None else len(data)])
        self._wait(dist.broadcast(length, 0, async_op=True))
        data = torch.empty(int(length), dtype=torch.uint8) if data is None else data
        self._wait(dist.broadcast(data, 0, async_op=True))
        value: Value = pickle.loads(data.numpy().tobytes())
        return value

    def key(self, compute: Callable[[], bytes]) -> bytes:
        key = torch.frombuffer(bytearray(compute() if self.is_first else bytes(32)), dtype=torch.uint8)
        self._wait(dist.broadcast(key, 0, async_op=True))
        return key.numpy().tobytes()

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
        return [(part, owner, dist.reduce(part, owner, async_op=True)) for owner, part in self._parts(vector)]

    def norm(self, summed: Any) -> float:
        square = float(sum(part.double().square().sum() for part, owner, _ in summed if owner == self.rank))
        return math.sqrt(self.total(square))

    def release(self, summed: Any, part: Part, like: torch.Tensor) -> torch.Tensor:
        released, sent = torch.empty_like(like), []
        outs = iter(released.split(_BUCKET))
        for bucket, owner, work in summed:
            self._wait(work)
            is_mine = owner == self.rank
            if self.shards > 1 and not is_mine:
                continue
            out = next(outs)
            if is_mine:
                out.copy_(part(bucket, bucket.storage_offset()))
            if self.shards == 1:
                sent.append(dist.broadcast(out, owner, async_op=True))
        for work in sent:
            self._wait(work)
        return released

    def spread(self, vector: torch.Tensor) -> None:
        if self.shards > 1:
            for work in [dist.broadcast(part, owner, async_op=True) for owner, part in self._parts(vector)]:
                self._wait(work)

    def _parts(self, vector: torch.Tensor) -> Iterator[tuple[int, torch.Tensor]]:
        """The parts that travel at once, in the same order in all ranks, each with the rank that owns it."""
        for owner, shard in enumerate(vector.chunk(self.shards)):
            for part in shard.split(_BUCKET):
                yield owner, part

    def whole(self, mine: torch.Tensor) -> torch.Tensor:
        if self.shards == 1:
            return super().whole(mine)
        own = mine.detach()
        found = torch.empty(self.size, len(own) if self.is_first else 0, dtype=own.dtype)
        for first in range(0, len(own), _BUCKET):
            piece = own[first : first + _BUCKET].contiguous()
            parts = [torch.empty_like(piece) for _ in range(self.size)] if self.is_first else None
            self._wait(dist.gather(piece, parts, 0, async_op=True))
            for rank, part in enumerate(parts or []):
                found[rank, first : first + _BUCKET] = part
        return found.view(-1)

    def from_first(self, tensor: torch.Tensor) -> None:
        sent = tensor.contiguous()
        self._wait(dist.broadcast(sent, 0, async_op=True))
        tensor.copy_(sent)

    def close(self) -> None:
        dist.destroy_process_group()

    def _wait(self, work: Any) -> None:
        pause = 2e-5
        with self._lost():
            while not work.is_completed():
                time.sleep(pause)
                pause = min(1.5 * pause, 2e-3)
            work.wait()

    @contextlib.contextmanager
    def _lost(self) -> Iterator[None]:
        try:
            yield
        except RuntimeError as error:
            raise MachineError(
                f"rank {self.rank} of {self.size} lost the others ({first_line(error)}). What was checkpointed is "
                "kept: torchrun starts the ranks again, or the same command with --resume."
            ) from error


def world_here(device: torch.device, timeout: float, sharded: bool) -> World:
    """The ranks that torchrun started this process with; else this process alone."""
    return Ranks(device, timeout, sharded) if is_under_torchrun() else World()


def is_under_torchrun() -> bool:
    """Whether torchrun started this process."""
    return dist.is_torchelastic_launched()


def end_with_parent() -> None:
    """Has Linux kill this process once torchrun's agent is dead: it would train on, and hold the run folder."""
    if sys.platform == "linux":
        parent = os.getppid()
        ctypes.CDLL(None).prctl(_PARENT_DEATH_SIGNAL, signal.SIGKILL)
        if os.getppid() != parent:
            os.kill(os.getpid(), signal.SIGKILL)
