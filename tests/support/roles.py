"""A database whose owner is not a superuser, with roles that have a prefix per test, as roles belong to the cluster."""

import secrets
from collections.abc import Iterator
from contextlib import ExitStack, closing, contextmanager
from typing import Any

import psycopg
import pytest
from psycopg import sql
from psycopg.conninfo import make_conninfo

from support.database import Connection, one
from tallybook._db import migrate, roles


class House:
    """One database, with connections as its owner or as a login with one of the roles."""

    def __init__(self, dsn: str, admin: Connection, *, createrole: bool = True) -> None:
        self.prefix = f"t{secrets.token_hex(5)}_"
        self.owner = self.prefix + "owner"
        self._admin_dsn = dsn
        self.admin = admin
        self._stack = ExitStack()
        self.created: list[str] = []
        self.login(self.owner, "createrole" if createrole else "nocreaterole")
        name = one(admin, "select current_database()")
        admin.execute(sql.SQL("alter database {} owner to {}").format(sql.Identifier(name), sql.Identifier(self.owner)))
        self.dsn = self.dsn_of(self.owner)
        self.db = self.connect(self.owner)
        migrate.migrate(self.db)

    def login(self, name: str, *options: str) -> str:
        """Make a login without rights and return its name."""
        words = sql.SQL(" ").join(map(sql.SQL, options))  # type: ignore[arg-type]
        self.admin.execute(sql.SQL("create role {} login password 'x' {}").format(sql.Identifier(name), words))
        self.created.append(name)
        return name

    def user(self, kind: str) -> str:
        """Make a login that is a member of one role and return its name."""
        name = self.login(f"{self.prefix}{kind}_login")
        self.admin.execute(sql.SQL("grant {} to {}").format(sql.Identifier(self.prefix + kind), sql.Identifier(name)))
        return name

    def dsn_of(self, user: str) -> str:
        return make_conninfo(self._admin_dsn, user=user, password="x")

    def connect(self, user: str, **options: Any) -> Connection:
        return self._stack.enter_context(psycopg.connect(self.dsn_of(user), **{"autocommit": True, **options}))

    def as_(self, kind: str) -> Connection:
        """Connect as a new login with this role."""
        return self.connect(self.user(kind))

    def give(self) -> roles.Done:
        """Do the same as `tallybook roles`."""
        return roles.create(self.db, self.prefix)

    def close(self) -> None:
        self._stack.close()
        for name in (*(self.prefix + kind for kind in roles.KINDS), *reversed(self.created)):
            if self.admin.execute("select from pg_roles where rolname = %s", [name]).fetchone():
                self.admin.execute(sql.SQL("reassign owned by {} to current_user").format(sql.Identifier(name)))
                self.admin.execute(sql.SQL("drop owned by {}").format(sql.Identifier(name)))
                self.admin.execute(sql.SQL("drop role {}").format(sql.Identifier(name)))


def refused(conn: Connection, *statements: str) -> None:
    """Check that the login may run none of these."""
    for statement in statements:
        with pytest.raises(psycopg.errors.InsufficientPrivilege):
            conn.execute(statement.encode())


@contextmanager
def house(dsn: str, *, createrole: bool = True) -> Iterator[House]:
    """Yield a House in this empty database; drop all its roles at the end."""
    with psycopg.connect(dsn, autocommit=True) as admin, closing(House(dsn, admin, createrole=createrole)) as made:
        yield made
