"""The operator API: signed requests over HTTP that look at jobs and steer them.

keys         who may sign, for what        signing   what is signed, and whether it is good
serve        what becomes of a request     routes    the table of endpoints, one file per noun beside it
operations   what an endpoint is           fields    what its values are: read and described by one thing
problems     refusals and their codes      openapi   the document, made of the table
request      the headers of a request      client    a client for programs: neither needs an extra
"""

from tallybook.extra.operator.client import OperatorClient
from tallybook.extra.operator.request import signed_headers

__all__ = ["OperatorClient", "signed_headers"]
