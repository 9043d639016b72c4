"""How a cost is printed: never below what it is.

Receives numbers; returns text.
"""

from __future__ import annotations

from decimal import ROUND_CEILING, Context, Decimal

__all__ = ["percent_up", "round_up", "round_up_fixed"]


def round_up(value: float, digits: int = 3) -> str:
    """Returns the number with this many significant digits, rounded up: how a cost is printed.

    >>> round_up(2.7182818), round_up(1.0000001e-5)
    ('2.72', '1.01e-05')
    """
    up = Context(prec=digits, rounding=ROUND_CEILING).create_decimal(repr(float(value)))
    return f"{float(up):.{digits}g}"


def round_up_fixed(value: float, decimals: int = 4) -> str:
    """Returns the number with this many decimals, rounded up; infinity is ``"inf"``.

    >>> round_up_fixed(2.00000001)
    '2.0001'
    """
    exact = Decimal(repr(float(value)))
    if not exact.is_finite():
        return str(float(value))
    up = exact.quantize(Decimal(1).scaleb(-decimals), ROUND_CEILING, Context(prec=400))
    return f"{up:f}"


def percent_up(share: float) -> str:
    """Returns a share as per cent with at most two decimals, rounded up, and never above 100 %.

    >>> percent_up(0.123401), percent_up(0.5)
    ('12.35 %', '50 %')
    """
    percent = Decimal(round_up_fixed(min(1.0, share))) * 100
    return f"{float(percent):g} %"
