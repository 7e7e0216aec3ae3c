"""The known values of the canary tests, and all forms in which they could leak."""

import base64
import json
from urllib.parse import quote

from tallybook._model.keyring import new_key

CANARY, FORMER, MOVED = "sk-canary/4711+ä", "sk-former/0815", "sk-moved/2342"
CONTROL = "may-be-seen-2342"
KEY = new_key("k1")


def forms(text: str) -> set[str]:
    """Return the forms in which a text could leak: plain, and in encodings without encryption."""
    raw = text.encode()
    return {
        text, text[3:-1], quote(text), raw.hex(), base64.b64encode(raw).decode()[:-4], json.dumps(text)[1:-1],
        repr(raw)[2:-1], text.encode("utf-16-le").hex(),
    }  # fmt: skip


FORBIDDEN = forms(CANARY) | forms(FORMER) | forms(MOVED)
KEYS = {KEY.split(":")[1][:-4], base64.b64decode(KEY.split(":")[1]).hex()}


def found_in(text: str) -> set[str]:
    return {one for one in FORBIDDEN | KEYS if one in text}
