"""An export: values, and the files that hold them."""

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from latfit.errors import WrongUsage
from latfit.files import check_writable, make_folder, write_text


@dataclass(frozen=True)
class Wanted:
    model: str | None = None  # name or folder that the engine is to load; None leaves it to whoever starts it
    shapes: Sequence[str] = ()  # inputs of a model with `B` where the batch goes, such as `input:Bx3x224x224`
    begins: str | None = None  # clock time of a plan's recorded day, with its zone; midnight UTC by default


@dataclass(frozen=True)
class Exported:
    """Settings of a plan as files by name; print it for all of them.

    settings: the values by the engine's names.  plan: name and digest of the plan.
    """

    target: str
    plan: str
    files: Mapping[str, str]
    settings: Mapping[str, Any] = field(default_factory=dict)

    def save(self, out: str | Path) -> list[Path]:
        """Write the files into the folder `out`; if it ends like one of them (`.yaml`), that one. Raises WrongUsage."""
        place = Path(out)
        if place.suffix and not place.is_dir():
            texts = [text for name, text in self.files.items() if Path(name).suffix == place.suffix]
            if len(texts) != 1:
                what = "several such files" if texts else "no such file"
                remedy = "Name a folder, which all of them go into; make it first where its name has a dot."
                raise WrongUsage(f"{self.target} has {what}: {', '.join(self.files)}", where="--out", remedy=remedy)
            write_text(place, texts[0])
            return [place]
        targets = {place / name: text for name, text in self.files.items()}
        for target in targets:
            make_folder(target.parent)
            check_writable(target)
        for target, text in targets.items():
            write_text(target, text)
        return list(targets)

    def to_json(self) -> dict[str, Any]:
        return asdict(self)

    def __str__(self) -> str:
        if len(self.files) == 1:
            return next(iter(self.files.values())).rstrip("\n")
        return "\n\n".join(f"# --- {name}\n{text.rstrip()}" for name, text in self.files.items())

    def __repr__(self) -> str:
        return f"Exported({self.target}: {', '.join(self.files)})"
