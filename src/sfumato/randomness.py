"""The run's secret key, and every random stream that is derived from it.

Whoever holds the key can regenerate the noise and undo the privacy. A private
run draws its key from the operating system; a public seed voids the guarantee.
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


def digest(value: Any) -> str:
    """SHA-256 of a JSON value in one canonical form, in hexadecimal."""
    return hashlib.sha256(_canonical(value)).hexdigest()


@dataclasses.dataclass(frozen=True)
class Streams:
    """All randomness of a run: one ChaCha20 stream for each (session, purpose, step).

    Attributes:
        key: The run's 256-bit key.
        context: Digests of everything that decides what is released: the recipe's keys
            that change a result, and the data as training sees it. With them in the
            derivation, changed data or a changed recipe never meet the same noise; two
            releases with one noise would give their difference away.
        session: Number and environment of the session. Updates repeated in another
            environment differ in rounding, so they are drawn afresh.
    """

    key: bytes = dataclasses.field(repr=False)
    context: dict[str, Any]
    session: dict[str, Any]

    def stream(self, purpose: str, step: int = 0) -> "Stream":
        """The stream of one purpose at one step; the same arguments give the same bits."""
        message = _canonical({"context": self.context, "session": self.session, "purpose": purpose, "step": step})
        return Stream(hmac.digest(self.key, message, "sha256"))


class Stream:
    """A ChaCha20 keystream, read from its start on (library: cryptography)."""

    def __init__(self, key: bytes) -> None:
        from cryptography.hazmat.primitives.ciphers import Cipher, algorithms

        # Each stream has a key of its own, so a constant nonce never repeats under one key.
        self._encryptor = Cipher(algorithms.ChaCha20(key, bytes(16)), mode=None).encryptor()

    def bytes(self, count: int) -> bytearray:
        """The next ``count`` bytes."""
        out = bytearray(count)
        self._encryptor.update_into(bytes(count), out)
        return out

    def uint64(self, count: int) -> np.ndarray:
        """The next ``count`` uniform 64-bit words, shape (count,)."""
        return np.frombuffer(self.bytes(8 * count), dtype="<u8")

    def uint32(self, count: int) -> np.ndarray:
        """The next ``count`` uniform 32-bit words, shape (count,)."""
        return np.frombuffer(self.bytes(4 * count), dtype="<u4")


def _canonical(value: Any) -> bytes:
    return json.dumps(value, sort_keys=True, separators=(",", ":"), allow_nan=False).encode()
