"""Fixtures of the sweeps that these tests look at."""

from runs.small_runs import brief, waves  # noqa: F401
