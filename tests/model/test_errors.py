"""The hierarchy of errors (errors.py)."""

import inspect
import pickle

import pytest

from tallybook import errors


def test_every_error_has_an_example_and_a_place_in_the_tree():
    """Each class is exported, derives from TallybookError, is in the tree at the top of the file and has an example."""
    classes = {c for _, c in inspect.getmembers(errors, inspect.isclass) if issubclass(c, errors.TallybookError)}
    (cases,) = [mark.args[1] for mark in test_errors_can_be_pickled.pytestmark]
    assert {type(example) for example in cases} == classes
    assert {c.__name__ for c in classes} | {"from_sqlstate"} == set(errors.__all__)
    for cls in classes:
        assert f"{cls.__name__}" in errors.__doc__
        assert cls.__doc__


@pytest.mark.parametrize(
    "error",
    [
        errors.TallybookError("it broke", detail="Some detail.", hint="Do this."),
        errors.PayloadError("$.a", "NUL character (U+0000)", task="mail.send"),
        errors.SignatureError("mail.send", "missing 'user_id'"),
        errors.ConfigError("timeout", "soon", "not a duration", hint="Write '5 min'"),
        errors.InvalidArgument("the queue name is empty"),
        errors.NotSupported("an async handler in a process", hint="Use def"),
        errors.ConnectionNotSupported(object(), "a psycopg connection"),
        errors.WrongIsolationLevel("claim in serializable"),
        errors.DuplicateTask("mail.send", "a.py:1", "b.py:2"),
        errors.UnknownTask("mail.sent", ["mail.send", "charge"]),
        errors.UnknownQueue("mial", ["mail"]),
        errors.UnknownJob(7),
        errors.LeaseLost(7, 2),
        errors.WorkerEnded("worker w1 has ended"),
        errors.ForeignCursor("the cursor is of another cluster"),
        errors.QueueUnavailable("db:5432", "connection refused"),
        errors.SchemaError("versions differ"),
        errors.SchemaMissing("shop"),
        errors.SchemaTooOld(1, 2),
        errors.SchemaUnreleased(7),
        errors.SchemaTooNew(3, 2),
        errors.SchemaBusy("psql (process 7, idle in transaction, for 9 s)"),
        errors.TransactionError("the handler has ended its transaction", hint="Leave COMMIT to the worker"),
        errors.KeyTaken(4711),
        errors.ResultTimeout(7, 10),
        errors.LockNotAvailable("ledger", 30.0),
        errors.ResultMissing(7, "its result was not kept: it is no JSON"),
        errors.JobFailed(7, "send", "ValueError", "no such user"),
        errors.JobDied(7, "ValueError", "no such user"),
        errors.JobCancelled(7, "the order was withdrawn"),
        errors.CommitUnknown("enqueue", "db:5432"),
        errors.NotASubject(7, "Reschedule"),
        errors.UnknownSchedule("swep", ["sweep"]),
        errors.UnknownNode("nort", ["north"]),
        errors.UnknownProvider("acne", ["acme"]),
        errors.SecretError("acme", "api_key", "it cannot be decrypted with key 'k1'", hint="Set the secret again"),
        errors.ExpressionError("cron", "61 * * * *", "'61' does not fit the field minute", field="minute"),
        errors.CallFailed("call of 'acme': status 429", provider="acme", status=429, headers={"retry-after": "5"}),
        errors.OperatorRefused(403, "scope", "the key may only read"),
        errors.RoleError(["a", "b"], "do not exist", "Make them"),
        errors.AddressRefused("loopback", provider="acme", who="call of 'acme'"),
    ],
    ids=lambda error: type(error).__name__,
)
def test_errors_can_be_pickled(error):
    """F29: a pickled error keeps its class, its text and its attributes."""
    again = pickle.loads(pickle.dumps(error))  # noqa: S301
    assert type(again) is type(error)
    assert str(again) == str(error)
    assert vars(again) == vars(error)


@pytest.mark.parametrize(
    ("error", "message"),
    [
        (errors.TallybookError("it broke", detail="Some detail.", hint="Do this."), "it broke. Some detail. Do this."),
        (
            errors.PayloadError("$.a", "NUL character (U+0000)", task="mail.send"),
            "args of task 'mail.send' cannot be stored: $.a: NUL character (U+0000)",
        ),
        (
            errors.ConfigError("timeout", "soon", "not a duration", hint="Write '5 min'"),
            "timeout: 'soon': not a duration. Write '5 min'.",
        ),
        (
            errors.UnknownTask("mail.sent", ["mail.send", "charge"]),
            "unknown task 'mail.sent'. Did you mean 'mail.send'?",
        ),
        (errors.UnknownQueue("mial", ["mail"]), "unknown queue 'mial'. Did you mean 'mail'?"),
        (errors.SchemaTooOld(1, 2), "the schema is at version 1, this program needs 2. Run `tallybook migrate`."),
    ],
)
def test_messages_say_what_where_and_what_to_do(error, message):
    """An error's text is complete sentences and suggests a near match."""
    assert str(error) == message


def test_errors_are_what_python_users_catch():
    """Errors for wrong values are also ValueErrors; errors for wrong calls are also TypeErrors."""
    assert issubclass(errors.PayloadError, ValueError)
    assert issubclass(errors.ConfigError, ValueError)
    assert issubclass(errors.SignatureError, TypeError)


@pytest.mark.parametrize(
    ("sqlstate", "cls"),
    [
        ("TB001", errors.LeaseLost),
        ("TB002", errors.UnknownJob),
        ("TB003", errors.WrongIsolationLevel),
        ("TB004", errors.ForeignCursor),
        ("TB005", errors.InvalidArgument),
        ("TB006", errors.WorkerEnded),
        ("TB007", errors.SchemaError),
    ],
)
def test_sqlstates_become_errors_with_the_servers_words(sqlstate, cls):
    """Each SQLSTATE of class TB0 maps to one class, with the server's message, detail and hint."""
    error = errors.from_sqlstate(sqlstate, "lease lost", "Job 7 is run by w2.", "Stop.")
    assert type(error) is cls
    assert (error.sqlstate, error.detail, error.hint) == (sqlstate, "Job 7 is run by w2.", "Stop.")
    assert str(error) == "lease lost. Job 7 is run by w2. Stop."
    assert str(pickle.loads(pickle.dumps(error))) == str(error)  # noqa: S301


def test_attributes_of_a_servers_error_are_none():
    """The server sends only text, so the attributes of the class exist and are None."""
    assert errors.from_sqlstate("TB001", "lease lost", None, None).job is None
    assert str(errors.from_sqlstate("TB001", "lease lost", None, None)) == "lease lost"


@pytest.mark.parametrize("sqlstate", ["40001", "TB999", ""])
def test_foreign_sqlstates_are_none(sqlstate):
    """An SQLSTATE that is not Tallybook's gives None, so the driver's error remains."""
    assert errors.from_sqlstate(sqlstate, "x", None, None) is None


def test_hostile_option_values_do_not_break_the_message():
    """A value whose repr fails is shown as its class name."""

    class Bad:
        def __repr__(self):
            raise RuntimeError

    assert "<Bad>" in str(errors.ConfigError("x", Bad(), "wrong"))
