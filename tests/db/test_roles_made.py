"""`tallybook roles`: run again, kept by migrations, run by an owner who may not create roles, and revoked."""

import pytest

from support.broken import source
from support.roles import House, house, refused
from tallybook._db import migrate, roles
from tallybook.errors import ConfigError, RoleError

pytestmark = pytest.mark.direct("logins of their own")


def matrix(at: House) -> list[tuple[object, ...]]:
    return at.db.execute(
        "select 'f', oid::regprocedure::text, proacl::text, prosecdef, proconfig::text from pg_proc"
        " where pronamespace = 'tallybook'::regnamespace"
        " union all select 'c', relname, relacl::text, null, null from pg_class"
        " where relnamespace = 'tallybook'::regnamespace order by 1, 2"
    ).fetchall()


def test_again_changes_nothing(at: House) -> None:
    """`tallybook roles` run twice changes nothing and creates nothing."""
    before = matrix(at)
    assert at.give().created == []
    assert matrix(at) == before


def test_a_migration_keeps_the_rights(at: House) -> None:
    """A migration that replaces functions and views leaves every right as it was."""
    before = matrix(at)
    at.db.execute("update tallybook.installation set routines = 'other'")
    assert migrate.migrate(at.db) == ["functions and views"]
    assert matrix(at) == before


def test_control_a_replaced_function_is_the_callers(at: House) -> None:
    """Negative control: "create or replace" alone loses the owner's rights, and anybody may call a new function."""
    text = source("enqueue")
    at.db.execute(text.encode())
    assert at.db.execute("select prosecdef, proconfig from pg_proc where proname = 'enqueue'").fetchone() == (
        False,
        None,
    )
    refused(at.as_("producer"), "select tallybook.enqueue('q', 't')")
    at.db.execute("create function tallybook.newer() returns int language sql as 'select 1'")
    assert at.as_("metrics").execute("select tallybook.newer()").fetchone() == (1,)
    at.db.execute("select tallybook._roles_apply()")
    refused(at.connect(f"{at.prefix}metrics_login"), "select tallybook.newer()")


def test_another_prefix_replaces_the_roles(at: House) -> None:
    """Roles with another prefix replace the old ones, which lose their rights here."""
    login = at.as_("producer")
    other = at.prefix + "n_"
    for kind in roles.KINDS:
        at.created.append(other + kind)
    roles.create(at.db, other)
    refused(login, "select tallybook.enqueue('q', 't')")


def test_forget(at: House) -> None:
    """--forget: functions run with the caller's rights again, as if there had never been roles."""
    conn = at.as_("producer")
    assert sorted(roles.forget(at.db)) == sorted(at.prefix + kind for kind in roles.KINDS)
    assert at.db.execute(
        "select count(*) from pg_proc where prosecdef and pronamespace = 'tallybook'::regnamespace"
    ).fetchone() == (0,)
    refused(conn, "select tallybook.enqueue('q', 't')")
    at.db.execute("select tallybook.enqueue('q', 't')")


def test_without_the_right_to_create_roles(empty_dsn: str) -> None:
    """An owner who may not create roles gets SQL for an administrator, and can use existing roles."""
    with house(empty_dsn, createrole=False) as made:
        before = matrix(made)
        with pytest.raises(RoleError, match=f"create role {made.prefix}producer nologin") as caught:
            made.give()
        assert caught.value.names == tuple(made.prefix + kind for kind in roles.KINDS)
        with pytest.raises(RoleError, match="do not exist"):
            roles.create(made.db, made.prefix, existing=True)
        assert matrix(made) == before
        for kind in roles.KINDS:
            made.login(made.prefix + kind)
        with pytest.raises(RoleError, match="--existing"):
            made.give()
        roles.create(made.db, made.prefix, existing=True)
        assert made.connect(made.prefix + "producer").execute("select tallybook.enqueue('q', 't')").fetchone() == (1,)


def test_the_script_does_the_same(empty_dsn: str) -> None:
    """--sql prints a script that grants the same rights."""
    with house(empty_dsn) as made:
        made.db.execute(roles.script(made.prefix).encode())
        before = matrix(made)
        assert made.give().created == []
        assert matrix(made) == before


def test_roles_of_another_cluster_are_left_out(at: House) -> None:
    """After a move to a cluster without the roles a migration works without them."""
    at.db.execute("update tallybook.role set name = 'not_of_this_cluster' where kind = 'metrics'")
    at.db.execute("update tallybook.installation set routines = 'other'")
    assert migrate.migrate(at.db) == ["functions and views"]


@pytest.mark.parametrize("prefix", ["", "Tb_", "1a", "a b", 'a"b', "pg_tb_", "x" * 42])
def test_a_prefix_is_a_plain_name(prefix: str) -> None:
    """A prefix that needs quotes, is reserved or is too long is refused."""
    with pytest.raises(ConfigError, match="prefix"):
        roles.names(prefix)


def test_a_superusers_installation_is_told(at: House) -> None:
    """S11: superuser_owner names the owner if it is a superuser, for the warning."""
    assert roles.superuser_owner(at.db) is None
    at.admin.execute("alter schema tallybook owner to current_user")
    assert roles.superuser_owner(at.db) == at.admin.info.user
