"""What machines can do: execution paths by name, from fits or nominal numbers, as every decision takes them."""

from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from html import escape
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

from latfit.api.fits import Fit, as_fit
from latfit.api.quantities import library_verb
from latfit.errors import BadInput, WrongUsage
from latfit.hardware import (
    Ceiling,
    ExecutionPath,
    HardwareProfile,
    beside_the_fit,
    nominal_path,
    parse_nominal,
    profile_from_json,
    read_hardware,
)
from latfit.model import FitResult

if TYPE_CHECKING:
    from pandas import DataFrame

Numbers = Fit | FitResult | ExecutionPath | str | Path
"""What stands for a path: a fit, its file, or nominal numbers such as "launch=12ms,slope=0.05ms"."""

FIT_FILE = ".json"
DEFAULT_PATH = "gpu"


@dataclass(frozen=True, init=False, repr=False)
class Hardware:
    """A machine: its execution paths by name, each measured (a fit) or given by nominal numbers.

    Made from a mapping of names to fits, `.fit.json` files or nominal numbers ({"cpu": fit, "gpu":
    "launch=12ms,slope=0.05ms"}), from a `hardware.json`, or from a fit alone.  result: the record
    (`latfit.hardware.HardwareProfile`). Raises BadInput, FitNotUsable, WrongUsage.
    """

    result: HardwareProfile

    @library_verb
    def __init__(self, paths: Any = MappingProxyType({})) -> None:
        object.__setattr__(self, "result", profile_of(paths))

    @library_verb
    def add(
        self,
        name: str,
        numbers: Numbers | None = None,
        *,
        nominal: str | None = None,
        flops: float | None = None,
        bandwidth: float | None = None,
        flops_per_token: float | None = None,
        step_bytes: float | None = None,
        price: float | None = None,
    ) -> "Hardware":
        """The machine with a path entered, or with more known of one that is there.

        numbers: a fit or its file.  nominal: numbers that were not measured, "p50=2ms", "launch=0.5ms,slope=0.02ms".
        flops, bandwidth (bytes/s), flops_per_token, step_bytes: what the machine could do at best.  price: an hour's,
        in any one currency. Raises BadInput, WrongUsage.
        """
        if not name.strip():
            raise WrongUsage("a path without a name", where="PATH", remedy="Name it: amx, gpu, cpu, ...")
        if price is not None and not 0 <= price < float("inf"):
            raise WrongUsage(f"a price of {price:g}", where="--price", remedy="Give 0 or more an hour.")
        path = self._found(name, numbers, nominal)
        ceiling = Ceiling(flops, bandwidth, flops_per_token, step_bytes)
        return Hardware(self.result.with_path(replace(path, ceiling=ceiling, price_per_hour=price)))

    def _found(self, name: str, numbers: Numbers | None, nominal: str | None) -> ExecutionPath:
        """The path of the fit or of the nominal numbers, or the one that is there already."""
        if numbers is not None and nominal is not None:
            raise WrongUsage(
                "a fit and nominal numbers contradict each other", where="--nominal", remedy="Give one of them."
            )
        if nominal is not None:
            return nominal_path(name, parse_nominal(nominal))
        if numbers is not None:
            return path_of(name, numbers)
        if name not in self.result.paths:
            raise WrongUsage(
                f"nothing to enter for path {name}",
                where="FIT",
                remedy='Name its .fit.json, or give --nominal "p50=2ms".',
            )
        return self.result.paths[name]

    @property
    def paths(self) -> "DataFrame":
        """A row a path: source, model, measured range of B and S, price an hour."""
        from pandas import DataFrame

        return DataFrame(
            [
                {
                    "path": path.name,
                    "source": _source(path),
                    "model": path.fit.model,
                    **{
                        f"{name}_{end}": value
                        for name in ("B", "S")
                        for end, value in zip(("min", "max"), path.fit.domain[name], strict=True)
                    },
                    "price_per_hour": path.price_per_hour,
                }
                for path in self.result.paths.values()
            ]
        )

    @library_verb
    def batches(self, tokens_per_request: int = 1, context: float | None = None) -> "DataFrame":
        """Latency of batches of 1, 2, 4, ... requests on every path, in ms: typical, mean, and the quantiles that the
        fit knows (p90_ms, ...). context: cached tokens of a request, by default the trace's. Raises WrongUsage."""
        from pandas import DataFrame

        return DataFrame(
            [
                {
                    **{name: value for name, value in vars(row).items() if name != "quantiles"},
                    **{f"p{100 * level:g}_ms": value for level, value in row.quantiles.items()},
                }
                for rows in self._estimates(tokens_per_request, context).values()
                for row in rows
            ]
        )

    @library_verb
    def described(self, tokens_per_request: int = 1, context: float | None = None) -> dict[str, Any]:
        """Every path as `latfit hardware show --json` has it. Raises WrongUsage."""
        estimates = self._estimates(tokens_per_request, context)
        return {
            name: {
                "source": "nominal" if path.nominal else "fitted",
                "nominal": path.nominal.text if path.nominal else None,
                "model": path.fit.model,
                "price_per_hour": path.price_per_hour,
                "ceiling": beside_the_fit(path.ceiling, path.fit).to_json() if path.ceiling.known else None,
                "estimates": [asdict(row) for row in estimates[name]],
            }
            for name, path in self.result.paths.items()
        }

    def _estimates(self, tokens: int, context: float | None) -> dict[str, Any]:
        from latfit.reporting import estimates

        return {name: estimates(path, tokens, context) for name, path in self.result.paths.items()}

    def save(self, target: str | Path = "hardware.json") -> None:
        """Write the profile whole or not at all. Raises TargetNotWritable."""
        from latfit.files import write_json

        write_json(Path(target), self.to_json())

    def to_json(self) -> dict[str, Any]:
        """The document of `hardware.json`."""
        return self.result.to_json()

    @classmethod
    def from_json(cls, document: Any) -> "Hardware":
        """The machine in a decoded document. Raises BadInput that names what is wrong with it."""
        return cls(profile_from_json(document, "the document"))

    def summary(self) -> str:
        """A line a path."""
        return "\n".join(f"{path.name}: {_source(path)}" for path in self.result.paths.values())

    def __repr__(self) -> str:
        return f"Hardware({'; '.join(self.summary().splitlines()) or 'no path'})"

    def _repr_html_(self) -> str:
        rows = "".join(
            f"<tr><td>{escape(path.name)}</td><td>{escape(_source(path))}</td></tr>"
            for path in self.result.paths.values()
        )
        return f"<table><tr><th>path</th><th>source</th></tr>{rows}</table>"


