"""Pages: one self-contained HTML file with cards and sliders, and the pictures beside it."""

import base64
import hashlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

from jinja2 import Environment, PackageLoader, StrictUndefined
from markupsafe import Markup
from matplotlib.figure import Figure

from latfit._version import __version__
from latfit.files import make_folder, write_bytes, write_text
from latfit.messages import Message
from latfit.reporting import style
from latfit.reporting.table import Bar, Card, Table, prose, table_html

PAGE_NAME = "simulation.html"

Plan = TypeVar("Plan")


@dataclass(frozen=True)
class Picture:
    """A drawn figure."""

    stem: str  # file name without its ending
    alt: str
    png: bytes
    readings: str = ""  # JSON that the page's script shows under the pointer
    broad: bool = False  # whether it takes the whole width of the page

    @property
    def source(self) -> str:
        return f"data:image/png;base64,{base64.b64encode(self.png).decode('ascii')}"


@dataclass(frozen=True)
class Slider:
    """Answers at other limits or loads."""

    label: str
    cards: Sequence[Card]
    requested: int


@dataclass(frozen=True)
class Section:
    """A folded part of a page."""

    title: str
    anchor: str
    tables: Sequence[Table] = ()
    pictures: Sequence[Picture] = ()
    sentences: Sequence[str] = ()
    formula: str = ""
    folded: Table | None = None  # a long table that stays closed
    open: bool = False


@dataclass(frozen=True)
class Making:
    command: str = ""
    made_at: str = ""


@dataclass(frozen=True)
class Page:
    """What a page shows, the answer first."""

    title: str
    made: Making
    answer: Card
    sliders: Sequence[Slider] = ()
    bars: Sequence[Bar] = ()
    target: str = ""  # what the bars change
    pictures: Sequence[Picture] = ()
    certainty: Sequence[str] = ()
    warnings: Sequence[tuple[str, str]] = ()  # message and remedy
    sections: Sequence[Section] = ()
    subjects: Sequence[tuple[str, str]] = ()  # paths with what they are
    notes: Sequence[str] = ()


@dataclass(frozen=True)
class Rendered:
    """The page, and its pictures, each for a separate file."""

    html: str
    pictures: Sequence[Picture]


def render_page(page: Page) -> Rendered:
    """Return a page as HTML; a security line lets it run its own script only."""
    environment = Environment(
        loader=PackageLoader("latfit.reporting"),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.filters |= {"prose": prose, "grid": table_html}
    script = (Path(__file__).parent / "templates" / "report.js").read_text(encoding="utf-8")
    digest = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
    facts = {"command": page.made.command, "made": page.made.made_at, "latfit": __version__}
    making = Table("How this page was made", ("", "value"), [each for each in facts.items() if each[1]], ("value",))
    html = environment.get_template("page.html").render(
        page=page, making=making, script=Markup(script), script_hash=digest
    )
    return Rendered(html, [*page.pictures, *(each for section in page.sections for each in section.pictures)])


def answer_page(
    title: str,
    answer: Card,
    made: Making,
    tables: Sequence[Table],
    figure: Figure | None,
    messages: Sequence[Message | str],
) -> Rendered:
    pictures = [] if figure is None else [draw_picture(Path(PAGE_NAME).stem, answer.sentence, figure)]
    sections = [Section("Tables", "tables", tables, open=True)] if tables else []
    warnings = [(each, "") if isinstance(each, str) else (each.message, each.remedy) for each in messages]
    return render_page(Page(title, made, answer, pictures=pictures, warnings=warnings, sections=sections))


def make_slider(label: str, plans: Mapping[str, Plan], requested: Plan, card: Callable[[Plan, str], Card]) -> Slider:
    at = [each is requested for each in plans.values()].index(True)
    return Slider(label, [card(each, place) for place, each in plans.items()], at)


def values_around(value: float, factors: Sequence[float]) -> list[tuple[bool, float]]:
    """Return a slider's values in three digits, and which is the requested one."""
    return [(factor == 1, float(f"{factor * value:.3g}")) for factor in factors]


def draw_picture(stem: str, alt: str, figure: Figure) -> Picture:
    """Return a figure as PNG; its title ends the text alternative."""
    width, height = figure.get_size_inches()
    title = " ".join(figure.axes[0].get_title(loc="left").split())
    return Picture(stem, f"{alt} {title}.", style.png(figure), broad=bool(width > 2 * height))


def write_page(folder: Path, rendered: Rendered, name: str = PAGE_NAME) -> list[Path]:
    """Return the files: the page, then its pictures."""
    make_folder(folder)
    figures = [folder / f"{picture.stem}.png" for picture in rendered.pictures]
    for target, picture in zip(figures, rendered.pictures, strict=True):
        write_bytes(target, picture.png)
    write_text(folder / name, rendered.html)
    return [folder / name, *figures]
