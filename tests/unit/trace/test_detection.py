"""Which reader takes a file: each format is recognised by its own alone, compressed or not, and from its head alone."""

import gzip
from pathlib import Path

import pyarrow as pa
import pytest

from latfit.errors import BadInput, WrongUsage
from latfit.trace import readers
from latfit.trace.read import ingest
from latfit.trace.readers import READERS, reader_for, table
from latfit.trace.readers.engines import TRTLLM
from latfit.trace.readers.source import HEAD_BYTES, Options, Reader, open_source
from tests.unit.trace.test_readers_engines import FPM, SGLANG, TRT
from tests.unit.trace.test_readers_grids import ATTENTION, DENSE, PER_SEQUENCE, SPLITWISE, mlp

AIPERF = (
    '{"metadata": {"session_num": 0, "x_request_id": "a", "credit_issued_ns": 1, "request_start_ns": 2, '
    '"request_end_ns": 9, "benchmark_phase": "profiling"}, "metrics": {"time_to_first_token": {"value": 4.5, '
    '"unit": "ms"}, "input_sequence_length": {"value": 9}, "output_sequence_length": {"value": 3}}, "error": null}\n'
)
BURST = "Timestamp,Model,Request tokens,Response tokens,Total tokens,Log Type\n5,ChatGPT,472,18,490,Conversation log\n"
BURST_3 = BURST.replace("Timestamp,", "Timestamp,Session ID,Elapsed time,").replace("5,", "5,a,2,", 1)

ARRIVALS = {
    "azure": "TIMESTAMP,ContextTokens,GeneratedTokens\n2023-11-16 18:15:46.6805900,374,44\n",
    "mooncake": '{"timestamp": 0, "input_length": 6758, "output_length": 500, "hash_ids": [0, 1, 2]}\n',
    "latfit": "t_s,prompt_tokens,output_tokens\n0.0,374,44\n",
    "vidur": "arrived_at,num_prefill_tokens,num_decode_tokens\n0.1,20,9\n",
    "lines": '{"arrived_at": 0.1, "prompt_tokens": 20, "output_tokens": 9}\n',
    "burstgpt": BURST,
    "burstgpt_3": BURST_3,
    "vllm_bench": '{"date": "20260101", "ttfts": [0.1], "input_lens": [10], "output_lens": [5], "itls": [[0.1]]}\n',
    "aiperf": AIPERF,
    "guidellm": '{\n "metadata": {"version": 1, "guidellm_version": "0.6.0"},\n "benchmarks": [{"start": 0.0}]\n}\n',
    "guidellm_old": '{"benchmarks": [{"type_": "generative_benchmark", "requests": {"successful": []}}]}\n',
}

SAMPLES = [
    ("trtllm", f"[{TRT}]"),
    ("trtllm", f"[\n  {TRT},\n  {TRT}\n]\n"),
    ("trtllm", f"{TRT}\n{TRT}\n"),
    ("dynamo", f"{FPM}\n"),
    (
        "dynamo",
        "wall_time_s,prefill_tokens,prefill_kv_tokens,prefill_requests,decode_kv_tokens,decode_requests\n0,0,0,0,0,0\n",
    ),
    ("sglang", f"{SGLANG}\n"),
    ("splitwise", SPLITWISE),
    ("vidur", mlp("32,32,4096,11008,32768", 4096)),
    ("llmservingsim", ATTENTION),
    ("llmservingsim", DENSE),
    ("llmservingsim", PER_SEQUENCE),
    *(("arrivals", content) for content in ARRIVALS.values()),
    ("table", "B,S,T_ms\n1,1,5\n"),
    ("table", "\n\nB,S,T_ms\n1,1,5\n"),
    ("table", "batch\ttokens\tlatency_us\n1\t1\t5\n"),
    ("table", "B,S,T_ms,t_s,prompt_tokens,output_tokens\n1,1,5,0,1,1\n"),
    ("table", '{"B": 1, "S": 1, "T_ms": 5}\n'),
    ("table", '[{"B": 1, "S": 1, "T_ms": 5}]'),
]


