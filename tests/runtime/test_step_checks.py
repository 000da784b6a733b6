"""The checks of the records of all ranks, which every rank of a step does alike."""

from __future__ import annotations

from dataclasses import replace

import pytest

from pipegraph.errors import BatchError, PipegraphError, RuntimeFault
from pipegraph.runtime.batch import ShownSizes
from pipegraph.runtime.checksums import ABSENT
from pipegraph.runtime.processes.rank_grid import RankGrid, single
from pipegraph.runtime.step_agreement import (
    ROOM,
    RecordLayout,
    StepRecord,
    agreed_tables,
    check_calls,
    check_inputs,
    check_training,
    trained_error,
    trained_ranks_that_differ,
)
from tests.messages import missing, refused

LAYOUT = RecordLayout(("batch", "seq"), ("x", "mask"))
PAIR = single(2)
REPLICAS = RankGrid(("pp", "dp_replicate"), (2, 2))
RECORD = StepRecord(3, False, 2, sizes=LAYOUT.encode_sizes(ShownSizes({"batch": 5, "seq": 8})), checksums=(1, 2, 3))


def sized(sizes: ShownSizes, microbatches: int = 2) -> StepRecord:
    return replace(RECORD, sizes=LAYOUT.encode_sizes(sizes), microbatches=microbatches)


@pytest.mark.parametrize(
    "record",
    [
        RECORD,
        replace(RECORD, evaluates=True, loss=True, weight=0.0, trained=2**47, trains=False, autocast=2),
        replace(RECORD, loss=False, weight=1234.5, checksum_call=2, checksums=(ABSENT, -5, 2**62)),
        sized(ShownSizes({"seq": 3}, ({"batch": 2}, {"batch": 1, "seq": 8}))),
        sized(ShownSizes()),
    ],
)
def test_a_record_survives_its_vector(record: StepRecord) -> None:
    vector = LAYOUT.encode(record)
    assert len(vector) == LAYOUT.length
    assert LAYOUT.following([vector]) == 0
    assert LAYOUT.decode(vector) == record


def test_sizes_beyond_the_room_of_a_record_follow_it() -> None:
    long = sized(ShownSizes({}, tuple({"batch": 1, "seq": 5} for _ in range(ROOM))))
    vectors = [LAYOUT.encode(RECORD), LAYOUT.encode(long)]
    assert [len(vector) for vector in vectors] == [LAYOUT.length] * 2
    length = LAYOUT.following(vectors)
    assert length == len(long.sizes)
    rows = [[*record.sizes, *[0] * (length - len(record.sizes))] for record in (RECORD, long)]
    assert [LAYOUT.decode(*pair) for pair in zip(vectors, rows, strict=True)] == [RECORD, long]


def test_ranks_are_in_the_same_call() -> None:
    check_calls([RECORD, RECORD], PAIR)
    with refused(
        RuntimeFault, "call 3, a step, on rank 0", "call 3, an evaluation, on rank 1", advice="the same calls"
    ):
        check_calls([RECORD, replace(RECORD, evaluates=True)], PAIR)
    with refused(RuntimeFault, "call 3, a step, on rank 0", "call 4, a step, on rank 1", advice="the same calls"):
        check_calls([RECORD, replace(RECORD, number=4)], PAIR)
    with refused(RuntimeFault, "torch.autocast", "none on rank 0", "bfloat16 on rank 1", advice="the same region"):
        check_calls([RECORD, replace(RECORD, autocast=2)], PAIR)
    last, without_loss = replace(RECORD, loss=True), replace(RECORD, loss=False)
    check_calls([RECORD, RECORD, last, last], REPLICAS)
    with refused(RuntimeFault, "a loss on rank 2", "no loss on rank 3", advice="the target"):
        check_calls([RECORD, RECORD, last, without_loss], REPLICAS)


def test_ranks_that_hold_the_same_stages_train_the_same() -> None:
    records = [replace(RECORD, trained=trained) for trained in (1, 1, 2, 3)]
    assert trained_ranks_that_differ(records[:2], PAIR) == ()
    assert trained_ranks_that_differ(records, REPLICAS) == (2, 3)
    error = trained_error((2, 3), ["", "", "a of stage 1\nb of stage 1", "a of stage 1"], REPLICAS)
    assert not missing(str(error), "b of stage 1", "on rank 2 (pp 1, dp_replicate 0)", "not on rank 3")


