"""/docs: the OpenAPI document as a plain page. It needs no script and nothing from another host."""

from __future__ import annotations

import json
from html import escape
from typing import Any

STYLE = """
:root { color-scheme: light dark; }
body { font: 16px/1.5 system-ui, sans-serif; max-width: 60rem; margin: 2rem auto; padding: 0 1rem; }
code, pre { font: 14px/1.4 ui-monospace, monospace; }
pre { overflow-x: auto; padding: .6rem; border: 1px solid #8886; border-radius: 6px; }
summary { cursor: pointer; padding: .3rem 0; }
b.method { display: inline-block; min-width: 4.5rem; }
table { border-collapse: collapse; } td, th { padding: .2rem .8rem .2rem 0; text-align: left; vertical-align: top; }
"""
POLICY = "default-src 'none'; style-src 'unsafe-inline'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
HEADERS = {"Content-Security-Policy": POLICY, "X-Content-Type-Options": "nosniff", "Referrer-Policy": "no-referrer"}


def docs_page(document: dict[str, Any]) -> str:
    """An HTML page with every operation of an OpenAPI document: parameters, body, answers."""
    title = escape(document["info"]["title"])
    operations = [
        _operation(method, path, operation, document)
        for path, methods in document["paths"].items()
        for method, operation in methods.items()
    ]
    about = escape(document["info"].get("description", ""))
    return (
        f"<!doctype html><html lang=en><meta charset=utf-8><meta name=viewport content='width=device-width'>"
        f"<title>{title}</title><style>{STYLE}</style><h1>{title}</h1><p>{about}</p>"
        f"<p><a href=openapi.json>openapi.json</a> is this page for programs.</p>{''.join(operations)}</html>"
    )


def _operation(method: str, path: str, operation: dict[str, Any], document: dict[str, Any]) -> str:
    parts = [f"<p>{escape(operation.get('description', ''))}</p>"]
    if parameters := operation.get("parameters"):
        rows = "".join(
            f"<tr><td><code>{escape(one['name'])}</code><td>{escape(one['in'])}"
            f"<td><code>{escape(_kind(one.get('schema', {})))}</code><td>{escape(one.get('description', ''))}</tr>"
            for one in parameters
        )
        parts.append(f"<table><tr><th>parameter<th>in<th>type<th>meaning</tr>{rows}</table>")
    content = operation.get("requestBody", {}).get("content", {})
    for kind, body in content.items():
        parts.append(f"<p>Body, {escape(kind)}:</p><pre>{_shape(body.get('schema', {}), document)}</pre>")
    for status, answer in operation.get("responses", {}).items():
        if status.startswith("2"):
            for kind, body in answer.get("content", {}).items():
                parts.append(
                    f"<p>Answer {escape(status)}, {escape(kind)}:</p><pre>{_shape(body.get('schema', {}), document)}</pre>"
                )
    summary = escape(operation.get("summary", ""))
    head = f"<b class=method>{method.upper()}</b> <code>{escape(path)}</code> {summary}"
    return f"<details><summary>{head}</summary>{''.join(parts)}</details>"


def _kind(schema: dict[str, Any]) -> str:
    if "anyOf" in schema:
        return " or ".join(_kind(one) for one in schema["anyOf"])
    kind = str(schema.get("type", schema.get("$ref", "any").rpartition("/")[2]))
    return f"{kind} = {json.dumps(schema['default'])}" if "default" in schema else kind


def _shape(schema: dict[str, Any], document: dict[str, Any]) -> str:
    return escape(json.dumps(_example(schema, document, 0), indent=2, ensure_ascii=False))


def _example(schema: dict[str, Any], document: dict[str, Any], depth: int) -> Any:
    """A value of the schema's shape: names of types where values stand."""
    if "$ref" in schema:
        schema = document["components"]["schemas"][schema["$ref"].rpartition("/")[2]]
    if "anyOf" in schema:
        return _example(schema["anyOf"][0], document, depth)
    if depth > 6:
        return "…"
    if schema.get("type") == "array":
        return [_example(schema.get("items", {}), document, depth + 1)]
    if "properties" in schema:
        return {name: _example(one, document, depth + 1) for name, one in schema["properties"].items()}
    return schema.get("type", "any")
