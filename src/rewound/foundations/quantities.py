"""How long something takes, how large it is and how many there are, as people would say it."""

from typing import Final

_UNITS: Final = (("day", 86_400), ("hour", 3_600), ("minute", 60))
_SIZES: Final = ((2**30, "GiB"), (2**20, "MiB"), (2**10, "KiB"))


def spoken(seconds: float) -> str:
    """A duration with two or three digits that count.

    >>> spoken(0.4), spoken(1), spoken(59.7), spoken(100), spoken(5_400), spoken(1_000_000)
    ('0.4 seconds', '1 second', '60 seconds', '1.7 minutes', '1.5 hours', '12 days')
    """
    name, size = next(((name, size) for name, size in _UNITS if seconds >= size), ("second", 1))
    count = seconds / size
    text = f"{count:,.0f}" if count >= 9.95 else f"{count:.1f}".removesuffix(".0")
    return f"{text} {name}{'' if text == '1' else 's'}"


def sized(size: int) -> str:
    """A number of bytes with one digit after the point.

    >>> sized(0), sized(200), sized(3_500), sized(5_000_000)
    ('0 bytes', '200 bytes', '3.4 KiB', '4.8 MiB')
    """
    unit, name = next(((unit, name) for unit, name in _SIZES if size >= unit), (0, ""))
    return f"{size / unit:.1f} {name}" if unit else f"{size} bytes"


def counted(count: int, what: str) -> str:
    """A number of things.

    >>> counted(1, "step"), counted(2_000, "step")
    ('1 step', '2,000 steps')
    """
    return f"{count:,} {what}{'' if count == 1 else 's'}"
