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


def subkey(key: bytes, purpose: str) -> bytes:
    """A key for one purpose alone: what is computed with it says nothing of streams or of other
    subkeys.
    """
    return hmac.digest(key, canonical({"subkey": purpose}), "sha256")


def run_id(key: bytes) -> str:
    """The name of the run whose key this is, 32 hexadecimal digits: public, bound to the key, of
    which it tells nothing.
    """
    return subkey(key, "run id").hex()[:32]


def canonical(value: Any) -> bytes:
    """A JSON value in one form: equal values give equal bytes, others give others."""
    return json.dumps(value, sort_keys=True, separators=(",", ":"), allow_nan=False).encode()


def digest(value: Any) -> str:
    """SHA-256 of a JSON value in its canonical form, in hexadecimal."""
    return hashlib.sha256(canonical(value)).hexdigest()


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

    Whoever keeps a key for longer than one process must bind the noise to the sum that it is
    added to, as `sfumato train` does (docs/privacy.md): no list of what decides a sum is complete.
    """

    key: bytes = dataclasses.field(repr=False)
    context: dict[str, Any]
    session: dict[str, Any]

    def stream(self, purpose: str, step: int = 0, **bound_to: str) -> "Stream":
        """The stream of one purpose at one step, bound to what else is named; equal arguments give
        equal bits.
        """
        message = {"context": self.context, "session": self.session, "purpose": purpose, "step": step}
        if bound_to:
            message["bound to"] = bound_to
        return Stream(hmac.digest(self.key, canonical(message), "sha256"))


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
