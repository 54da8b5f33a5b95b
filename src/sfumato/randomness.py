"""Random numbers of a cryptographic generator: ChaCha20, under a key that serves one purpose.

A private run takes its keys from the operating system, one for each purpose of each update, and keeps them in memory
alone: whoever had one could subtract the noise. A public seed derives all keys from a number, and voids the guarantee.
"""

import dataclasses
import hashlib
import hmac
import json
import secrets
from typing import Any

import numpy as np

KEY_BYTES = 32


def new_key() -> bytes:
    """256 random bits from the operating system."""
    return secrets.token_bytes(KEY_BYTES)


def key_from_seed(seed: int) -> bytes:
    """The key of a public seed, for tests and simulations: a run that uses it is not private."""
    return hashlib.sha256(f"sfumato public seed {seed}".encode()).digest()


def canonical(value: Any) -> bytes:
    """A JSON value in one form: equal values give equal bytes, others give others."""
    return json.dumps(value, sort_keys=True, separators=(",", ":"), allow_nan=False).encode()


def digest(value: Any) -> str:
    """SHA-256 of a JSON value in its canonical form, in hexadecimal."""
    return hashlib.sha256(canonical(value)).hexdigest()


def derived(key: bytes, purpose: str, step: int = 0) -> "Stream":
    """The stream of one purpose at one step under a key; equal arguments give equal bits."""
    return Stream(_derived_key(key, purpose, step))


def _derived_key(key: bytes, purpose: str, step: int) -> bytes:
    return hmac.digest(key, canonical({"purpose": purpose, "step": step}), "sha256")


@dataclasses.dataclass(frozen=True)
class Streams:
    """All randomness of a run.

    Guarantee: without a seed each stream has 256 fresh bits of the operating system for its key, which nothing keeps:
    no two calls ever give the same numbers, in this process or in another.

    Attributes:
        seed: None; or a public number from which every stream follows by its purpose and step.
    """

    seed: int | None = None

    def stream(self, purpose: str, step: int = 0) -> "Stream":
        """The stream of one purpose at one step."""
        return Stream(self.key(purpose, step))

    def key(self, purpose: str, step: int = 0) -> bytes:
        """Its key, where another process is to have the stream too."""
        return new_key() if self.seed is None else _derived_key(key_from_seed(self.seed), purpose, step)


class Stream:
    """A ChaCha20 keystream (library: cryptography): read from its start on, or word by word at any
    place.
    """

    def __init__(self, key: bytes) -> None:
        self._key = key
        self._encryptor = self._from(0)

    def bytes(self, count: int) -> bytearray:
        """The next ``count`` bytes."""
        return _read(self._encryptor, count)

    def uint64(self, count: int) -> np.ndarray:
        """The next ``count`` uniform 64-bit words, shape (count,)."""
        return np.frombuffer(self.bytes(8 * count), dtype="<u8")

    def uint32(self, count: int) -> np.ndarray:
        """The next ``count`` uniform 32-bit words, shape (count,)."""
        return np.frombuffer(self.bytes(4 * count), dtype="<u4")

    def words_at(self, first: int, count: int) -> np.ndarray:
        """The 64-bit words number ``first`` and on, shape (count,), wherever reading has come to.

        Several threads may ask at once. For streams that nobody reads from their start.

        Args:
            first: A multiple of 8, the words of one block of ChaCha20.
        """
        assert first % 8 == 0
        return np.frombuffer(_read(self._from(first // 8), 8 * count), dtype="<u8")

    def _from(self, block: int) -> Any:
        """The cipher from one of its blocks of 64 bytes on. After 2^32 blocks, 256 GiB, the library
        refuses to go on.
        """
        from cryptography.hazmat.primitives.ciphers import Cipher, algorithms

        # Each stream has a key of its own, so a constant nonce never repeats under one key. The
        # block's number is before it.
        return Cipher(algorithms.ChaCha20(self._key, block.to_bytes(4, "little") + bytes(12)), mode=None).encryptor()


def _read(encryptor: Any, count: int) -> bytearray:
    out = bytearray(count)
    encryptor.update_into(bytes(count), out)
    return out
