"""The operator API: signed HTTP requests that inspect jobs and manage them.

keys         the keys and their scopes     signing   the headers of a signature, and its check
serve        handling of one request       routes    the table of endpoints, with those of jobs in `jobs`
operations   the class of an endpoint      fields    its values: one class reads and describes them
problems     refusals and their codes      openapi   the document, built from the table
client       the signed text, the headers of a request, and a client for programs; needs no extra
"""

from tallybook.extra.operator.client import OperatorClient, signed_headers

__all__ = ["OperatorClient", "signed_headers"]
