"""What every page shares: one HTML file that needs nothing else, its look, and the pictures beside it."""

import base64
import hashlib
import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from jinja2 import Environment, PackageLoader, StrictUndefined, Template
from markupsafe import Markup, escape

from latfit._version import __version__
from latfit.files import make_folder, write_bytes, write_text
from latfit.reporting.fit import tables

_QUANTITY = re.compile(r"(\d) (%|ms\b|s\b|µs\b)")


@dataclass(frozen=True)
class Picture:
    """A drawn figure: file name without its ending, the finding as its title, words in place of it, PNG bytes, and as
    JSON what the page's script reads from it under the pointer."""

    stem: str
    title: str
    alt: str
    png: bytes
    readings: str = ""


@dataclass(frozen=True)
class Rendered:
    """The page, and every picture for a file of its own; the overview of the first path comes first."""

    html: str
    pictures: Sequence[Picture]


@dataclass(frozen=True)
class Written:
    """Where a report went."""

    html: Path
    figures: Sequence[Path]


def template(name: str) -> Template:
    """A template of this package; what it is not given is an error."""
    environment = Environment(
        loader=PackageLoader("latfit.reporting"),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.filters["prose"] = prose
    script = (Path(__file__).parent / "templates" / "report.js").read_text(encoding="utf-8")
    # The page runs this script and no other: the security line names its hash.
    digest = hashlib.sha256(script.encode()).digest()
    environment.globals |= {"script": Markup(script), "script_hash": base64.b64encode(digest).decode()}
    return environment.get_template(name)


def prose(text: str) -> Markup:
    """A sentence as HTML, escaped: commands between backticks as code, no line break inside a quantity."""
    whole = _QUANTITY.sub("\\1\u00a0\\2", text)
    parts = [escape(part) for part in whole.split("`")]
    if len(parts) % 2 == 0:
        return escape(whole)
    return Markup("").join(Markup("<code>{}</code>").format(part) if i % 2 else part for i, part in enumerate(parts))


def shown(picture: Picture) -> dict[str, str]:
    """A picture as the templates take it, inside the page."""
    encoded = base64.b64encode(picture.png).decode("ascii")
    source = f"data:image/png;base64,{encoded}"
    return {"title": picture.title, "alt": picture.alt, "source": source, "readings": picture.readings}


def making(command: str, made_at: str) -> tables.Table:
    """How and when a page was made."""
    return tables.provenance({"command": command, "made": made_at, "latfit": __version__}, "How this page was made")


def write_rendered(folder: Path, name: str, rendered: Rendered) -> Written:
    """Store a page and its pictures in `folder`, which is made where it is missing; every file whole or not at all, the
    page last. Raises TargetNotWritable."""
    make_folder(folder)
    figures = []
    for picture in rendered.pictures:
        target = folder / f"{picture.stem}.png"
        write_bytes(target, picture.png)
        figures.append(target)
    write_text(folder / name, rendered.html)
    return Written(folder / name, figures)
