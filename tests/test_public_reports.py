"""25 faults that users of ring attention and its neighbours reported in public, each as a test for its whole class.

REPORTS says for each what went wrong, and where it is tested: by the tests of its number in public_reports/, also by
others where they go further, or why there is no test. Nothing was taken from the reports but the fault itself. Results
are compared with dense attention in float64 on fresh random inputs.
"""

from __future__ import annotations

import ast
import re
from pathlib import Path
from typing import NamedTuple

HERE = Path(__file__).parent


class Report(NamedTuple):
    """One public report. tests: functions of public_reports/, and file::function of other files in this folder; none,
    or not all that belongs here: why."""

    date: str
    address: str
    fault: str
    tests: tuple[str, ...] = ()
    why: str = ""


REPORTS = {
    1: Report(
        "2026-07-21",
        "https://github.com/huggingface/diffusers/issues/14265",
        "backward used the keys of the first hop for every hop",
        (
            "test_01_backward_sees_every_block",
            "test_01_graphs_keep_what_is_theirs",
        ),
    ),
    2: Report(
        "2025-07-06",
        "https://github.com/NVIDIA/TransformerEngine/issues/1930",
        "a packed length of 7 on 2 ranks became 6: the last token was lost",
        ("test_02_packed_lengths_are_not_rounded",),
    ),
    3: Report(
        "2024-09-09",
        "https://github.com/jzhang38/EasyContext/issues/47",
        "2999 tokens over 4 ranks: the halves of zigzag did not fit each other, backward failed",
        (
            "test_03_lengths_that_no_ring_divides",
            "test_03_as_reported",
            "test_03_unequal_parts_without_a_length",
        ),
    ),
    4: Report(
        "2025-06-23",
        "https://github.com/deepspeedai/DeepSpeed/issues/7384",
        "an all-to-all over heads divided the sequence rounding down and dropped the rest",
        why="there is no all-to-all yet; lengths that no ring divides are reports 2 and 3",
    ),
    5: Report(
        "2026-08-03",
        "https://github.com/vllm-project/vllm-omni/pull/5716",
        "query and key heads were padded apart for an all-to-all, and their ratio changed",
        why="there is no all-to-all yet, and the ring pads no heads: test_attention_virtual.py::test_grouped_queries",
    ),
    6: Report(
        "2024-09-03",
        "https://github.com/zhuzilin/ring-flash-attention/issues/46",
        "a new version gave the log-sum of packed documents in another layout, and merging went wrong",
        (
            "test_06_lse_has_one_shape",
            "test_06_an_lse_of_another_layout_is_refused",
        ),
    ),
    7: Report(
        "2025-04-29",
        "https://github.com/feifeibear/long-context-attention/issues/149",
        "forward took one argument more than backward had gradients for",
        ("test_07_backward_with_every_argument",),
    ),
    8: Report(
        "2024-03-15",
        "https://github.com/lucidrains/ring-attention-pytorch/pull/9",
        "send and receive of a hop, each on its own, hung on 8 GPUs",
        (
            "test_08_messages_that_no_buffer_holds",
            "streams/test_ring.py::test_every_size_of_ring",
        ),
    ),
    9: Report(
        "2023-11-08",
        "https://github.com/pytorch/pytorch/issues/113281",
        "one rank left, and the others sat in the set-up of their connections",
        (
            "test_faults.py::test_fault",
            "test_faults.py::test_killed_far_away",
            "test_faults.py::test_killed_at_any_time",
        ),
    ),
    10: Report(
        "2026-09-13",
        "https://github.com/NVIDIA/nccl/pull/2407",
        "two ranks that both send before they receive mixed up their connections, and memory was overwritten",
        (
            "test_10_sends_and_receives_pair_up",
            "test_10_the_check_finds_hops_that_are_not_whole",
            "streams/test_ring.py::test_every_size_of_ring",
        ),
    ),
    11: Report(
        "2026-02-17",
        "https://github.com/pytorch/pytorch/issues/175145",
        "messages in one thread and an all-reduce in another waited for each other",
        (
            "test_11_all_reduce_in_hooks_of_a_ring_backward",
            "test_11_hooks_of_torch_itself",
            "test_11_all_reduce_in_another_thread",
            "test_groups.py::test_second_caller",
        ),
    ),
    12: Report(
        "2026-07-01",
        "https://github.com/pytorch/pytorch/issues/188655",
        "memory that NCCL still wrote was used again by another stream",
        (
            "streams/test_faults.py::test_a_workspace_is_freed_while_another_stream_uses_it",
            "streams/test_operators.py::test_a_kernel_fails_in_the_middle",
        ),
    ),
    13: Report(
        "2026-06-22",
        "https://github.com/cornstarch-org/Cornstarch/pull/77",
        "gradients were read and copied around a reduction on a side stream without both waits",
        (
            "streams/test_faults.py::test_a_wait_for_an_exchange_is_left_out",
            "streams/test_faults.py::test_communication_does_not_wait_for_the_buffers",
            "streams/test_faults.py::test_virtual_ranks_leave_out_a_wait_for_an_event",
        ),
    ),
    14: Report(
        "2021-07-27",
        "https://github.com/pytorch/pytorch/issues/62283",
        "of a transposed tensor the raw memory was sent",
        ("test_14_views_give_the_bits_of_copies",),
    ),
    15: Report(
        "2026-07-19",
        "https://github.com/flashinfer-ai/flashinfer/issues/4051",
        "merging two results of no keys gave NaN",
        ("test_15_merging_with_nothing", "test_blocks.py::test_merge_of_special_rows"),
    ),
    16: Report(
        "2025-12-17",
        "https://github.com/Dao-AILab/flash-attention/issues/2082",
        "the first block was masked, its maximum was set to 0, and large negative scores then vanished against it",
        (
            "test_16_low_scores_after_masked_blocks",
            "test_16_low_scores_round_a_ring",
        ),
    ),
    17: Report(
        "2024-01-23",
        "https://github.com/NVIDIA/Megatron-LM/issues/673",
        "unclear whether the loss must be multiplied by the number of ranks",
        ("test_17_gradients_have_one_scale",),
    ),
    18: Report(
        "2025-03-07",
        "https://github.com/huggingface/transformers/pull/36607",
        "labels were shifted inside each shard, so each shard's last label was lost",
        (
            "test_18_labels_across_shards",
            "test_18_loss_over_shards",
        ),
    ),
    19: Report(
        "2025-07-25",
        "https://github.com/huggingface/transformers/pull/39674",
        "a trainer scaled the loss by all processes, those of one sequence too",
        why="there are no adapters for trainers yet; the scale of loss and gradients is report 17",
    ),
    20: Report(
        "2026-07-21",
        "https://github.com/axolotl-ai-cloud/axolotl/issues/3608",
        "packed documents were given to a ring that knew none, and attended to each other",
        ("test_20_documents_do_not_see_each_other",),
        why="there are no adapters yet that would find the documents themselves",
    ),
    21: Report(
        "2026-09-09",
        "https://github.com/ISEEKYAN/Megatron-LM/pull/208",
        "rotary angles of zigzag were given to contiguous shards",
        (
            "test_21_positions_of_every_layout",
            "test_21_rotary_before_a_ring",
        ),
    ),
    22: Report(
        "2026-07-17",
        "https://github.com/ml-explore/mlx/issues/3862",
        "one reset connection ended a helper thread, and the ring stood still for ever",
        ("test_faults.py::test_fault",),
    ),
    23: Report(
        "2026-08-31",
        "https://github.com/vllm-project/vllm/pull/54541",
        "global positions of keys were used as places in a shard of the cache",
        ("test_23_keys_of_a_shard_at_their_global_positions",),
        why="sharded decode itself is not there yet: the test puts it together from the building blocks",
    ),
    24: Report(
        "2026-07-09",
        "https://github.com/pytorch/pytorch/issues/189454",
        "the compiler moved a receive over a send that it did not see",
        (
            "test_24_compiled_calls_keep_their_order",
            "test_24_compiled_calls_have_one_order_on_all_ranks",
            "test_compile.py::test_calls_keep_program_order_on_two_ranks",
        ),
    ),
    25: Report(
        "2023-12-23",
        "https://github.com/pytorch/pytorch/issues/116350",
        "a second derivative was asked of a fused attention that has none",
        (
            "test_25_second_derivatives_are_refused_by_every_rank",
            "test_autograd.py::test_second_derivative_raises",
        ),
    ),
}


