"""The libraries whose models are diagnosed."""

from __future__ import annotations

from hosts.conftest import timm, transformers  # noqa: F401
