"""Laws of units: what people write is what is computed with, and back."""

from __future__ import annotations

import random

import pytest

from lightning_pipe.errors import ConfigError
from lightning_pipe.units import (
    format_bytes,
    format_rate,
    format_seconds,
    parse_bytes,
    parse_rate,
    parse_seconds,
    spell_bytes,
    spell_rate,
    spell_seconds,
)

KINDS = [(parse_bytes, format_bytes, 2**45), (parse_seconds, format_seconds, 1e5), (parse_rate, format_rate, 1e12)]


@pytest.mark.parametrize(
    ("parse", "text", "value"),
    [
        (parse_bytes, "1.5 GiB", 3 * 2**29),
        (parse_bytes, "300MB", 300_000_000),
        (parse_bytes, "12 B", 12),
        (parse_bytes, "2 giB", 2**31),
        (parse_seconds, "3.2 ms", 3.2e-3),
        (parse_seconds, "15 µs", 15e-6),
        (parse_seconds, "2e2 us", 2e-4),
        (parse_seconds, "1.5h", 5400),
        (parse_rate, "10 Gbit/s", 1.25e9),
        (parse_rate, "12 GB/s", 12e9),
        (parse_rate, "1 GiB/s", 2**30),
    ],
)
def test_text_is_read_in_its_unit(parse, text, value):
    assert parse(text) == pytest.approx(value, rel=1e-12)


@pytest.mark.parametrize(
    ("text", "written"),
    [
        (format_bytes(0), "0 B"),
        (format_bytes(1023), "1023 B"),
        (format_bytes(3 * 2**29), "1.5 GiB"),
        (format_bytes(2**40 * 5000), "5000 TiB"),
        (format_seconds(0.0032), "3.2 ms"),
        (format_seconds(0.0), "0 ns"),
        (format_seconds(90), "1.5 min"),
        (format_seconds(0.9999), "1000 ms"),
        (format_rate(1.25e9), "10 Gbit/s"),
    ],
)
def test_numbers_are_written_with_three_digits_in_the_largest_unit(text, written):
    assert text == written


@pytest.mark.parametrize(("parse", "write", "largest"), KINDS)
def test_reading_what_was_written_keeps_three_digits(parse, write, largest):
    rng = random.Random(0)
    for _ in range(300):
        value = largest ** rng.random()
        assert parse(write(value)) == pytest.approx(value, rel=0.005, abs=0.5)


@pytest.mark.parametrize(
    ("parse", "text", "message"),
    [
        (parse_bytes, "many", "found 'many'; expected an amount of bytes such as '1.5 GiB'; units: B, kB"),
        (parse_bytes, "3", "found '3'; expected an amount of bytes"),
        (parse_bytes, "3 Gb", "found '3 Gb'"),
        (parse_bytes, "-3 GB", "found '-3 GB'"),
        (parse_seconds, "3 GB", "found '3 GB'; expected a time such as '3.2 ms'"),
        (parse_rate, "10 Gbit", "found '10 Gbit'; expected a rate"),
    ],
)
def test_what_has_no_clear_meaning_is_refused(parse, text, message):
    with pytest.raises(ConfigError) as caught:
        parse(text)
    assert message in str(caught.value)


@pytest.mark.parametrize(
    ("parse", "spell", "largest"),
    [(parse_bytes, spell_bytes, 2**45), (parse_seconds, spell_seconds, 1e5), (parse_rate, spell_rate, 1e12)],
)
def test_what_is_spelled_out_is_read_back_exactly(parse, spell, largest):
    rng = random.Random(0)
    for _ in range(100):
        value = parse(spell(largest ** rng.random() if parse is not parse_bytes else rng.randrange(largest)))
        assert parse(spell(value)) == value
    assert parse(spell(0)) == 0


@pytest.mark.parametrize(
    ("text", "written"),
    [
        (spell_bytes(16 * 2**30), "16 GiB"),
        (spell_bytes(16 * 10**9), "16 GB"),
        (spell_seconds(parse_seconds("30 us")), "30 us"),
        (spell_rate(25e9 / 8), "25 Gbit/s"),
        (spell_rate(40e9), "40 GB/s"),
    ],
)
def test_numbers_are_spelled_as_shortly_as_possible(text, written):
    assert text == written
