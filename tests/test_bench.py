"""The benchmarks: their arithmetic, that they see wrong results, and a tiny run of each. No time is ever asserted."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F

import ringattn_ext as ra
import setup

sys.path.insert(0, str(setup.ROOT / "bench"))

import attention  # noqa: E402
from comparison import cases, checks, local, measure, restricted, result, ring, workers  # noqa: E402

TINY = ["--quick", "--threads", "1"]


# --- arithmetic and printing ---


def a_result(**changes: object) -> result.Result:
    given = {"bar": 1.5, "share": 0.814, "share_bar": 0.8, "wrong": 0, "checked": 64} | changes
    numbers = ("attention", "bf16 forward D=64 full", 2, 0.00125, 2.5e11, "GFLOP/s", "torch", 1.499)
    return result.Result(*numbers, **given)


def test_a_line_is_aligned_with_the_heading() -> None:
    text = result.line(a_result())
    assert text.split() == (
        "bf16 forward D=64 full 2 1.25 ms 250.0 GFLOP/s 81 % 80 % yes 1.50x 1.50x no torch 0 of 64".split()
    )
    for word, under in (("torch", "to "), ("0 of 64", "wrong"), ("bf16", "case")):
        assert text.index(word) == result.HEADING.index(under)
    assert result.line(a_result(bar=None, share=None, share_bar=None, other_wrong=3)).endswith("0 of 64, 3 of theirs")


def test_a_bar_is_reached_by_what_is_as_large() -> None:
    assert result.reached(2.2, 2.2) is True and result.reached(2.19, 2.2) is False
    assert result.reached(2.2, None) is None and result.reached(None, 2.2) is None
    assert a_result().as_json()["reached"] is False


def test_the_bars_are_those_that_were_set() -> None:
    found = {case.name: case.bar for case in cases.attention_cases(1, 4096)}
    assert len(found) == 24
    assert found["bf16 forward D=128 causal"] == 2.4 and found["bf16 backward D=64 full"] == 1.5
    assert found["fp32 backward D=128 causal"] == 1.12 and found["fp16 backward D=64 full"] == 8
    assert found["fp16 forward D=64 causal"] is None


def test_work_is_counted_as_flash_attention_does() -> None:
    forward, backward = (cases.Case("attention", "bf16", way, 64, True, 1, 100, 100) for way in ("forward", "backward"))
    assert forward.flop == 4 * 8 * 100 * 100 * 64 / 2 and backward.flop == 2.5 * forward.flop
    assert cases.Case("decode", "bf16", "forward", 64, False, 1, 4, 1000).key_bytes == 2 * 8 * 1000 * 64 * 2


def test_each_side_is_first_as_often_and_the_ratio_is_the_median_of_pairs() -> None:
    calls: list[str] = []
    ours, other = iter([1.0, 2.0, 4.0, 1.0]), iter([2.0, 2.0, 40.0, 3.0])

    def timed(name: str, times: object) -> float:
        calls.append(name)
        return next(times)  # type: ignore[call-overload]

    times = measure.alternate(lambda: timed("ours", ours), lambda: timed("other", other), 4)
    assert calls == ["ours", "other", "other", "ours"] * 2
    assert times.seconds == 1.5 and times.ratio == 2.5
    assert measure.repeats_for(1.0) == 1 and measure.repeats_for(0.003) == 7


def test_options(capsys: pytest.CaptureFixture[str]) -> None:
    assert attention.parse_arguments([]).threads == [1, 2]
    assert attention.parse_arguments(["--threads", "1", "4"]).threads == [1, 4]
    for wrong, reason in ((["--threads", "0"], "positive"), (["--only", "("], "--only"), (["--fast"], "--fast")):
        with pytest.raises(SystemExit):
            attention.parse_arguments(wrong)
        assert reason in capsys.readouterr().err


def test_a_pattern_that_matches_nothing_is_an_error() -> None:
    with pytest.raises(SystemExit, match="no case matches --only 'fp8'"):
        attention.main([*TINY, "--only", "fp8"])


def test_every_case_has_a_name_of_its_own() -> None:
    known = attention.all_cases(local.Sizes(), [1, 2])
    assert tuple(known) == attention.GROUPS
    names = [attention.full_name(case) for group in known.values() for case in group]
    assert len(set(names)) == len(names)
    assert (
        "attention: bf16 forward D=64 full, 2 threads" in names and "decode: fp32 decode 1 row D=64, 1 thread" in names
    )


def test_what_libraries_say_about_instruction_sets() -> None:
    text = (
        "ours avx2\ntorch AVX2\n"
        "MKL_VERBOSE oneMKL 2024.0 Update 2 Product build 20240605 for Intel(R) 64 architecture Intel(R) Advanced "
        "Vector Extensions 2 (Intel(R) AVX2) enabled processors, Lnx 2.60GHz lp64 gnu_thread\n"
        "onednn_verbose,v1,info,cpu,runtime:OpenMP,nthr:2\nonednn_verbose,v1,info,cpu,isa:Intel AVX2\n"
    )
    assert restricted.parse_proof(text) == {
        "ours": "avx2",
        "torch": "AVX2",
        "MKL": "Intel(R) Advanced Vector Extensions 2 (Intel(R) AVX2) enabled processors",
        "oneDNN": "Intel AVX2",
    }
    assert restricted.parse_proof("") == {}


# --- checks ---


@pytest.mark.parametrize("causal", [False, True])
def test_exact_attention_is_that_of_torch(causal: bool) -> None:
    tensors = [torch.randn(1, 2, 150, 16, requires_grad=True) for _ in range(3)]
    grad_out = torch.randn(1, 2, 150, 16)
    out = F.scaled_dot_product_attention(*(tensor.double() for tensor in tensors), is_causal=causal)
    results = [out.float(), *torch.autograd.grad(out, tensors, grad_out.double())]
    right = checks.exact(*tensors, grad_out, causal=causal)
    assert checks.check(right, results) == checks.Count(0, 256)
    assert checks.check(checks.exact(*tensors, None, causal=causal), results[:1]) == checks.Count(0, 64)

    for number, rows in enumerate((right.queries, right.queries, right.keys, right.keys)):
        spoiled = [one.detach().clone() for one in results]
        spoiled[number][0, right.head, rows[3]] *= 1.01
        spoiled[number][0, right.head, rows[7], 0] = torch.nan
        assert checks.check(right, spoiled) == checks.Count(2, 256)


def test_queries_may_stand_behind_the_first_keys() -> None:
    query, key, value = (torch.randn(1, 1, tokens, 8) for tokens in (5, 12, 12))
    visible = torch.ones(5, 12, dtype=torch.bool).tril(7)
    out = F.scaled_dot_product_attention(query, key, value, attn_mask=visible)
    assert checks.check(checks.exact(query, key, value, None, causal=True, first_position=7), [out]).wrong == 0


def test_samples_have_both_ends() -> None:
    assert checks.sample(5).tolist() == [0, 1, 2, 3, 4]
    for tokens in (97, 1000):
        found = checks.sample(tokens).tolist()
        assert len(set(found)) == checks.SAMPLES == len(found)
        assert found[0] == 0 and found[1] >= checks.FEW and found[-1] == tokens - 1


# --- tiny runs ---


def test_a_tiny_run_writes_results_and_chart(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file, picture = tmp_path / "new" / "results.json", tmp_path / "chart.png"
    only = (
        "attention: bf16 .*64 causal|attention: fp32 forward D=64 full|carried: fp32.*64 causal|decode: bf16.* 4 .*64"
    )
    assert attention.main([*TINY, "--only", only, "--json", str(file), "--chart", str(picture)]) == 0
    printed = capsys.readouterr().out
    assert printed.startswith(result.machine_line(result.machine([1])))
    assert "0 rows of our results were wrong; 5 cases" in printed

    report = json.loads(file.read_text())
    assert (
        report["machine"]["torch"] == torch.__version__ and report["sizes"]["tokens"] == 256 and report["skipped"] == {}
    )
    assert [row["name"] for row in report["results"]] == [
        "bf16 forward D=64 causal", "bf16 backward D=64 causal", "fp32 forward D=64 full",
        "fp32 carried D=64 causal", "bf16 decode 4 rows D=64",
    ]  # fmt: skip
    assert [row["unit"] for row in report["results"]] == ["GFLOP/s"] * 4 + ["GB/s"]
    assert [row["checked"] for row in report["results"]] == [64, 256, 64, 64, 4]
    for row in report["results"]:
        assert row["wrong"] == row["other_wrong"] == 0
        assert min(row["seconds"], row["rate"], row["ratio"], row["share"]) > 0
        assert row["reached"] is (None if row["bar"] is None else row["ratio"] >= row["bar"])
    assert picture.read_bytes().startswith(b"\x89PNG")


def test_a_wrong_result_is_counted_and_fails(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    right = ra.ring_attention
    monkeypatch.setattr(ra, "ring_attention", lambda *args, **options: 1.01 * right(*args, **options))
    assert attention.main([*TINY, "--only", "attention: fp32 forward D=64 full"]) == 1
    assert "64 rows of our results were wrong" in capsys.readouterr().out


def test_a_peer_that_is_missing_is_skipped_with_a_reason(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    monkeypatch.setattr(ring.importlib.util, "find_spec", lambda name: None)
    assert attention.main([*TINY, "--only", "^peer", "--json", str(tmp_path / "results.json")]) == 0
    assert "skipped: ring-attention-pytorch is not installed" in capsys.readouterr().out
    assert "make bench-peers" in json.loads((tmp_path / "results.json").read_text())["skipped"]["peer"]


@pytest.mark.slow
def test_a_ring_beside_one_process() -> None:
    sizes = local.QUICK._replace(ring_tokens=150)
    found = list(ring.results(list(ring.ring_cases(sizes)), sizes))
    assert [(one.wrong, one.checked, one.other_wrong) for one in found] == [(0, 256, 0)] * 2
    assert all(one.bar == 0.9 and one.ratio > 0 for one in found)


@pytest.mark.slow
def test_an_error_in_a_worker_comes_with_its_reason() -> None:
    with pytest.raises(workers.WorkerFailure, match="KeyError: 'nothing'"), workers.Workers(1, 1) as one:
        one.call(ring.timed, "nothing")
    with pytest.raises(workers.WorkerFailure, match="rank 0 ended"), workers.Workers(1, 1) as one:
        one.call(os._exit, 3)


@pytest.mark.slow
@pytest.mark.skipif(not restricted.available(), reason="this CPU has no AVX2")
def test_a_run_restricted_to_avx2() -> None:
    in_use = restricted.proof()
    assert in_use["ours"] == "avx2" and in_use["torch"] == "AVX2"
    (case, *_) = cases.restricted_cases(1, 128)
    (found,) = restricted.results([case], local.QUICK)
    assert (found.name, found.wrong, found.checked) == ("fp32 forward D=64 full", 0, 64)


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_the_kernels_benchmark_is_right(tmp_path: Path) -> None:
    """Every kind of benchmark once; they compare their results themselves. The folder is that of the C++ tests."""
    folder, ninja = setup.ROOT / "build" / "tests", setup.find_program("ninja")
    settings = {"CMAKE_MAKE_PROGRAM": ninja, "RINGATTN_TESTS": "ON", "RINGATTN_BENCH": "ON", "RINGATTN_TORCH_DIR": ""}
    setup.forget_moved_build(folder)

    def run(*command: object) -> str:
        words = [str(word) for word in command]
        done = subprocess.run(words, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, timeout=800)
        assert done.returncode == 0, done.stdout
        return done.stdout

    definitions = [f"-D{key}={value}" for key, value in settings.items()]
    said = run(setup.find_program("cmake"), "-S", setup.ROOT, "-B", folder, "-G", "Ninja", *definitions)
    if "Google Benchmark was not found" in said:
        pytest.skip("Google Benchmark is not installed (libbenchmark-dev)")
    run(ninja, "-C", folder, f"-j{setup.job_count(os.environ.get('MAX_JOBS'))}", "ringattn_bench_cpu")
    chosen = "(forward|backward).*/D=64/causal|decode.*/D=64/rows=4|product/.*/D=64|exponentials"
    options = ("--benchmark_min_time=0.001", f"--benchmark_filter={chosen}", "--benchmark_format=json")
    printed = run(folder / "ringattn_bench_cpu", *options)
    rows = json.loads(printed[printed.index("{") :])["benchmarks"]
    assert not [row for row in rows if row.get("error_occurred")]
    names = {row["name"] for row in rows}
    assert {"forward/bfloat16/D=64/causal", "backward/float16/D=64/causal", "decode/float32/D=64/rows=4"} <= names
    assert {"float product/scores/D=64", "exponentials/float"} <= names
