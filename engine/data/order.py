"""The order of samples as a function of (seed, epoch, index): nothing to build, to store or to share.

Each epoch is a keyed permutation of ``[0, num_samples)``: an alternating Feistel network over Z_a x Z_b with
a * b >= num_samples, made exact by cycle walking (Black and Rogaway, "Ciphers with Arbitrary Finite Domains", CT-RSA
2002, methods 2 and 3; Hoang and Rogaway, "On Generalized Feistel Networks", CRYPTO 2010), with the ten rounds of NIST
SP 800-38G. Its round function is the finaliser of SplitMix64 (Steele, Lea, Flood, OOPSLA 2014; constants of Stafford's
variant 13): good mixing, no secrecy.

Position p of a run, counted in consumed samples from 0, is index ``p % num_samples`` of epoch ``p // num_samples``.
Changing anything here changes the order of running jobs; a test pins the values.
"""

from __future__ import annotations

import hashlib
from math import isqrt

import numpy as np
import numpy.typing as npt

_ROUNDS = 10
_MAX_SAMPLES = 1 << 62


def _round_keys(seed: int, epoch: int) -> npt.NDArray[np.uint64]:
    digest = hashlib.shake_128(f"sample order:{seed}:{epoch}".encode()).digest(8 * _ROUNDS)
    return np.frombuffer(digest, dtype="<u8")


def _mix(values: npt.NDArray[np.uint64], key: np.uint64) -> npt.NDArray[np.uint64]:
    values = values + key
    values = (values ^ (values >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    values = (values ^ (values >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return values ^ (values >> np.uint64(31))


def permute(indices: npt.NDArray[np.int64], num_samples: int, seed: int, epoch: int) -> npt.NDArray[np.int64]:
    """The sample numbers at ``indices`` [n] of one epoch: a bijection of ``[0, num_samples)`` per (seed, epoch)."""
    if not 1 <= num_samples <= _MAX_SAMPLES:
        raise ValueError(f"num_samples {num_samples} is outside 1..2^62")
    a = isqrt(num_samples - 1) + 1
    b = -(-num_samples // a)
    size_a, size_b = np.uint64(a), np.uint64(b)
    keys = _round_keys(seed, epoch)
    result = indices.astype(np.uint64)
    assert np.all(result < num_samples), "indices are outside the epoch"
    walking = np.arange(result.size)
    while walking.size:
        left, right = np.divmod(result[walking], size_b)
        for number, key in enumerate(keys):
            if number % 2:
                right = (right + _mix(left, key) % size_b) % size_b
            else:
                left = (left + _mix(right, key) % size_a) % size_a
        result[walking] = left * size_b + right
        # What fell outside the epoch is permuted again until it is inside: the cycle through it leads back.
        walking = walking[result[walking] >= num_samples]
    return result.astype(np.int64)


def samples_of_step(step: int, global_batch_size: int, num_samples: int, seed: int) -> npt.NDArray[np.int64]:
    """The sample numbers [global_batch_size] that step ``step`` (from 0) consumes, whatever the layout.

    A step may reach into the next epoch, or hold several when the corpus is smaller than the batch.
    """
    position, end = step * global_batch_size, (step + 1) * global_batch_size
    parts = []
    while position < end:
        epoch, index = divmod(position, num_samples)
        count = min(end - position, num_samples - index)
        parts.append(permute(np.arange(index, index + count, dtype=np.int64), num_samples, seed, epoch))
        position += count
    return np.concatenate(parts)
