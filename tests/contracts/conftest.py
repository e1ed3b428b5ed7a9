"""Leaves out a contract for the variants that are exempt from it; their table gives the reason."""

from __future__ import annotations

import pytest


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    exempt = [item for item in items if _is_exempt(item)]
    items[:] = [item for item in items if item not in set(exempt)]
    config.hook.pytest_deselected(items=exempt)


def _is_exempt(item: pytest.Item) -> bool:
    callspec = getattr(item, "callspec", None)
    exemptions = getattr(getattr(callspec and callspec.params.get("case"), "variant", None), "exempt", {})
    return getattr(item, "originalname", None) in exemptions
