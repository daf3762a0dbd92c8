"""What every page shares: one HTML file that needs nothing else, its cards and sliders, and the pictures beside it."""

import base64
import hashlib
import struct
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

from jinja2 import Environment, PackageLoader, StrictUndefined, Template
from markupsafe import Markup
from matplotlib.figure import Figure

from latfit._version import __version__
from latfit.files import make_folder, write_bytes, write_text
from latfit.reporting import style
from latfit.reporting.fit.tables import provenance
from latfit.reporting.table import KeyNumber, Table, prose, table_html
from latfit.units import format_ms

Bar = tuple[str, str, float]
Plan = TypeVar("Plan")


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
class Card:
    """An answer: the question, the verdict with its look ("", "doubt" or "unmet"), sentences, key numbers, a command.

    at: the limit or the load that a slider names for this answer.
    """

    asked: str
    verdict: str
    sentence: str
    state: str
    beside: Sequence[str] = ()
    numbers: Sequence[KeyNumber] = ()
    command: str = ""
    at: str = ""


@dataclass(frozen=True)
class Slider:
    """Answers at other limits or loads; `requested`: the place of the page's own answer."""

    label: str
    cards: Sequence[Card]
    requested: int


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
    environment.filters |= {"prose": prose, "grid": table_html}
    script = (Path(__file__).parent / "templates" / "report.js").read_text(encoding="utf-8")
    # The page runs this script and no other: the security line names its hash.
    digest = hashlib.sha256(script.encode()).digest()
    environment.globals |= {"script": Markup(script), "script_hash": base64.b64encode(digest).decode()}
    return environment.get_template(name)


def shown(picture: Picture) -> dict[str, str]:
    """A picture as the templates take it, inside the page; a broad one over the whole width."""
    encoded = base64.b64encode(picture.png).decode("ascii")
    width, height = struct.unpack(">II", picture.png[16:24])  # of the PNG's header
    source, look = f"data:image/png;base64,{encoded}", "broad" if width > 2 * height else ""
    return {"alt": picture.alt, "source": source, "readings": picture.readings, "look": look}


def make_slider(label: str, plans: Mapping[str, Plan], requested: Plan, card: Callable[[Plan, str], Card]) -> Slider:
    """The cards of plans by their place, one of which is the requested plan."""
    at = [each is requested for each in plans.values()].index(True)
    return Slider(label, [card(each, place) for place, each in plans.items()], at)


def draw_picture(stem: str, alt: str, figure: Figure) -> Picture:
    """A figure as PNG, under its own title."""
    title = style.title_of(figure)
    return Picture(stem, title, f"{alt} {title}.", style.png(figure))


def make_bars(values: Iterable[tuple[str, float | None]], write: Callable[[float], str] = format_ms) -> list[Bar]:
    """Return (label, value in words, length in percent of the longest) of values; None is no bar."""
    known = [(label, value) for label, value in values if value is not None]
    longest = max((value for _, value in known), default=0.0) or 1.0
    return [(label, write(value), 100 * value / longest) for label, value in known]


def making(command: str, made_at: str) -> Table:
    """How and when a page was made."""
    return provenance({"command": command, "made": made_at, "latfit": __version__}, "How this page was made")


def write_rendered(folder: Path, name: str, rendered: Rendered) -> Written:
    """Store a page and its pictures in `folder`, which is made where it is missing; every file whole or not at all, the
    page last. Raises TargetNotWritable."""
    make_folder(folder)
    figures = [folder / f"{picture.stem}.png" for picture in rendered.pictures]
    for target, picture in zip(figures, rendered.pictures, strict=True):
        write_bytes(target, picture.png)
    write_text(folder / name, rendered.html)
    return Written(folder / name, figures)
