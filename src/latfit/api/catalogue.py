"""`catalog`: step models of systems that others measured."""

import math
from collections.abc import Mapping, Sequence
from pathlib import Path

from msgspec import structs

from latfit import catalogue, reporting
from latfit.api.answer import PlainAnswer
from latfit.api.fits import as_fit, fit as fit_steps
from latfit.api.request import verb
from latfit.api.requests import CatalogAddRequest, CatalogRequest
from latfit.errors import FitNotUsable, WrongUsage
from latfit.messages import message
from latfit.model import FitResult, fitted_identity
from latfit.planning import count_parameters, model_config
from latfit.trace import Trace
from latfit.units import count_text, format_percent


def _shown(entries: Sequence[catalogue.CatalogEntry], added: Path | None = None) -> PlainAnswer:
    verdict = f"{count_text(len(entries), 'system').capitalize()}. Use one as --fit {catalogue.PREFIX}NAME."
    lines = [
        *(f"A step lacks {each.lacks}." for each in entries if each.lacks),
        *(f"{each.steps:,} steps, {each.dtype or 'unknown dtype'}, tensor parallel {each.tp}." for each in entries),
        *(f"Source: {each.source or 'unknown'} ({each.licence or 'no licence named'})." for each in entries),
    ]
    table = reporting.table.make_table(
        "",
        entries,
        ("name", "name"),
        ("a step is", "contents"),
        ("B up to", lambda each: each.B[1], reporting.table.count),
        ("S up to", lambda each: each.S[1], reporting.table.count),
        ("error", "error_pct", format_percent),
        ("source", "engine"),
        words=["name", "a step is", "source"],
    )
    documents = [{name: value for name, value in each.to_json().items() if name != "fit"} for each in entries]
    return PlainAnswer(
        {"entries": documents, "added": added and str(added)},
        reporting.table.Shown(
            verdict if added is None else f"Added {entries[0].name}: {added}.",
            lines=lines if len(entries) == 1 else (),
            brief=[table],
        ),
    )


@verb(CatalogRequest)
def catalog(request: CatalogRequest) -> PlainAnswer:
    """List the systems of the catalogue, or show one. Raises WrongUsage, BadInput."""
    name = request.name
    return _shown([*catalogue.all_entries().values()] if name is None else [catalogue.entry_named(name)])


@verb(CatalogAddRequest)
def add_to_catalog(request: CatalogAddRequest) -> PlainAnswer:
    """Add a fit to the folder of own entries, under a name such as `h100/llama-3.1-8b@tp2`.

    Raises WrongUsage, BadInput, FitNotUsable, TargetNotWritable.
    """
    found = as_fit(request.fit)
    fit = found.result
    if (why := found.kept_out()) is not None:
        raise FitNotUsable(why.message, where=str(request.fit), remedy=why.remedy)
    identity = fitted_identity(fit)
    words = ("-".join(identity.get(each, "").lower().split()) for each in ("hardware", "model"))
    name = request.name or "/".join(words)
    try:
        gpu, model, tp = _parts(name)
        entry = catalogue.CatalogEntry(
            name=name,
            gpu=gpu,
            model=model,
            tp=tp,
            dtype=identity.get("dtype", ""),
            engine=identity.get("engine", ""),
            contents=catalogue.STEPS,
            B=(float(fit.domain["B"][0]), float(fit.domain["B"][1])),
            S=(float(fit.domain["S"][0]), float(fit.domain["S"][1])),
            steps=int(fit.metrics.n or 0),
            error_pct=fit.cross_validation.mape_pct,
            weights=request.weights,
            source=request.source or "",
            fit=structs.replace(fit, warnings=()).to_json(),
        )
    except ValueError:
        remedy = "Write GPU/MODEL in lower case: h100/llama-3.1-8b@tp2."
        raise WrongUsage(f"{name!r} is no name", where="--name", remedy=remedy) from None
    folder = None if request.folder is None else Path(request.folder)
    return _shown([entry], catalogue.add_entry(entry, folder))


def _parts(name: str) -> tuple[str, str, int]:
    """Split GPU/MODEL@tpN. Raises ValueError."""
    gpu, _, model = name.partition("/")
    model, _, tp = model.partition("@tp")
    return gpu, model, int(tp or 1)


def fit_in_catalog(name: str) -> FitResult:
    """Return a fit of the catalogue, widened by the error on another machine."""
    plain, entries = name.removeprefix(catalogue.PREFIX), catalogue.all_entries()
    error = catalogue.TRANSFER
    if plain in entries:
        entry, fit = entries[plain], catalogue.fit_of(entries[plain])
        origin = f"{plain} was measured on another machine"
    else:
        scaled = _scaled(plain, entries)
        if scaled is None:
            catalogue.entry_named(name)  # raises the error that names the nearest
        assert scaled is not None
        entry, fit = scaled
        error = math.hypot(catalogue.TRANSFER, catalogue.NEIGHBOUR_ERROR)
        origin = f"{plain} was not measured: scaled from {entry.name} by bandwidth and FLOPs"
    lacks = f"; its steps lack {entry.lacks}" if entry.lacks else ""
    text = f"{origin}{lacks}. Expect an error of {format_percent(100 * error)}."
    return structs.replace(
        catalogue.widen(fit, error),
        data=structs.replace(fit.data, source=name, sources=[name]),
        warnings=[message("from_catalog", what=text)],
    )


def _scaled(
    name: str, entries: Mapping[str, catalogue.CatalogEntry]
) -> tuple[catalogue.CatalogEntry, FitResult] | None:
    """Return the nearest neighbour and its times scaled to GPU/MODEL@tpN; None if unknown."""
    try:
        gpu, model, tp = _parts(name)
    except ValueError:
        return None
    if model.endswith(".json"):
        weights: float | None = sum(count_parameters(model_config(Path(model))))
    else:
        weights = next((each.weights for each in entries.values() if each.model == model and each.weights), None)
    found = None if weights is None else catalogue.nearest(entries, gpu, model, weights, tp)
    if found is None or weights is None:
        return None
    fit = fit_steps(Trace(catalogue.scaled_steps(found, gpu, weights, tp)), model="roofline").result
    system = {"hardware": gpu, "model": model, "tp": str(tp)}
    facts = structs.replace(fit.data, source=name, sources=[name])
    return found, structs.replace(fit, data=facts, provenance={**fit.provenance, "identity": system})
