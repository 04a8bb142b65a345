"""The shared secret: which ones can be guessed, and what a guess costs."""

from __future__ import annotations

import base64
import hashlib
import random
import time

import pytest

from rdzv.config import secret as module
from rdzv.config.secret import BITS_MIN, Secret, entropy_bits
from rdzv.errors import SettingsError

GUESSED = [
    "short", "password12345678", "a" * 64, "0123456789abcdef" * 4, "deadbeef" * 4, "1234567890" * 5,
    "correct horse battery staple", "CorrectHorseBatteryStaple", "qwertyuiopasdfghjkl",
    "hunter2" * 10, "this is our secret", "abcdefghijklmnopqrstuvwxyz", "2026-11-17 my secret",
]  # fmt: skip


@pytest.mark.parametrize("text", GUESSED)
def test_a_secret_that_is_short_regular_or_of_words_can_be_guessed_however_long_it_is(text):
    assert Secret(text).can_be_guessed


@pytest.mark.parametrize("size", [12, 16, 32])
def test_random_secrets_are_not_taken_for_guessable(size):
    draw = random.Random(4711)
    for _ in range(200):
        data = draw.randbytes(size)
        assert entropy_bits(data.hex().encode()) > BITS_MIN
        if size >= 16:
            assert entropy_bits(data) > BITS_MIN
            assert entropy_bits(base64.b64encode(data)) > BITS_MIN * 0.9


def test_a_file_that_has_just_gone_is_no_error_of_the_warning(tmp_path):
    module.warn_if_shown("tls_key", str(tmp_path / "gone"))


def test_a_guess_costs_time_and_memory_and_a_process_pays_once(monkeypatch):
    assert module.COST["n"] * module.COST["r"] * 128 >= 32 * 2**20, "bytes of memory for every guess"
    paid = []
    real = hashlib.scrypt
    monkeypatch.setattr(hashlib, "scrypt", lambda *args, **more: paid.append(args) or real(*args, **more))
    began_at = time.process_time()
    proofs = {Secret("of this test alone").prove(b"a", b"b") for _ in range(100)}
    assert time.process_time() - began_at > 0.01
    assert (len(proofs), len(paid)) == (1, 1)


def test_the_price_is_paid_before_any_connection_waits_for_it(monkeypatch):
    paid = []
    monkeypatch.setattr(module, "_derived", paid.append)
    module.find(Secret("given as a setting"), "")
    assert paid == [b"given as a setting"]


def test_a_python_without_scrypt_is_said_so(monkeypatch):
    def missing(*_, **__):
        raise ValueError("unsupported")

    monkeypatch.setattr(hashlib, "scrypt", missing)
    with pytest.raises(SettingsError, match="a shared secret needs scrypt, which this Python's OpenSSL does not have"):
        Secret("never derived before").prove(b"a")
