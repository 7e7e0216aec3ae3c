"""The task `tallybook.email`: send one message through a provider's SMTP server."""

import asyncio
import hashlib
import json
import os
import re
import ssl
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from datetime import timedelta
from email.headerregistry import Address
from email.message import EmailMessage
from email.policy import SMTP as POLICY
from email.utils import formatdate
from functools import lru_cache
from typing import Any, Self

from tallybook._model.backoff import Exponential
from tallybook._model.provider import Provider, Secret
from tallybook._worker.run.context import Context
from tallybook.errors import CallFailed, ConfigError
from tallybook.extra.tasks._provider import Mask, needed, option, ready_made, seconds, text_setting

PATIENT = Exponential(timedelta(minutes=1), factor=4, cap=timedelta(hours=6), jitter=True)
_ADDRESS = re.compile(r"[^\s@<>()\[\],;:\\\"]{1,64}@[^\s@<>()\[\],;:\\\"]{1,255}")
_NAME = re.compile(r"[A-Za-z0-9!#$%&'*+.^_`|~-]{1,76}")
_OURS = {
    *("from", "to", "cc", "bcc", "sender", "reply-to", "subject", "date", "message-id", "mime-version", "return-path"),
    *("received", "dkim-signature"),
}
_MOST_RECIPIENTS = 100
_TEMPLATE = re.compile(r"[A-Za-z0-9_-]+(/[A-Za-z0-9_-]+)*")
_QUIT = 2.0
_PORTS = {"tls": 465, "starttls": 587, "none": 25}
"""By the setting `tls`: from the first byte, by STARTTLS, or not at all."""
_FILES = {"subject": "subject", "text": "txt", "html": "html"}


@ready_made("tallybook.email", retry=PATIENT, max_attempts=8, summary="Mail by {provider}: {subject}")
async def email(
    ctx: Context,
    provider: str,
    to: str | list[str],
    subject: str | None = None,
    text: str | None = None,
    *,
    html: str | None = None,
    template: str | None = None,
    values: dict[str, Any] | None = None,
    cc: list[str] | None = None,
    bcc: list[str] | None = None,
    reply_to: str | None = None,
    sender: str | None = None,
    headers: dict[str, str] | None = None,
    idempotency_key: str | None = None,
) -> dict[str, Any]:
    """Send one message, as text, html or both, to at most 100 recipients.

    Addresses are `ada@example.org` or `Ada <ada@example.org>`. `sender` defaults to the provider's setting `from`. The
    Message-ID is the same at every attempt; it is derived from the job's id and args, or from `idempotency_key`.

    The result is {"message_id", "accepted", "refused"}; `refused` has the recipients that the server refused for good.
    The next attempt is for the deferred recipients only. The job is dead if all are refused for good, or if an argument
    contains a line break. `template` names files in the folder TALLYBOOK_MAIL_TEMPLATES, which render subject, text and
    html from `values`; see https://github.com/tallybook/tallybook/blob/main/docs/webhooks.md.

        await email.enqueue(conn, "mail", "ada@example.org", "Your invoice", "It is attached to your account.")
    """
    who = f"mail by provider {provider!r}"
    found = await ctx.app.providers.get(provider)
    from_ = _address(who, "sender", sender if sender is not None else text_setting(found, "from"))
    if template is not None:
        if text is not None or html is not None:
            raise _wrong(who, "pass a template, or text and html, not both")
        made = _rendered(who, template, values or {})
        subject, text, html = subject or made.get("subject", "").strip() or None, made.get("text"), made.get("html")
    if subject is None:
        raise _wrong(who, "the subject is missing")
    groups = {"to": [to] if isinstance(to, str) else to, "cc": cc or [], "bcc": bcc or []}
    addresses = {name: [_address(who, name, one) for one in given] for name, given in groups.items()}
    recipients = list(dict.fromkeys(one.addr_spec for given in addresses.values() for one in given))
    if not 1 <= len(recipients) <= _MOST_RECIPIENTS:
        raise _wrong(who, f"it has {len(recipients)} recipients; 1 to {_MOST_RECIPIENTS} are allowed")
    message = EmailMessage(policy=POLICY)
    message["From"] = from_
    for name in ("to", "cc"):  # never bcc: it belongs to the envelope only
        if addresses[name]:
            message[name.title()] = addresses[name]
    if reply_to is not None:
        message["Reply-To"] = _address(who, "reply_to", reply_to)
    _add_header(who, message, "Subject", "subject", subject)
    message["Date"] = formatdate()
    message["Message-ID"] = _message_id(ctx, from_, idempotency_key)
    for name, value in (headers or {}).items():
        if not _NAME.fullmatch(name) or name.lower() in _OURS or name.lower().startswith(("content-", "resent-")):
            raise _wrong(who, f"header {name!r} cannot be set")
        _add_header(who, message, name, f"header {name!r}", value)
    _add_content(who, message, text, html)
    return await _deliver(ctx, found, Server.of(who, found), message, from_.addr_spec, recipients)


