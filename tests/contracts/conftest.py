"""Leaves out a contract for the variants that are exempt from it, with the reason."""

from __future__ import annotations

import pytest


@pytest.fixture(autouse=True)
def _exemptions(request: pytest.FixtureRequest) -> None:
    callspec = getattr(request.node, "callspec", None)
    case = callspec.params.get("case") if callspec else None
    reason = case.variant.exempt.get(request.node.originalname) if case else None
    if reason:
        pytest.skip(f"{case}: {reason}")
