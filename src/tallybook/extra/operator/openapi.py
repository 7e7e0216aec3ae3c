"""The OpenAPI 3.1 document, built from the table of endpoints. It contains nothing secret and needs no signature."""

from itertools import groupby
from typing import Any

from tallybook.extra.operator.fields import Field
from tallybook.extra.operator.keys import SCOPES
from tallybook.extra.operator.operations import Operation, record
from tallybook.extra.operator.problems import CODES, Problem
from tallybook.extra.operator.routes import NODE, OPERATIONS

PATH = "/openapi.json"

# Every signed endpoint can return these.
_ALWAYS = ("unsigned", "signature", "late", "early", "scope", "replayed", "too_large", "media_type", "malformed",
           "invalid", "rights", "failed", "unavailable", "slow")  # fmt: skip
_SECURITY = {
    "key": "The id of the key.",
    "timestamp": "When it was signed: seconds since 1970, within 300 s of the database's clock.",
    "nonce": "16 to 128 random characters, used once.",
    "signature": "v1= and the HMAC-SHA256 of the signed text, 64 hexadecimal digits.",
}


def document(prefix: str = "", *, many: bool = False) -> dict[str, Any]:
    """Return the document of an API below this path. With `many`, it covers several nodes, and changes name theirs."""
    from tallybook import __version__

    return {
        "openapi": "3.1.0",
        "info": {
            "title": "Tallybook operator API",
            "version": __version__,
            "description": "Every request is signed. How to sign, from a shell and from Python: "
            "https://github.com/tallybook/tallybook/blob/main/docs/operator-api.md",
            "license": {"name": "Apache-2.0", "identifier": "Apache-2.0"},
        },
        "servers": [{"url": prefix or "/"}],
        "security": [{name: [] for name in _SECURITY}],
        "tags": [{"name": scope, "description": f"Needs the scope {scope}."} for scope in SCOPES],
        "paths": {one.path: {one.method.lower(): _operation(one, many)} for one in OPERATIONS},
        "components": {
            "securitySchemes": {
                name: {"type": "apiKey", "in": "header", "name": f"Tallybook-{name.title()}", "description": about}
                for name, about in _SECURITY.items()
            },
            "schemas": {"Problem": _PROBLEM},
        },
    }


_CODE = {"type": "string", "enum": list(CODES)}
_PROBLEM = record(type="about:blank", title="Not Found", status=404, code=(_CODE, "unknown"), detail="").schema
_PROBLEM["properties"]["hint"] = {"type": "string"}
_PROBLEM["description"] = "RFC 9457. Programs check code."


def _operation(operation: Operation, many: bool) -> dict[str, Any]:
    told = [NODE] if many and NODE in operation.in_query else []
    parameters = [
        *(_parameter(field, "path") for field in operation.in_path),
        *(_parameter(field, "query") for field in operation.in_query if field is not NODE),
        *({**_parameter(node, "query"), "required": operation.changes is not None} for node in told),
    ]
    found: dict[str, Any] = {"operationId": operation.name, "tags": [operation.scope], "summary": operation.about}
    found |= {"parameters": parameters, "responses": _responses(operation, many)}
    if operation.method == "POST":
        content: dict[str, Any] = {"schema": _body(operation.in_body)}
        if operation.in_body:
            chosen = (field for field in operation.in_body if field.required or not field.admin)
            hidden = ("delay", "expires_at", "all")
            content["example"] = {field.name: field.example for field in chosen if field.name not in hidden}
        required = any(field.required or field.name == "all" for field in operation.in_body)
        found["requestBody"] = {"required": required, "content": {"application/json": content}}
    return found


def _parameter(field: Field, place: str) -> dict[str, Any]:
    shown = {"name": field.name, "in": place, "required": field.required, "description": _about(field)}
    return {**shown, "schema": field.schema, "example": field.example}


def _about(field: Field) -> str:
    needs = "the scope admin" if field.admin else "node, if the API serves several nodes" if field.of_node else None
    return f"{field.about} Only with {needs}." if needs else field.about


def _body(fields: tuple[Field, ...]) -> dict[str, Any]:
    properties = {field.name: {**field.schema, "description": _about(field)} for field in fields}
    schema: dict[str, Any] = {"type": "object", "properties": properties, "additionalProperties": False}
    if required := [field.name for field in fields if field.required]:
        schema["required"] = required
    names = {field.name for field in fields}
    if {"run_at", "delay"} <= names:
        schema["not"] = {"required": ["run_at", "delay"]}
    if {"on_conflict", "unique"} <= names:
        schema["dependentRequired"] = {"on_conflict": ["unique"], "unique_while": ["unique"]}
    if "all" in names:  # either true, or a filter
        filters = [{"required": [field.name]} for field in fields if field.name not in ("all", "max_jobs", "dry_run")]
        schema["oneOf"] = [{"anyOf": filters}, {"required": ["all"], "properties": {"all": {"const": True}}}]
    return schema


def _responses(operation: Operation, many: bool) -> dict[str, Any]:
    answer = operation.answer
    if many and operation.reads and NODE in operation.in_query:
        # The shape of a list over several nodes, as `operations.merged` builds it.
        ((name, rows),) = answer.schema["properties"].items()
        item = rows["items"]
        node = {"type": "string", "description": "The node that has it."}
        away = {"type": "array", "items": {"type": "string"}, "description": "Nodes that did not answer."}
        item = {**item, "properties": {**item["properties"], "node": node}, "required": [*item["required"], "node"]}
        examples = [{**row, "node": NODE.example} for row in answer.example[name]]
        answer = record(**{name: ({**rows, "items": item}, examples), "away": (away, [])})
    good = {"application/json": answer._asdict()}
    found: dict[str, Any] = {"200": {"description": "Done.", "content": good}}
    if operation.created:
        found["201"] = {"description": "Enqueued.", "content": good}
    always = [code for code in _ALWAYS if operation.method == "POST" or code not in ("malformed", "conflict")]
    codes = {*operation.codes, *always, *(("in_doubt", "read_only") if operation.changes else ())}
    for status, of_status in groupby(filter(codes.__contains__, CODES), key=lambda code: CODES[code][0]):
        told = [(code, CODES[code][1]) for code in of_status]
        shown = {"schema": {"$ref": "#/components/schemas/Problem"}, "example": Problem(*told[0]).document}
        about = " ".join(f"{code}: {meaning}" for code, meaning in told)
        found[str(status)] = {"description": about, "content": {"application/problem+json": shown}}
    return found
