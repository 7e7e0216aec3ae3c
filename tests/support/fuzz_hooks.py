"""Hooks of schemathesis for the operator API: signatures, and texts of its formats."""

from typing import Any

import requests
import schemathesis
from hypothesis import strategies as st

from support.operator_client import headers

PLAIN = st.characters(codec="ascii", min_codepoint=33, max_codepoint=126)
schemathesis.openapi.format("tallybook-name", st.text(PLAIN, min_size=1, max_size=64))
schemathesis.openapi.format("tallybook-text", st.text(PLAIN, min_size=1, max_size=64))
schemathesis.openapi.format(
    "tallybook-duration", st.builds("{} {}".format, st.integers(0, 99), st.sampled_from(["s", "min", "h", "days"]))
)

MARK = "signed"
"""Placeholder in a header, on the fuzzer's command line, for a value to compute."""


class Sign(requests.auth.AuthBase):
    """Signs the final request in the headers that the case has: a case without a header must be refused."""

    def __call__(self, request: requests.PreparedRequest) -> requests.PreparedRequest:
        body = request.body or b""
        body = body.encode() if isinstance(body, str) else body
        good = headers(request.method or "", request.path_url, body)
        request.headers.update({name: good[name] for name in good if request.headers.get(name) == MARK})
        return request


@schemathesis.hook
def before_call(context: Any, case: Any, kwargs: dict[str, Any]) -> None:
    """Sign the final request."""
    kwargs["auth"] = Sign()
