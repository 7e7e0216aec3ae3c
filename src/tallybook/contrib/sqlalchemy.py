"""Tallybook beside SQLAlchemy's tools. Sessions need nothing from here: `enqueue` takes them as they are."""

from __future__ import annotations

from collections.abc import Mapping

__all__ = ["include_name"]


def include_name(name: str | None, type_: str, parent_names: Mapping[str, str | None]) -> bool:
    """For Alembic: whether autogenerate looks at this; not at the schema `tallybook`, which `tallybook migrate` keeps.

    In env.py, where `include_schemas` is on; without it Alembic looks at no other schema than yours anyway:

        context.configure(..., include_schemas=True, include_name=include_name)

    With a rule of your own: `include_name=lambda *about: include_name(*about) and mine(*about)`.
    """
    schema = name if type_ == "schema" else parent_names.get("schema_name")
    return schema != "tallybook"