def test_a_rank_may_train_nothing_and_not_all_ranks() -> None:
    frozen = replace(RECORD, trains=False)
    check_training([frozen, RECORD])
    with refused(PipegraphError, "no parameter", "gradient", advice="pipe.evaluate("):
        check_training([frozen, frozen])


def test_sizes_are_merged_from_those_that_ranks_know() -> None:
    sizes = ShownSizes({"batch": 5})
    expected = [{"batch": 3, "seq": 8}, {"batch": 2, "seq": 8}]
    assert agreed_tables([sized(sizes), sized(ShownSizes({"seq": 8}))], PAIR, LAYOUT) == {(0, 1): expected}
    cut = ShownSizes({}, ({"batch": 3, "seq": 8}, {"batch": 2, "seq": 8}))
    assert agreed_tables([sized(sizes), sized(cut)], PAIR, LAYOUT) == {(0, 1): expected}, "as whole tensors are cut"
    one_row = agreed_tables([sized(ShownSizes({"batch": 1})), sized(ShownSizes({"seq": 8}))], PAIR, LAYOUT)
    assert one_row == {(0, 1): [{"batch": 1, "seq": 8}]}, "fewer microbatches than requested"


@pytest.mark.parametrize(
    ("sizes", "parts"),
    [
        (ShownSizes({"batch": 6}), ["2 microbatches of [3, 2] rows, seq 8 on rank 0", "[3, 3] rows on rank 1"]),
        (ShownSizes({"batch": 1}), ["1 microbatch of [1] rows on rank 1"]),
        (ShownSizes({"seq": 9}), ["seq 9 on rank 1"]),
        (ShownSizes({}, ({"batch": 4}, {"batch": 1})), ["2 microbatches of [4, 1] rows on rank 1"]),
        (ShownSizes({}, ({"seq": 8}, {"seq": 4})), ["seq [8, 4] on rank 1"]),
    ],
)
def test_sizes_that_differ_within_a_pipeline_are_refused(sizes: ShownSizes, parts: list[str]) -> None:
    with refused(RuntimeFault, "sizes", *parts, advice="the same batch"):
        agreed_tables([RECORD, sized(sizes)], PAIR, LAYOUT)
    with refused(RuntimeFault, "microbatches", "2 on rank 0", "3 on rank 1", advice="microbatches="):
        agreed_tables([RECORD, replace(RECORD, microbatches=3)], PAIR, LAYOUT)


def test_pipelines_have_the_least_number_of_microbatches_of_any() -> None:
    one_microbatch, two = sized(ShownSizes({"batch": 1, "seq": 4})), RECORD
    assert agreed_tables([one_microbatch, two, one_microbatch, two], REPLICAS, LAYOUT) == {
        (0, 2): [{"batch": 1, "seq": 4}],
        (1, 3): [{"batch": 5, "seq": 8}],
    }
    lists = sized(ShownSizes({}, ({"batch": 3, "seq": 8}, {"batch": 2, "seq": 8})))
    with refused(BatchError, "microbatches", "1 on rank 0", "2 on rank 1", advice="the same number"):
        agreed_tables([one_microbatch, lists, one_microbatch, lists], REPLICAS, LAYOUT)


def test_inputs_are_compared_within_a_pipeline() -> None:
    record = replace(RECORD, checksum_call=3)
    names = (*LAYOUT.inputs, "target")
    other_record, absent = replace(record, checksums=(1, 9, 3)), replace(record, checksums=(1, ABSENT, ABSENT))
    check_inputs([record, absent], PAIR, names)
    check_inputs([record, other_record, record, other_record], REPLICAS, names)
    check_inputs([record, replace(other_record, checksum_call=0)], PAIR, names)
    with refused(RuntimeFault, "mask", "rank 0 against rank 1", advice="the same batch"):
        check_inputs([record, other_record], PAIR, names)
    with refused(RuntimeFault, "mask", "call before this one", advice="the same batch"):
        check_inputs([replace(rank_record, number=4) for rank_record in (record, other_record)], PAIR, names)
    with refused(RuntimeFault, "mask", "rank 1 (pp 0, dp_replicate 1) against rank 3", advice="the same batch"):
        check_inputs([record, record, record, other_record], REPLICAS, names)
