"""Helpers for SQLAlchemy's tools. Sessions need nothing from here: pass them to `enqueue` directly."""

from collections.abc import Mapping

__all__ = ["include_name"]


def include_name(name: str | None, type_: str, parent_names: Mapping[str, str | None]) -> bool:
    """For Alembic: exclude the schema `tallybook`, which `tallybook migrate` manages, from autogenerate.

    Use it in env.py with `include_schemas`; without that option Alembic reads no other schema than yours anyway:

        context.configure(..., include_schemas=True, include_name=include_name)

    Combined with your own rule: `include_name=lambda *about: include_name(*about) and mine(*about)`.
    """
    schema = name if type_ == "schema" else parent_names.get("schema_name")
    return schema != "tallybook"