async def _deliver(
    ctx: Context, provider: Provider, server: "Server", message: EmailMessage, sender: str, recipients: list[str]
) -> dict[str, Any]:
    """Send the message to the recipients that no earlier attempt has settled."""
    before = await ctx.get_checkpoint() if ctx.attempt > 1 else None
    accepted: list[str] = before["accepted"] if before else []
    refused: dict[str, str] = before["refused"] if before else {}
    left = [one for one in recipients if one not in accepted and one not in refused]
    later: dict[str, str] = {}
    if left:
        async with ctx.provider(provider):
            answers = await server.send(message, sender, left)
        refused = {**refused, **{to: said for to, (code, said) in answers.items() if code >= 500}}
        later = {to: said for to, (code, said) in answers.items() if code < 500}
        accepted = [*accepted, *(to for to in left if to not in answers)]
    if later:
        if accepted or refused:
            await ctx.set_checkpoint({"accepted": accepted, "refused": refused})
        raise server.failed(f"deferred: {_listed(later)}")
    if not accepted:
        raise server.failed(f"refused: {_listed(refused)}", no_retry=True)
    return {"message_id": message["Message-ID"], "accepted": accepted, "refused": refused}


def _listed(answers: dict[str, str]) -> str:
    return "; ".join(f"{to}: {said}" for to, said in answers.items())[:2000]


def _message_id(ctx: Context, sender: Address, key: str | None) -> str:
    # With the args: a job of another installation can have the same id, and servers silently drop a known Message-ID.
    seed = key if key is not None else json.dumps([ctx.job_id, ctx.args], sort_keys=True)
    name = "key" if key is not None else f"job-{ctx.job_id}"
    domain = sender.domain.encode("ascii", "ignore").decode() or "localhost"
    return f"<{name}.{hashlib.sha256(seed.encode()).hexdigest()[:24]}@{domain}>"


def _address(who: str, what: str, text: object) -> Address:
    """Parse exactly one address: a second one, or a smuggled header, would send the mail to somebody else."""
    line = _line(who, what, text)
    with suppress(Exception):  # the library's parser can raise any error
        header: Any = POLICY.header_factory("To", line)
        if not header.defects and len(header.addresses) == 1 and header.groups[0].display_name is None:
            found: Address = header.addresses[0]
            if _ADDRESS.fullmatch(found.addr_spec) and ".." not in found.addr_spec:
                return found
    raise _wrong(who, f"{what}: pass one address, like ada@example.org or Ada <ada@example.org>")


def _line(who: str, what: str, text: object) -> str:
    """Return a text that fits one header line; raise CallFailed for any other."""
    if not isinstance(text, str) or len(text) > 900 or any(ord(one) < 32 or 127 <= ord(one) < 160 for one in text):
        raise _wrong(who, f"{what}: pass one line of at most 900 characters, without line breaks")
    if "\u2028" in text or "\u2029" in text:
        raise _wrong(who, f"{what}: it contains a line break")
    return text


def _rendered(who: str, name: str, values: Mapping[str, Any]) -> dict[str, str]:
    """Render the subject, text and html for which the template has files. Raises ConfigError and CallFailed."""
    jinja2 = needed(f"{who}, template {name!r}", "jinja2", "templates")
    folder = os.environ.get("TALLYBOOK_MAIL_TEMPLATES")
    if not folder:
        hint = "Set it for your workers"
        raise ConfigError("TALLYBOOK_MAIL_TEMPLATES", None, "the folder of the templates is not set", hint=hint)
    if not _TEMPLATE.fullmatch(name):
        hint = "Pass a name like welcome or shop/welcome, without an extension"
        raise CallFailed(f"{who}: template {name!r} is not a valid name", no_retry=True, hint=hint)
    found = {}
    for part, ending in _FILES.items():
        file = f"{name}.{ending}"
        try:
            found[part] = str(_environment(folder).get_template(file).render(values))
        except jinja2.TemplateNotFound as error:
            if error.name != file:  # an included template
                raise CallFailed(f"{who}: template {file!r} needs {error.name!r}, which is missing") from None
        except Exception as error:  # a missing value, or any error of a filter
            raise CallFailed(f"{who}: template {file!r}: {error}", no_retry=True) from None
    if not found.keys() & {"text", "html"}:
        raise CallFailed(f"{who}: neither {name}.txt nor {name}.html is in TALLYBOOK_MAIL_TEMPLATES")
    return found


@lru_cache(maxsize=8)
def _environment(folder: str) -> Any:
    """Return an environment that escapes values in HTML but not in text, and raises an error for a missing value."""
    from jinja2 import Environment, FileSystemLoader, StrictUndefined, select_autoescape

    escaped = select_autoescape(["html"])
    return Environment(loader=FileSystemLoader(folder), autoescape=escaped, undefined=StrictUndefined)


