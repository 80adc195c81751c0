"""Pieces of the reports: HTML files that need nothing else."""

from __future__ import annotations

import base64
import html
from collections.abc import Iterable

CSS = """
:root { color-scheme: light dark; --text: #24292f; --soft: #646c76; --line: #d9dde2; --back: #ffffff; --tint: #f4f6f8;
  --ours: #e9f2fc; --accent: #1f6fbf; }
@media (prefers-color-scheme: dark) { :root { --text: #d5d9de; --soft: #969ea8; --line: #363c44; --back: #16191d;
  --tint: #1e2227; --ours: #1a2a3b; --accent: #6cb1f5; } }
* { box-sizing: border-box; }
body { margin: 0; background: var(--back); color: var(--text); font: 16px/1.55 system-ui, -apple-system, "Segoe UI",
  Roboto, "Helvetica Neue", Arial, sans-serif; }
main { max-width: 80rem; margin: 0 auto; padding: 3rem 1.5rem 4rem; }
h1 { font-size: 1.9rem; line-height: 1.2; margin: 0 0 .8rem; letter-spacing: -.01em; }
h2 { font-size: 1.3rem; margin: 3rem 0 .4rem; }
h3 { font-size: 1rem; margin: 2rem 0 .4rem; }
p, ul { max-width: 46rem; margin: .5rem 0 1rem; }
ul { padding-left: 1.2rem; } li { margin: .3rem 0; }
.soft, figcaption { color: var(--soft); font-size: .9rem; }
.scroll { overflow-x: auto; /* a shadow at the right edge while there is more to see */
  background: linear-gradient(to left, var(--back) 40%, transparent) right / 3rem 100% no-repeat local,
    linear-gradient(to left, var(--line), transparent) right / 1.2rem 100% no-repeat scroll; }
table { border-collapse: collapse; font-size: .875rem; font-variant-numeric: tabular-nums; margin: .8rem 0; }
th { text-align: left; font-weight: 600; color: var(--soft); border-bottom: 1px solid var(--line); }
th, td { padding: .22rem .8rem; white-space: nowrap; }
th.number, td.number { text-align: right; }
tr.start td { border-top: 1px solid var(--line); }
tr.ours td { background: var(--ours); }
td:last-child { padding-right: 1.7rem; position: relative; }
tr.best td:last-child { font-weight: 700; color: var(--accent); }
tr.best td:last-child::after { content: "★"; } tr.tied td:last-child::after { content: "≈"; color: var(--soft); }
tr.best td:last-child::after, tr.tied td:last-child::after { position: absolute; left: calc(100% - 1.4rem); }
figure { margin: 1.2rem 0 2rem; }
figure img { display: block; max-width: 100%; height: auto; }
figcaption { max-width: 46rem; margin-top: .4rem; }
.pair { display: grid; grid-template-columns: repeat(auto-fit, minmax(min(22rem, 100%), 1fr)); gap: 1rem 2rem; }
pre { background: var(--tint); border: 1px solid var(--line); border-radius: 6px; padding: .9rem 1rem; overflow-x: auto;
  font: .8rem/1.5 ui-monospace, SFMono-Regular, Menlo, Consolas, "DejaVu Sans Mono", monospace; }
.published { color: var(--soft); font-size: .8rem; }
table.plain td:last-child { padding-right: .8rem; }
.opening { display: grid; grid-template-columns: repeat(auto-fit, minmax(min(20rem, 100%), 1fr)); gap: 0 2rem; }
nav ul { columns: 20rem 2; }
"""


_SOFT = ' class="soft"'


def page(title: str, body: str) -> str:
    """A whole document."""
    return (
        '<!doctype html>\n<html lang="en"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        f"<title>{html.escape(title)}</title><style>{CSS}</style></head>"
        f"<body><main>{body}</main></body></html>\n"
    )


def paragraph(text: str, soft: bool = False) -> str:
    return f"<p{_SOFT if soft else ''}>{html.escape(text)}</p>"


def bullets(lines: Iterable[str]) -> str:
    return f"<ul>{''.join(f'<li>{html.escape(line)}</li>' for line in lines)}</ul>"


def figure(svg: str, caption: str) -> str:
    data = base64.b64encode(svg.encode()).decode()
    text = html.escape(caption)
    return f'<figure><img alt="{text}" src="data:image/svg+xml;base64,{data}"><figcaption>{text}</figcaption></figure>'
