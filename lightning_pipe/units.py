"""Units: bytes, seconds and rates as people write them. The only place where text becomes a number or back.

Numbers inside the package are bytes (int), seconds (float) and bytes per second (float). Bits and decimal prefixes are
those of networks, binary prefixes (KiB) those of memory. Case matters only between `b` (bits) and `B` (bytes).
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterable, Mapping

from lightning_pipe.errors import ConfigError

_DECIMAL = {"": 1, "k": 10**3, "M": 10**6, "G": 10**9, "T": 10**12}
_BINARY = {"Ki": 2**10, "Mi": 2**20, "Gi": 2**30, "Ti": 2**40}

BYTES: Mapping[str, float] = {f"{prefix}B": factor for prefix, factor in {**_DECIMAL, **_BINARY}.items()}
SECONDS: Mapping[str, float] = {"ns": 1e-9, "us": 1e-6, "µs": 1e-6, "ms": 1e-3, "s": 1.0, "min": 60.0, "h": 3600.0}
RATES: Mapping[str, float] = {
    **{f"{unit}/s": factor for unit, factor in BYTES.items()},
    **{f"{prefix}bit/s": factor / 8 for prefix, factor in _DECIMAL.items()},
}

_NUMBER = re.compile(r"\s*([+-]?(?:\d+\.?\d*|\.\d+)(?:[eE][+-]?\d+)?)\s*(\S*)\s*")


def parse_bytes(text: str) -> int:
    """Return the bytes that a text such as `1.5 GiB` or `300 MB` names.

    Raises:
        ConfigError: if number or unit cannot be read, or the number is negative.
    """
    return round(_parse(text, units=BYTES, what="an amount of bytes", example="1.5 GiB"))


def parse_seconds(text: str) -> float:
    """Return the seconds that a text such as `3.2 ms` names.

    Raises:
        ConfigError: if number or unit cannot be read, or the number is negative.
    """
    return _parse(text, units=SECONDS, what="a time", example="3.2 ms")


def parse_rate(text: str) -> float:
    """Return the bytes per second that a text such as `10 Gbit/s` or `12 GB/s` names.

    Raises:
        ConfigError: if number or unit cannot be read, or the number is negative.
    """
    return _parse(text, units=RATES, what="a rate", example="10 Gbit/s")


def format_bytes(count: float) -> str:
    """Return bytes with the largest binary unit that fits, e.g. `1.5 GiB`."""
    return _format(count, {unit: BYTES[unit] for unit in ("B", "KiB", "MiB", "GiB", "TiB")})


def format_seconds(seconds: float) -> str:
    """Return seconds with the largest unit that fits, e.g. `3.2 ms`."""
    return _format(seconds, {unit: SECONDS[unit] for unit in ("ns", "us", "ms", "s", "min", "h")})


def format_rate(bytes_per_s: float) -> str:
    """Return a rate with the largest unit of bits that fits, e.g. `10 Gbit/s`."""
    return _format(bytes_per_s, {unit: RATES[unit] for unit in ("bit/s", "kbit/s", "Mbit/s", "Gbit/s", "Tbit/s")})


def format_share(share: float, digits: int = 1) -> str:
    """Return a share in percent, e.g. `12.5%`; one that rounds to nothing has no sign."""
    return f"{round(100 * share, digits) + 0.0:.{digits}f}%"


def counted_noun(count: int, noun: str) -> str:
    """Return a number with its noun in singular or plural, e.g. `1 micro-batch`, `8 micro-batches`."""
    plural = f"{noun}es" if noun.endswith(("ch", "s", "x")) else f"{noun}s"
    return f"{count} {noun if count == 1 else plural}"


def numbers_text(numbers: Iterable[int]) -> str:
    """Return rising numbers with runs of three or more as ranges, e.g. `0-3,6,7`."""
    runs: list[list[int]] = []
    for number in numbers:
        if runs and runs[-1][-1] + 1 == number:
            runs[-1].append(number)
        else:
            runs.append([number])
    return ",".join(f"{run[0]}-{run[-1]}" if len(run) > 2 else ",".join(map(str, run)) for run in runs)


def spell_bytes(count: int) -> str:
    """Return bytes as a text that `parse_bytes` reads back as the same number, e.g. `16 GiB`."""
    return _spell(count, units=BYTES, parse=parse_bytes)


def spell_seconds(seconds: float) -> str:
    """Return seconds as a text that `parse_seconds` reads back as the same number, e.g. `30 us`."""
    return _spell(seconds, units=SECONDS, parse=parse_seconds)


def spell_rate(bytes_per_s: float) -> str:
    """Return a rate as a text that `parse_rate` reads back as the same number, e.g. `25 Gbit/s`."""
    return _spell(bytes_per_s, units=RATES, parse=parse_rate)


def _parse(text: str, *, units: Mapping[str, float], what: str, example: str) -> float:
    match = _NUMBER.fullmatch(text)
    unit = _unit(match[2], units) if match else None
    if not match or unit is None or not 0 <= float(match[1]) * units[unit] < math.inf:
        raise ConfigError(f"found {text!r}; expected {what} such as {example!r}; units: {', '.join(units)}")
    return float(match[1]) * units[unit]


def _unit(text: str, units: Mapping[str, float]) -> str | None:
    """Return the unit that a text names; case is ignored except in `b` and `B`."""
    return {_folded(unit): unit for unit in units}.get(_folded(text))


def _folded(unit: str) -> str:
    return "".join(letter if letter in "bB" else letter.lower() for letter in unit)


_ALL_DIGITS = 17  # of a double


def _spell(value: float, *, units: Mapping[str, float], parse: Callable[[str], float]) -> str:
    """Write a value, at least zero, as the shortest text that is read back exactly."""
    numbers = ((f"{value / units[unit]:.{digits}g}", unit) for digits in range(1, _ALL_DIGITS + 1) for unit in units)
    return min((text for number, unit in numbers if parse(text := f"{number} {unit}") == value), key=len)


_FOUR_DIGITS = 999.5  # from here on three digits would be written as 1e+03


def _format(value: float, units: Mapping[str, float]) -> str:
    """Write a value with three significant digits in the largest of the units (given in rising order) that fits."""
    smallest = next(iter(units))
    fitting = [unit for unit, factor in units.items() if abs(value) >= factor]
    unit = fitting[-1] if fitting else smallest
    number = value / units[unit]
    digits = f"{number:.3g}" if abs(number) < _FOUR_DIGITS else f"{number:.0f}"
    return f"{digits} {unit}"