def _add_header(who: str, message: EmailMessage, name: str, what: str, value: object) -> None:
    message[name] = _line(who, what, value)
    _line(who, what, str(message.get_all(name, [])[-1]))  # encoded words are decoded now, and may contain line breaks


def _add_content(who: str, message: EmailMessage, text: str | None, html: str | None) -> None:
    if text is not None:
        message.set_content(text)
    elif html is None:
        raise _wrong(who, "pass text or html")
    if html is not None:
        (message.set_content if text is None else message.add_alternative)(html, subtype="html")


def _wrong(who: str, what: str) -> CallFailed:
    return CallFailed(f"{who}: {what}", no_retry=True)


@dataclass(frozen=True)
class Server:
    """The SMTP server of a provider. Errors show `who`."""

    who: str
    name: str
    timeout: float
    password: Secret | None = field(repr=False)
    mask: Mask = field(repr=False)
    options: dict[str, Any] = field(repr=False)  # of the library's client, without the password

    @classmethod
    def of(cls, who: str, provider: Provider) -> Self:
        """Return the server of the provider's settings. ConfigError for an invalid setting."""
        tls = text_setting(provider, "tls", "starttls")
        if tls not in _PORTS:
            raise ConfigError(option(provider, "tls"), tls, "must be starttls, tls or none")
        port = provider.settings.get("port", _PORTS[tls])
        if isinstance(port, bool) or not isinstance(port, int) or not 0 < port < 65_536:
            raise ConfigError(option(provider, "port"), port, "must be a number from 1 to 65535")
        password = provider.secrets.get("password")
        if password is not None and tls == "none":
            hint = "Leave tls at starttls"
            raise ConfigError(option(provider, "tls"), tls, "the password would be sent in clear text", hint=hint)
        host, user = text_setting(provider, "host"), None if password is None else text_setting(provider, "user")
        ca = text_setting(provider, "ca") if "ca" in provider.settings else None
        options = {
            "hostname": host, "port": port, "use_tls": tls == "tls", "username": user,
            "start_tls": tls == "starttls", "tls_context": None if tls == "none" else _context(ca),
            "local_hostname": text_setting(provider, "helo", "localhost"),
        }  # fmt: skip
        # Servers quote the line of the login when they refuse it.
        mask = Mask.of(provider, *([] if password is None else [f"\0{user}\0{password.reveal()}"]))
        return cls(who, provider.name, seconds(provider, 30.0), password, mask, options)

    async def send(self, message: EmailMessage, sender: str, recipients: list[str]) -> dict[str, tuple[int, str]]:
        """Send the message. Return the server's answer for each refused recipient, by address.

        A refusal of all recipients is returned as well. An answer of 5xx is final; any other is worth another attempt.
        Raises CallFailed if the server did not accept the message.
        """
        smtp = needed(self.who, "aiosmtplib", "email")
        client = smtp.SMTP(  # no variable holds the password: error trackers show them
            **self.options, timeout=self.timeout, password=None if self.password is None else self.password.reveal()
        )
        try:
            async with asyncio.timeout(self.timeout):
                await client.connect()
                answers, _ = await client.send_message(message, sender=sender, recipients=recipients)
            with suppress(smtp.SMTPException, OSError):  # the message is accepted: the answer to QUIT is irrelevant
                async with asyncio.timeout(min(_QUIT, self.timeout)):
                    await client.quit()
        except smtp.SMTPRecipientsRefused as error:
            return {one.recipient: (one.code, self._said(one)) for one in error.recipients}
        except smtp.SMTPAuthenticationError as error:  # the job succeeds once the provider's password is corrected
            raise self.failed(self._said(error)) from None
        except smtp.SMTPResponseException as error:
            raise self.failed(self._said(error), no_retry=error.code >= 500) from None
        except ssl.SSLError as error:  # a wrong certificate is also a ValueError, but it may be corrected
            raise self.failed(self.mask.text(str(error))) from None
        except (smtp.SMTPNotSupported, ValueError) as error:
            raise self.failed(self.mask.text(str(error)), no_retry=True) from None
        except TimeoutError:
            raise self.failed(f"not finished within {self.timeout:g} s") from None
        except (smtp.SMTPException, OSError) as error:
            raise self.failed(f"{type(error).__name__}: {self.mask.text(str(error))}") from None
        finally:
            client.close()
        return {to: (answer.code, self._said(answer)) for to, answer in answers.items()}

    def failed(self, what: str, *, no_retry: bool = False) -> CallFailed:
        return CallFailed(f"{self.who}: {what}", provider=self.name, no_retry=no_retry)

    def _said(self, answer: Any) -> str:
        said = " ".join(self.mask.text(str(answer.message)).split())
        return f"{answer.code} {said[:300]}"


@lru_cache(maxsize=32)  # it reads more than a hundred certificates
def _context(ca: str | None) -> ssl.SSLContext:
    """Return a context with the system's certificate authorities, or only with these (PEM)."""
    return ssl.create_default_context(cadata=ca)
