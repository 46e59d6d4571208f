"""How long something takes, in the unit that people would say it in."""

from typing import Final

_UNITS: Final = (("day", 86_400), ("hour", 3_600), ("minute", 60))


def spoken(seconds: float) -> str:
    """A duration with two or three digits that count.

    >>> spoken(0.4), spoken(1), spoken(59.7), spoken(100), spoken(5_400), spoken(1_000_000)
    ('0.4 seconds', '1 second', '60 seconds', '1.7 minutes', '1.5 hours', '12 days')
    """
    name, size = next(((name, size) for name, size in _UNITS if seconds >= size), ("second", 1))
    count = seconds / size
    text = f"{count:,.0f}" if count >= 9.95 else f"{count:.1f}".removesuffix(".0")
    return f"{text} {name}{'' if text == '1' else 's'}"
