"""The pages ``/openapi.json`` and ``/docs``: what this server answers to, for programs and people.

Owns their delivery, and how a description becomes HTML. Needs no script, and no key: neither page
says anything of this server but its paths.
"""

from collections.abc import Iterable, Mapping
from html import escape
from typing import Any, Final, cast

from starlette.requests import Request
from starlette.responses import HTMLResponse, JSONResponse, Response
from starlette.routing import Route

from stratakv.serve.openapi import openapi_document

HEADERS: Final = {
    "Content-Security-Policy": (
        "default-src 'none'; style-src 'unsafe-inline'; base-uri 'none'; form-action 'none'; "
        "frame-ancestors 'none'"
    ),
    "Cache-Control": "no-cache",
}
_STYLE: Final = (
    "body{font:15px/1.5 system-ui,sans-serif;max-width:60rem;margin:2rem auto;padding:0 1rem;"
    "color-scheme:light dark}code,h2{font-family:ui-monospace,monospace}h2{font-size:1rem;"
    "margin-top:2rem}table{border-collapse:collapse;width:100%}td{border-top:1px solid #8884;"
    "padding:.2rem .8rem .2rem 0;vertical-align:top}"
)

Json = Mapping[str, Any]


class DocsPages:
    """``paths``: of the server that is described, without these two."""

    def __init__(self, version: str, paths: Iterable[str]) -> None:
        shown = sorted({*paths, "/docs", "/openapi.json"} - {"/disagg/join"})
        self._document = openapi_document(version, shown)
        self._page = page_of(self._document)

    def routes(self) -> list[Route]:
        return [
            Route("/openapi.json", self.document, methods=["GET"]),
            Route("/docs", self.page, methods=["GET"]),
        ]

    async def document(self, _request: Request) -> Response:
        return JSONResponse(self._document)

    async def page(self, _request: Request) -> Response:
        return HTMLResponse(self._page, headers=HEADERS)


def page_of(document: Json) -> str:
    """An OpenAPI document as HTML."""
    about = document["info"]
    title = f"{escape(about['title'])} {escape(about['version'])}"
    top = f'<!doctype html><html lang="en"><meta charset="utf-8"><title>{title}</title>'
    top += f"<style>{_STYLE}</style><h1>{title}</h1><p>{escape(about['description'])} "
    top += 'As a document for programs: <a href="openapi.json">openapi.json</a>.</p>'
    parts = [top]
    for path, operations in document["paths"].items():
        for method, operation in operations.items():
            parts.append(_operation(document, f"{method.upper()} {path}", operation))
    return "".join(parts)


def _operation(document: Json, head: str, operation: Json) -> str:
    found = [f"<h2>{escape(head)}</h2><p>{escape(operation['summary'])}.</p>"]
    rows = [
        (each["name"], _kind(each["schema"]), f"in the {each['in']}")
        for each in operation.get("parameters", ())
    ]
    if "requestBody" in operation:
        schema = operation["requestBody"]["content"]["application/json"]["schema"]
        schema = _resolved(document, schema)
        for form in schema.get("anyOf", [schema]):
            needed = form.get("required", ())
            rows += [
                (
                    name,
                    _kind(one),
                    ("needed; " if name in needed else "") + one.get("description", ""),
                )
                for name, one in form["properties"].items()
            ]
    answers = [
        (status, ", ".join(answer["content"]), answer["description"])
        for status, answer in operation["responses"].items()
    ]
    return "".join([*found, _table(rows), "<p>Answers:</p>", _table(answers)])


def _table(rows: Iterable[tuple[str, str, str]]) -> str:
    lines = [
        f"<tr><td><code>{escape(name)}</code><td>{escape(kind)}<td>{escape(text)}"
        for name, kind, text in rows
    ]
    return f"<table>{''.join(lines)}</table>" if lines else ""


def _resolved(document: Json, schema: Json) -> Json:
    if "$ref" not in schema:
        return schema
    return document["components"]["schemas"][schema["$ref"].rsplit("/", 1)[1]]


def _kind(schema: Json) -> str:
    """What a value is, in a few words."""
    if "enum" in schema:
        return " or ".join("null" if one is None else repr(one) for one in schema["enum"])
    if "anyOf" in schema:
        return " or ".join(dict.fromkeys(map(_kind, cast("list[Json]", schema["anyOf"]))))
    kinds = schema.get("type", "anything")
    text = kinds if isinstance(kinds, str) else " or ".join(kinds)
    low = schema.get("minimum", schema.get("exclusiveMinimum"))
    return text if low is None else f"{text}, {low} to {schema.get('maximum', 'any')}"