def profile_of(paths: Any) -> HardwareProfile:
    """The profile that `paths` describes, or names the file of: see `Hardware`. Raises BadInput, FitNotUsable,
    WrongUsage."""
    if isinstance(paths, Hardware):
        return paths.result
    if isinstance(paths, HardwareProfile):
        return paths
    if isinstance(paths, Mapping):
        return HardwareProfile({str(name): path_of(str(name), each) for name, each in paths.items()})
    if isinstance(paths, ExecutionPath):
        return HardwareProfile({paths.name: paths})
    if isinstance(paths, Fit | FitResult) or str(paths).endswith(".fit.json"):
        fit = as_fit(paths)
        name = fit.path or DEFAULT_PATH
        return HardwareProfile({name: path_of(name, fit)})
    if not isinstance(paths, str | Path):
        raise WrongUsage(
            f"{type(paths).__name__} does not describe a machine",
            where="paths",
            remedy='Give a fit, a hardware.json, or {"cpu": fit, "gpu": "launch=12ms,slope=0.05ms"}.',
        )
    if isinstance(paths, str) and "=" in paths and not Path(paths).exists():
        raise WrongUsage(
            "nominal numbers of a path without a name", where="paths", remedy=f'Name it: {{"gpu": "{paths}"}}.'
        )
    return read_hardware(Path(paths))


def path_of(name: str, numbers: Numbers) -> ExecutionPath:
    """A path under `name`. Raises BadInput, FitNotUsable, WrongUsage."""
    if isinstance(numbers, ExecutionPath):
        return replace(numbers, name=name)
    if isinstance(numbers, str) and not numbers.endswith(FIT_FILE):
        return nominal_path(name, parse_nominal(numbers, where=f"path {name}"))
    if isinstance(numbers, Fit | FitResult | str | Path):
        return ExecutionPath(name, as_fit(numbers).result)
    raise BadInput(
        f"{type(numbers).__name__} is neither a fit nor nominal numbers",
        where=f"path {name}",
        remedy='Give a fit, its .fit.json, or numbers such as "launch=12ms,slope=0.05ms".',
    )


def _source(path: ExecutionPath) -> str:
    """`nominal: p50=2ms`, or `saturation fit of 732 steps`."""
    return f"nominal: {path.nominal.text}" if path.nominal else f"{path.fit.model} fit of {path.fit.metrics.n:,} steps"
