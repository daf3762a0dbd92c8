"""Measured steps: traces, readers of logs and tables, cleaning, weighted cells of any number of rows."""

from typing import TYPE_CHECKING

from latfit._face import face

if TYPE_CHECKING:
    from latfit.trace.cells import compress
    from latfit.trace.clean import CleanOptions, are_window_means, impossible_steps, runs_in_time
    from latfit.trace.coverage import Coverage, coverage_of, reading_notes
    from latfit.trace.metadata import (
        LARGEST_REQUESTS,
        LARGEST_TOKENS,
        REQUEST_TIMES,
        SYSTEM,
        WATCHED,
        Fact,
        facts_beside,
        facts_of,
        identity_of,
        system_label,
        system_labels,
    )
    from latfit.trace.parquet import check_trace_name, columns_of, read_parquet, stored_provenance, write_trace
    from latfit.trace.read import (
        CleanTrace,
        Reading,
        check_one_machine,
        check_one_system,
        data_facts,
        ingest,
        ingest_table,
        parse_column_map,
        read_again,
        timed,
    )
    from latfit.trace.readers import Options as Options, Reader as Reader, add_reader as add_reader
    from latfit.trace.readers.engines import Rows, add_pass, trace_of_passes
    from latfit.trace.readers.requests import OUTPUTS, PROMPTS, TABLES, TIMES, request_format
    from latfit.trace.readers.source import Source as Source, Tally, member, number, numbers, open_source, records
    from latfit.trace.readers.table import read_columns, typed_columns
    from latfit.trace.serving_engine import (
        EngineFacts,
        engine_counts,
        engine_facts,
        path_on,
        request_times,
        time_bin,
        time_quantile,
    )
    from latfit.trace.step_records import COMPUTE, PERIOD, period_ms
    from latfit.trace.table import (
        DECODE,
        MIXED,
        PHASES,
        PREFILL,
        UNKNOWN,
        WEIGHT,
        Array,
        Trace as Trace,
        concatenated,
        phases,
        row_weights,
    )

__all__, __getattr__, __dir__ = face(__name__, __file__)
