"""Fixtures of the runs that these tests look at."""

from training.runs import brief, trained, trained_regression, waves  # noqa: F401
