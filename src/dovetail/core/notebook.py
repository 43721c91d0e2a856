"""Small pieces of HTML for notebooks: everything is escaped, nothing needs a style sheet."""

from collections.abc import Sequence
from html import escape

__all__ = ["html_table", "html_text"]


def html_table(title: str, headings: Sequence[str], rows: Sequence[Sequence[object]]) -> str:
    """A table with a title.

    >>> html_table("a < b", ["n"], [[1]])
    '<p><b>a &lt; b</b></p><table><thead><tr><th>n</th></tr></thead><tbody><tr><td>1</td></tr></tbody></table>'
    """
    head = "".join(f"<th>{escape(name)}</th>" for name in headings)
    body = "".join("<tr>" + "".join(f"<td>{escape(str(cell))}</td>" for cell in row) + "</tr>" for row in rows)
    return f"<p><b>{escape(title)}</b></p><table><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table>"


def html_text(text: str) -> str:
    """Lines as they are.

    >>> html_text("a <b>")
    '<pre>a &lt;b&gt;</pre>'
    """
    return f"<pre>{escape(text)}</pre>"
