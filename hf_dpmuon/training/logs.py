"""What a log of the base class may say.

Receives the values that the base class would log; returns those that are private, or public.
"""

from __future__ import annotations

__all__ = ["private_values"]

# What takes longer or counts more the more rows are drawn, whose number is private.
TELLING = ("train_runtime", "train_samples_per_second", "train_steps_per_second", "total_flos")
RAW = ("loss", "train_loss")


def private_values(logs: dict[str, float], *, keep_loss: bool) -> dict[str, float]:
    """Leave out times and raw losses; or keep raw losses under a name that says what they are."""
    private = {name: value for name, value in logs.items() if name not in (*TELLING, *RAW)}
    if keep_loss:
        private |= {f"nonprivate_{name}": logs[name] for name in RAW if name in logs}
    return private
