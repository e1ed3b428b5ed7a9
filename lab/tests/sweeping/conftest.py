"""Fixtures of the sweeps that these tests look at."""

from training.runs import brief, waves  # noqa: F401
