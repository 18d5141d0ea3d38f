"""Fill the report's template, and put pictures into it.

The page is one file: styles and pictures are inline, there is no script, and nothing is fetched from anywhere. The same
values give the same bytes.
"""

import io
import re
from collections.abc import Mapping
from importlib import resources
from typing import TYPE_CHECKING, Any

from treeopt.errors import DocumentError
from treeopt.plot import plain_style

if TYPE_CHECKING:
    from matplotlib.figure import Figure

__all__ = ["inline_svg", "render_report"]

_TEMPLATE = "report.html.jinja"


def inline_svg(figure: "Figure", name: str, label: str) -> str:
    """Return a figure as an ``<svg>`` element for a page that holds several.

    Parameters
    ----------
    figure : Figure
        The picture.
    name : str
        Prefix of all ids inside, so that two pictures on one page do not use each other's parts.
    label : str
        What a screen reader says.

    Returns
    -------
    str
        The element, as wide as its container at most; text is drawn as outlines, so no font is needed.
    """
    picture = io.StringIO()
    with plain_style():
        figure.savefig(picture, format="svg", metadata={"Date": None, "Creator": None})
    text = picture.getvalue()
    text = text[text.index("<svg") :]
    text = re.sub(r"<metadata>.*?</metadata>", "", text, flags=re.DOTALL)
    text = re.sub(r'(\sid=")([^"]+)"', rf"\g<1>{name}-\g<2>" + '"', text)
    text = re.sub(r'(href="#)([^"]+)"', rf"\g<1>{name}-\g<2>" + '"', text)
    text = text.replace("url(#", f"url(#{name}-")
    label = label.replace("&", "and").replace('"', "").replace("<", "")
    natural = f"{figure.get_size_inches()[0]:.3f}in"
    return text.replace("<svg", f'<svg role="img" aria-label="{label}" style="--natural: {natural}"', 1).strip()


def render_report(values: Mapping[str, Any]) -> str:
    """Return the page.

    Parameters
    ----------
    values : mapping
        What the template names; texts are escaped.

    Raises
    ------
    DocumentError
        When jinja2 is not installed.
    """
    try:
        from jinja2 import Environment, StrictUndefined
        from markupsafe import Markup
    except ImportError as error:
        raise DocumentError("report: needs jinja2; install treeopt[runtime]") from error

    def figure(svg: str) -> Markup:
        return Markup(svg)  # noqa: S704  # made by inline_svg, not by a user

    source = (resources.files("treeopt") / "report" / _TEMPLATE).read_text(encoding="utf-8")
    environment = Environment(
        autoescape=True, undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True, keep_trailing_newline=True
    )
    environment.filters["figure"] = figure
    return environment.from_string(source).render(**values)
