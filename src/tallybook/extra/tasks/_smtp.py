"""A provider's SMTP server, and the sending of one message."""

from __future__ import annotations

import asyncio
import ssl
from contextlib import suppress
from dataclasses import dataclass, field
from email.message import EmailMessage
from functools import lru_cache
from typing import Any

from tallybook._model.provider import Provider, Secret
from tallybook.errors import CallFailed, ConfigError
from tallybook.extra.tasks._provider import Mask, needed, option, seconds, text_setting

_QUIT = 2.0
_PORTS = {"tls": 465, "starttls": 587, "none": 25}


@dataclass(frozen=True)
class Server:
    """The SMTP server of a provider. Errors show `who`."""

    who: str
    name: str
    host: str
    port: int
    tls: str  # `starttls`, `tls` from the first byte, or `none`
    user: str | None
    password: Secret | None = field(repr=False)
    ca: str | None = field(repr=False)
    helo: str
    timeout: float
    mask: Mask = field(repr=False)

    @classmethod
    def of(cls, who: str, provider: Provider) -> Server:
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
        helo, timeout = text_setting(provider, "helo", "localhost"), seconds(provider, 30.0)
        # Servers quote the line of the login when they refuse it.
        mask = Mask.of(provider, *([] if password is None else [f"\0{user}\0{password.reveal()}"]))
        return cls(who, provider.name, host, port, tls, user, password, ca, helo, timeout, mask)

    async def send(self, message: EmailMessage, sender: str, recipients: list[str]) -> dict[str, tuple[int, str]]:
        """Send the message. Return the server's answer for each refused recipient, by address.

        A refusal of all recipients is returned as well. An answer of 5xx is final; any other is worth another attempt.
        Raises CallFailed if the server did not accept the message.
        """
        smtp = needed(self.who, "aiosmtplib", "email")
        client = smtp.SMTP(
            hostname=self.host,
            port=self.port,
            use_tls=self.tls == "tls",
            start_tls=self.tls == "starttls",
            tls_context=None if self.tls == "none" else _context(self.ca),
            username=self.user,
            password=None if self.password is None else self.password.reveal(),
            local_hostname=self.helo,
            timeout=self.timeout,
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
