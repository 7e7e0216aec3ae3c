"""Ready-made tasks: `webhook`, `http`, `email`, `sms`, and `notification`, a mail and an SMS as one job.

An app serves the tasks that it includes.

    from tallybook import App
    from tallybook.extra.tasks import email, http, webhook

    app = App("shop")
    app.include(webhook, email, http)

    await webhook.enqueue(conn, "acme", {"type": "invoice.paid", "data": {"id": 42}})
    await webhook.with_(queue="out", delay="5 min").enqueue(conn, "acme", {...})

In SQL: `select tallybook.enqueue('out', 'tallybook.webhook', '{"provider": "acme", "body": {...}}')`. The args name a
provider, which has the address and the secrets; a job never contains these. Workers need
`pip install 'tallybook[webhooks]'` for `webhook`, `http` and `sms`, and `tallybook[email]` for `email`. Programs that
only enqueue need neither.
"""

from tallybook.extra.tasks._email import email
from tallybook.extra.tasks._http import http, new_signing_secret, sms, webhook
from tallybook.extra.tasks._notification import notification
from tallybook.extra.tasks._provider import Registry

__all__ = ["Registry", "email", "http", "new_signing_secret", "notification", "sms", "webhook"]
