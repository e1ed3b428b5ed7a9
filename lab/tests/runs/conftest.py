"""Fixtures of the runs that these tests look at."""

from runs.small_runs import brief, trained, trained_regression, waves  # noqa: F401
