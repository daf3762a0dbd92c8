"""Measured steps: traces, readers of logs and tables, cleaning, weighted cells of any number of rows."""

from typing import TYPE_CHECKING

from latfit._face import face

if TYPE_CHECKING:
    from latfit.trace.cells import compress as compress
    from latfit.trace.clean import (
        CleanOptions as CleanOptions,
        are_window_means as are_window_means,
        impossible_steps as impossible_steps,
        runs_in_time as runs_in_time,
    )
    from latfit.trace.columns import PHASES as PHASES
    from latfit.trace.coverage import Coverage as Coverage, coverage_of as coverage_of, reading_notes as reading_notes
    from latfit.trace.identity import (
        Fact as Fact,
        facts_beside as facts_beside,
        identity_of as identity_of,
        system_label as system_label,
        system_labels as system_labels,
    )
    from latfit.trace.parquet import (
        check_trace_name as check_trace_name,
        columns_of as columns_of,
        read_parquet as read_parquet,
        stored_provenance as stored_provenance,
        write_trace as write_trace,
    )
    from latfit.trace.read import (
        CleanTrace as CleanTrace,
        Reading as Reading,
        check_one_machine as check_one_machine,
        check_one_system as check_one_system,
        data_facts as data_facts,
        ingest as ingest,
        ingest_table as ingest_table,
        parse_column_map as parse_column_map,
        read_again as read_again,
        timed as timed,
    )
    from latfit.trace.readers import Options as Options, Reader as Reader, add_reader as add_reader
    from latfit.trace.readers.engines import Rows as Rows, add_pass as add_pass, trace_of_passes as trace_of_passes
    from latfit.trace.readers.requests import (
        OUTPUTS as OUTPUTS,
        PROMPTS as PROMPTS,
        TABLES as TABLES,
        TIMES as TIMES,
        request_format as request_format,
    )
    from latfit.trace.readers.source import Source as Source, open_source as open_source
    from latfit.trace.readers.table import read_columns as read_columns, typed_columns as typed_columns
    from latfit.trace.readers.text import (
        Tally as Tally,
        member as member,
        number as number,
        numbers as numbers,
        records as records,
    )
    from latfit.trace.recorded_times import (
        REQUEST_TIMES as REQUEST_TIMES,
        request_times as request_times,
        time_bin as time_bin,
        time_quantile as time_quantile,
    )
    from latfit.trace.serving_engine import (
        LARGEST_REQUESTS as LARGEST_REQUESTS,
        LARGEST_TOKENS as LARGEST_TOKENS,
        WATCHED as WATCHED,
        EngineFacts as EngineFacts,
        engine_counts as engine_counts,
        engine_facts as engine_facts,
        path_on as path_on,
    )
    from latfit.trace.step_records import COMPUTE as COMPUTE, PERIOD as PERIOD, period_ms as period_ms
    from latfit.trace.table import (
        DECODE as DECODE,
        MIXED as MIXED,
        PREFILL as PREFILL,
        UNKNOWN as UNKNOWN,
        WEIGHT as WEIGHT,
        Array as Array,
        Trace as Trace,
        concatenated as concatenated,
        phases as phases,
        row_weights as row_weights,
    )

__all__, __getattr__, __dir__ = face(__name__, __file__)
