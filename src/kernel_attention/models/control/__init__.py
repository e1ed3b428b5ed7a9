"""Policies: models of trajectories, and what they remember while they act."""