def recognising(head: bytes) -> list[str]:
    special = [reader.name for reader in READERS if reader is not table.READER and reader.recognises(head)]
    return special or [reader.name for reader in READERS if reader.recognises(head)]


def zstd(content: bytes, target: Path) -> bytes:
    with pa.output_stream(str(target), compression="zstd") as stream:
        stream.write(content)
    return target.read_bytes()


class TestRecognition:
    @pytest.mark.parametrize(("name", "content"), SAMPLES)
    def test_by_content_alone(self, name: str, content: str, tmp_path: Path) -> None:
        plain = content.encode()
        for written in (plain, gzip.compress(plain), zstd(plain, tmp_path / "z")):
            (tmp_path / "file").write_bytes(written)
            source = open_source(tmp_path / "file")
            assert recognising(source.head) == [name]
            assert reader_for(source).name == name

    @pytest.mark.parametrize(("name", "content"), SAMPLES)
    def test_from_a_head_that_is_cut_inside_a_line(self, name: str, content: str, tmp_path: Path) -> None:
        header, newline, body = content.partition("\n")
        line = body or header
        long = f"{header}{newline}" + f"{line.rstrip()}\n" * (2 * HEAD_BYTES // len(line) + 1)
        (tmp_path / "file").write_text(long)
        source = open_source(tmp_path / "file")
        assert len(source.head) == HEAD_BYTES
        assert not source.head.endswith(b"\n") or HEAD_BYTES % len(line) == 0
        assert recognising(source.head) == [name]

    def test_several_formats_are_listed(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        twin = Reader("twin", "the same again", TRTLLM.recognises, TRTLLM.read)
        monkeypatch.setattr(readers, "READERS", (TRTLLM, twin, table.READER))
        (tmp_path / "file").write_text(TRT)
        with pytest.raises(BadInput, match="several formats: trtllm, twin") as caught:
            reader_for(open_source(tmp_path / "file"))
        assert "--format" in caught.value.remedy
        assert reader_for(open_source(tmp_path / "file"), "twin") is twin

    def test_a_format_that_does_not_exist(self, tmp_path: Path) -> None:
        (tmp_path / "file").write_text(TRT)
        with pytest.raises(WrongUsage, match="not a format") as caught:
            reader_for(open_source(tmp_path / "file"), "sqlite")
        assert all(reader.name in caught.value.remedy for reader in READERS)

    @pytest.mark.parametrize("content", [b"\x89PNG\r\n\x1a\n\0\0", b"<!doctype html><html></html>", b"one column\n1\n"])
    def test_what_is_no_format_at_all(self, content: bytes, tmp_path: Path) -> None:
        (tmp_path / "file").write_bytes(content)
        with pytest.raises(BadInput, match="not a format"):
            reader_for(open_source(tmp_path / "file"))


class TestArrivals:
    @pytest.mark.parametrize("kind", ARRIVALS)
    def test_are_refused_with_the_command_that_takes_them(self, kind: str, tmp_path: Path) -> None:
        (tmp_path / "arrivals").write_text(ARRIVALS[kind])
        with pytest.raises(BadInput, match="holds request arrivals, not steps") as caught:
            ingest(tmp_path / "arrivals")
        assert f"latfit simulate engine --arrivals {tmp_path / 'arrivals'}" in caught.value.remedy


class TestSpecialReaders:
    @pytest.mark.parametrize(
        ("name", "content"), [sample for sample in SAMPLES if sample[0] not in ("table", "arrivals")]
    )
    def test_refuse_a_column_map_and_name_the_way_out(self, name: str, content: str, tmp_path: Path) -> None:
        (tmp_path / "file").write_text(content)
        source = open_source(tmp_path / "file")
        with pytest.raises(WrongUsage, match="does not apply") as caught:
            reader_for(source).read(source, Options({"B": "x"}))
        assert "--format table" in caught.value.remedy
