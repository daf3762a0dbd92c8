"""Arbitrary and damaged bytes: any reader gives rows or an error of ours, whatever it is handed."""

import gzip
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings, strategies as st

from latfit.errors import LatfitError, WrongUsage
from latfit.trace.readers import READERS, table
from latfit.trace.readers.source import Options, Reader, open_source
from tests.unit.trace.test_readers_tables import write

WORDS = st.sampled_from(
    [
        *(
            '{"inflightBatchingStats": {"numGenRequests": 1}, "iterLatencyMS": 2}',
            '{"fpm": {"scheduled_requests": {}}}',
        ),
        *(
            "dynamo.fpm.trace.v1",
            '{"batch_size": 1, "input_len": 2, "prefill_latency": 3}',
            "[",
            "{",
            "]",
            "}",
            "\n",
            ",",
        ),
        *(
            "B,S,T_ms\n",
            "1,1,5\n",
            "prompt_size,batch_size,token_size,prompt_time,token_time\n",
            "nan",
            "1e999",
            '"',
            "\0",
        ),
        *(
            "layer,tokens,time_us\n",
            "prefill_chunk,kv_prefill,n_decode,kv_decode,time_us\n",
            "time_stats.x.median,num_tokens\n",
        ),
        *(
            "wall_time_s,prefill_tokens,prefill_requests,decode_requests\n",
            ";",
            "\t",
            "\ufeff",
            "\x1f\x8b",
            "PAR1",
            "ARROW1",
        ),
        *("9" * 5000, "true", "null", "n_embd,n_expanded_embd,n_head,n_kv_head,", "t_s,prompt_tokens,output_tokens\n"),
    ]
)
CONTENT = st.one_of(
    st.binary(min_size=1, max_size=300),
    st.lists(WORDS, min_size=1, max_size=12).map(lambda words: "".join(words).encode("utf-8", "surrogatepass")),
    st.lists(WORDS, min_size=1, max_size=6).map(lambda words: gzip.compress("".join(words).encode())),
    st.tuples(
        st.sampled_from([b"PAR1", b"ARROW1\0\0", b"FEA1", b"\xff\xff\xff\xff", b"\xff\xfe", b"\x28\xb5\x2f\xfd"]),
        st.binary(max_size=200),
    ).map(b"".join),
)


class TestArbitraryBytes:
    @pytest.mark.parametrize("reader", READERS, ids=lambda reader: reader.name)
    @settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
    @given(content=CONTENT)
    def test_are_rows_or_an_error_of_ours(self, reader: Reader, content: bytes, tmp_path: Path) -> None:
        (tmp_path / "any").write_bytes(content)
        try:
            source = open_source(tmp_path / "any")
            reader.recognises(source.head)
            trace = reader.read(source, Options())
        except LatfitError as error:
            assert error.remedy
        else:
            assert {"B", "S", "T_ms"} <= set(trace.columns)

    @settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
    @given(drawn=st.data())
    def test_a_damaged_table_is_rows_or_an_error_of_ours(self, drawn: st.DataObject, tmp_path: Path) -> None:
        container = drawn.draw(st.sampled_from(["parquet", "feather", "arrow", "stream"]))
        target = write(tmp_path, container, {"B": [1, 2], "S": [1, 64], "T_ms": [2.5, 3.5], "run": ["a", "b"]})
        content = bytearray(target.read_bytes())
        for place in drawn.draw(st.lists(st.integers(0, len(content) - 1), max_size=6)):
            content[place] = drawn.draw(st.integers(0, 255))
        target.write_bytes(content[: drawn.draw(st.integers(1, len(content)))])
        try:
            table.READER.read(open_source(target), Options())
        except LatfitError as error:
            assert not isinstance(error, WrongUsage)
