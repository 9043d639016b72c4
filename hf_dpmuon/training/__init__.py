"""What the trainer's hooks call, one room a concern; none of it knows the base class."""

__all__: list[str] = []
