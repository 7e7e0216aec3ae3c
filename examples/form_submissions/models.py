"""SQLAlchemy models of forms and submissions; schema.sql has all tables."""

from __future__ import annotations

import os
import re
from datetime import datetime

from sqlalchemy import DateTime, FetchedValue
from sqlalchemy.dialects.postgresql import JSONB
from sqlalchemy.ext.asyncio import async_sessionmaker, create_async_engine
from sqlalchemy.orm import DeclarativeBase, Mapped, mapped_column

DATABASE_URL = re.sub(r"^postgres(ql)?://", "postgresql+psycopg://", os.environ["TALLYBOOK_DSN"])
engine = create_async_engine(DATABASE_URL, hide_parameters=True)  # errors are logged without the visitors' data
sessions = async_sessionmaker(engine, expire_on_commit=False)


class Base(DeclarativeBase):
    pass


class Form(Base):
    __tablename__ = "form"
    name: Mapped[str] = mapped_column(primary_key=True)
    webhook: Mapped[str]  # a URL; the provider's secret of the form's name signs it
    owner_email: Mapped[str]
    owner_phone: Mapped[str]
    sheet: Mapped[str]
    webhook_attempts: Mapped[int]


class Submission(Base):
    __tablename__ = "submission"
    id: Mapped[int] = mapped_column(primary_key=True)
    form: Mapped[str]
    data: Mapped[dict[str, str]] = mapped_column(JSONB)
    handed_over: Mapped[bool]
    saved_at: Mapped[datetime] = mapped_column(DateTime(timezone=True), server_default=FetchedValue())

    @property
    def links(self) -> dict[str, str | int]:
        return {"submission": self.id, "form": self.form}

    def key(self, kind: str) -> str:
        """Return form-submission-kind, the same in every attempt, so that a receiver can skip a repeated request."""
        return f"{self.form}-{self.id}-{kind}"
