"""The operator API for your own ASGI server or framework. Needs the extra `tallybook[web]`."""

from importlib.util import find_spec

if find_spec("starlette") is None:
    raise ModuleNotFoundError("tallybook.web needs starlette: pip install 'tallybook[web]'", name="starlette")

from tallybook._web.api.keys import Key, read_keys
from tallybook._web.api.serve import OperatorApi, operator_api

__all__ = ["Key", "OperatorApi", "operator_api", "read_keys"]