def functions_of(file: Path) -> set[str]:
    return {node.name for node in ast.parse(file.read_text()).body if isinstance(node, ast.FunctionDef)}


def test_every_report_has_its_place() -> None:
    """All 25 are in the table; each has a test that exists, or a reason; each numbered test is in its row."""
    numbered = set().union(*(functions_of(file) for file in (HERE / "public_reports").glob("test_*.py")))
    numbered = {name for name in numbered if name.startswith("test_")}
    assert list(REPORTS) == list(range(1, 26))
    assert len({report.address for report in REPORTS.values()}) == 25
    for number, report in REPORTS.items():
        assert re.fullmatch(r"20\d\d-\d\d-\d\d", report.date) and report.address.startswith("https://github.com/")
        assert report.fault and (report.tests or report.why), number
        own = {name for name in report.tests if "::" not in name}
        assert own == {name for name in numbered if name.startswith(f"test_{number:02}_")}, number
        for file, function in (name.split("::") for name in report.tests if "::" in name):
            assert function in functions_of(HERE / file), (number, file, function)
    assert len(numbered) == sum("::" not in name for report in REPORTS.values() for name in report.tests)


def test_reasons_hold() -> None:
    """Where a reason names a test, it exists; where it names a file to come, that is not there yet."""
    for number, report in REPORTS.items():
        for file, function in re.findall(r"(\w+\.py)(?:::(\w+))?", report.why):
            if function:
                assert function in functions_of(HERE / file), (number, file, function)
            else:
                assert not (HERE / file).exists(), f"report {number}: {file} is there now; name its tests in the table"
